use std::fs;

use super::*;

/// Loopback, on which nobody reports anything.
const LINK: IfIndex = IfIndex::new(1);

/// How often a group of the link is joined, by the kernel's table.
fn joined(group: Ipv6Addr) -> u32 {
    let all = fs::read_to_string("/proc/thread-self/net/igmp6").unwrap_or_default();
    let name: String = group
        .octets()
        .iter()
        .map(|octet| format!("{octet:02x}"))
        .collect();
    let line = all
        .lines()
        .find(|line| line.starts_with("1 ") && line.contains(&name));
    line.and_then(|line| line.split_whitespace().nth(3)?.parse().ok())
        .unwrap_or(0)
}

#[test]
fn a_group_is_joined_as_long_as_an_address_is_of_it() {
    if fs::metadata("/proc/thread-self/net/igmp6").is_err() {
        println!("skipped: a_group_is_joined_as_long_as_an_address_is_of_it: no IPv6");
        return;
    }
    let address = |text: &str| text.parse::<Ipv6Addr>().unwrap();
    let [one, alike, other] = [
        "2001:db8::f1:2345",
        "2001:db8:1::f1:2345",
        "2001:db8::f1:2346",
    ]
    .map(address);
    let group = address("ff02::1:fff1:2345");
    assert_eq!((solicited_node(one), solicited_node(alike)), (group, group));
    let mut groups = SolicitedGroups::default();
    for of in [one, alike, other] {
        groups.join(LINK, of).unwrap();
    }
    assert_eq!(joined(group), 1);
    groups.leave(LINK, one);
    assert_eq!(joined(group), 1);
    groups.leave(LINK, alike);
    groups.leave(LINK, alike);
    assert_eq!((joined(group), joined(solicited_node(other))), (0, 1));
    // More than a socket may have.
    for at in 0..3_000_u128 {
        groups
            .join(LINK, Ipv6Addr::from_bits(0xf2_0000 + at))
            .unwrap();
    }
    assert!(groups.sockets.len() > 1);
    drop(groups);
    assert_eq!(joined(solicited_node(other)), 0);
    assert!(
        SolicitedGroups::default()
            .join(IfIndex::new(1 << 20), one)
            .is_err()
    );
}
