//! What all questions to nftables share (`<linux/netfilter/nfnetlink.h>`).

use std::io;

use netlink_sys::protocols::NETLINK_NETFILTER;

use super::none_when_unsupported;
use crate::netlink::raw;

/// `NFT_MSG_GETCHAIN`.
pub(super) const GET_CHAIN: u8 = 4;
/// `NFT_MSG_GETRULE`.
pub(super) const GET_RULE: u8 = 7;

/// What `read` makes of each object, given its family and attributes; nothing where the kernel has no
/// nftables.
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

/// Whether a family's objects see IPv4: its own, or those of both families.
pub(super) fn sees_ipv4(family: u8) -> bool {
    const NFPROTO_INET: u8 = 1;
    const NFPROTO_IPV4: u8 = 2;
    matches!(family, NFPROTO_INET | NFPROTO_IPV4)
}

/// The value of the first attribute of a kind.
pub(super) fn find(of: &[u8], wanted: u16) -> Option<&[u8]> {
    raw::attributes(of).find_map(|(kind, value)| (kind == wanted).then_some(value))
}

/// A number, which is in network order as all of nfnetlink.
pub(super) fn number(value: &[u8]) -> Option<u32> {
    value.first_chunk().map(|word| u32::from_be_bytes(*word))
}

/// A string, which may end in a zero.
pub(super) fn text(value: &[u8]) -> String {
    String::from_utf8_lossy(value)
        .trim_end_matches('\0')
        .to_owned()
}
