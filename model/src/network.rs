//! The host's network: the part that the engine's decisions depend on.
use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use slipgate_abi::IfIndex;
use slipgate_policy::LocalAddresses;

mod further;

pub use self::further::{FurtherRoutes, RouteDomain, RouteStep, StepAction};

/// Network of the host, as the engine sees it.
#[derive(Clone, Default, PartialEq, Debug, Serialize, Deserialize)]
pub struct NetworkView {
    /// Routes and addresses of the host.
    pub routes: RouteSnapshot,
    /// Addresses of this host that the rules protect.
    pub local: LocalAddresses,
    /// Links of the host with their MTUs.
    pub links: Vec<Link>,
}

/// Snapshot of the host's addresses and routes, of both families.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RouteSnapshot {
    /// Interface that flows leave by. `None`: the interface that the route names.
    pub uplink_ifindex: Option<IfIndex>,
    /// Interfaces that flows of VMs with an uplink of their own leave by, sorted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vm_uplinks: Vec<IfIndex>,
    /// The host's addresses, of all links.
    pub addresses: Vec<HostAddress>,
    /// Routes of the main (and default) table; those of the local table may be among them.
    pub routes: Vec<RouteEntry>,
    /// Routes of the VMs whose policies choose others than those.
    #[serde(default)]
    pub further: FurtherRoutes,
}

/// An address of the host and the network it is in.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HostAddress {
    /// Link that has the address.
    pub ifindex: IfIndex,
    /// The address with its network's prefix length.
    pub addr: IpNet,
    /// The network's broadcast address, where it has one (`IFA_BROADCAST`).
    pub broadcast: Option<Ipv4Addr>,
    /// How far packets may have it as their source.
    #[serde(default)]
    pub source: SourceUse,
}

/// How far packets may have an address as their source. IPv4 addresses are all preferred.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SourceUse {
    /// Any flow may use it.
    #[default]
    Preferred,
    /// A temporary address (RFC 8981): it goes after some days, and flows with it.
    Temporary,
    /// Its preferred lifetime is over (RFC 4862 section 5.5.4): only if there is no other.
    Deprecated,
    /// Not at all: it is not yet known to be unique on the link, or it is not.
    Unusable,
}

/// One route of the host, or one next hop of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RouteEntry {
    /// Destination prefix of the route.
    pub prefix: IpNet,
    /// Treatment of packets to these destinations.
    pub kind: RouteKind,
    /// Output interface (`RTA_OIF`); 0 for kinds without one.
    pub ifindex: IfIndex,
    /// Address of the router, which for IPv4 may be one of IPv6 (`RTA_VIA`); `None`: the destination
    /// is on link.
    pub gateway: Option<IpAddr>,
    /// Preferred source address (`RTA_PREFSRC`).
    pub prefsrc: Option<IpAddr>,
    /// Metric: the lowest wins (`RTA_PRIORITY`).
    pub metric: u32,
    /// Path MTU of the route, bytes (`RTAX_MTU`); `None`: the link's MTU applies.
    pub mtu: Option<u32>,
    /// Its part in a route that has several next hops.
    #[serde(default, skip_serializing_if = "HopShare::is_whole")]
    pub share: HopShare,
}

/// Part of an entry in a route that has several next hops (`RTA_MULTIPATH`). Such a route has an entry
/// for each, one after the other.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HopShare {
    /// Weight of the next hop among the route's, 1 or more.
    pub weight: u16,
    /// Whether the entry is a further next hop of the route that the entry before it is of.
    pub is_further: bool,
}

impl Default for HopShare {
    fn default() -> Self {
        Self {
            weight: 1,
            is_further: false,
        }
    }
}

impl HopShare {
    /// Whether it is that of a route with one next hop, as far as an entry alone can tell.
    fn is_whole(&self) -> bool {
        *self == Self::default()
    }
}

/// Type of a route, as in `rtm_type`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RouteKind {
    /// Forwarded to a gateway or on link.
    Unicast,
    /// Delivered to the host itself.
    Local,
    /// A broadcast address of one of the host's networks.
    Broadcast,
    /// Packets are discarded silently.
    Blackhole,
    /// Packets are refused with host unreachable.
    Unreachable,
    /// Packets are refused as administratively prohibited.
    Prohibit,
    /// The table has no route to these destinations; another may have.
    Throw,
}

/// A link that packets may leave by.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Link {
    /// Interface index of the link.
    pub ifindex: IfIndex,
    /// Name of the link.
    pub name: String,
    /// Largest L3 packet, bytes.
    pub mtu: u32,
    /// Whether its frames begin with an Ethernet header.
    pub has_l2: bool,
}

/// The link and the neighbour by which a flow leaves, as records show them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct FlowUplink<Name> {
    /// Name of the link, where it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<Name>,
    /// Interface index of the link.
    pub index: IfIndex,
    /// The router, or the peer itself if it is on the link; `None` if the link has no neighbours, or
    /// the kernel resolves them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_hop: Option<IpAddr>,
}

impl<Name> FlowUplink<Name> {
    /// `next_hop`: unspecified if there is none.
    pub fn new(name: Option<Name>, index: IfIndex, next_hop: IpAddr) -> Self {
        Self {
            name,
            index,
            next_hop: Some(next_hop).filter(|neighbour| !neighbour.is_unspecified()),
        }
    }
}

/// Device by which the tables of a user-mode engine name its guest. No device of the host has such a
/// number, and uplinks have theirs.
pub const USERSPACE_GUEST: IfIndex = IfIndex::new(0x5000_0000);
/// As [`USERSPACE_GUEST`], the engine's port.
pub const USERSPACE_PORT: IfIndex = IfIndex::new(0x4000_0000);

/// Sockets that are made at a time in the network namespace of a command, for connections of forwards.
pub const NAMESPACE_SOCKETS: usize = 64;
