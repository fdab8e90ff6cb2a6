//! Follows the network.
//!
//! The kernel does not tell of every IPv4 route that goes with a link or an address, and says what
//! replaces what only by flags. So a notice of a link, an address or a route only means "ask
//! again"; neighbours, which change all the time, are followed notice by notice.
//!
//! A host that is short of descriptors or memory is not asked in vain again and again, nor given up:
//! the watch falls behind, says so, and after a while begins anew, with a new socket and all
//! questions; each time that fails it waits for twice as long. What changed meanwhile it can't tell,
//! so then everything has.

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

use super::{
    network::{Neighbour, Network},
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

type Neighbours = HashMap<(u32, Ipv4Addr), Neighbour>;

/// The network, and notices of its changes. Poll its descriptor, then [`NetworkWatch::update`].
#[derive(Debug)]
pub struct NetworkWatch {
    notices: Notices,
    requests: Requests,
    network: Network,
    behind: Option<Behind>,
}

/// Changes have been missed.
#[derive(Clone, Copy, Debug)]
struct Behind {
    again_at: Instant,
    wait: Duration,
}

/// How long the first and any later wait is, before all is asked for anew.
const FIRST_WAIT: Duration = Duration::from_millis(200);
const LONGEST_WAIT: Duration = Duration::from_secs(10);

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
            behind: None,
        };
        watch.network = watch.ask_configuration()?;
        watch.network.neighbours = watch.ask_neighbours()?;
        Ok(watch)
    }

    /// As of the last update.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// When it is to be [updated](Self::update) without a notice.
    pub fn due(&self) -> Option<Instant> {
        self.behind.map(|behind| behind.again_at)
    }

    /// What changed could not be taken in, or gone along with, for a reason that passes: everything is
    /// asked for anew in a while, and is then said to have changed.
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

    /// What was behind is not any more, also for those who go along with it.
    pub fn caught_up(&mut self) {
        if self
            .behind
            .take_if(|behind| behind.again_at <= Instant::now())
            .is_some()
        {
            tracing::info!("changes of the host's network are followed again");
        }
    }

    /// Takes in what has changed, without waiting. Where the host is short of what that takes, it
    /// [falls behind](Self::fall_behind).
    pub fn update(&mut self) -> Result<Changes> {
        let updated = match self.behind {
            None => self.take_in(),
            Some(behind) if behind.again_at <= Instant::now() => self.begin_anew(),
            // Only so that they do not wake us.
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

    fn begin_anew(&mut self) -> Result<Changes> {
        self.notices.drain(drop)?;
        self.requests = Requests::open()?;
        let mut network = self.ask_configuration()?;
        network.neighbours = self.ask_neighbours()?;
        self.network = network;
        Ok(Changes {
            links: true,
            addresses: true,
            routes: true,
            neighbours: true,
        })
    }

    fn take_in(&mut self) -> Result<Changes> {
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
            let mut now = self.ask_configuration()?;
            now.neighbours = std::mem::take(&mut self.network.neighbours);
            let before = std::mem::replace(&mut self.network, now);
            changes.links = self.network.links != before.links;
            changes.addresses = self.network.addresses != before.addresses;
            changes.routes = self.network.routes != before.routes;
        }
        if overrun {
            let now = self.ask_neighbours()?;
            let before = std::mem::replace(&mut self.network.neighbours, now);
            changes.neighbours |= self.network.neighbours != before;
        }
        Ok(changes)
    }

    /// All but the neighbours.
    fn ask_configuration(&mut self) -> Result<Network> {
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

    fn ask_neighbours(&mut self) -> Result<Neighbours> {
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
