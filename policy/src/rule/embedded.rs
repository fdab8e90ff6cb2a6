//! IPv6 addresses that lead to IPv4 addresses, by a translator or a tunnel.
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net};

/// Returns the IPv4 address that a packet to an IPv6 address reaches in the end: the one inside a
/// mapped, NAT64 (RFC 6052), 6to4 (RFC 3056) or Teredo (RFC 4380, where it is inverted) address.
pub fn embedded(addr: IpAddr) -> Option<Ipv4Addr> {
    let IpAddr::V6(addr) = addr else {
        return None;
    };
    let v4 = |high: u16, low: u16| Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low));
    match addr.segments() {
        [0, 0, 0, 0, 0, 0xffff, high, low] => Some(v4(high, low)),
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] => Some(v4(high, low)),
        [0x2002, high, low, ..] => Some(v4(high, low)),
        [0x2001, 0, _, _, _, _, high, low] => Some(v4(!high, !low)),
        _ => None,
    }
}

/// Returns the NAT64 and 6to4 prefixes of the addresses that lead to an IPv4 prefix. Teredo
/// addresses that do are in no common prefix.
pub(crate) fn leading_to(prefix: Ipv4Net) -> [IpNet; 2] {
    let bits = u128::from(prefix.network().to_bits());
    [(0x64_ff9b << 96, 96), (0x2002 << 112, 16)].map(|(first, len)| {
        let addr = Ipv6Addr::from_bits(first | bits << (96 - len));
        IpNet::new_assert(addr.into(), len + prefix.prefix_len())
    })
}
