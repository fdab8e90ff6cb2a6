//! Ports that the host's connection tracking has given translated connections
//! (`<linux/netfilter/nfnetlink_conntrack.h>`).

use std::{collections::BTreeSet, io};

use netlink_sys::protocols::NETLINK_NETFILTER;

use super::{nfnetlink::find, none_when_unsupported};
use crate::netlink::raw;

/// One direction of a connection, of TCP or UDP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Tuple<'a> {
    source: (&'a [u8], u16),
    destination: (&'a [u8], u16),
    protocol: u8,
}

/// Returns IP protocol and port of each connection whose source the host translates, TCP and UDP of
/// both families, for those ports that are wanted. It walks all connections, in about a
/// microsecond for each.
///
/// # Errors
/// The kernel does not list its connections, or the caller lacks CAP_NET_ADMIN.
pub fn translated_ports(is_wanted: impl Fn(u16) -> bool) -> io::Result<BTreeSet<(u8, u16)>> {
    const NFNL_SUBSYS_CTNETLINK: u16 = 1;
    const IPCTNL_MSG_CT_GET: u16 = 1;
    /// `struct nfgenmsg`: any family, version 0, no resource.
    const HEADER: [u8; 4] = [0; 4];
    let request = NFNL_SUBSYS_CTNETLINK << 8 | IPCTNL_MSG_CT_GET;
    let mut ports = BTreeSet::new();
    let dumped = raw::dump(NETLINK_NETFILTER, request, &HEADER, |_, payload| {
        let attributes = payload.get(HEADER.len()..).unwrap_or_default();
        ports.extend(translated(attributes).filter(|(_, port)| is_wanted(*port)));
    });
    none_when_unsupported(dumped.map(|()| ports))
}

/// Returns protocol and new source port of a connection, if its source is translated.
fn translated(attributes: &[u8]) -> Option<(u8, u16)> {
    const CTA_TUPLE_ORIG: u16 = 1;
    const CTA_TUPLE_REPLY: u16 = 2;
    let original = tuple(find(attributes, CTA_TUPLE_ORIG)?)?;
    let reply = tuple(find(attributes, CTA_TUPLE_REPLY)?)?;
    (reply.destination != original.source).then_some((reply.protocol, reply.destination.1))
}

fn tuple(of: &[u8]) -> Option<Tuple<'_>> {
    const CTA_TUPLE_IP: u16 = 1;
    const CTA_TUPLE_PROTO: u16 = 2;
    const CTA_IP_V4: [u16; 2] = [1, 2];
    const CTA_IP_V6: [u16; 2] = [3, 4];
    const CTA_PROTO_NUM: u16 = 1;
    const CTA_PROTO_PORTS: [u16; 2] = [2, 3];
    let (ip, proto) = (find(of, CTA_TUPLE_IP)?, find(of, CTA_TUPLE_PROTO)?);
    let address = |which: usize| find(ip, CTA_IP_V4[which]).or_else(|| find(ip, CTA_IP_V6[which]));
    // Of ICMP and others there are none.
    let port = |which: usize| {
        let port = find(proto, CTA_PROTO_PORTS[which])?.first_chunk()?;
        Some(u16::from_be_bytes(*port))
    };
    Some(Tuple {
        source: (address(0)?, port(0)?),
        destination: (address(1)?, port(1)?),
        protocol: *find(proto, CTA_PROTO_NUM)?.first()?,
    })
}

#[cfg(test)]
#[path = "tracked_test.rs"]
mod tests;
