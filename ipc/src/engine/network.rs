//! The host's network, as far as the engine decides by it.
use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use serde::{Deserialize, Serialize};
use slipgate_policy::LocalAddresses;

/// The host's network.
#[derive(Clone, Default, PartialEq, Debug, Serialize, Deserialize)]
pub struct NetworkView {
    /// Routes and addresses.
    pub routes: RouteSnapshot,
    /// What the rules protect on this host.
    pub local: LocalAddresses,
    /// Links and their MTUs.
    pub links: Vec<Link>,
}

/// Addresses and routes.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RouteSnapshot {
    /// The interface that flows leave by. `None`: any that a route names.
    pub uplink_ifindex: Option<u32>,
    /// The host's IPv4 addresses, of all links.
    pub addresses: Vec<HostAddress>,
    /// Routes of the main (and default) table; those of the local table may be among them.
    pub routes: Vec<RouteEntry>,
}

/// An address of the host and the network it is in.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HostAddress {
    /// The link it is on.
    pub ifindex: u32,
    /// The address with its network's prefix length.
    pub addr: Ipv4Net,
    /// The network's broadcast address, where it has one (`IFA_BROADCAST`).
    pub broadcast: Option<Ipv4Addr>,
}

/// One route.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RouteEntry {
    /// Destinations.
    pub prefix: Ipv4Net,
    /// What becomes of packets to them.
    pub kind: RouteKind,
    /// The link they leave by (`RTA_OIF`); 0 for kinds without one.
    pub ifindex: u32,
    /// The router; `None`: on link.
    pub gateway: Option<Ipv4Addr>,
    /// The source address it prefers (`RTA_PREFSRC`).
    pub prefsrc: Option<Ipv4Addr>,
    /// Priority: the lower wins (`RTA_PRIORITY`).
    pub metric: u32,
    /// Largest packet that it carries, bytes (`RTAX_MTU`); `None`: as large as the link's.
    pub mtu: Option<u32>,
}

/// A route's type, as `rtm_type` has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RouteKind {
    /// To a gateway or on link.
    Unicast,
    /// The host itself.
    Local,
    /// A broadcast address of one of its networks.
    Broadcast,
    /// Discarded silently.
    Blackhole,
    /// Refused: host unreachable.
    Unreachable,
    /// Refused: administratively prohibited.
    Prohibit,
}

/// A link that packets may leave by.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Link {
    /// Its ifindex.
    pub ifindex: u32,
    /// Largest L3 packet, bytes.
    pub mtu: u32,
    /// Whether its frames begin with an Ethernet header.
    pub has_l2: bool,
}
