//! Packets and bytes as if segmented, so that figures are the same under any GSO or GRO.

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
