use super::*;

#[test]
fn an_answer_is_the_query_with_the_names_address() {
    let mut message = [0; 512];
    let query = query(7, "n3.Bench.test");
    message[..query.len()].copy_from_slice(&query);
    let address = Ipv4Addr::new(198, 19, 0, 3);
    let told = |name: &str| (name == "n3.bench.test").then_some(address);
    let len = answer(&mut message, query.len(), told).unwrap();
    let said = &message[..len];
    assert!(is_answer(said));
    assert!(!is_answer(&query));
    assert_eq!(said[..2], [0, 7]);
    assert_eq!(said[12..query.len()], query[12..], "the question as asked");
    assert_eq!(said[len - 4..], address.octets());
}

#[test]
fn a_name_without_an_address_and_a_cut_query_get_no_answer() {
    let query = query(7, "n3.Bench.test");
    for len in [0, 11, 12, 13, query.len() - 6] {
        let mut message = [0; 512];
        message[..len].copy_from_slice(&query[..len]);
        let told = |_: &str| Some(Ipv4Addr::LOCALHOST);
        assert_eq!(answer(&mut message, len, told), None, "{len}");
    }
    let mut message = [0; 512];
    message[..query.len()].copy_from_slice(&query);
    assert_eq!(answer(&mut message, query.len(), |_: &str| None), None);
}
