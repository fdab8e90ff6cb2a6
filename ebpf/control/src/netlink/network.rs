//! State of the network as the kernel reports it, as plain data.
//!
//! What IPv6 has on every link (link-local and multicast addresses and their routes) is left out:
//! no guest's packet leaves to them, and a host with many containers has many.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap},
    net::{IpAddr, Ipv4Addr},
};

use slipgate_abi::IfIndex;

use super::{links::Links, rules::Rule};

/// State of a network namespace at one moment.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Network {
    /// Network devices, by interface index.
    pub links: Links,
    /// Addresses of the host, in the kernel's order.
    pub addresses: Vec<Address>,
    /// Routes of the tables main and local, and of further ones that are followed. A route with several
    /// next hops is here once for each that is alive, one after the other.
    pub routes: Vec<Route>,
    /// Rules by which the kernel chooses the table, in their order, if they are followed.
    pub rules: Vec<Rule>,
    /// Neighbours, by ifindex and address.
    pub neighbours: HashMap<(IfIndex, IpAddr), Neighbour>,
}

/// A network device (link).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Link {
    /// Index of the device.
    pub ifindex: IfIndex,
    /// Name of the device.
    pub name: String,
    /// Kind of the driver, such as `veth` or `tun`; `None` for physical devices.
    pub kind: Option<String>,
    /// Whether it is up and has a carrier.
    pub up: bool,
    /// Largest packet, L3 bytes.
    pub mtu: u32,
    /// MAC address, if it has one.
    pub mac: Option<[u8; 6]>,
    /// Whether its frames begin with an Ethernet header.
    pub has_l2: bool,
    /// Whether it is the loopback device.
    pub loopback: bool,
    /// Whether it resolves neighbours (no `IFF_NOARP`).
    pub arp: bool,
    /// Of a TAP, whether several queues of it can be opened (`IFF_MULTI_QUEUE`).
    pub is_multi_queue_tap: Option<bool>,
    /// Of a VRF, its routing table.
    pub vrf_table: Option<u32>,
    /// Largest packet of IPv6 to which it joins segments that arrive, bytes; `None`: the kernel is too
    /// old to say, and joins none beyond 64 KiB.
    pub gro_max_size: Option<u32>,
}

impl Link {
    /// Describes an Ethernet device that is up, with the usual MTU and without a MAC address: what tests
    /// need that are not about the device itself.
    pub fn ethernet(ifindex: IfIndex, name: &str) -> Self {
        Self {
            ifindex,
            name: name.to_owned(),
            kind: None,
            up: true,
            mtu: 1_500,
            mac: None,
            has_l2: true,
            loopback: false,
            arp: true,
            is_multi_queue_tap: None,
            vrf_table: None,
            gro_max_size: None,
        }
    }
}

/// Queues of a TAP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TapQueues {
    /// Whether several can be opened (`IFF_MULTI_QUEUE`).
    pub(crate) is_multi_queue: bool,
    /// Whether the device stays when the last of them is closed.
    pub(crate) is_persistent: bool,
    /// Number that are open; of a device with one queue the kernel does not say.
    pub(crate) open: u32,
}

/// An address of the host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Address {
    /// Index of its device.
    pub ifindex: IfIndex,
    /// Address of the host.
    pub address: IpAddr,
    /// Length of the network's prefix.
    pub prefix_len: u8,
    /// The network's broadcast address.
    pub broadcast: Option<Ipv4Addr>,
    /// Address of the peer on a point-to-point link.
    pub peer: Option<IpAddr>,
    /// Lifetime and uniqueness of the address, as far as its use as a source depends on them.
    pub state: AddressState,
}

/// State of an address. IPv4 addresses are all preferred.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum AddressState {
    /// It may be used by anything.
    #[default]
    Preferred,
    /// A temporary address of IPv6 (RFC 8981).
    Temporary,
    /// Its preferred lifetime is over, temporary or not.
    Deprecated,
    /// It may not be used: it is not yet known to be unique on the link, or it is not.
    Unusable,
}

/// The routing tables that are read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Table {
    /// Table `main`, number 254.
    Main,
    /// Table `local` (255): addresses of the host and broadcast addresses.
    Local,
    /// Another one, by its number.
    Other(u32),
}

impl Table {
    /// Returns the table of a number.
    pub(super) const fn of(number: u32) -> Self {
        match number {
            MAIN => Self::Main,
            LOCAL => Self::Local,
            other => Self::Other(other),
        }
    }

    const fn number(self) -> u32 {
        match self {
            Self::Main => MAIN,
            Self::Local => LOCAL,
            Self::Other(number) => number,
        }
    }
}

/// `RT_TABLE_MAIN` and `RT_TABLE_LOCAL` of `linux/rtnetlink.h`.
const MAIN: u32 = 254;
const LOCAL: u32 = 255;

/// Action of a route.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RouteKind {
    /// Forwards to a next hop.
    Unicast,
    /// Delivers to the host.
    Local,
    /// Sends as a broadcast of a local network.
    Broadcast,
    /// Another type: multicast, anycast.
    Other,
    /// Drops without an ICMP error.
    Blackhole,
    /// Refuses: `unreachable` or `prohibit`.
    Refused,
    /// The table has no route (`throw`).
    Throw,
}

