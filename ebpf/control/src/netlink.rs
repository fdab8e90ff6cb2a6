//! Links, addresses, routes and neighbours: listed once, then followed; and the next hops that the
//! programs use, kept up to date from them. Also single netlink requests.

mod links;
mod network;
mod next_hops;
mod parse;
mod questions;
pub(crate) mod raw;
mod rules;
mod socket;
mod watch;

use netlink_packet_route::{
    RouteNetlinkMessage,
    link::{LinkAttribute, LinkMessage},
};
use slipgate_abi::IfIndex;

pub(crate) use self::network::TapQueues;
pub(crate) use self::socket::{Notice, Notices, Requests};
pub use self::{
    links::Links,
    network::{Address, AddressState, Link, Neighbour, Network, Route, RouteKind, Table},
    next_hops::NextHops,
    questions::{Packet, RouteQuestions, Routing},
    rules::{Rule, RuleKind},
    watch::{Changes, Followed, NetworkWatch},
};
use crate::{Error, Result};

/// Removes a network device.
pub(crate) fn remove_link(ifindex: IfIndex, name: &str) -> Result<()> {
    let mut message = LinkMessage::default();
    message.header.index = ifindex.get();
    Requests::open()?.send(
        RouteNetlinkMessage::DelLink(message),
        0,
        &format!("remove the interface {name}"),
    )
}

/// What the kernel says of a TAP's queues; `None`: there is no device of this name.
///
/// # Errors
/// The device is no TAP, or the kernel can't be asked.
pub(crate) fn tap_queues(name: &str) -> Result<Option<TapQueues>> {
    let mut message = LinkMessage::default();
    let named = LinkAttribute::IfName(name.to_owned());
    message.attributes.push(named);
    let request = RouteNetlinkMessage::GetLink(message);
    let mut found = None;
    let asked = Requests::open()?.ask(request, &format!("look at {name}"), |answer| {
        if let RouteNetlinkMessage::NewLink(link) = answer {
            found = Some(parse::tap_queues_of(&link));
        }
    });
    match (asked, found) {
        (Err(e), _) if e.errno() == Some(libc::ENODEV) => Ok(None),
        (Err(e), _) => Err(e),
        (Ok(()), Some(Some(queues))) => Ok(Some(queues)),
        (Ok(()), Some(None)) => Err(Error::NoTap(name.to_owned())),
        (Ok(()), None) => Ok(None),
    }
}

#[cfg(test)]
#[path = "netlink_test.rs"]
mod tests;
