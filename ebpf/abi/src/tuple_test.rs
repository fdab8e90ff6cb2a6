use core::net::Ipv6Addr;

use super::*;

fn address(text: &str) -> Ip6 {
    text.parse::<Ipv6Addr>().unwrap().into()
}

#[test]
fn an_address_is_known_by_its_prefix() {
    for (text, is_multicast, is_link_local) in [
        ("fe80::1", false, true),
        ("febf:ffff::1", false, true),
        ("fec0::1", false, false),
        ("fe7f::1", false, false),
        ("ff02::1", true, false),
        ("::", false, false),
        ("2001:db8::1", false, false),
    ] {
        let address = address(text);
        assert_eq!(address.is_multicast(), is_multicast, "{text}");
        assert_eq!(address.is_link_local(), is_link_local, "{text}");
        assert_eq!(address.is_unspecified(), text == "::");
        assert_eq!(Ip6::from_words(address.to_words()), address);
    }
    let (a, b) = (address("fd00:1:2:3::1"), address("fd00:1:2:3:ffff::2"));
    assert!(a.same_prefix(b) && !a.is(b) && a.is(a));
    assert!(!a.same_prefix(address("fd00:1:2:4::1")));
}

#[test]
fn each_family_has_its_own_icmp() {
    assert_eq!(Protocol::from_ip(58), None);
    assert_eq!(Protocol::from_ip6(1), None);
    for number in 0..=255 {
        let of_either = Protocol::from_ip(number).or(Protocol::from_ip6(number));
        assert_eq!(Protocol::from_number(number), of_either, "{number}");
    }
}

#[test]
fn a_tuple_is_its_words() {
    let (local, remote) = (
        Ip4 {
            octets: [1, 2, 3, 4],
        },
        Ip4 {
            octets: [5, 6, 7, 8],
        },
    );
    let tuple = Tuple {
        scope: 9,
        local,
        remote,
        local_port: 0x1234,
        remote_port: 0x5678,
        protocol: 17,
        pad: [0; 3],
    };
    let by_words = Tuple::of_words(9, (local, 0x1234), (remote, 0x5678), 17);
    assert_eq!(by_words, tuple);
}

#[test]
fn tuples_are_compared_by_every_field() {
    let tuple = Tuple6 {
        scope: 1,
        local_port: 2,
        remote_port: 3,
        local: address("fd00::1"),
        remote: address("2001:db8::1"),
        protocol: 6,
        pad: [0; 7],
    };
    let others = [
        Tuple6 { scope: 2, ..tuple },
        Tuple6 {
            local_port: 9,
            ..tuple
        },
        Tuple6 {
            remote_port: 9,
            ..tuple
        },
        Tuple6 {
            local: address("fd00::2"),
            ..tuple
        },
        Tuple6 {
            remote: address("2001:db9::1"),
            ..tuple
        },
        Tuple6 {
            protocol: 17,
            ..tuple
        },
    ];
    let by_words = Tuple6::of_words(1, (tuple.local, 2), (tuple.remote, 3), 6);
    assert_eq!(by_words, tuple);
    assert!(tuple.is(&tuple));
    for other in others {
        assert!(!tuple.is(&other) && tuple != other, "{other:?}");
    }
}
