//! Routes beside those of the table `main`: of routing tables that policies name, and what the host's
//! rules (`ip rule`) say about marks.
use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use slipgate_policy::EgressRoutes;

use super::{RouteEntry, RouteKind};

/// Routes of other tables than `main`, and who has which of them.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FurtherRoutes {
    /// The tables and devices that policies name for their routes, each with the way to them.
    pub domains: Vec<RouteDomain>,
    /// The tables that these have steps to, and their routes.
    pub tables: Vec<(u32, Vec<RouteEntry>)>,
}

/// Way from what a policy names to a route: the tables in the order in which they are asked.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RouteDomain {
    /// The table or device that a policy names.
    pub routes: EgressRoutes,
    /// Steps for IPv4. The first that gives a route decides.
    pub ipv4: Vec<RouteStep>,
    /// The same for IPv6.
    pub ipv6: Vec<RouteStep>,
}

/// One step of a look-up, as a rule of the host's has it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RouteStep {
    /// Source addresses that it is for; `None`: all, those of packets that have none yet too.
    pub from: Option<IpNet>,
    /// Destinations that it is for; `None`: all.
    pub to: Option<IpNet>,
    /// Whether it is for all packets but those of `from` and `to`.
    pub is_inverted: bool,
    /// Longest prefix whose routes are passed over; `None`: no route is.
    pub suppressed_len: Option<u8>,
    /// Consequence of the step, when the rule matches.
    pub action: StepAction,
}

/// Action of a [`RouteStep`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum StepAction {
    /// Asks the table `main`, by the uplink of all VMs only.
    Main,
    /// Asks the table `main`, by any link to which the programs are attached.
    AnyOfMain,
    /// Look the destination up in another table.
    Table(u32),
    /// Refuse the packet with an error of this kind.
    Refuse(RouteKind),
    /// It depends on something of a packet that is not looked at: the kernel is asked about all
    /// rules at once, and decides.
    Undecided {
        /// Priority of the rule, by which `ip rule` shows it.
        priority: u32,
        /// Digest of all rules of the family: the kernel's answers may be others under another one.
        rules: u64,
    },
}

impl RouteStep {
    /// A step that is for all packets.
    pub fn all(action: StepAction) -> Self {
        Self {
            from: None,
            to: None,
            is_inverted: false,
            suppressed_len: None,
            action,
        }
    }
}
