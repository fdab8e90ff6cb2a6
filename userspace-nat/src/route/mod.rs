//! Routes to destinations: a snapshot of the host's routing table, looked up at admission.
//!
//! `bpf_redirect` sends a packet to any destination, even an address of the host itself, so the
//! engine looks the route up first. The broker follows the kernel's tables by netlink and sends a
//! whole [`RouteSnapshot`] at each change; the [`RouteTable`] compiled from it is replaced whole,
//! and a [`Difference`] says which flows the change may concern.
//!
//! A look-up takes the longest prefix, of those the lowest metric, as the kernel does in its main
//! table. Routes of links other than the uplink are included and give [`Route::OtherUplink`]: a
//! network behind another link must not be reached by the default route. Policy routing (`ip
//! rule`) and routes by TOS are not supported.
use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use serde::{Deserialize, Serialize};

use crate::datapath::Hop;

mod difference;
mod table;

pub use difference::Difference;
pub use table::RouteTable;

/// Smallest MTU that a link may have, bytes (RFC 791).
const LEAST_MTU: u32 = 68;

/// Addresses and routes of the host at one time, as the broker read them.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RouteSnapshot {
    /// Interface by which flows leave; `None` for any that a route names.
    pub uplink_ifindex: Option<u32>,
    /// IPv4 addresses of all the host's links.
    pub addresses: Vec<HostAddress>,
    /// Routes of the main (and default) table. Routes of the local table may be included.
    pub routes: Vec<RouteEntry>,
}

/// An IPv4 address of the host, with its network.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HostAddress {
    /// Interface that has the address.
    pub ifindex: u32,
    /// The address, with its network's prefix length.
    pub addr: Ipv4Net,
    /// Broadcast address of the network (`IFA_BROADCAST`); `None` if it has none.
    pub broadcast: Option<Ipv4Addr>,
}

/// One route of the host.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RouteEntry {
    /// Destinations of the route.
    pub prefix: Ipv4Net,
    /// Type of the route: the treatment of packets to these destinations.
    pub kind: RouteKind,
    /// Interface by which packets leave (`RTA_OIF`); 0 for types without one.
    pub ifindex: u32,
    /// Router; `None` if the destinations are on link.
    pub gateway: Option<Ipv4Addr>,
    /// Preferred source address (`RTA_PREFSRC`).
    pub prefsrc: Option<Ipv4Addr>,
    /// Priority (`RTA_PRIORITY`); the lowest wins.
    pub metric: u32,
    /// Largest packet that the route carries, bytes (`RTAX_MTU`); `None` if only the link limits
    /// it.
    pub mtu: Option<u32>,
}

/// Type of a route (`rtm_type`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RouteKind {
    /// Packets are sent to a gateway, or directly on link.
    Unicast,
    /// The destination is an address of the host.
    Local,
    /// The destination is a broadcast address of one of the host's networks.
    Broadcast,
    /// Packets are discarded silently.
    Blackhole,
    /// Packets are refused with ICMP host unreachable.
    Unreachable,
    /// Packets are refused with ICMP administratively prohibited.
    Prohibit,
}

impl RouteEntry {
    /// MTU of the route, bytes, raised to the smallest that a link may have (RFC 791); `None` if
    /// the route sets none.
    fn mtu(&self) -> Option<u32> {
        self.mtu
            .filter(|mtu| *mtu > 0)
            .map(|mtu| mtu.max(LEAST_MTU))
    }
}

/// Result of a route look-up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Route {
    /// The destination is reached by the uplink.
    Via {
        /// Interface by which to send.
        ifindex: u32,
        /// Address of the gateway, or of the destination if it is on link. Its MAC is the L2
        /// destination.
        next_hop: Ipv4Addr,
        /// Source address that the host would use.
        source: Ipv4Addr,
        /// Largest packet that the route carries, bytes; `None` if only the link limits it.
        mtu: Option<u32>,
    },
    /// The destination is an address of the host, or a broadcast address of one of its networks.
    HostLocal,
    /// The destination is reached by a link other than the uplink.
    OtherUplink {
        /// Interface of the route.
        ifindex: u32,
    },
    /// A route of this type refuses or discards packets to the destination.
    Refused(RouteKind),
    /// There is no route, or the route's link has no source address.
    Unreachable,
}

impl Route {
    /// Next hop, with the host's source address there; `None` if the destination is not reached by
    /// an uplink.
    pub fn hop(self) -> Option<(Hop, Ipv4Addr)> {
        match self {
            Self::Via {
                ifindex,
                next_hop,
                source,
                mtu,
            } => {
                let hop = Hop {
                    ifindex,
                    neighbour: next_hop.into(),
                    route_mtu: mtu.unwrap_or(0),
                };
                Some((hop, source))
            }
            _ => None,
        }
    }
}
