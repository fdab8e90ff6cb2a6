//! Follows changes of the network.
//!
//! The kernel does not report every route that is removed with a link or an address, and marks
//! replacements only by flags. So a notification of an address or a route, or of a link that they
//! name, only means that addresses and routes must be requested again. Links and neighbours, which
//! may be many and change all the time, are followed notification by notification.
//!
//! On a host that is short of descriptors or memory the watch falls behind: it logs this, waits,
//! and starts over with a new socket and all requests. Each failure doubles the wait. The changes
//! meanwhile are unknown, so then everything is reported as changed.

use std::{
    collections::{BTreeSet, HashMap},
    fmt::Display,
    net::IpAddr,
    os::fd::{AsFd, BorrowedFd},
    time::{Duration, Instant},
};

use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    address::AddressMessage,
    link::{LinkAttribute, LinkEvent, LinkMessage},
    neighbour::NeighbourMessage,
    route::RouteMessage,
    rule::RuleMessage,
};
use slipgate_abi::IfIndex;

use super::{
    links::Links,
    network::{Address, Neighbour, Network, Route, Table},
    parse,
    rules::Rule,
    socket::{Notice, Notices, Requests},
};
use crate::Result;

/// Multicast groups `RTNLGRP_*` of `linux/rtnetlink.h`.
const GROUPS: [u32; 9] = [
    LINK,
    NEIGHBOUR,
    IPV4_ADDRESS,
    IPV4_ROUTE,
    IPV6_ADDRESS,
    IPV6_ROUTE,
    IPV4_RULE,
    IPV6_RULE,
    IPV4_NETCONF,
];
const LINK: u32 = 1;
const NEIGHBOUR: u32 = 3;
const IPV4_ADDRESS: u32 = 5;
const IPV4_ROUTE: u32 = 7;
const IPV4_RULE: u32 = 8;
const IPV6_ADDRESS: u32 = 9;
const IPV6_ROUTE: u32 = 11;
const IPV6_RULE: u32 = 19;
const IPV4_NETCONF: u32 = 24;

/// Families that are followed.
const FAMILIES: [AddressFamily; 2] = [AddressFamily::Inet, AddressFamily::Inet6];

type Neighbours = HashMap<(IfIndex, IpAddr), Neighbour>;

/// State of the network, followed by notifications. Poll its descriptor, then call
/// [`NetworkWatch::update`].
#[derive(Debug)]
pub struct NetworkWatch {
    notices: Notices,
    requests: Requests,
    network: Network,
    followed: Followed,
    /// Whether rules or routes were read and not reported as changed.
    read_ahead: bool,
    /// Links whose features changed since they were taken.
    features_changed: BTreeSet<IfIndex>,
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

/// Tables and rules that a watch follows besides the tables main and local.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Followed {
    /// Numbers of the further routing tables.
    pub tables: BTreeSet<u32>,
    /// Whether the rules (`ip rule`) are, and all tables that they name.
    pub rules: bool,
}

/// Parts of the network that changed.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Changes {
    /// A link was added, removed, or changed its name, state, MTU or MAC.
    pub links: bool,
    /// Names of the links that changed, the former ones of renamed links among them.
    pub named: BTreeSet<String>,
    /// Devices on which forwarding of IPv4 packets was turned on.
    pub forwarding: BTreeSet<IfIndex>,
    /// Devices on which IPv6 was turned on: they got an address or a route that it has on every link.
    pub ipv6: BTreeSet<IfIndex>,
    /// Notices were lost: anything may have changed besides what is named here.
    pub missed: bool,
    /// An address of the host changed.
    pub addresses: bool,
    /// A route changed, or a rule.
    pub routes: bool,
    /// A neighbour entry changed.
    pub neighbours: bool,
}

