//! Selection of IPv6 source addresses (RFC 6724 section 5).
//!
//! Two choices are slipgate's own. A source whose scope is smaller than the destination's is never
//! selected, for no answer would come. And of two addresses a temporary one loses, which rule 7
//! lets an implementation choose: guests' flows live as long as the address that they are
//! translated to, and a temporary address (RFC 8981) hides no guest, because all share it.
//!
//! Rules 1 and 4 never decide: packets to the host's own addresses do not leave, and there is no
//! mobility. The kernel does not implement rule 5.5 either.
use std::{cmp::Reverse, net::Ipv6Addr};

use ipnet::{IpNet, Ipv6Net};
use slipgate_abi::IfIndex;

use super::{HostAddress, SourceUse};

/// Scopes of addresses (RFC 4291 section 2.7).
const LINK: u8 = 2;
const SITE: u8 = 5;
const GLOBAL: u8 = 14;

/// Returns the source address of packets to `to` that leave by `link`: one of the link's, or, if it
/// has none that will do, one of the host's.
pub(super) fn select(all: &[HostAddress], link: IfIndex, to: Ipv6Addr) -> Option<Ipv6Addr> {
    let candidates = all.iter().filter_map(|own| match own.addr {
        IpNet::V6(net) => Some((own, net)),
        IpNet::V4(_) => None,
    });
    let will_do = |(own, net): &(&HostAddress, Ipv6Net)| {
        let is_links = own.ifindex == link;
        let is_enough = scope(net.addr()) >= scope(to);
        // A smaller scope is that of its own link only.
        is_enough && (is_links || scope(net.addr()) == GLOBAL)
    };
    let best = candidates
        .filter(will_do)
        .min_by_key(|(own, net)| rank(own, *net, link, to));
    best.map(|(_, net)| net.addr())
}

/// Rank of a candidate: the lowest is selected, of equal ones the first.
fn rank(own: &HostAddress, net: Ipv6Net, link: IfIndex, to: Ipv6Addr) -> impl Ord + use<> {
    let addr = net.addr();
    (
        // Before all rules: the candidates are the link's (section 4), unless it has none.
        own.ifindex != link,
        // Rule 2: of those whose scope is enough, the smallest.
        scope(addr),
        // Rule 3: avoid deprecated addresses.
        own.source == SourceUse::Deprecated,
        // Rule 6: prefer a matching label.
        label(addr) != label(to),
        // Rule 7, reversed.
        own.source == SourceUse::Temporary,
        // Rule 8: the longest matching prefix, as far as the source's prefix.
        Reverse(common_prefix(addr, to).min(u32::from(net.prefix_len()))),
    )
}

/// Whether two sources have the same scope and label, so that what receives answers by one does so by
/// the other, whatever the destination.
pub(super) fn serve_alike(one: Ipv6Addr, other: Ipv6Addr) -> bool {
    (scope(one), label(one)) == (scope(other), label(other))
}

fn scope(addr: Ipv6Addr) -> u8 {
    let first = addr.segments()[0];
    match first {
        // The lower bits of the second octet (RFC 4291 section 2.7).
        0xff00..=0xffff => (first & 0xf) as u8,
        0xfe80..=0xfebf => LINK,
        0xfec0..=0xfeff => SITE,
        _ if addr.is_loopback() => LINK,
        _ => GLOBAL,
    }
}

/// Label of the default policy table (RFC 6724 section 2.1).
fn label(addr: Ipv6Addr) -> u8 {
    match addr.segments() {
        [0, 0, 0, 0, 0, 0, 0, 1] => 0,
        [0, 0, 0, 0, 0, 0xffff, ..] => 4,
        [0, 0, 0, 0, 0, 0, ..] => 3,
        [0x2002, ..] => 2,
        [0x2001, 0, ..] => 5,
        [0x3ffe, ..] => 12,
        [0xfec0..=0xfeff, ..] => 11,
        [0xfc00..=0xfdff, ..] => 13,
        _ => 1,
    }
}

fn common_prefix(one: Ipv6Addr, other: Ipv6Addr) -> u32 {
    (one.to_bits() ^ other.to_bits()).leading_zeros()
}

#[cfg(test)]
#[path = "source_test.rs"]
mod tests;
