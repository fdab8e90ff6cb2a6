use std::net::{Ipv4Addr, Ipv6Addr};

use super::*;
use crate::testing::{in_netns, run};

const HOST: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 2);
const OTHER: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 3);

fn any(table: &str, chain: &str) -> SourceNat {
    SourceNat {
        table: table.into(),
        chain: chain.into(),
        sees: [true, false],
        device: None,
        addresses: Addresses::OfDevice,
        ports: None,
    }
}

fn among(least: impl Into<Ipv4Addr>, most: impl Into<Ipv4Addr>) -> Addresses {
    Addresses::Among(IpAddr::V4(least.into())..=IpAddr::V4(most.into()))
}

/// A target as iptables-nft writes it: an expression `target` whose data name it.
fn target(name: &[u8], info: &[u8]) -> Vec<u8> {
    let attribute = |kind: u16, value: &[u8]| {
        let mut bytes = Vec::new();
        bytes.extend((4 + value.len() as u16).to_ne_bytes());
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    };
    let data = [
        attribute(1, name),
        attribute(2, &0u32.to_be_bytes()),
        attribute(3, info),
    ];
    let expression = [attribute(1, b"target\0"), attribute(2, &data.concat())];
    attribute(1, &expression.concat())
}

fn sources(of_guests: &[IpAddr], by_masquerade: &[IpAddr]) -> Sources {
    Sources {
        of_guests: of_guests.to_vec(),
        by_masquerade: by_masquerade.to_vec(),
    }
}

fn guests() -> GuestsTuples {
    GuestsTuples {
        uplink: "eth0".into(),
        by_routes: None,
        ports: 61_000..=65_535,
        ipv4: Some(sources(&[HOST.into()], &[HOST.into()])),
        ipv6: None,
    }
}

#[test]
fn rules_that_translate_sources_are_found_and_others_are_not() {
    in_netns("rules_that_translate_sources_are_found", || {
        assert_eq!(find().unwrap(), []);
        run("nft add table ip own");
        run("nft add chain ip own in { type nat hook prerouting priority -100 ; }");
        run("nft add chain ip own out { type nat hook postrouting priority 100 ; }");
        run("nft add chain ip own more");
        run("nft add rule ip own in tcp dport 80 dnat to 10.0.0.1");
        run("nft add rule ip own more counter accept");
        assert_eq!(find().unwrap(), []);

        run("nft add rule ip own out oifname eth0 masquerade");
        run("nft add rule ip own out oifname eth0 masquerade");
        run("nft add rule ip own out ip saddr 10.0.0.0/8 masquerade");
        run("nft add rule ip own out meta l4proto tcp oifname \"eth*\" masquerade to :1024-60999");
        run("nft add rule ip own out oifname != docker0 masquerade random");
        run("nft add rule ip own more snat to 192.0.2.1");
        run("nft add rule ip own more meta l4proto udp snat to 192.0.2.1-192.0.2.9:4000");
        let to = |last: u8| among([192, 0, 2, 1], [192, 0, 2, last]);
        let named = Some(Device::Named("eth0".into()));
        let out = any("own", "out");
        let more = any("own", "more");
        assert_eq!(
            find().unwrap(),
            [
                SourceNat {
                    addresses: to(1),
                    ..more.clone()
                },
                SourceNat {
                    addresses: to(9),
                    ports: Some(4_000..=4_000),
                    ..more
                },
                SourceNat {
                    device: named,
                    ..out.clone()
                },
                // That of 10.0.0.0/8 and that of other devices are the same here.
                out.clone(),
                SourceNat {
                    device: Some(Device::Prefix("eth".into())),
                    ports: Some(1_024..=60_999),
                    ..out
                },
            ]
        );
    });
}

