//! What broker and engine say to each other.
use std::net::{Ipv4Addr, SocketAddrV4};

use serde::{Deserialize, Serialize};
use slipgate_policy::LocalAddresses;
use userspace_nat::{
    engine::{Link, NamesPage, OnExit, Subject},
    record::Events,
    route::RouteSnapshot,
    vm::VmSpec,
};

use slipgate_policy::document::LoadedPolicies;

/// From the broker.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) enum ToEngine {
    /// First. Descriptors: as [`Start`] says.
    Start(Box<Start>),
    /// Reservation sockets of forwards, one descriptor each, in order.
    Forwards(Vec<ForwardSocket>),
    /// Everything is there: confine yourself, adopt, serve.
    Begin,
    /// A VM has changed.
    Vm(VmSpec),
    /// Routes, addresses or links have changed.
    Network(NetworkView),
    /// The host's resolvers are others now.
    Resolvers(Vec<SocketAddrV4>),
    /// Ports among the translated ones that sockets of the host hold: IP protocol and port.
    ReservedPorts(Vec<(u8, u16)>),
    /// Explain a decision; answered by [`ToBroker::Why`] with the same number.
    Why {
        request: u64,
        row: u16,
        address: Ipv4Addr,
        port: u16,
        /// IP protocol number.
        protocol: u8,
        /// The name that the guest would ask for; then the address is 0.0.0.0 if this host finds
        /// none.
        name: Option<String>,
    },
    /// What is known by name, from this place; answered by [`ToBroker::Names`].
    Names { request: u64, from: u64 },
    /// Another file for the flow log, the one descriptor.
    FlowLog,
    /// Another file for `--pcap`, the one descriptor.
    Pcap,
    /// Other policies; answered by [`ToBroker::Applied`] when nothing leaves any more that they
    /// refuse.
    Policies(Box<Policies>),
    /// End flows; answered by [`ToBroker::Cut`] when nothing of theirs can leave any more.
    Cut { request: u64, what: Subject },
    /// Write packets to a socket, the one descriptor; answered by [`ToBroker::Capturing`].
    Capture {
        request: u64,
        what: Subject,
        packets: Option<u64>,
        seconds: Option<u64>,
    },
    /// Send what is recorded of a VM to a socket, the one descriptor; answered by
    /// [`ToBroker::Listening`].
    Listen { request: u64, row: u16 },
    /// A frozen VM is about to be thawed; answered by [`ToBroker::Thawed`].
    Thaw { request: u64, row: u16 },
    /// Are you there? Answered by [`ToBroker::Answered`], from the loop that serves guests.
    Ping { request: u64 },
    /// Stop, and answer [`ToBroker::Stopped`].
    Shutdown(OnExit),
}

/// How the engine is to work. Descriptors with it: the maps, the engine port, and the flow log
/// and the file for `--pcap` when there are such.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct Start {
    /// Row in `OWNERS`.
    pub(crate) owner_row: u32,
    /// Epoch in that row.
    pub(crate) epoch: u32,
    /// Whether the flow log's descriptor comes behind the port's.
    pub(crate) flow_log: bool,
    /// What it is told.
    pub(crate) flow_log_events: Events,
    /// Whether that of the file for `--pcap` is the next.
    pub(crate) pcap: bool,
    /// Whose rows are filled already.
    pub(crate) vms: Vec<VmSpec>,
    pub(crate) policies: LoadedPolicies,
    /// Where this owner's rules begin in `RULES`.
    pub(crate) rule_base: u32,
    /// What follows the policy's texts there: the forwards'.
    pub(crate) forward_texts: Vec<String>,
    /// The host's.
    pub(crate) resolvers: Vec<SocketAddrV4>,
    /// First and last port of translated flows.
    pub(crate) nat_ports: (u16, u16),
    pub(crate) reserved_ports: Vec<(u8, u16)>,
    pub(crate) network: NetworkView,
    /// Level of messages on stderr.
    pub(crate) log: String,
}

/// What is to be in force from now on.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct Policies {
    pub(crate) request: u64,
    pub(crate) policies: LoadedPolicies,
    /// Where their texts begin in `RULES`; behind them are the forwards', which stay.
    pub(crate) rule_base: u32,
    pub(crate) local: LocalAddresses,
    /// All of them, with their policy and quotas.
    pub(crate) vms: Vec<VmSpec>,
    /// VMs, by id, of whose flows none is left that may not be, whatever their policy says.
    pub(crate) strictly: Vec<u32>,
}

/// What the engine must know of the host's network.
#[derive(Clone, Default, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct NetworkView {
    pub(crate) routes: RouteSnapshot,
    pub(crate) local: LocalAddresses,
    pub(crate) links: Vec<Link>,
}

/// A reserved port of the host.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct ForwardSocket {
    pub(crate) vm: u32,
    pub(crate) vm_row: u16,
    /// IP protocol number.
    pub(crate) protocol: u8,
    pub(crate) host: SocketAddrV4,
    pub(crate) guest_port: u16,
    /// Element of `RULES`.
    pub(crate) rule: u32,
}

/// From the engine.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) enum ToBroker {
    /// Confined, adopted, about to serve.
    Ready {
        /// Flows taken over from a predecessor.
        adopted: u64,
    },
    /// New elements of `NEXT_HOPS` want to be filled.
    NextHopsWanted,
    /// The answer to [`ToEngine::Why`].
    Why { request: u64, answer: WhyAnswer },
    /// The answer to [`ToEngine::Names`].
    Names { request: u64, page: NamesPage },
    /// The answer to [`ToEngine::Policies`].
    Applied {
        request: u64,
        cut: u64,
        kept: u64,
        left: u64,
    },
    /// The answer to [`ToEngine::Cut`].
    Cut { request: u64, flows: Option<u64> },
    /// The answer to [`ToEngine::Capture`].
    Capturing {
        request: u64,
        /// Why not, in words.
        refused: Option<String>,
    },
    /// The answer to [`ToEngine::Listen`].
    Listening {
        request: u64,
        /// Why not, in words.
        refused: Option<String>,
    },
    /// The answer to [`ToEngine::Thaw`].
    Thawed { request: u64 },
    /// The answer to [`ToEngine::Ping`].
    Answered { request: u64 },
    /// The last message: the loop has ended as asked.
    Stopped,
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
    /// The name that the guest would ask for; then the address is 0.0.0.0 unless it
    /// [turned out](WhyAnswer::lacks_address) to be wanted, and this host finds one.
    #[serde(default)]
    pub(crate) name: Option<String>,
}

/// What would become of it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct WhyAnswer {
    /// Whether it would be admitted.
    pub(crate) admitted: bool,
    /// The rule that decides, as typed.
    pub(crate) rule: String,
    /// The refusal's name in `stats`.
    pub(crate) refusal: Option<String>,
    /// In words: what would happen.
    pub(crate) outcome: String,
    /// In sentences, one a line: why that rule, and no other.
    pub(crate) explanation: String,
    /// Where it would leave.
    pub(crate) via: Option<String>,
    /// It was not judged: an address of the name is wanted, too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) lacks_address: bool,
}
