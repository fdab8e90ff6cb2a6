use super::*;

#[test]
fn a_key_tells_addresses_of_both_families_apart() {
    let address = |text: &str| text.parse::<IpAddr>().unwrap();
    // Among them the same octets in each family.
    let texts = [
        "203.0.113.1",
        "::203.0.113.1",
        "cb00:7101::",
        "::1",
        "2001:db8::1",
    ];
    let key = |text: &str| NameKey::new(VmId::new(7), address(text), b"\x01a\0");
    for text in texts {
        assert_eq!(
            (key(text).address(), key(text).id()),
            (address(text), VmId::new(7))
        );
        let same = texts.iter().filter(|other| key(other) == key(text));
        assert_eq!(same.count(), 1, "{text}");
    }
}
