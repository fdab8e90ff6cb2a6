use slipgate_control::{InMemory, Paths, Sizes};
use slipgate_policy::{Action, Rule};

use super::*;

#[test]
fn prefixes_of_both_families_come_and_go_by_their_policys_number() {
    let dir = tempfile::tempdir().unwrap();
    let paths = Paths {
        pin_dir: dir.path().join("maps"),
        run_dir: dir.path().join("maps"),
    };
    let (memory, _owner) = InMemory::open(paths, Sizes::of_slots(1_024)).unwrap();
    let maps = &memory.maps;
    let deny = |text: &str| Rule::parse(Action::Deny, text).unwrap();
    let rules = ["192.0.2.0/24", "2001:db8:bad::/48", "[2001:db8::1]:443"].map(deny);
    let policy = Policy::new(Action::Allow, Vec::from(rules));
    for number in [6, 7] {
        for (key, rule) in denied(&policy, number) {
            insert(maps, key, rule).unwrap();
        }
    }
    let listed = || {
        let four = maps.deny.entries().unwrap().into_iter();
        let six = maps.deny6.entries().unwrap().into_iter();
        let four = four.map(|(prefix, _)| (prefix.prefix_len, prefix.key.policy));
        let six = six.map(|(prefix, _)| (prefix.prefix_len, prefix.key.policy));
        let mut all: Vec<_> = four.chain(six).collect();
        all.sort_unstable();
        all
    };
    let [six, seven] = [6_u32, 7].map(u32::to_be_bytes);
    assert_eq!(listed(), [(56, six), (56, seven), (80, six), (80, seven)]);
    remove_all_of(maps, |number| number == 6).unwrap();
    assert_eq!(listed(), [(56, seven), (80, seven)]);
    for (key, _) in denied(&policy, 7) {
        remove(maps, key).unwrap();
    }
    assert_eq!(listed(), []);
}
