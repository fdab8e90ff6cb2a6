use proptest::prelude::*;

use super::*;
use crate::{fake::packets, packet::checksum};

const GUEST: Ip4 = Ip4 {
    octets: [10, 0, 2, 15],
};
const NAT: Ip4 = Ip4 {
    octets: [192, 0, 2, 1],
};
const PEER: Ip4 = Ip4 {
    octets: [198, 51, 100, 7],
};

/// An error from the peer about this packet of ours, of which so many bytes are quoted.
fn error_about(sent: &[u8], quoted: usize) -> Vec<u8> {
    packets::icmp_error(PEER, NAT, 3, 3, &sent[..quoted.min(sent.len())])
}

fn quoted(error: &[u8]) -> Result<Quoted, Untranslatable> {
    Quoted::parse(&Ipv4::parse(error).unwrap(), true)
}

#[test]
fn quotes_too_short_or_of_later_fragments_belong_to_nobody() {
    let sent = packets::udp((NAT, 61_000), (PEER, 443), b"x");
    assert!(quoted(&error_about(&sent, 28)).is_ok());
    assert_eq!(
        quoted(&error_about(&sent, 27)).unwrap_err(),
        Untranslatable::Quote
    );
    assert_eq!(
        quoted(&error_about(&sent, 10)).unwrap_err(),
        Untranslatable::Quote
    );
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
        protocol in prop::sample::select(vec![1u8, 6, 17]),
        data in prop::collection::vec(any::<u8>(), 0..80),
        quote in 28usize..130,
        port: u16,
        guest_port: u16,
    ) {
        let sent = match protocol {
            1 => packets::echo(NAT, PEER, true, port, &data),
            6 => packets::tcp((NAT, port), (PEER, 443), 16, 1, 2, &[], &data),
            _ => packets::udp((NAT, port), (PEER, 443), &data),
        };
        let before = error_about(&sent, quote);
        let mut error = before.clone();
        translate(&mut error, End::Source, GUEST, guest_port);
        prop_assert!(packets::is_right(&error));
        if quote >= sent.len() {
            prop_assert!(packets::is_right(&error[28..]));
        }
        prop_assert_eq!(&error[16..20], &GUEST.octets);
        prop_assert_eq!(&error[40..44], &GUEST.octets);
        translate(&mut error, End::Source, NAT, port);
        // 0 and 0xffff are the same sum.
        prop_assert_eq!(&error[..22], &before[..22]);
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
        let mut error = packets::icmp_error(PEER, NAT, kind, 0, &inner);
        let _ = quoted(&error);
        translate(&mut error, End::Source, GUEST, 1);
        translate(&mut error, End::Destination, GUEST, 1);
        prop_assert_eq!(checksum::of(&error[20..]), 0);
    }
}