/// A route of the host, or one next hop of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Route {
    /// Destination network of the route.
    pub destination: IpAddr,
    /// Prefix length of the destination; 0: the default route.
    pub prefix_len: u8,
    /// Routing table that contains the route.
    pub table: Table,
    /// Action of the route.
    pub kind: RouteKind,
    /// Index of the output device.
    pub oif: Option<IfIndex>,
    /// Address of the router, if the destination is not on link.
    pub gateway: Option<IpAddr>,
    /// Source address that the route prefers for packets of the host.
    pub source: Option<IpAddr>,
    /// Metric; a lower one is preferred.
    pub metric: u32,
    /// MTU of the route, if it has one, L3 bytes.
    pub mtu: Option<u32>,
    /// Weight of the next hop among those of the route.
    pub weight: u16,
    /// Whether it is a further next hop of the route that the one before it is of.
    pub is_further: bool,
}

/// State of a neighbour entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Neighbour {
    /// MAC address; `None` while the kernel would not use it.
    pub mac: Option<[u8; 6]>,
    /// Whether an administrator entered it permanently; slipgate does not change such entries.
    pub permanent: bool,
}

impl Route {
    /// Whether an address is in the route's destination network.
    pub fn covers(&self, address: impl Into<IpAddr>) -> bool {
        let (differs, bits) = match (self.destination, address.into()) {
            (IpAddr::V4(one), IpAddr::V4(other)) => {
                (u128::from(one.to_bits() ^ other.to_bits()), 32u32)
            }
            (IpAddr::V6(one), IpAddr::V6(other)) => (one.to_bits() ^ other.to_bits(), 128),
            _ => return false,
        };
        let shift = bits.saturating_sub(u32::from(self.prefix_len));
        differs.checked_shr(shift).unwrap_or(0) == 0
    }
}

impl Network {
    /// Returns the device of that name.
    pub fn link_by_name(&self, name: &str) -> Option<&Link> {
        self.links.named(name)
    }

    /// Returns the devices that addresses or routes name. They are few where there are many TAPs.
    pub fn routed(&self) -> BTreeSet<IfIndex> {
        let addresses = self.addresses.iter().map(|address| address.ifindex);
        let routes = self.routes.iter().filter_map(|route| route.oif);
        addresses.chain(routes).collect()
    }

    /// Whether an address or a route names this device. It takes a walk over these, which are few
    /// where there are many TAPs.
    pub fn is_routed(&self, ifindex: IfIndex) -> bool {
        self.addresses
            .iter()
            .any(|address| address.ifindex == ifindex)
            || self.routes.iter().any(|route| route.oif == Some(ifindex))
    }

    /// Returns the device of the preferred default route: IPv4's, or IPv6's if there is none.
    pub fn default_uplink(&self) -> Option<&Link> {
        self.routes
            .iter()
            .filter(|route| {
                route.prefix_len == 0
                    && route.table == Table::Main
                    && route.kind == RouteKind::Unicast
            })
            .filter_map(|route| Some((route, self.links.get(&route.oif?)?)))
            .filter(|(_, link)| !link.loopback)
            .min_by_key(|(route, _)| (route.destination.is_ipv6(), route.metric))
            .map(|(_, link)| link)
    }

    /// Whether the host's routes use this neighbour at this device: as a router, or because it is
    /// on the link. A device without L2 headers reaches every neighbour by itself.
    pub fn is_next_hop(&self, ifindex: IfIndex, neighbour: IpAddr) -> bool {
        let Some(link) = self.links.get(&ifindex) else {
            return false;
        };
        if !link.has_l2 || neighbour.is_unspecified() {
            return !link.has_l2;
        }
        let by_it = |route: &&Route| {
            route.kind == RouteKind::Unicast
                && route.table != Table::Local
                && route.oif == Some(ifindex)
        };
        let mut by_it = self.routes.iter().filter(by_it);
        by_it.any(|route| route.gateway == Some(neighbour)) || self.is_on_link(ifindex, neighbour)
    }

    fn is_on_link(&self, ifindex: IfIndex, address: IpAddr) -> bool {
        let order = |route: &Route| (Reverse(route.prefix_len), route.metric);
        let mut best: BTreeMap<u32, &Route> = BTreeMap::new();
        for route in self.routes.iter().filter(|route| route.covers(address)) {
            let known = best.entry(route.table.number()).or_insert(route);
            if order(route) < order(known) {
                *known = route;
            }
        }
        // The host's own addresses and broadcasts are in the table local, which the kernel asks
        // first.
        if best.contains_key(&LOCAL) {
            return false;
        }
        best.values().any(|route| {
            route.kind == RouteKind::Unicast
                && route.gateway.is_none()
                && route.oif == Some(ifindex)
        })
    }

    /// Returns a device's first address.
    pub fn address_of(&self, ifindex: IfIndex) -> Option<&Address> {
        self.addresses
            .iter()
            .find(|address| address.ifindex == ifindex)
    }
}
