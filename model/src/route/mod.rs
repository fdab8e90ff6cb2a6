//! Routes to destinations: a snapshot of the host's routing table, looked up at admission.
//!
//! `bpf_redirect` sends a packet to any destination, even an address of the host itself, so the
//! engine looks the route up first. The broker follows the kernel's tables by netlink and sends a
//! whole [`RouteSnapshot`] at each change; the [`RouteTable`] compiled from it is replaced whole,
//! and a [`Difference`] says which flows the change may concern.
//!
//! A look-up takes the longest prefix, of those the lowest metric, as the kernel does in its main
//! table. Routes of links other than the uplink are included and give [`Route::OtherUplink`]: a
//! network behind another link must not be reached by the default route. Routes by TOS are not
//! supported.
//!
//! A VM whose policy names a table, a VRF or a mark ([`EgressRoutes`](slipgate_policy::EgressRoutes))
//! has the routes of that *domain* instead: a list of tables that are asked in turn, as the host's
//! rules (`ip rule`) have the kernel ask them about packets with that mark (`domain`). Where such a
//! rule is by what is not looked at, the kernel itself is asked ([`ask`]).
//!
//! A route may have several next hops: flows are spread over those of them that leave by the uplink
//! ([`spread`]).
//!
//! A VM may have an uplink of its own. Of equal prefixes its look-ups take the route by that link,
//! even if the metric of another link's route is lower, as the kernel does for a socket that is
//! bound to a device. So a default route of a high metric is enough for such an uplink, and the host
//! itself does not use it.
//!
//! Both families are in one table. The source address of IPv4 is selected as the kernel selects it,
//! that of IPv6 by RFC 6724 (`source`).
use std::net::IpAddr;

use slipgate_abi::IfIndex;

pub use crate::network::{
    FurtherRoutes, HopShare, HostAddress, RouteDomain, RouteEntry, RouteKind, RouteSnapshot,
    RouteStep, SourceUse, StepAction,
};

pub mod ask;
mod difference;
mod domain;
mod recent;
mod source;
pub mod spread;
mod table;

pub use difference::Difference;
pub use domain::Query;
pub use spread::Choose;
pub use table::{OUT_THERE, RouteTable};

/// Smallest MTU that a link may have, bytes: RFC 791, and RFC 8200 section 5.
const LEAST_MTU: u32 = 68;
const LEAST_MTU6: u32 = 1_280;

/// MTU of a route, bytes, raised to the smallest that a link of its family may have; `None` if the
/// route sets none.
fn mtu(route: &RouteEntry) -> Option<u32> {
    let least = match route.prefix.addr() {
        IpAddr::V4(_) => LEAST_MTU,
        IpAddr::V6(_) => LEAST_MTU6,
    };
    let set = route.mtu.filter(|mtu| *mtu > 0);
    set.map(|mtu| mtu.max(least))
}

/// Next hop for which an element of `NEXT_HOPS` is claimed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Hop {
    /// Ifindex of the uplink.
    pub ifindex: IfIndex,
    /// Address of the neighbour; unspecified where the link has no neighbours.
    pub neighbour: IpAddr,
    /// Largest packet that the route carries, bytes; 0: the link's MTU applies.
    pub route_mtu: u32,
}

/// Result of a route look-up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Route {
    /// The destination is reached by the uplink.
    Via {
        /// Interface by which to send.
        ifindex: IfIndex,
        /// Address of the gateway, or of the destination if it is on link. Its MAC is the L2
        /// destination.
        next_hop: IpAddr,
        /// Source address that the host would use.
        source: IpAddr,
        /// Largest packet that the route carries, bytes; `None` if only the link limits it.
        mtu: Option<u32>,
    },
    /// The destination is an address of the host, or a broadcast address of one of its networks.
    HostLocal,
    /// The destination is reached by a link other than the uplink.
    OtherUplink {
        /// Interface of the route.
        ifindex: IfIndex,
    },
    /// A route of this type refuses or discards packets to the destination.
    Refused(RouteKind),
    /// There is no route, or the route's link has no source address.
    Unreachable,
    /// The host has none of the addresses that the VM may have as its source.
    NoSource,
    /// A rule of the host (`ip rule`) depends on something of a packet that is not looked at.
    Undecided {
        /// Priority of the rule, by which `ip rule` shows it.
        priority: u32,
    },
}

impl Route {
    /// Next hop, with the host's source address there; `None` if the destination is not reached by
    /// an uplink.
    pub fn hop(self) -> Option<(Hop, IpAddr)> {
        match self {
            Self::Via {
                ifindex,
                next_hop,
                source,
                mtu,
            } => {
                let hop = Hop {
                    ifindex,
                    neighbour: next_hop,
                    route_mtu: mtu.unwrap_or(0),
                };
                Some((hop, source))
            }
            _ => None,
        }
    }
}
