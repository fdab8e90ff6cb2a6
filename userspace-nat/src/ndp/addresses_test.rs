use slipgate_abi::Vm6;

use super::*;

fn row() -> Vm6Ref {
    let row = Box::leak(Box::new(Vm6::OFF));
    // SAFETY: the row is leaked, so it stays.
    unsafe { Vm6Ref::new(row) }
}

fn address(host: u16) -> Ipv6Addr {
    Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, host)
}

const LOCAL: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 5);
/// Addresses of the prefix that are bound at once.
const MOST: u16 = GUEST_ADDRESSES as u16 - 1;

#[test]
fn a_guest_has_one_address_of_the_link_and_several_of_the_prefix() {
    let row = row();
    assert_eq!(bind(row, address(1), 1), Bound::New);
    assert_eq!(bind(row, LOCAL, 2), Bound::New);
    for host in 2..=MOST {
        assert_eq!(bind(row, address(host), 3), Bound::New, "{host}");
    }
    assert_eq!(bind(row, address(1), 4), Bound::Known);
    assert_eq!(bind(row, address(MOST + 1), 5), Bound::Refused);
    let all = bound(row);
    assert_eq!((all[0], all.len()), (LOCAL, GUEST_ADDRESSES));
    // Another one of the link does not take a place of the prefix, nor the other way round.
    let other: Ipv6Addr = "fe80::6".parse().unwrap();
    assert_eq!(bind(row, other, 5), Bound::InPlaceOf(LOCAL));
    assert!(bound(row).contains(&address(1)));
}

#[test]
fn the_one_that_was_silent_for_longest_makes_room() {
    let row = row();
    for host in 1..=MOST {
        bind(row, address(host), u64::from(host));
    }
    // A packet from the first: the second is the most silent now.
    bind(row, address(1), 20);
    let new = address(99);
    assert_eq!(bind(row, new, 2 + MIN_SILENCE_NS - 1), Bound::Refused);
    let now = 2 + MIN_SILENCE_NS;
    assert_eq!(bind(row, new, now), Bound::InPlaceOf(address(2)));
    assert!(bound(row).contains(&new) && !bound(row).contains(&address(2)));
    // What made room comes back when it speaks and another is silent.
    assert_eq!(
        bind(row, address(2), now),
        Bound::Refused,
        "the third spoke at 3"
    );
    assert_eq!(bind(row, address(2), now + 1), Bound::InPlaceOf(address(3)));
}

#[test]
fn a_flood_of_sources_changes_one_address_in_a_while() {
    let row = row();
    let second = crate::clock::SECOND_NS;
    let mut changes = 0;
    for host in 0..10_000_u16 {
        // 100 new ones a second, for 100 s.
        let now = u64::from(host) * second / 100;
        changes += u32::from(!matches!(bind(row, address(host + 1), now), Bound::Refused));
    }
    let most = u32::from(MOST) * (100 / 30 + 1);
    assert!(changes <= most, "{changes}");
}
