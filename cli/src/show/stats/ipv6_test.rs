use super::*;

#[test]
fn a_row_says_prefix_and_addresses_while_ipv6_is_on() {
    let mut row = Vm6::OFF;
    assert_eq!(GuestIpv6::of(&row), None);
    let address = |text: &str| text.parse::<Ipv6Addr>().unwrap();
    row.flags = Vm6Flags::ON;
    row.prefix = address("fd00:1:2:3::").into();
    let shown = GuestIpv6::of(&row).unwrap();
    assert_eq!(shown.text(), "IPv6 fd00:1:2:3::/64: no address in use");
    row.guests[3] = address("fd00:1:2:3::15").into();
    row.guests[0] = address("fe80::15").into();
    let shown = GuestIpv6::of(&row).unwrap();
    assert_eq!(
        shown.addresses,
        [address("fe80::15"), address("fd00:1:2:3::15")]
    );
    assert_eq!(
        shown.text(),
        "IPv6 fd00:1:2:3::/64: fe80::15, fd00:1:2:3::15"
    );
    row.flags |= Vm6Flags::SINGLE;
    row.prefix = address("2001:db8::15").into();
    row.guests = Vm6::OFF.guests;
    let shown = GuestIpv6::of(&row).unwrap();
    assert_eq!(shown.text(), "IPv6 2001:db8::15/128: no address in use");
}
