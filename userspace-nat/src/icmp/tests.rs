use proptest::prelude::*;

use super::*;
use crate::fake::packets;

/// The three addresses of a flow, and the type of "unreachable".
#[derive(Clone, Copy, Debug)]
struct Family {
    guest: IpAddr,
    nat: IpAddr,
    peer: IpAddr,
    unreachable: (u8, u8),
}

fn families() -> [Family; 2] {
    let family = |guest: &str, nat: &str, peer: &str, unreachable| Family {
        guest: guest.parse().unwrap(),
        nat: nat.parse().unwrap(),
        peer: peer.parse().unwrap(),
        unreachable,
    };
    [
        family("10.0.2.15", "192.0.2.1", "198.51.100.7", (3, 3)),
        family("fd00::5", "2001:db8::1", "2001:db8:5::7", (1, 4)),
    ]
}

/// An error from the peer about this packet of ours, of which so many bytes are quoted.
fn error_of(family: Family, sent: &[u8], quoted: usize) -> Vec<u8> {
    let Family {
        nat,
        peer,
        unreachable: (kind, code),
        ..
    } = family;
    packets::icmp_error(peer, nat, kind, code, &sent[..quoted.min(sent.len())])
}

fn quoted(error: &[u8]) -> Result<Quoted, Untranslatable> {
    Quoted::parse(&Ip::parse(error).unwrap(), true)
}

#[test]
fn quotes_too_short_belong_to_nobody_in_either_family() {
    for family in families() {
        let sent = packets::udp((family.nat, 61_000), (family.peer, 443), b"x");
        let least = Version::of(family.nat).header_len() + 8;
        assert!(quoted(&error_of(family, &sent, least)).is_ok());
        for shorter in [least - 1, 10, 0] {
            let error = quoted(&error_of(family, &sent, shorter)).unwrap_err();
            assert_eq!(error, Untranslatable::Quote, "{family:?} {shorter}");
        }
    }
}

#[test]
fn types_without_a_meaning_and_redirects_are_not_translated() {
    for family in families() {
        let sent = packets::udp((family.nat, 61_000), (family.peer, 443), b"x");
        let of = |kind| packets::icmp_error(family.peer, family.nat, kind, 0, &sent);
        let translated = match Version::of(family.nat) {
            Version::V4 => vec![3, 4, 11, 12],
            Version::V6 => vec![1, 2, 3, 4],
        };
        for kind in 0..=u8::MAX {
            let outcome = quoted(&of(kind)).map(drop);
            let expected = match translated.contains(&kind) {
                true => Ok(()),
                false => Err(Untranslatable::Type),
            };
            assert_eq!(outcome, expected, "{family:?} type {kind}");
        }
    }
}

#[test]
fn a_quote_with_the_icmp_of_the_other_family_belongs_to_nobody() {
    for family in families() {
        let mut sent = packets::echo(family.nat, family.peer, true, 9, b"x");
        assert!(quoted(&error_of(family, &sent, 100)).is_ok());
        match Version::of(family.nat) {
            Version::V4 => sent[9] = 58,
            Version::V6 => sent[6] = 1,
        }
        let error = quoted(&error_of(family, &sent, 100)).unwrap_err();
        assert_eq!(error, Untranslatable::Quote, "{family:?}");
    }
}

#[test]
fn a_path_mtu_is_read_in_either_family() {
    let of = |version, kind, code, word: u32| {
        let word = word.to_be_bytes();
        next_hop_mtu(version, &[&[kind, code, 0, 0], &word[..]].concat())
    };
    assert_eq!(of(Version::V4, 3, 4, 1_400), Some(1_400));
    assert_eq!(of(Version::V4, 3, 4, 0), None, "an old router tells none");
    assert_eq!(of(Version::V4, 2, 0, 1_400), None);
    assert_eq!(of(Version::V6, 2, 0, 1_400), Some(1_400));
    assert_eq!(of(Version::V6, 2, 0, 100), Some(1_280), "RFC 8201");
    assert_eq!(of(Version::V6, 3, 4, 1_400), None);
}

