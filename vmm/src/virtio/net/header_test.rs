use proptest::prelude::*;

use super::*;

const ALL: Features = Features(
    1 << VIRTIO_NET_F_CSUM
        | 1 << VIRTIO_NET_F_HOST_ECN
        | 1 << VIRTIO_NET_F_HOST_TSO4
        | 1 << VIRTIO_NET_F_HOST_TSO6
        | 1 << VIRTIO_NET_F_HOST_USO,
);
const NONE: Features = Features(0);

fn header(flags: u8, gso: u8, halves: [u16; 4]) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..2].copy_from_slice(&[flags, gso]);
    for (to, half) in header[2..10].chunks_exact_mut(2).zip(halves) {
        to.copy_from_slice(&half.to_le_bytes());
    }
    header
}

fn checked(mut it: [u8; 12], bytes: usize, negotiated: Features) -> Result<[u8; 12], DropReason> {
    check(&mut it, bytes, negotiated).map(|()| it)
}

const TSO: [u16; 4] = [54, 1448, 34, 16];
const USO: [u16; 4] = [42, 1400, 34, 6];

#[test]
fn plain_frames_have_a_length() {
    let plain = header(0, 0, [0; 4]);
    for (bytes, expected) in [
        (13, Err(DropReason::TxShort)),
        (14, Ok(plain)),
        (65_549, Ok(plain)),
        (65_550, Err(DropReason::TxLong)),
    ] {
        assert_eq!(checked(plain, bytes, ALL), expected);
    }
}

#[test]
fn what_means_nothing_is_cleared() {
    // DATA_VALID, RSC_INFO and unknown flags; lengths without GSO; num_buffers.
    let mut odd = header(0xfe, 0, [9_999, 7, 60_000, 60_000]);
    odd[10] = 5;
    assert_eq!(checked(odd, 60, ALL), Ok([0; 12]));
}

#[test]
fn a_checksum_lies_within_the_frame() {
    let with = |start, offset| header(NEEDS_CSUM, 0, [0, 0, start, offset]);
    assert_eq!(checked(with(34, 16), 52, ALL), Ok(with(34, 16)));
    for (start, offset, bytes) in [(34, 16, 51), (13, 16, 60), (65_535, 65_535, 65_549)] {
        let refused = Err(DropReason::TxChecksum);
        assert_eq!(checked(with(start, offset), bytes, ALL), refused);
    }
    assert_eq!(checked(with(34, 16), 60, NONE), Err(DropReason::TxChecksum));
}

#[test]
fn gso_needs_type_size_checksum_and_headers() {
    for good in [
        header(NEEDS_CSUM, GSO_TCPV4, TSO),
        header(NEEDS_CSUM, GSO_TCPV6 | GSO_ECN, TSO),
        header(NEEDS_CSUM, GSO_UDP_L4, USO),
    ] {
        assert_eq!(checked(good, 4_000, ALL), Ok(good));
        let only_csum = Features(1 << VIRTIO_NET_F_CSUM);
        assert_eq!(checked(good, 4_000, only_csum), Err(DropReason::TxGsoType));
    }
    let [gso, length] = [DropReason::TxGso, DropReason::TxHeaderLength];
    for (bad, reason) in [
        (header(NEEDS_CSUM, 2, TSO), DropReason::TxGsoType),
        (header(NEEDS_CSUM, 3, TSO), DropReason::TxGsoType),
        (header(NEEDS_CSUM, GSO_ECN, TSO), DropReason::TxGsoType),
        (
            header(NEEDS_CSUM, GSO_UDP_L4 | GSO_ECN, USO),
            DropReason::TxGsoType,
        ),
        (header(0, GSO_TCPV4, TSO), gso),
        (header(NEEDS_CSUM, GSO_TCPV4, [54, 0, 34, 16]), gso),
        (header(NEEDS_CSUM, GSO_TCPV4, [54, 1448, 34, 6]), gso),
        (header(NEEDS_CSUM, GSO_UDP_L4, TSO), gso),
        (header(NEEDS_CSUM, GSO_TCPV4, [54, 1448, 3_981, 16]), gso),
        (header(NEEDS_CSUM, GSO_TCPV4, [4_001, 1448, 34, 16]), length),
    ] {
        assert_eq!(checked(bad, 4_000, ALL), Err(reason), "{bad:?}");
    }
    let no_ecn = Features(ALL.0 & !(1 << VIRTIO_NET_F_HOST_ECN));
    let ecn = header(NEEDS_CSUM, GSO_TCPV4 | GSO_ECN, TSO);
    assert_eq!(checked(ecn, 4_000, no_ecn), Err(DropReason::TxGsoType));
}

proptest! {
    /// A header that passes is in bounds, was negotiated, and passes again unchanged.
    #[test]
    fn what_passes_is_sound(
        it in any::<[u8; 12]>(),
        near in any::<bool>(),
        bytes in 0_usize..70_000,
        negotiated in any::<u64>(),
    ) {
        let mut it = it;
        if near {
            // Small numbers, so that some headers pass.
            for at in [3, 7, 9] { it[at] = 0; }
            it[1] &= 0x85;
        }
        let negotiated = Features(negotiated & ALL.0);
        if let Ok(out) = checked(it, bytes, negotiated) {
            let half = |at: usize| usize::from(u16::from_le_bytes([out[at], out[at + 1]]));
            prop_assert!((14..=65_549).contains(&bytes));
            prop_assert!(half(2) <= bytes && out[0] & !1 == 0 && half(10) == 0);
            prop_assert!(out[0] == 0 || half(6) + half(8) + 2 <= bytes);
            prop_assert!(out[1] == 0 || (out[0] == 1 && half(4) > 0));
            prop_assert!(out[1] == 0 || half(6) + 8 <= bytes);
            prop_assert_eq!(checked(out, bytes, negotiated), Ok(out));
        }
    }
}
