use std::collections::HashSet;

use super::*;

#[test]
fn a_name_of_its_own_and_an_address_of_its_own_for_each() {
    let addresses: HashSet<_> = (0..NAMES).map(address_of).collect();
    assert_eq!(addresses.len(), NAMES as usize);
    assert!(addresses.iter().all(|a| a.octets()[..2] == [198, 19]));
    let names: HashSet<_> = (0..NAMES).map(name).collect();
    assert_eq!(names.len(), NAMES as usize);
    assert!((0..NAMES).all(|i| number(&name(i)) == Some(i)));
    assert_eq!(number("x.test"), None);
    let text = allow_rules();
    assert_eq!(text.lines().count(), ZONES as usize + 1);
    assert!(text.contains("{ allow = [\"z7.test\", \"www.z7.test\", \"*.z7.test\"] },"));
    assert_eq!(deny_rules().lines().count(), RULES as usize);
    assert_eq!(denied_names().lines().count(), NAMES as usize);
}

#[test]
fn each_takes_part_in_admission_and_only_the_plain_one_in_everything() {
    for one in Slipgate::ALL {
        assert!(ADMISSION.iter().all(|workload| one.takes_part(workload)));
        assert_eq!(one.takes_part("bulk-up"), one == Slipgate::Plain);
    }
}
