//! What the kernel knows of the network, as plain data. IPv4.

use std::{
    collections::{BTreeMap, HashMap},
    net::Ipv4Addr,
};

use serde::{Deserialize, Serialize};

/// One network namespace's network at one moment. Neighbours are not serialised: they are the
/// broker's business.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Network {
    /// By ifindex.
    pub links: BTreeMap<u32, Link>,
    /// In the kernel's order.
    pub addresses: Vec<Address>,
    /// Of the tables main and local; multipath routes by their first live hop.
    pub routes: Vec<Route>,
    /// By ifindex and address.
    #[serde(skip)]
    pub neighbours: HashMap<(u32, Ipv4Addr), Neighbour>,
}

/// A network device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Link {
    /// Its index.
    pub ifindex: u32,
    /// Its name.
    pub name: String,
    /// The driver's kind, such as `veth` or `tun`; physical devices have none.
    pub kind: Option<String>,
    /// Whether it is up and has a carrier.
    pub up: bool,
    /// L3 bytes.
    pub mtu: u32,
    /// Its MAC address, when it has one.
    pub mac: Option<[u8; 6]>,
    /// Whether its frames begin with an Ethernet header.
    pub has_l2: bool,
    /// Whether it is the loopback.
    pub loopback: bool,
    /// Whether it resolves neighbours (no `IFF_NOARP`).
    pub arp: bool,
}

/// An address of the host.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Address {
    /// The device.
    pub ifindex: u32,
    /// The host's own address.
    pub address: Ipv4Addr,
    /// Length of the network's prefix.
    pub prefix_len: u8,
    /// The network's broadcast address.
    pub broadcast: Option<Ipv4Addr>,
    /// On a point-to-point link: the other end.
    pub peer: Option<Ipv4Addr>,
}

/// The two tables that are read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Table {
    /// 254.
    Main,
    /// 255: the host's own addresses and broadcasts.
    Local,
}

/// What a route does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum RouteKind {
    /// Sends on.
    Unicast,
    /// Delivers to the host.
    Local,
    /// A broadcast of a local network.
    Broadcast,
    /// Multicast, anycast.
    Other,
    /// Drops in silence.
    Blackhole,
    /// Refuses: unreachable, prohibit, throw.
    Refused,
}

/// A route.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Route {
    /// Destination network.
    pub destination: Ipv4Addr,
    /// Its prefix length; 0: the default route.
    pub prefix_len: u8,
    /// The table it is in.
    pub table: Table,
    /// What it does.
    pub kind: RouteKind,
    /// The device it leads out of.
    pub oif: Option<u32>,
    /// The router, when the destination is not on link.
    pub gateway: Option<Ipv4Addr>,
    /// The preferred source address.
    pub source: Option<Ipv4Addr>,
    /// Lower is preferred.
    pub metric: u32,
    /// The route's own MTU, when it has one, L3 bytes.
    pub mtu: Option<u32>,
}

/// What is known of a neighbour.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Neighbour {
    /// Its MAC, while the kernel would use it.
    pub mac: Option<[u8; 6]>,
    /// Entered by hand: not to be touched.
    pub permanent: bool,
}

impl Network {
    /// The device of that name.
    pub fn link_by_name(&self, name: &str) -> Option<&Link> {
        self.links.values().find(|link| link.name == name)
    }

    /// The device of the preferred default route.
    pub fn default_uplink(&self) -> Option<&Link> {
        self.routes
            .iter()
            .filter(|route| {
                route.prefix_len == 0
                    && route.table == Table::Main
                    && route.kind == RouteKind::Unicast
            })
            .filter_map(|route| Some((route.metric, self.links.get(&route.oif?)?)))
            .filter(|(_, link)| !link.loopback)
            .min_by_key(|(metric, _)| *metric)
            .map(|(_, link)| link)
    }

    /// Whether the host's routes lead to this neighbour by this device: as a router, or because it
    /// is on the link. Without L2 header the device leads there by itself.
    pub fn is_next_hop(&self, ifindex: u32, neighbour: Ipv4Addr) -> bool {
        let Some(link) = self.links.get(&ifindex) else {
            return false;
        };
        if !link.has_l2 || neighbour.is_unspecified() {
            return !link.has_l2;
        }
        let by_it = |route: &&Route| {
            route.kind == RouteKind::Unicast
                && route.table == Table::Main
                && route.oif == Some(ifindex)
        };
        let mut by_it = self.routes.iter().filter(by_it);
        by_it.any(|route| route.gateway == Some(neighbour)) || self.is_on_link(ifindex, neighbour)
    }

    fn is_on_link(&self, ifindex: u32, address: Ipv4Addr) -> bool {
        let has = |route: &&Route| {
            let shift = 32u32.saturating_sub(u32::from(route.prefix_len));
            let differs = u32::from(route.destination) ^ u32::from(address);
            differs.checked_shr(shift).unwrap_or(0) == 0
        };
        // The host's own addresses and broadcasts are in the table local, which the kernel asks
        // first.
        let best = |table| {
            let routes = self.routes.iter().filter(move |r| r.table == table);
            routes.filter(has).min_by_key(|route| {
                let longest = std::cmp::Reverse(route.prefix_len);
                (longest, route.metric)
            })
        };
        let route = best(Table::Local).or_else(|| best(Table::Main));
        route.is_some_and(|route| {
            route.kind == RouteKind::Unicast
                && route.gateway.is_none()
                && route.oif == Some(ifindex)
        })
    }

    /// A device's first address.
    pub fn address_of(&self, ifindex: u32) -> Option<&Address> {
        self.addresses
            .iter()
            .find(|address| address.ifindex == ifindex)
    }
}