#[test]
fn an_error_is_shortened_to_what_its_family_permits() {
    for family in families() {
        let version = Version::of(family.nat);
        let sent = packets::udp((family.nat, 61_000), (family.peer, 443), &[7; 1_400]);
        let (kind, code) = family.unreachable;
        let about = [&sent[..], &[0; 200]].concat();
        let mut error = Vec::new();
        build::ip(&mut error, family.nat, family.peer, version.icmp(), |out| {
            out.extend_from_slice(&[kind, code, 0, 0, 9, 9, 0, 0]);
            out.extend_from_slice(&about);
        });
        for (most, len) in [
            (Quote::Most, version.least_mtu() as usize),
            (Quote::Least, 2 * version.header_len() + 16),
        ] {
            let mut error = error.clone();
            shorten(&mut error, most);
            assert_eq!(error.len(), len, "{family:?}");
            translate(&mut error, End::Source, family.guest, 5_000);
            assert!(packets::is_right(&error), "{family:?}");
            let length = Ip::parse(&error).unwrap().payload()[match version {
                Version::V4 => 5,
                Version::V6 => 4,
            }];
            assert_eq!(length, 0, "no extension follows");
        }
        // The MTU of "packet too big" stays.
        if version == Version::V6 {
            let mut error = error.clone();
            error[version.header_len()] = icmp::v6::TOO_BIG;
            shorten(&mut error, Quote::Least);
            assert_eq!(Ip::parse(&error).unwrap().payload()[4..6], [9, 9]);
        }
    }
}

const GUEST: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 2, 15));
const NAT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
const PEER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(198, 51, 100, 7));

/// An error from the peer about this packet of ours, of which so many bytes are quoted.
fn error_about(sent: &[u8], quoted: usize) -> Vec<u8> {
    error_of(families()[0], sent, quoted)
}

#[test]
fn quotes_of_later_fragments_belong_to_nobody() {
    let sent = packets::udp((NAT, 61_000), (PEER, 443), b"x");
    let mut fragment = sent.clone();
    fragment[7] = 1;
    assert_eq!(
        quoted(&error_about(&fragment, 28)).unwrap_err(),
        Untranslatable::Quote
    );
}

#[test]
fn an_error_about_an_error_belongs_to_nobody() {
    let inner = error_about(&packets::udp((NAT, 61_000), (PEER, 443), b"x"), 28);
    assert_eq!(
        quoted(&error_about(&inner, 100)).unwrap_err(),
        Untranslatable::Quote
    );
}

#[test]
fn a_udp_quote_without_checksum_keeps_none() {
    let mut sent = packets::udp((NAT, 61_000), (PEER, 443), b"x");
    sent[26..28].fill(0);
    let mut error = error_about(&sent, 100);
    translate(&mut error, End::Source, GUEST, 5_000);
    assert_eq!(error[28 + 26..28 + 28], [0, 0]);
    assert!(packets::is_right(&error));
}

proptest! {
    /// Translating and translating back gives the same packet, and every checksum on the way is
    /// as right or wrong as it was.
    #[test]
    fn there_and_back(
        family in prop::sample::select(families().to_vec()),
        protocol in prop::sample::select(vec![1u8, 6, 17]),
        data in prop::collection::vec(any::<u8>(), 0..80),
        quote in 8usize..110,
        port: u16,
        guest_port: u16,
    ) {
        let Family { guest, nat, peer, .. } = family;
        let sent = match protocol {
            1 => packets::echo(nat, peer, true, port, &data),
            6 => packets::tcp((nat, port), (peer, 443), 16, 1, 2, &[], &data),
            _ => packets::udp((nat, port), (peer, 443), &data),
        };
        let header_len = Version::of(nat).header_len();
        let quote = header_len + quote;
        let before = error_of(family, &sent, quote);
        let mut error = before.clone();
        translate(&mut error, End::Source, guest, guest_port);
        prop_assert!(packets::is_right(&error));
        if quote >= sent.len() {
            prop_assert!(packets::is_right(&error[header_len + 8..]));
        }
        prop_assert_eq!(Ip::parse(&error).unwrap().destination, guest);
        let again = quoted(&error).unwrap();
        prop_assert_eq!((again.source, again.source_port), (guest, guest_port));
        translate(&mut error, End::Source, nat, port);
        // 0 and 0xffff are the same sum.
        prop_assert_eq!(&error[..header_len + 2], &before[..header_len + 2]);
        prop_assert!(packets::is_right(&error));
    }

    /// No content of an ICMP message causes a panic.
    #[test]
    fn nothing_panics(kind: u8, inner in prop::collection::vec(any::<u8>(), 0..90), plausible: bool) {
        let mut inner = inner;
        if plausible && inner.len() > 10 {
            inner[0] = 0x45;
            inner[9] = [1, 6, 17][usize::from(inner[9]) % 3];
        }
        if plausible && inner.len() > 10 && kind % 2 == 0 {
            inner[0] = 0x60;
            inner[6] = [58, 6, 17][usize::from(inner[6]) % 3];
        }
        for Family { guest, nat, peer, .. } in families() {
            let mut error = packets::icmp_error(peer, nat, kind, 0, &inner);
            let _ = quoted(&error);
            translate(&mut error, End::Source, guest, 1);
            translate(&mut error, End::Destination, guest, 1);
            prop_assert!(packets::is_right(&error));
            shorten(&mut error, Quote::Least);
            shorten(&mut error, Quote::Most);
        }
    }
}
