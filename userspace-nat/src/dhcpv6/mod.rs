//! DHCPv6 (RFC 8415): tells the guest its resolver, and its address if it has a single one.
//!
//! # Theory of operation
//! A guest with a /64 makes its addresses by itself ([`crate::ndp`]), and most learn the resolver from
//! router advertisements. Those that do not ask by an information request, as the advertisement's flag
//! O says.
//!
//! A guest with a single address (/128) can't make it. The advertisement's flag M sends it here, and it
//! asks for a non-temporary address (IA_NA). There is one address, and it is the VM's whatever client
//! asks: identities (DUID, IAID) are returned as they came, and no binding is stored. So a guest that
//! boots again, another system in it, and a clone get it at once, and an engine that starts knows all
//! that the one before it knew.
//!
//! | message | answer | with a single address |
//! | --- | --- | --- |
//! | solicit | none: advertisements say that there are no addresses | advertise, or reply to rapid commit: the address |
//! | request | none | reply: the address; an address that the VM does not have is not on the link |
//! | renew, rebind | none | reply: the address; others get lifetimes of zero (a clone renews its original's) |
//! | confirm | none | reply: whether all addresses are the VM's |
//! | release, decline | none | reply: success; the address is bound no more until it is used |
//! | information request | reply: server id, resolver, the client's id if it gave one | the same |
//!
//! Of several associations in a message the one that names the address has it, or else the first one;
//! the others get none. There are no temporary addresses (IA_TA) and no prefixes (IA_PD). A message has
//! at most [`MAX_ASSOCIATIONS`] associations and [`MAX_ADDRESSES`] addresses, and is refused otherwise,
//! so that the answer fits into a packet.
//!
//! The server's DUID is made of the gateway's MAC (RFC 8415 section 11.4), so it is the same at each
//! start. There are no relays on a guest's link. The guest is alone on it, so an address that it
//! declines is nobody else's: it gets it again when it asks.
mod message;
mod reply;

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use slipgate_abi::DropReason;
use slipgate_model::GuestIpv6;

pub use self::message::{MAX_ADDRESSES, MAX_ASSOCIATIONS};
use self::{
    message::{Kind, Request},
    reply::Server,
};
use crate::{datagram::Datagram, ndp, stats::Tally, vm::VmNet};

/// UDP port that servers and relay agents listen on.
pub const SERVER_PORT: u16 = 547;
/// UDP port that clients listen on.
pub const CLIENT_PORT: u16 = 546;
/// All relay agents and servers on the link (RFC 8415 section 7.1).
pub const ALL_SERVERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 1, 2);
/// Time after which a client asks again, seconds (RFC 8415 section 21.23).
pub const REFRESH_S: u32 = 86_400;
/// Time after which a client renews its address, seconds (T1). It is short beside the lifetimes: a
/// clone that has its original's address learns its own soon.
pub const RENEW_S: u32 = 3_600;
/// Time after which a client that was not answered asks any server, seconds (T2).
pub const REBIND_S: u32 = 5_760;

/// Answer to a client.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Answer {
    /// The IPv6 packet.
    pub packet: Vec<u8>,
    /// What becomes of the guest's single address.
    pub address: AddressUse,
}

/// What a client may do with its single address by an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AddressUse {
    /// As before.
    Unchanged,
    /// It uses the address from now on.
    Granted(Ipv6Addr),
    /// It has given it back.
    Released(Ipv6Addr),
}

/// Answers a guest's IPv6 packet to UDP port 547. `None`: no answer is due. `is_withheld`: the guest's
/// single address is the host's at present, and is not given to the guest.
///
/// # Errors
/// The drop reason to count if the message is malformed, or not for a server.
pub fn handle(
    vm: &VmNet,
    net: &GuestIpv6,
    packet: &[u8],
    is_withheld: bool,
) -> Result<Option<Answer>, DropReason> {
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
    let server = Server {
        duid: server_id(vm),
        resolver: net.gateway(),
        address: net.single_address().filter(|_| !is_withheld),
    };
    let is_to_all = datagram.to.ip() == IpAddr::V6(ALL_SERVERS);
    let reply = match request.kind {
        Kind::InformationRequest => server.inform(&request),
        _ if net.single_address().is_none() => None,
        _ if !is_to_all => server.refuse_unicast(&request),
        _ => server.assign(&request),
    };
    Ok(reply.map(|(message, address)| {
        let source = net.gateway_link_local(vm.gateway_mac);
        let reply = Datagram {
            from: SocketAddr::new(source.into(), SERVER_PORT),
            to: datagram.from,
            payload: &message,
        };
        Answer {
            packet: reply.emit(),
            address,
        }
    }))
}

/// DUID-LL of the gateway (RFC 8415 section 11.4).
fn server_id(vm: &VmNet) -> [u8; 10] {
    let [a, b, c, d, e, f] = vm.gateway_mac;
    [0, 3, 0, 1, a, b, c, d, e, f]
}

#[cfg(test)]
#[path = "dhcpv6_test.rs"]
mod tests;

#[cfg(test)]
#[path = "single_address_test.rs"]
mod single_address_tests;
