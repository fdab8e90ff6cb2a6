//! What broker and engine say to each other.
use std::net::{Ipv4Addr, SocketAddrV4};

use serde::{Deserialize, Serialize};
use userspace_nat::route::RouteSnapshot;

use crate::config::LoadedRules;

/// From the broker.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) enum ToEngine {
    /// First. Descriptors: as [`Start`] says.
    Start(Box<Start>),
    /// Reservation sockets of forwards, one descriptor each, in order.
    Sockets(Vec<ForwardSocket>),
    /// Everything is there: confine yourself, adopt, serve.
    Begin,
    /// Routes or addresses have changed.
    Network(RouteSnapshot),
    /// Explain a decision; answered by [`ToBroker::Why`] with the same id.
    Why { id: u64, question: WhyQuestion },
    /// Stop, and answer [`ToBroker::Stopped`]. `end_flows`: end and record every flow first.
    Stop { end_flows: bool },
}

/// How the engine is to work. Descriptors with it: the maps, the engine port, and the flow log
/// when there is one.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct Start {
    /// How many descriptors are maps.
    pub(crate) maps: usize,
    /// Row in `OWNERS`.
    pub(crate) owner_row: u32,
    /// Epoch in that row.
    pub(crate) epoch: u32,
    /// Whether the last descriptor is the flow log.
    pub(crate) flow_log: bool,
    pub(crate) vms: Vec<StartVm>,
    pub(crate) rules: LoadedRules,
    /// Where this owner's rules begin in `RULES`.
    pub(crate) rules_at: u32,
    /// Resolvers.
    pub(crate) dns: Vec<SocketAddrV4>,
    /// First and last port of translated flows.
    pub(crate) nat_ports: (u16, u16),
    /// Source addresses; empty: the route's.
    pub(crate) nat_addresses: Vec<Ipv4Addr>,
    pub(crate) network: RouteSnapshot,
    /// Level of messages on stderr.
    pub(crate) log: String,
}

/// One VM, whose row is filled already.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct StartVm {
    pub(crate) id: u32,
    pub(crate) row: u16,
    pub(crate) name: String,
    pub(crate) guest: Ipv4Addr,
    pub(crate) gateway: Ipv4Addr,
    pub(crate) dns: Ipv4Addr,
    pub(crate) prefix_len: u8,
    pub(crate) guest_mac: Option<[u8; 6]>,
    pub(crate) gateway_mac: [u8; 6],
    pub(crate) mtu: u16,
    pub(crate) max_flows: u32,
    pub(crate) new_flows_per_second: u32,
}

/// A reserved port of the host.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct ForwardSocket {
    /// The VM's row.
    pub(crate) vm_row: u16,
    /// IP protocol number.
    pub(crate) protocol: u8,
    pub(crate) host: SocketAddrV4,
    pub(crate) guest_port: u16,
}

/// From the engine.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) enum ToBroker {
    /// Confined, adopted, about to serve.
    Ready {
        /// Flows taken over from a predecessor.
        adopted: u32,
    },
    /// New elements of `NEXT_HOPS` want to be filled.
    NextHopsWanted,
    /// The answer to [`ToEngine::Why`].
    Why { id: u64, answer: WhyAnswer },
    /// The last message: the loop has ended as asked.
    Stopped {
        /// Flows that were ended and recorded.
        ended: u32,
    },
}

/// A flow that some VM might open.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct WhyQuestion {
    /// The VM's name.
    pub(crate) vm: String,
    pub(crate) address: Ipv4Addr,
    /// 0 for ICMP.
    pub(crate) port: u16,
    /// IP protocol number.
    pub(crate) protocol: u8,
}

/// What would become of it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct WhyAnswer {
    /// Whether it would be admitted.
    pub(crate) admitted: bool,
    /// The rule as the user wrote it; `None` when no rule was asked.
    pub(crate) rule: Option<String>,
    /// The refusal's name in `stats`.
    pub(crate) refusal: Option<String>,
    /// Sentences.
    pub(crate) because: Vec<String>,
}