impl Changes {
    /// Whether any part changed.
    pub fn any(&self) -> bool {
        *self != Self::default()
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
            followed: Followed::default(),
            read_ahead: false,
            features_changed: BTreeSet::new(),
            behind: None,
        };
        watch.network = watch.request_configuration()?;
        watch.network.neighbours = watch.request_neighbours()?;
        Ok(watch)
    }

    /// Sets what is followed besides the tables main and local. What is new is read at once, and with it
    /// changes whose notices wait: the next [update](Self::update) reports them.
    ///
    /// # Errors
    /// A request fails.
    pub fn follow(&mut self, followed: Followed) -> Result<()> {
        if self.followed == followed {
            return Ok(());
        }
        let before = std::mem::replace(&mut self.followed, followed);
        let read = self.request_routing();
        let (rules, routes) = match read {
            Ok(read) => read,
            Err(error) => {
                self.followed = before;
                return Err(error);
            }
        };
        let network = &mut self.network;
        self.read_ahead |= rules != network.rules || routes != network.routes;
        (network.rules, network.routes) = (rules, routes);
        Ok(())
    }

    /// Returns the network as of the last update.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// Takes the links whose features (offloads) may have changed since the last call: the kernel
    /// said so, or notifications were lost.
    pub fn take_changed_features(&mut self) -> BTreeSet<IfIndex> {
        std::mem::take(&mut self.features_changed)
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
        self.read_ahead = false;
        self.features_changed = self.network.links.indexes().collect();
        Ok(Changes {
            links: true,
            missed: true,
            addresses: true,
            routes: true,
            neighbours: true,
            ..Changes::default()
        })
    }

    fn read_changes(&mut self) -> Result<Changes> {
        let (mut links, mut routing, mut overrun) = (false, false, false);
        let mut changes = Changes::default();
        let (network, features) = (&mut self.network, &mut self.features_changed);
        self.notices.drain(|notice| match notice {
            Notice::Overrun => overrun = true,
            Notice::Forwarding(ifindex) => drop(changes.forwarding.insert(ifindex)),
            Notice::Message(RouteNetlinkMessage::NewLink(message)) => {
                let by_features = LinkAttribute::Event(LinkEvent::Features);
                if message.attributes.contains(&by_features) {
                    features.insert(IfIndex::new(message.header.index));
                }
                let Some(link) = parse::complete_link(&message) else {
                    links = true;
                    return;
                };
                // The kernel removes routes of a link that goes down without a notice.
                routing |= network.is_routed(link.ifindex);
                let before = network.links.insert(link.clone());
                if before.as_ref() != Some(&link) {
                    changes.links = true;
                    let names = before.map(|before| before.name).into_iter();
                    changes.named.extend(names.chain([link.name]));
                }
            }
            Notice::Message(RouteNetlinkMessage::DelLink(message)) => {
                if !parse::is_of_a_link(&message) {
                    links = true;
                    return;
                }
                let ifindex = IfIndex::new(message.header.index);
                if let Some(gone) = network.links.remove(&ifindex) {
                    changes.links = true;
                    changes.named.insert(gone.name);
                }
                routing |= network.is_routed(ifindex);
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
            Notice::Message(message) => match parse::is_about_a_link_only(&message) {
                true => changes.ipv6.extend(parse::added_to(&message)),
                false => routing = true,
            },
        })?;
        if links || overrun {
            let now = self.request_links()?;
            now.differences(&self.network.links, &mut changes.named);
            changes.links |= now != self.network.links;
            self.network.links = now;
        }
        if routing || links || overrun {
            let addresses = self.request_addresses()?;
            let (rules, routes) = self.request_routing()?;
            changes.addresses = addresses != self.network.addresses;
            changes.routes = routes != self.network.routes || rules != self.network.rules;
            self.network.addresses = addresses;
            self.network.routes = routes;
            self.network.rules = rules;
        }
        changes.routes |= std::mem::take(&mut self.read_ahead);
        if overrun {
            changes.missed = true;
            self.features_changed = self.network.links.indexes().collect();
            let now = self.request_neighbours()?;
            let before = std::mem::replace(&mut self.network.neighbours, now);
            changes.neighbours |= self.network.neighbours != before;
        }
        Ok(changes)
    }

    /// Requests links, addresses and routes, but not neighbours.
    fn request_configuration(&mut self) -> Result<Network> {
        let (rules, routes) = self.request_routing()?;
        Ok(Network {
            links: self.request_links()?,
            addresses: self.request_addresses()?,
            routes,
            rules,
            ..Network::default()
        })
    }

    fn request_links(&mut self) -> Result<Links> {
        let mut links = Links::default();
        self.requests.dump(
            RouteNetlinkMessage::GetLink(LinkMessage::default()),
            "list links",
            |answer| {
                if let RouteNetlinkMessage::NewLink(message) = answer
                    && let Some(link) = parse::link(&message)
                {
                    links.insert(link);
                }
            },
        )?;
        Ok(links)
    }

    fn request_addresses(&mut self) -> Result<Vec<Address>> {
        let mut addresses = Vec::new();
        for family in FAMILIES {
            let mut question = AddressMessage::default();
            question.header.family = family;
            self.requests.dump(
                RouteNetlinkMessage::GetAddress(question),
                "list addresses",
                |answer| {
                    // A kernel without IPv6 answers with all that it has.
                    if let RouteNetlinkMessage::NewAddress(message) = answer
                        && message.header.family == family
                    {
                        addresses.extend(parse::address(&message));
                    }
                },
            )?;
        }
        Ok(addresses)
    }

    /// Requests the rules and the routes that are followed.
    fn request_routing(&mut self) -> Result<(Vec<Rule>, Vec<Route>)> {
        let rules = match self.followed.rules {
            true => self.request_rules()?,
            false => Vec::new(),
        };
        let mut tables = self.followed.tables.clone();
        tables.extend(rules.iter().map(|rule| rule.table));
        Ok((rules, self.request_routes(&tables)?))
    }

    fn request_rules(&mut self) -> Result<Vec<Rule>> {
        let mut rules = Vec::new();
        for family in FAMILIES {
            let mut question = RuleMessage::default();
            question.header.family = family;
            let asked = self.requests.dump(
                RouteNetlinkMessage::GetRule(question),
                "list routing rules",
                |answer| {
                    if let RouteNetlinkMessage::NewRule(message) = answer
                        && message.header.family == family
                    {
                        rules.extend(parse::rule(&message));
                    }
                },
            );
            match asked {
                // A kernel without rules has the table main alone.
                Err(error) if error.errno() == Some(libc::EOPNOTSUPP) => {}
                other => other?,
            }
        }
        Ok(rules)
    }

    fn request_routes(&mut self, tables: &BTreeSet<u32>) -> Result<Vec<Route>> {
        let is_followed = |route: &Route| match route.table {
            Table::Main | Table::Local => true,
            Table::Other(number) => tables.contains(&number),
        };
        let mut routes = Vec::new();
        for family in FAMILIES {
            let mut question = RouteMessage::default();
            question.header.address_family = family;
            self.requests.dump(
                RouteNetlinkMessage::GetRoute(question),
                "list routes",
                |answer| {
                    if let RouteNetlinkMessage::NewRoute(message) = answer
                        && message.header.address_family == family
                    {
                        parse::route(&message, |route| {
                            if is_followed(&route) {
                                routes.push(route);
                            }
                        });
                    }
                },
            )?;
        }
        Ok(routes)
    }

    fn request_neighbours(&mut self) -> Result<Neighbours> {
        let mut neighbours = Neighbours::new();
        for family in FAMILIES {
            let mut question = NeighbourMessage::default();
            question.header.family = family;
            self.requests.dump(
                RouteNetlinkMessage::GetNeighbour(question),
                "list neighbours",
                |answer| {
                    if let RouteNetlinkMessage::NewNeighbour(message) = answer {
                        neighbours.extend(parse::neighbour(&message));
                    }
                },
            )?;
        }
        Ok(neighbours)
    }
}

impl AsFd for NetworkWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.notices.as_fd()
    }
}
