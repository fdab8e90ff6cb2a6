//! Follows changes of the network.
//!
//! The kernel does not report every IPv4 route that is removed with a link or an address, and marks
//! replacements only by flags. So a notification of a link, an address or a route only means that
//! the state must be requested again. Neighbours, which change all the time, are followed
//! notification by notification.
//!
//! On a host that is short of descriptors or memory the watch falls behind: it logs this, waits,
//! and starts over with a new socket and all requests. Each failure doubles the wait. The changes
//! meanwhile are unknown, so then everything is reported as changed.

use std::{
    collections::HashMap,
    fmt::Display,
    net::Ipv4Addr,
    os::fd::{AsFd, BorrowedFd},
    time::{Duration, Instant},
};

use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage, address::AddressMessage, link::LinkMessage,
    neighbour::NeighbourMessage, route::RouteMessage,
};
use slipgate_abi::IfIndex;

use super::{
    network::{Neighbour, Network},
    parse,
    socket::{Notice, Notices, Requests},
};
use crate::Result;

/// Multicast groups `RTNLGRP_*` of `linux/rtnetlink.h`.
const GROUPS: [u32; 4] = [LINK, NEIGHBOUR, IPV4_ADDRESS, IPV4_ROUTE];
const LINK: u32 = 1;
const NEIGHBOUR: u32 = 3;
const IPV4_ADDRESS: u32 = 5;
const IPV4_ROUTE: u32 = 7;

type Neighbours = HashMap<(IfIndex, Ipv4Addr), Neighbour>;

/// State of the network, followed by notifications. Poll its descriptor, then call
/// [`NetworkWatch::update`].
#[derive(Debug)]
pub struct NetworkWatch {
    notices: Notices,
    requests: Requests,
    network: Network,
    behind: Option<Behind>,
}

/// State while changes have been missed.
#[derive(Clone, Copy, Debug)]
struct Behind {
    /// Time of the next attempt.
    again_at: Instant,
    /// Wait before that attempt.
    wait: Duration,
}

/// First wait before everything is requested again.
const FIRST_WAIT: Duration = Duration::from_millis(200);
/// Longest wait before everything is requested again.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// Parts of the network that changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Changes {
    /// A link was added, removed, or changed its name, state, MTU or MAC.
    pub links: bool,
    /// An address of the host changed.
    pub addresses: bool,
    /// A route changed.
    pub routes: bool,
    /// A neighbour entry changed.
    pub neighbours: bool,
}

impl Changes {
    /// Whether any part changed.
    pub fn any(self) -> bool {
        self != Self::default()
    }
}

impl NetworkWatch {
    /// Opens a watch of the calling thread's network namespace. It stays with this namespace when
    /// another thread uses it.
    ///
    /// # Errors
    /// A netlink socket cannot be opened, or a request fails.
    pub fn open() -> Result<Self> {
        // Join the groups before the requests: no change is missed in between.
        let notices = Notices::join(&GROUPS)?;
        let mut watch = Self {
            notices,
            requests: Requests::open()?,
            network: Network::default(),
            behind: None,
        };
        watch.network = watch.request_configuration()?;
        watch.network.neighbours = watch.request_neighbours()?;
        Ok(watch)
    }

    /// Returns the network as of the last update.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// Returns the time at which to [update](Self::update) without a notification; `None`: not
    /// needed.
    pub fn due(&self) -> Option<Instant> {
        self.behind.map(|behind| behind.again_at)
    }

    /// Records that changes could not be read, or not be followed by the caller, for a temporary
    /// reason. Everything is requested again after a wait, and then reported as changed.
    pub fn fall_behind(&mut self, why: &dyn Display) {
        let wait = match self.behind {
            None => {
                tracing::warn!(
                    "changes of the host's network are not followed now: {why}; trying again until \
                     they are"
                );
                FIRST_WAIT
            }
            Some(behind) => (2 * behind.wait).min(LONGEST_WAIT),
        };
        self.behind = Some(Behind {
            again_at: Instant::now() + wait,
            wait,
        });
    }

    /// Ends the state of being behind, once the caller too has followed the changes.
    pub fn caught_up(&mut self) {
        if self
            .behind
            .take_if(|behind| behind.again_at <= Instant::now())
            .is_some()
        {
            tracing::info!("changes of the host's network are followed again");
        }
    }