#[test]
fn what_a_map_gives_is_unknown_and_an_address_of_the_packet_no_device() {
    in_netns("what_a_map_gives_is_unknown", || {
        run("nft add table ip own");
        run("nft add chain ip own a { type nat hook postrouting priority 100 ; }");
        run("nft add chain ip own b");
        run("nft add rule ip own a meta mark set 7 snat to ip saddr map { 10.0.0.1 : 192.0.2.7 }");
        run("nft add rule ip own b oifname != docker0 ip saddr 10.0.0.1 masquerade");
        let by_map = SourceNat {
            addresses: Addresses::Unknown,
            ..any("own", "a")
        };
        assert_eq!(find().unwrap(), [by_map, any("own", "b")]);
    });
}

#[test]
fn rules_of_ipv6_meet_guests_that_have_it() {
    in_netns("rules_of_ipv6_meet_guests_that_have_it", || {
        for (family, sees) in [("ip6", [false, true]), ("inet", [true, true])] {
            run(&format!("nft add table {family} own"));
            run(&format!(
                "nft add chain {family} own out {{ type nat hook postrouting priority 100 ; }}"
            ));
            run(&format!("nft add rule {family} own out masquerade"));
            let rule = SourceNat {
                sees,
                ..any("own", "out")
            };
            assert_eq!(find().unwrap(), [rule]);
            run(&format!("nft delete table {family} own"));
        }
        run("nft add table ip6 own");
        run("nft add chain ip6 own out { type nat hook postrouting priority 100 ; }");
        run("nft add rule ip6 own out meta l4proto udp snat to [2001:db8::1]:4000-4999");
        let [rule] = find().unwrap().try_into().unwrap();
        let address = |last| IpAddr::from(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last));
        assert_eq!(rule.addresses, Addresses::Among(address(1)..=address(1)));
        assert_eq!(rule.ports, Some(4_000..=4_999));
    });
    let address = |last: u16| IpAddr::from(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last));
    let among = |of_guests: &[u16], by_masquerade: &[u16]| GuestsTuples {
        ipv6: Some(Sources {
            of_guests: of_guests.iter().copied().map(address).collect(),
            by_masquerade: by_masquerade.iter().copied().map(address).collect(),
        }),
        ..guests()
    };
    let with = |of_guests: &[u16]| among(of_guests, of_guests);
    let masquerade = SourceNat {
        sees: [false, true],
        ..any("own", "out")
    };
    assert!(!masquerade.may_meet(&guests()), "no guest has IPv6");
    assert!(masquerade.may_meet(&with(&[1])));
    assert!(masquerade.may_meet_ipv6_only(&with(&[1])));
    let to = |last: u16| SourceNat {
        addresses: Addresses::Among(address(last)..=address(last)),
        ..masquerade.clone()
    };
    assert!(to(2).may_meet(&with(&[1, 2])) && !to(3).may_meet(&with(&[1, 2])));
    assert!(to(3).may_meet(&with(&[])), "which one is not known yet");
    // Of a pool: masquerading gives one of the device's, if it has one at all.
    assert!(!masquerade.may_meet(&among(&[7, 8], &[1, 2])));
    assert!(masquerade.may_meet(&among(&[7, 8], &[1, 8])));
    assert!(masquerade.may_meet(&among(&[7, 8], &[])));
    // A rule of both families is one of IPv4, too.
    let both = SourceNat {
        sees: [true, true],
        ..masquerade
    };
    assert!(both.may_meet(&with(&[1])) && !both.may_meet_ipv6_only(&with(&[1])));
}

#[test]
fn targets_of_ip6tables_have_a_range_of_their_own() {
    let mut info = 3u32.to_ne_bytes().to_vec();
    for last in [1, 2] {
        info.extend(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last).octets());
    }
    info.extend(1_024u16.to_be_bytes());
    info.extend(60_999u16.to_be_bytes());
    let read = |name: &[u8]| translation(&target(name, &info), true).unwrap();
    let masquerade = read(b"MASQUERADE\0");
    assert_eq!(masquerade.ports, Some(1_024..=60_999));
    assert_eq!(masquerade.addresses, Addresses::OfDevice);
    let address = |last| IpAddr::from(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last));
    assert_eq!(
        read(b"SNAT\0").addresses,
        Addresses::Among(address(1)..=address(2))
    );
}

