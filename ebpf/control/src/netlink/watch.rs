//! Follows the network.
//!
//! The kernel does not tell of every IPv4 route that goes with a link or an address, and says what
//! replaces what only by flags. So a notice of a link, an address or a route only means "ask
//! again"; neighbours, which change all the time, are followed notice by notice.

use std::os::fd::{AsFd, BorrowedFd};

use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage, address::AddressMessage, link::LinkMessage,
    neighbour::NeighbourMessage, route::RouteMessage,
};

use super::{
    network::Network,
    parse,
    socket::{Notice, Notices, Requests},
};
use crate::Result;

/// `RTNLGRP_*` of `linux/rtnetlink.h`.
const GROUPS: [u32; 4] = [LINK, NEIGHBOUR, IPV4_ADDRESS, IPV4_ROUTE];
const LINK: u32 = 1;
const NEIGHBOUR: u32 = 3;
const IPV4_ADDRESS: u32 = 5;
const IPV4_ROUTE: u32 = 7;

/// The network, and notices of its changes. Poll its descriptor, then [`NetworkWatch::update`].
#[derive(Debug)]
pub struct NetworkWatch {
    notices: Notices,
    requests: Requests,
    network: Network,
}

/// What differs from before.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Changes {
    /// A link came, went, or changed its name, state, MTU or MAC.
    pub links: bool,
    /// An address of the host.
    pub addresses: bool,
    /// A route.
    pub routes: bool,
    /// A neighbour.
    pub neighbours: bool,
}

impl Changes {
    /// Whether anything does.
    pub fn any(self) -> bool {
        self != Self::default()
    }
}

impl NetworkWatch {
    /// Of the calling thread's network namespace, also when used by another thread.
    pub fn open() -> Result<Self> {
        // First the notices, then the questions: nothing is missed in between.
        let notices = Notices::join(&GROUPS)?;
        let mut watch = Self {
            notices,
            requests: Requests::open()?,
            network: Network::default(),
        };
        watch.ask_configuration()?;
        watch.ask_neighbours()?;
        Ok(watch)
    }

    /// As of the last update.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// Takes in what has changed, without waiting.
    pub fn update(&mut self) -> Result<Changes> {
        let (mut configuration, mut overrun) = (false, false);
        let mut changes = Changes::default();
        let neighbours = &mut self.network.neighbours;
        self.notices.drain(|notice| match notice {
            Notice::Overrun => overrun = true,
            Notice::Message(RouteNetlinkMessage::NewNeighbour(message)) => {
                if let Some((key, neighbour)) = parse::neighbour(&message) {
                    changes.neighbours |= neighbours.insert(key, neighbour) != Some(neighbour);
                }
            }
            Notice::Message(RouteNetlinkMessage::DelNeighbour(message)) => {
                if let Some((key, _)) = parse::neighbour(&message) {
                    changes.neighbours |= neighbours.remove(&key).is_some();
                }
            }
            Notice::Message(_) => configuration = true,
        })?;
        if configuration || overrun {
            let before = std::mem::take(&mut self.network);
            self.network.neighbours = before.neighbours;
            self.ask_configuration()?;
            changes.links = self.network.links != before.links;
            changes.addresses = self.network.addresses != before.addresses;
            changes.routes = self.network.routes != before.routes;
        }
        if overrun {
            let before = std::mem::take(&mut self.network.neighbours);
            self.ask_neighbours()?;
            changes.neighbours |= self.network.neighbours != before;
        }
        Ok(changes)
    }

    fn ask_configuration(&mut self) -> Result<()> {
        let network = &mut self.network;
        self.requests.dump(
            RouteNetlinkMessage::GetLink(LinkMessage::default()),
            "list links",
            |answer| {
                if let RouteNetlinkMessage::NewLink(message) = answer
                    && let Some(link) = parse::link(&message)
                {
                    network.links.insert(link.ifindex, link);
                }
            },
        )?;
        let mut question = AddressMessage::default();
        question.header.family = AddressFamily::Inet;
        self.requests.dump(
            RouteNetlinkMessage::GetAddress(question),
            "list addresses",
            |answer| {
                if let RouteNetlinkMessage::NewAddress(message) = answer {
                    network.addresses.extend(parse::address(&message));
                }
            },
        )?;
        let mut question = RouteMessage::default();
        question.header.address_family = AddressFamily::Inet;
        self.requests.dump(
            RouteNetlinkMessage::GetRoute(question),
            "list routes",
            |answer| {
                if let RouteNetlinkMessage::NewRoute(message) = answer {
                    network.routes.extend(parse::route(&message));
                }
            },
        )
    }

    fn ask_neighbours(&mut self) -> Result<()> {
        let network = &mut self.network;
        let mut question = NeighbourMessage::default();
        question.header.family = AddressFamily::Inet;
        self.requests.dump(
            RouteNetlinkMessage::GetNeighbour(question),
            "list neighbours",
            |answer| {
                if let RouteNetlinkMessage::NewNeighbour(message) = answer {
                    network.neighbours.extend(parse::neighbour(&message));
                }
            },
        )
    }
}

impl AsFd for NetworkWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.notices.as_fd()
    }
}
