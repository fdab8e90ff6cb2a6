//! Requests to nftables (`<linux/netfilter/nfnetlink.h>`).

use std::io;

use netlink_sys::protocols::NETLINK_NETFILTER;

use super::none_when_unsupported;
use crate::netlink::raw;

/// Message type `NFT_MSG_GETCHAIN` of nftables.
pub(super) const GET_CHAIN: u8 = 4;
/// Message type `NFT_MSG_GETRULE` of nftables.
pub(super) const GET_RULE: u8 = 7;

/// Dumps the objects of a kind and returns what `read` parses of each, given its family and
/// attributes. The result is empty if the kernel has no nftables.
pub(super) fn dump<T>(request: u8, read: impl Fn(u8, &[u8]) -> Option<T>) -> io::Result<Vec<T>> {
    const NFNL_SUBSYS_NFTABLES: u16 = 10;
    /// `struct nfgenmsg`: any family, version 0, no resource.
    const ANY_FAMILY: [u8; 4] = [0; 4];
    let request = NFNL_SUBSYS_NFTABLES << 8 | u16::from(request);
    let mut found = Vec::new();
    let dumped = raw::dump(NETLINK_NETFILTER, request, &ANY_FAMILY, |_, payload| {
        found.extend(
            payload
                .split_at_checked(ANY_FAMILY.len())
                .and_then(|(header, attributes)| read(*header.first()?, attributes)),
        );
    });
    none_when_unsupported(dumped.map(|()| found))
}

/// Whether objects of a family see IPv6: those of IPv6, or of both families.
pub(super) fn sees_ipv6(family: u8) -> bool {
    const NFPROTO_INET: u8 = 1;
    const NFPROTO_IPV6: u8 = 10;
    matches!(family, NFPROTO_INET | NFPROTO_IPV6)
}

/// Whether objects of a family see IPv4: those of IPv4, or of both families.
pub(super) fn sees_ipv4(family: u8) -> bool {
    const NFPROTO_INET: u8 = 1;
    const NFPROTO_IPV4: u8 = 2;
    matches!(family, NFPROTO_INET | NFPROTO_IPV4)
}

/// Returns the value of the first attribute of a type.
pub(super) fn find(of: &[u8], wanted: u16) -> Option<&[u8]> {
    raw::attributes(of).find_map(|(kind, value)| (kind == wanted).then_some(value))
}

/// Decodes a number, which is in network byte order as in all of nfnetlink.
pub(super) fn number(value: &[u8]) -> Option<u32> {
    value.first_chunk().map(|word| u32::from_be_bytes(*word))
}

/// Decodes a string, which may end in a zero.
pub(super) fn text(value: &[u8]) -> String {
    String::from_utf8_lossy(value)
        .trim_end_matches('\0')
        .to_owned()
}
