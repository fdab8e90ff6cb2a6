use slipgate_abi::Ip4;

use super::*;
use crate::packet::checksum::Sum;

const A: Ip4 = Ip4 {
    octets: [10, 0, 2, 15],
};
const B: Ip4 = Ip4 {
    octets: [192, 0, 2, 1],
};

/// A SYN header with these options, padded, with a right checksum.
fn syn(options: &[u8]) -> Vec<u8> {
    let mut h = vec![0u8; TCP_HEADER_LEN];
    h.extend_from_slice(options);
    h.resize(h.len().next_multiple_of(4), 0);
    h[12] = ((h.len() / 4) << 4) as u8;
    h[13] = 2;
    let sum = Sum::default().pseudo(A, B, 6, h.len()).bytes(&h).finish();
    h[16..18].copy_from_slice(&sum.to_be_bytes());
    h
}

fn is_right(h: &[u8]) -> bool {
    Sum::default().pseudo(A, B, 6, h.len()).bytes(h).finish() == 0
}

#[test]
fn lowers_at_any_alignment_and_keeps_the_checksum_right() {
    for nops in 0..4 {
        let mut options = vec![1; nops];
        options.extend_from_slice(&[2, 4, 0x23, 0x28]);
        let mut h = syn(&options);
        assert!(clamp(&mut h, 1_337, false));
        assert_eq!(h[TCP_HEADER_LEN + nops + 2..][..2], 1_337u16.to_be_bytes());
        assert!(is_right(&h), "{nops} NOPs");
    }
}

#[test]
fn never_raises_nor_adds() {
    let mut small = syn(&[2, 4, 2, 0x18]);
    assert!(!clamp(&mut small, 1_460, false));
    let mut none = syn(&[1, 1, 4, 2]);
    assert!(!clamp(&mut none, 1_460, false));
}

#[test]
fn a_partial_checksum_stays() {
    let mut h = syn(&[2, 4, 0x23, 0x28]);
    let pseudo = Sum::default().pseudo(A, B, 6, h.len()).folded();
    h[16..18].copy_from_slice(&pseudo.to_be_bytes());
    assert!(clamp(&mut h, 1_000, true));
    assert_eq!(h[16..18], pseudo.to_be_bytes());
}

#[test]
fn malformed_options_are_left_alone() {
    for options in [
        &[2, 4, 0x23][..],
        &[2, 0, 9, 9],
        &[2, 3, 9, 9],
        &[8, 200],
        &[2],
    ] {
        let mut h = syn(options);
        // The padding may complete a truncated option; what matters is that nothing panics.
        clamp(&mut h, 100, false);
    }
}

#[test]
fn an_mss_leaves_room_for_the_headers_of_its_family() {
    let of = |mtu| (for_mtu(Version::V4, mtu), for_mtu(Version::V6, mtu));
    assert_eq!(of(1_500), (1_460, 1_440));
    assert_eq!(of(68), (536, 1_220), "what every host or link carries");
    assert_eq!(of(100_000), (u16::MAX, u16::MAX));
}
