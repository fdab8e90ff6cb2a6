//! DHCPv6 without addresses (RFC 8415): tells the guest its resolver.
//!
//! # Theory of operation
//! A guest makes its addresses by itself ([`crate::ndp`]), and most learn the resolver from router
//! advertisements. Those that do not ask by an information request, as the advertisement's flag O
//! says, and are answered with a reply. Nothing is stored.
//!
//! | message | answer |
//! | --- | --- |
//! | information request | reply: server id, resolver, the client's id if it gave one |
//! | solicit and what follows it | none: advertisements say that there are no addresses |
//!
//! The server's DUID is made of the gateway's MAC (RFC 8415 section 11.4), so it is the same at each
//! start. There are no relays on a guest's link.
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use slipgate_abi::DropReason;
use slipgate_model::GuestIpv6;

use crate::{datagram::Datagram, ndp, stats::Tally, vm::VmNet};

/// Port of servers.
pub const SERVER_PORT: u16 = 547;
/// Port of clients.
pub const CLIENT_PORT: u16 = 546;
/// All relay agents and servers on the link (RFC 8415 section 7.1).
pub const ALL_SERVERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 1, 2);
/// Time after which a client asks again, seconds (RFC 8415 section 21.23).
pub const REFRESH_S: u32 = 86_400;
/// Longest DUID, bytes (RFC 8415 section 11.1).
const MAX_DUID_LEN: usize = 130;

/// Types of messages (RFC 8415 section 7.3).
mod kind {
    pub(super) const REPLY: u8 = 7;
    pub(super) const INFORMATION_REQUEST: u8 = 11;

    /// Whether clients send messages of this type to servers.
    pub(super) const fn is_clients(kind: u8) -> bool {
        matches!(kind, 1 | 3..=6 | 8 | 9 | INFORMATION_REQUEST)
    }
}

/// Codes of options.
mod code {
    pub(super) const CLIENT_ID: u16 = 1;
    pub(super) const SERVER_ID: u16 = 2;
    pub(super) const IA_NA: u16 = 3;
    pub(super) const IA_TA: u16 = 4;
    pub(super) const REQUESTED: u16 = 6;
    /// RFC 3646 section 3.
    pub(super) const RESOLVERS: u16 = 23;
    pub(super) const IA_PD: u16 = 25;
    pub(super) const REFRESH_TIME: u16 = 32;
}

/// Answers a guest's IPv6 packet to UDP port 547. `None`: no answer is due.
///
/// # Errors
/// The drop reason to count if the message is malformed, or not for a server.
pub fn handle(vm: &VmNet, net: &GuestIpv6, packet: &[u8]) -> Result<Option<Vec<u8>>, DropReason> {
    let datagram = Datagram::parse(packet).ok_or(DropReason::Malformed)?;
    let IpAddr::V6(client) = datagram.from.ip() else {
        return Err(DropReason::ServiceReject);
    };
    if !client.is_unicast_link_local() || !ndp::is_guests(net, vm.gateway_mac, client) {
        return Err(DropReason::Spoofed);
    }
    if (datagram.from.port(), datagram.to.port()) != (CLIENT_PORT, SERVER_PORT) {
        return Err(DropReason::ServiceReject);
    }
    let request = Request::parse(datagram.payload).ok_or(DropReason::ServiceReject)?;
    vm.stats.tally(Tally::DhcpMessage, 1);
    let duid = server_id(vm);
    Ok(request.is_for(&duid).then(|| {
        let server = net.gateway_link_local(vm.gateway_mac);
        let reply = Datagram {
            from: SocketAddr::new(server.into(), SERVER_PORT),
            to: datagram.from,
            payload: &request.reply(&duid, net.gateway()),
        };
        reply.emit()
    }))
}

/// DUID-LL of the gateway (RFC 8415 section 11.4).
fn server_id(vm: &VmNet) -> [u8; 10] {
    let [a, b, c, d, e, f] = vm.gateway_mac;
    [0, 3, 0, 1, a, b, c, d, e, f]
}

/// A message of a client.
struct Request<'p> {
    kind: u8,
    transaction: [u8; 3],
    client_id: Option<&'p [u8]>,
    server_id: Option<&'p [u8]>,
    /// Whether it asks for addresses or prefixes.
    wants_addresses: bool,
    /// Options that it asks for, two bytes each; `None` if it does not say.
    requested: Option<&'p [u8]>,
}

impl<'p> Request<'p> {
    /// Parses a message of a kind that clients send.
    fn parse(message: &'p [u8]) -> Option<Self> {
        let [kind, a, b, c, rest @ ..] = message else {
            return None;
        };
        let mut this = Self {
            kind: *kind,
            transaction: [*a, *b, *c],
            client_id: None,
            server_id: None,
            wants_addresses: false,
            requested: None,
        };
        let mut rest = rest;
        while !rest.is_empty() {
            let [k0, k1, l0, l1, after @ ..] = rest else {
                return None;
            };
            let len = usize::from(u16::from_be_bytes([*l0, *l1]));
            let data = after.get(..len)?;
            match u16::from_be_bytes([*k0, *k1]) {
                code::CLIENT_ID => this.client_id = Some(data),
                code::SERVER_ID => this.server_id = Some(data),
                code::IA_NA | code::IA_TA | code::IA_PD => this.wants_addresses = true,
                code::REQUESTED => this.requested = Some(data),
                _ => {}
            }
            rest = &after[len..];
        }
        let is_sane = this
            .client_id
            .is_none_or(|id| (3..=MAX_DUID_LEN).contains(&id.len()));
        (kind::is_clients(*kind) && is_sane).then_some(this)
    }

    /// Whether the message is an information request to this server (RFC 8415 section 16.12).
    fn is_for(&self, server: &[u8]) -> bool {
        self.kind == kind::INFORMATION_REQUEST
            && !self.wants_addresses
            && self.server_id.is_none_or(|id| id == server)
    }

    fn asks_for(&self, wanted: u16) -> bool {
        self.requested.is_none_or(|codes| {
            let mut codes = codes.chunks_exact(2);
            codes.any(|code| code == wanted.to_be_bytes())
        })
    }

    fn reply(&self, server: &[u8], resolver: Ipv6Addr) -> Vec<u8> {
        let [a, b, c] = self.transaction;
        let mut message = vec![kind::REPLY, a, b, c];
        let mut option = |code: u16, data: &[u8]| {
            message.extend(code.to_be_bytes());
            message.extend((data.len() as u16).to_be_bytes());
            message.extend(data);
        };
        if let Some(id) = self.client_id {
            option(code::CLIENT_ID, id);
        }
        option(code::SERVER_ID, server);
        if self.asks_for(code::RESOLVERS) {
            option(code::RESOLVERS, &resolver.octets());
        }
        if self.asks_for(code::REFRESH_TIME) {
            option(code::REFRESH_TIME, &REFRESH_S.to_be_bytes());
        }
        message
    }
}

#[cfg(test)]
#[path = "dhcpv6_test.rs"]
mod tests;