#[test]
fn what_has_other_ports_another_address_or_another_device_meets_no_guest() {
    let plain = any("own", "out");
    assert!(plain.may_meet(&guests()));
    let meets = |change: fn(&mut SourceNat)| {
        let mut nat = any("own", "out");
        change(&mut nat);
        nat.may_meet(&guests())
    };
    assert!(!meets(|nat| nat.ports = Some(1_024..=60_999)));
    assert!(meets(|nat| nat.ports = Some(1_024..=61_000)));
    assert!(!meets(|nat| nat.device = Some(Device::Named("wg0".into()))));
    assert!(meets(|nat| nat.device = Some(Device::Named("eth0".into()))));
    assert!(meets(|nat| nat.device = Some(Device::Prefix("eth".into()))));
    assert!(!meets(
        |nat| nat.device = Some(Device::Prefix("eth0.".into()))
    ));
    assert!(!meets(|nat| nat.addresses = among(OTHER, OTHER)));
    assert!(meets(|nat| nat.addresses = among(HOST, OTHER)));
    let by = |of_guests: Option<Ipv4Addr>, by_masquerade: Option<Ipv4Addr>| {
        let all = |address: Option<Ipv4Addr>| address.map(IpAddr::V4).into_iter().collect();
        GuestsTuples {
            ipv4: Some(Sources {
                of_guests: all(of_guests),
                by_masquerade: all(by_masquerade),
            }),
            ..guests()
        }
    };
    assert!(!plain.may_meet(&by(Some(OTHER), Some(HOST))));
    // What is not known may be, whatever masquerading would give.
    let by_map = SourceNat {
        addresses: Addresses::Unknown,
        ..plain.clone()
    };
    assert!(by_map.may_meet(&by(Some(OTHER), Some(HOST))));
    assert!(plain.may_meet(&by(Some(OTHER), None)));
    assert!(plain.may_meet(&by(None, Some(HOST))));
    let of_no_ipv4 = GuestsTuples {
        ipv4: None,
        ..guests()
    };
    assert!(!plain.may_meet(&of_no_ipv4));
}

#[test]
fn legacy_tables_and_targets_of_iptables_are_known_by_name() {
    let legacy = |tables, targets| of_legacy(tables, targets, [true, false]).is_some();
    assert!(legacy("filter\nnat\n", "ERROR\nMASQUERADE\n"));
    assert!(!legacy("filter\n", "MASQUERADE\n"));
    assert!(!legacy("nat\n", "ERROR\nDNAT\n"));
    // One range: flags, addresses, ports.
    let range = |flags: u32| {
        let mut info = 1u32.to_ne_bytes().to_vec();
        info.extend(flags.to_ne_bytes());
        info.extend([192, 0, 2, 1, 192, 0, 2, 2]);
        info.extend(1_024u16.to_be_bytes());
        info.extend(60_999u16.to_be_bytes());
        info
    };
    let read = |name: &[u8], flags| translation(&target(name, &range(flags)), false);
    let plain = read(b"MASQUERADE\0", 0).unwrap();
    assert_eq!((plain.addresses, plain.ports), (Addresses::OfDevice, None));
    let netmap = read(b"NETMAP\0", 1).unwrap();
    assert_eq!((netmap.addresses, netmap.ports), (Addresses::Unknown, None));
    let with_ports = read(b"MASQUERADE\0", 2).unwrap();
    assert_eq!(with_ports.ports, Some(1_024..=60_999));
    assert_eq!(with_ports.addresses, Addresses::OfDevice);
    let with_both = read(b"SNAT\0", 3).unwrap();
    assert_eq!(with_both.ports, Some(1_024..=60_999));
    assert_eq!(with_both.addresses, among([192, 0, 2, 1], [192, 0, 2, 2]));
    assert_eq!(read(b"DNAT\0", 3), None);
    // Cut short it is a translation of anything, or none.
    let whole = target(b"SNAT\0", &range(3));
    for length in 0..whole.len() {
        if let Some(cut) = translation(&whole[..length], false) {
            assert_eq!(cut, Default::default(), "{length}");
        }
    }
}
