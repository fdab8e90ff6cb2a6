//! Packets and bytes as if segmented, so that figures are the same under any GSO or GRO.

use crate::Protocol;

/// What a frame counts as on the wire.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segments {
    /// Packets.
    pub packets: u64,
    /// L3 bytes.
    pub bytes: u64,
}

/// Least TCP MSS that a clamped connection can have: RFC 791's 576-byte minimum less headers is
/// 536; Linux goes down to `net.ipv4.tcp_min_snd_mss` = 48 only when asked to. Timestamps and SACK
/// options take up to 40 bytes of the 536.
pub const MIN_TCP_GSO_SIZE: u32 = 496;

/// Least UDP GSO size let through: a QUIC datagram of 1,200 bytes is the usual one, DNS-like
/// batches are smaller; below this a frame costs more in segments than it carries.
pub const MIN_UDP_GSO_SIZE: u32 = 256;

/// A GSO frame of this length, Ethernet header included, is cut in pieces by a device on its way
/// (`GSO_LEGACY_MAX_SIZE` of the kernel's `netdevice.h`).
pub const MAX_GSO_FRAME_LEN: u32 = 65_536;

/// Counts a frame. `l3_len`: IP header to end. `headers_len`: L3 and L4 headers, repeated in each
/// segment. `gso_size`: L4 payload bytes per segment, 0 when the frame is one packet.
#[inline(always)]
pub const fn count(l3_len: u32, headers_len: u32, gso_size: u32) -> Segments {
    if gso_size == 0 || l3_len <= headers_len {
        return Segments {
            packets: 1,
            bytes: l3_len as u64,
        };
    }
    let payload = l3_len - headers_len;
    let packets = payload.div_ceil(gso_size);
    Segments {
        packets: packets as u64,
        bytes: l3_len as u64 + (packets as u64 - 1) * headers_len as u64,
    }
}

/// What a frame takes of its VM's credits on its way to the engine: as many frames as it may come
/// out as, or be sent on as. The port takes GSO frames whole, except UDP ones of the old kind that
/// become IP fragments (UFO), which a program can't tell from the new. The engine sends a packet on
/// in fragments where it is larger than an ordinary link. `protocol`: the IP header's.
#[inline(always)]
pub const fn credits(l3_len: u32, protocol: u8, gso_size: u32) -> u64 {
    if gso_size == 0 {
        fragments(l3_len, ORDINARY_MTU)
    } else if protocol == Protocol::Udp as u8 {
        count(l3_len, UDP_HEADERS_LEN, gso_size).packets
    } else {
        1
    }
}

/// Ethernet's.
const ORDINARY_MTU: u32 = 1_500;

/// How many packets of at most `mtu` bytes a packet without options is sent as.
#[inline(always)]
pub const fn fragments(l3_len: u32, mtu: u32) -> u64 {
    if l3_len <= mtu || l3_len <= IPV4_HEADER_LEN {
        return 1;
    }
    (l3_len - IPV4_HEADER_LEN).div_ceil(fragment_payload(mtu)) as u64
}

/// What a fragment carries, but for the last: a multiple of eight bytes (RFC 791).
#[inline(always)]
pub const fn fragment_payload(mtu: u32) -> u32 {
    if mtu < IPV4_HEADER_LEN + 8 {
        8
    } else {
        (mtu - IPV4_HEADER_LEN) / 8 * 8
    }
}

/// IPv4 header without options.
const IPV4_HEADER_LEN: u32 = 20;

/// IPv4 header without options, and UDP's.
const UDP_HEADERS_LEN: u32 = 28;

/// The largest L3 packet that a frame becomes.
#[inline(always)]
pub const fn largest_packet(l3_len: u32, headers_len: u32, gso_size: u32) -> u32 {
    let segment = headers_len + gso_size;
    if gso_size == 0 || segment > l3_len {
        l3_len
    } else {
        segment
    }
}

#[cfg(test)]
#[path = "segment_test.rs"]
mod tests;
