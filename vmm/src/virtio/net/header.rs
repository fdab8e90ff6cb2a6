//! The header in front of each frame (`struct virtio_net_hdr`, virtio 1.2 section 5.1.6), and the
//! checks of a guest's header.
//!
//! The guest's header is copied, checked and rewritten with the fields that have a meaning; the TAP
//! gets the copy. So the kernel reads what was checked, and fields without a meaning are zero.
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN, VIRTIO_NET_F_GUEST_TSO4,
    VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_GUEST_USO4, VIRTIO_NET_F_GUEST_USO6,
    VIRTIO_NET_F_HOST_ECN, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_HOST_USO,
    VIRTIO_NET_HDR_F_NEEDS_CSUM, VIRTIO_NET_HDR_GSO_ECN, VIRTIO_NET_HDR_GSO_NONE,
    VIRTIO_NET_HDR_GSO_TCPV4, VIRTIO_NET_HDR_GSO_TCPV6, VIRTIO_NET_HDR_GSO_UDP_L4,
};

use super::{DropReason, features::Features, tap::HEADER_BYTES};

/// Length of the Ethernet header without a tag, bytes.
pub(super) const ETHERNET_BYTES: usize = 14;
/// Length of the longest frame, bytes: the longest IP packet behind its Ethernet header.
pub(super) const MAX_FRAME_BYTES: usize = ETHERNET_BYTES + 65_535;
/// Offset of the number of merged buffers in the header.
pub(super) const NUM_BUFFERS_AT: usize = 10;

const NEEDS_CSUM: u8 = VIRTIO_NET_HDR_F_NEEDS_CSUM as u8;
const GSO_NONE: u8 = VIRTIO_NET_HDR_GSO_NONE as u8;
const GSO_TCPV4: u8 = VIRTIO_NET_HDR_GSO_TCPV4 as u8;
const GSO_TCPV6: u8 = VIRTIO_NET_HDR_GSO_TCPV6 as u8;
const GSO_UDP_L4: u8 = VIRTIO_NET_HDR_GSO_UDP_L4 as u8;
const GSO_ECN: u8 = VIRTIO_NET_HDR_GSO_ECN as u8;

/// Returns the number of packets of a frame of `frame_bytes`: those that a GSO frame will be
/// segmented into, or one.
pub(super) fn packets(header: &[u8; HEADER_BYTES], frame_bytes: usize) -> u64 {
    let half = |at: usize| usize::from(u16::from_le_bytes([header[at], header[at + 1]]));
    let (headers, segment) = (half(2), half(4));
    if header[1] == GSO_NONE || segment == 0 {
        return 1;
    }
    frame_bytes.saturating_sub(headers).div_ceil(segment).max(1) as u64
}

/// Checks the header of a frame of `frame_bytes`, and rewrites it.
///
/// # Errors
/// The frame must be dropped, for this reason.
pub(super) fn check(
    header: &mut [u8; HEADER_BYTES],
    frame_bytes: usize,
    negotiated: Features,
) -> Result<(), DropReason> {
    if frame_bytes < ETHERNET_BYTES {
        return Err(DropReason::TxShort);
    }
    if frame_bytes > MAX_FRAME_BYTES {
        return Err(DropReason::TxLong);
    }
    let half = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
    let (hdr_len, gso_size) = (half(2), half(4));
    let (csum_start, csum_offset) = (half(6), half(8));
    let gso_type = header[1];

    let mut out = [0; HEADER_BYTES];
    let mut put = |at: usize, value: u16| out[at..at + 2].copy_from_slice(&value.to_le_bytes());
    let checksum = header[0] & NEEDS_CSUM != 0;
    if checksum {
        let start = usize::from(csum_start);
        let end = start + usize::from(csum_offset) + 2;
        if !negotiated.has(VIRTIO_NET_F_CSUM) || start < ETHERNET_BYTES || end > frame_bytes {
            return Err(DropReason::TxChecksum);
        }
        put(6, csum_start);
        put(8, csum_offset);
    }
    if gso_type != GSO_NONE {
        let l4 = L4::of(gso_type, negotiated).ok_or(DropReason::TxGsoType)?;
        // Earliest offset of the payload's first byte.
        let payload = usize::from(csum_start) + l4.header_bytes;
        if !checksum || gso_size == 0 || csum_offset != l4.checksum_at || payload > frame_bytes {
            return Err(DropReason::TxGso);
        }
        if usize::from(hdr_len) > frame_bytes {
            return Err(DropReason::TxHeaderLength);
        }
        put(2, hdr_len);
        put(4, gso_size);
        out[1] = gso_type;
    }
    out[0] = if checksum { NEEDS_CSUM } else { 0 };
    *header = out;
    Ok(())
}

/// Returns whether a frame from the TAP, whose header begins with these flags and this GSO type,
/// may go to a guest with these features. The TAP knows what the guest accepts, but frames that
/// were in it before were made for another driver.
pub(super) fn may_receive([flags, gso_type]: [u8; 2], negotiated: Features) -> bool {
    let checksum = flags & NEEDS_CSUM == 0 || negotiated.has(VIRTIO_NET_F_GUEST_CSUM);
    let ecn = gso_type & GSO_ECN == 0 || negotiated.has(VIRTIO_NET_F_GUEST_ECN);
    // The IP header decides which of the two features a UDP frame needs; the TAP takes both or
    // none.
    let uso = [VIRTIO_NET_F_GUEST_USO4, VIRTIO_NET_F_GUEST_USO6];
    let gso = match gso_type & !GSO_ECN {
        GSO_NONE => true,
        GSO_TCPV4 => negotiated.has(VIRTIO_NET_F_GUEST_TSO4),
        GSO_TCPV6 => negotiated.has(VIRTIO_NET_F_GUEST_TSO6),
        GSO_UDP_L4 => uso.iter().all(|bit| negotiated.has(*bit)),
        _ => false,
    };
    checksum && ecn && gso
}

/// Transport protocol of a GSO frame.
struct L4 {
    header_bytes: usize,
    checksum_at: u16,
}

impl L4 {
    /// Returns the protocol of a GSO type; `None` when the type is unknown or was not negotiated.
    fn of(gso_type: u8, negotiated: Features) -> Option<L4> {
        const TCP: L4 = L4 {
            header_bytes: 20,
            checksum_at: 16,
        };
        const UDP: L4 = L4 {
            header_bytes: 8,
            checksum_at: 6,
        };
        let ecn = gso_type & GSO_ECN != 0;
        let (l4, feature) = match gso_type & !GSO_ECN {
            GSO_TCPV4 => (TCP, VIRTIO_NET_F_HOST_TSO4),
            GSO_TCPV6 => (TCP, VIRTIO_NET_F_HOST_TSO6),
            GSO_UDP_L4 if !ecn => (UDP, VIRTIO_NET_F_HOST_USO),
            _ => return None,
        };
        let allowed = negotiated.has(feature) && (!ecn || negotiated.has(VIRTIO_NET_F_HOST_ECN));
        allowed.then_some(l4)
    }
}

#[cfg(test)]
#[path = "header_test.rs"]
mod tests;
