//! Clamping of the TCP MSS option in a SYN to the path's MTU.
//!
//! The engine sees only the opener's SYN: the guest's, or with a forward the world's. So it clamps
//! the size that the opener is willing to *receive*. The SYN-ACK is translated in the kernel
//! unchanged. Packets of the opener that exceed the path's MTU as a result are answered by ICMP
//! "fragmentation needed".
use slipgate_abi::segment::MIN_TCP_GSO_SIZE;

use crate::packet::{
    Version, checksum,
    transport::{OPTION_MSS, TCP_HEADER_LEN, tcp_options},
};

/// Length of the IP and TCP headers without options, bytes; an MSS does not include them.
const fn headers(version: Version) -> u32 {
    (version.header_len() + TCP_HEADER_LEN) as u32
}

/// Returns the least MSS to which a SYN is clamped, bytes: a link with less does not carry the 576
/// bytes that every IPv4 host accepts, or the 1,280 that every link of IPv6 carries.
pub const fn least(version: Version) -> u16 {
    (version.least_mtu() - headers(version)) as u16
}

/// Returns the MSS for a path with this MTU, bytes.
pub fn for_mtu(version: Version, mtu: u32) -> u16 {
    u16::try_from(mtu.saturating_sub(headers(version)))
        .unwrap_or(u16::MAX)
        .max(least(version))
}

// Segments of GSO frames that are let through are no smaller, but for options (40 bytes).
const _: () = assert!(least(Version::V4) as u32 == MIN_TCP_GSO_SIZE + 40);

/// Lowers the MSS option in a TCP header with options to `most` bytes. Returns whether it changed.
/// A SYN without the option is not changed: its sender assumes 536 (RFC 9293 section 3.7.1).
///
/// `partial`: the checksum field holds only the pseudo-header's sum, which does not include
/// options.
pub fn clamp(tcp_header: &mut [u8], most: u16, partial: bool) -> bool {
    let Some((_, at, 4)) = tcp_options(tcp_header).find(|(kind, ..)| *kind == OPTION_MSS) else {
        return false;
    };
    let old = u16::from_be_bytes([tcp_header[at + 2], tcp_header[at + 3]]);
    if old <= most {
        return false;
    }
    tcp_header[at + 2..at + 4].copy_from_slice(&most.to_be_bytes());
    if !partial {
        let mut field = [tcp_header[16], tcp_header[17]];
        if at % 2 == 0 {
            checksum::replace16(&mut field, old, most);
        } else {
            // After an odd number of NOPs the value straddles two words of the sum; swapping its
            // octets gives what those words change by (RFC 1071 section 2).
            checksum::replace16(&mut field, old.swap_bytes(), most.swap_bytes());
        }
        tcp_header[16..18].copy_from_slice(&field);
    }
    true
}

#[cfg(test)]
#[path = "mss_test.rs"]
mod tests;
