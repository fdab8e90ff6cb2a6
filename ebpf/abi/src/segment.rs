//! Counts of packets and bytes as if segmented, which do not depend on GSO or GRO.

use crate::Protocol;

/// Packets and bytes of a frame after segmentation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segments {
    /// Number of packets on the wire.
    pub packets: u64,
    /// Number of L3 bytes, with the headers of each packet.
    pub bytes: u64,
}

/// Smallest TCP GSO size let through, bytes. RFC 791's minimum of 576 bytes less headers is an MSS
/// of 536, of which timestamps and SACK options take up to 40 bytes. Linux uses a smaller MSS, down
/// to `net.ipv4.tcp_min_snd_mss` = 48, only when asked to.
pub const MIN_TCP_GSO_SIZE: u32 = 496;

/// Smallest UDP GSO size let through, bytes. A QUIC datagram of 1,200 bytes is usual, and batches
/// like those of DNS are smaller. Below this size a frame costs more in segments than it carries.
pub const MIN_UDP_GSO_SIZE: u32 = 256;

/// Length from which a device on the path segments a GSO frame, bytes with the Ethernet header
/// (`GSO_LEGACY_MAX_SIZE` of the kernel's `netdevice.h`).
pub const MAX_GSO_FRAME_LEN: u32 = 65_536;

/// Counts the packets and bytes of a frame after segmentation. `l3_len` is the length from the IP
/// header to the end, bytes. `headers_len` is that of the L3 and L4 headers, which each segment
/// repeats. `gso_size` is the L4 payload per segment, bytes; 0 if the frame is one packet.
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

/// Number of credits that a frame takes on its way to the engine: the most frames that it may
/// arrive as or be sent as. The port takes GSO frames whole, except UDP frames of the old kind that
/// become IP fragments (UFO), which a program cannot distinguish from the new kind. The engine
/// fragments a packet that exceeds an ordinary link's MTU. `protocol` is the IP header's.
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

/// As [`credits`], for IPv6, whose packets are not made into fragments on their way (RFC 8200 section
/// 4.5). `protocol` is the next header of the IPv6 header.
#[inline(always)]
pub const fn credits6(l3_len: u32, protocol: u8, gso_size: u32) -> u64 {
    if gso_size != 0 && protocol == Protocol::Udp as u8 {
        count(l3_len, UDP6_HEADERS_LEN, gso_size).packets
    } else {
        1
    }
}

/// MTU of an Ethernet link, bytes.
const ORDINARY_MTU: u32 = 1_500;

/// Number of packets of at most `mtu` bytes in which a packet without options is sent.
#[inline(always)]
pub const fn fragments(l3_len: u32, mtu: u32) -> u64 {
    pieces(l3_len, mtu, IPV4_HEADER_LEN, fragment_payload(mtu))
}

/// Payload of each fragment but the last, bytes: a multiple of eight (RFC 791).
#[inline(always)]
pub const fn fragment_payload(mtu: u32) -> u32 {
    payload_behind(IPV4_HEADER_LEN, mtu)
}

/// As [`fragments`], for an IPv6 packet without extension headers, whose sender has fragmented it.
#[inline(always)]
pub const fn fragments6(l3_len: u32, mtu: u32) -> u64 {
    pieces(l3_len, mtu, IPV6_HEADER_LEN, fragment_payload6(mtu))
}

/// As [`fragment_payload`], behind an IPv6 header and a fragment header (RFC 8200 section 4.5).
#[inline(always)]
pub const fn fragment_payload6(mtu: u32) -> u32 {
    payload_behind(IPV6_FRAGMENT_HEADERS_LEN, mtu)
}

/// Number of fragments with this payload each that a packet with this header needs.
#[inline(always)]
const fn pieces(l3_len: u32, mtu: u32, header_len: u32, payload: u32) -> u64 {
    if l3_len <= mtu || l3_len <= header_len {
        return 1;
    }
    (l3_len - header_len).div_ceil(payload) as u64
}

/// Payload of a fragment that has so many bytes of headers: a multiple of eight, and eight at least.
#[inline(always)]
const fn payload_behind(headers_len: u32, mtu: u32) -> u32 {
    if mtu < headers_len + 8 {
        8
    } else {
        (mtu - headers_len) / 8 * 8
    }
}

/// Length of an IPv4 header without options, bytes.
const IPV4_HEADER_LEN: u32 = 20;

/// Length of an IPv6 header without extension headers, bytes.
const IPV6_HEADER_LEN: u32 = 40;

/// Length of an IPv6 header and a fragment header, which each IPv6 fragment has, bytes.
pub const IPV6_FRAGMENT_HEADERS_LEN: u32 = IPV6_HEADER_LEN + 8;

/// Length of an IPv4 header without options and a UDP header, bytes.
const UDP_HEADERS_LEN: u32 = 28;

/// Length of an IPv6 header and a UDP header, bytes.
const UDP6_HEADERS_LEN: u32 = 48;

/// Length of the largest L3 packet in a frame after segmentation, bytes.
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