    /// Reads the changes without blocking. If the host is short of descriptors or memory, the watch
    /// [falls behind](Self::fall_behind).
    ///
    /// # Errors
    /// Notifications cannot be read or a request fails, for another reason.
    pub fn update(&mut self) -> Result<Changes> {
        let updated = match self.behind {
            None => self.read_changes(),
            Some(behind) if behind.again_at <= Instant::now() => self.resynchronize(),
            // Drained only so that they do not wake the poll loop.
            Some(_) => self.notices.drain(drop).map(|()| Changes::default()),
        };
        match updated {
            Err(error) if error.is_shortage() => {
                self.fall_behind(&error);
                Ok(Changes::default())
            }
            updated => updated,
        }
    }

    fn resynchronize(&mut self) -> Result<Changes> {
        self.notices.drain(drop)?;
        self.requests = Requests::open()?;
        let mut network = self.request_configuration()?;
        network.neighbours = self.request_neighbours()?;
        self.network = network;
        Ok(Changes {
            links: true,
            addresses: true,
            routes: true,
            neighbours: true,
        })
    }

    fn read_changes(&mut self) -> Result<Changes> {
        let (mut configuration, mut overrun) = (false, false);
        let mut changes = Changes::default();
        let network = &mut self.network;
        self.notices.drain(|notice| match notice {
            Notice::Overrun => overrun = true,
            Notice::Message(RouteNetlinkMessage::NewLink(message)) => {
                match parse::complete_link(&message) {
                    Some(link) if !network.is_routed(link.ifindex) => {
                        let before = network.links.insert(link.ifindex, link.clone());
                        changes.links |= before != Some(link);
                    }
                    // The kernel removes routes of a link that goes down without a notice.
                    _ => configuration = true,
                }
            }
            Notice::Message(RouteNetlinkMessage::DelLink(message)) => {
                let ifindex = IfIndex::new(message.header.index);
                match network.is_routed(ifindex) || !parse::is_of_a_link(&message) {
                    true => configuration = true,
                    false => changes.links |= network.links.remove(&ifindex).is_some(),
                }
            }
            Notice::Message(RouteNetlinkMessage::NewNeighbour(message)) => {
                if let Some((key, neighbour)) = parse::neighbour(&message) {
                    let before = network.neighbours.insert(key, neighbour);
                    changes.neighbours |= before != Some(neighbour);
                }
            }
            Notice::Message(RouteNetlinkMessage::DelNeighbour(message)) => {
                if let Some((key, _)) = parse::neighbour(&message) {
                    changes.neighbours |= network.neighbours.remove(&key).is_some();
                }
            }
            Notice::Message(_) => configuration = true,
        })?;
        if configuration || overrun {
            let mut now = self.request_configuration()?;
            now.neighbours = std::mem::take(&mut self.network.neighbours);
            let before = std::mem::replace(&mut self.network, now);
            changes.links |= self.network.links != before.links;
            changes.addresses = self.network.addresses != before.addresses;
            changes.routes = self.network.routes != before.routes;
        }
        if overrun {
            let now = self.request_neighbours()?;
            let before = std::mem::replace(&mut self.network.neighbours, now);
            changes.neighbours |= self.network.neighbours != before;
        }
        Ok(changes)
    }

    /// Requests links, addresses and routes, but not neighbours.
    fn request_configuration(&mut self) -> Result<Network> {
        let mut network = Network::default();
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
        )?;
        Ok(network)
    }

    fn request_neighbours(&mut self) -> Result<Neighbours> {
        let mut neighbours = Neighbours::new();
        let mut question = NeighbourMessage::default();
        question.header.family = AddressFamily::Inet;
        self.requests.dump(
            RouteNetlinkMessage::GetNeighbour(question),
            "list neighbours",
            |answer| {
                if let RouteNetlinkMessage::NewNeighbour(message) = answer {
                    neighbours.extend(parse::neighbour(&message));
                }
            },
        )?;
        Ok(neighbours)
    }
}

impl AsFd for NetworkWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.notices.as_fd()
    }
}
