//! Which way a destination is reached: a snapshot of the host's routes, looked up at admission.
//!
//! `bpf_redirect` puts a packet on the wire whatever its destination, even one that is the host's
//! own, so the engine asks first. The broker follows the kernel's tables by netlink and sends a
//! whole [`RouteSnapshot`] at each change; the [`RouteTable`] compiled from it is replaced whole, and
//! a [`Difference`] says which flows that may concern.
//!
//! A look-up takes the longest prefix, of those the lowest metric, as the kernel does in its main
//! table. Routes of other links than the uplink are seen and answer [`Route::OtherUplink`]: a
//! network behind another link must not be looked for by the default route. Policy routing (`ip
//! rule`) and routes by TOS are not seen.
use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use serde::{Deserialize, Serialize};

use crate::datapath::Hop;

mod difference;
mod table;

pub use difference::Difference;
pub use table::RouteTable;

/// Least MTU of any link, bytes (RFC 791).
const LEAST_MTU: u32 = 68;

/// What the broker knows of the host's addresses and routes.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RouteSnapshot {
    /// The interface flows leave by. `None`: any that a route names.
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

impl RouteEntry {
    /// Its MTU, if it has one: no less than what any link carries (RFC 791).
    fn mtu(&self) -> Option<u32> {
        self.mtu
            .filter(|mtu| *mtu > 0)
            .map(|mtu| mtu.max(LEAST_MTU))
    }
}

/// How a destination is reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Route {
    /// By the uplink.
    Via {
        /// The link to leave by.
        ifindex: u32,
        /// Whose MAC address is wanted: the gateway, or the destination itself.
        next_hop: Ipv4Addr,
        /// The address that the host would use as source.
        source: Ipv4Addr,
        /// Largest packet that the route carries, bytes; `None`: as large as the link's.
        mtu: Option<u32>,
    },
    /// It is an address of the host, or a broadcast address of one of its networks.
    HostLocal,
    /// By a link that is not the uplink.
    OtherUplink {
        /// That link.
        ifindex: u32,
    },
    /// A route says that it is to be refused or discarded.
    Refused(RouteKind),
    /// No route, or no source address on the link of the route.
    Unreachable,
}

impl Route {
    /// The next hop, with the host's source address there; `None` where it leads by no uplink.
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
