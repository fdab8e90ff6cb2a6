//! Links, addresses, routes and neighbours: listed once, then followed; and the next hops that the
//! programs use, kept up to date from them. Also single netlink requests.

mod links;
mod network;
mod next_hops;
mod parse;
pub(crate) mod raw;
mod rules;
mod socket;
mod watch;

use netlink_packet_route::{RouteNetlinkMessage, link::LinkMessage};
use slipgate_abi::IfIndex;

pub(crate) use self::socket::{Notice, Notices, Requests};
pub use self::{
    links::Links,
    network::{Address, AddressState, Link, Neighbour, Network, Route, RouteKind, Table},
    next_hops::NextHops,
    rules::{Rule, RuleKind},
    watch::{Changes, Followed, NetworkWatch},
};
use crate::Result;

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

#[cfg(test)]
#[path = "netlink_test.rs"]
mod tests;
