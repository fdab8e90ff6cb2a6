//! Messages between the broker and the engine: commands, requests and their answers.
use std::{
    io::{self, Write},
    net::{SocketAddr, SocketAddrV4},
    os::fd::{BorrowedFd, OwnedFd},
};

use serde::{Deserialize, Serialize};
use slipgate_abi::{Protocol, VmId, VmRow};

use crate::{
    observe::{CaptureRequest, NotCaptured, Subject},
    record::{Output, RefusedSample, RelayedId},
    relay,
    route::RouteSnapshot,
    vm::VmSpec,
};
use slipgate_policy::{LocalAddresses, PolicySet};

pub(crate) mod why;

pub use crate::state::{Forward, Link};

/// Treatment of the live flows when the engine stops.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum OnExit {
    /// The flows stay in the kernel for the next process.
    Keep,
    /// The flows are ended and recorded.
    Detach,
}

/// A message from the broker to the engine.
pub enum ControlMessage {
    /// A VM was added, or its description changed.
    Vm(VmSpec),
    /// A VM was removed: its flows end.
    VmGone {
        /// The VM's row in `VMS`.
        row: VmRow,
        /// Id of the VM.
        id: VmId,
    },
    /// Routes, addresses or links changed. The message carries the whole new state.
    Routes {
        /// Routes and addresses of the host.
        routes: RouteSnapshot,
        /// Addresses of this host that the rules protect.
        local: LocalAddresses,
        /// Links of the host and their MTUs.
        links: Vec<Link>,
    },
    /// A bound socket of the host whose connections are relayed to a guest.
    RelayForward(relay::Forward),
    /// Every forward, in order.
    Forwards(Vec<Forward>),
    /// The texts of the forwards in `RULES`, for the flow log. They follow the policy's texts.
    ForwardTexts(Vec<String>),
    /// The host's resolvers, for policies that configure none of their own.
    Resolvers(Vec<SocketAddr>),
    /// Ports in the translated range that are bound by sockets of the host.
    ReservedPorts(Vec<(Protocol, u16)>),
    /// A new file for the flow log (rotation).
    FlowLog(Option<Box<dyn Write + Send>>),
    /// Replaces the policies. Answered when no packet of a flow that they deny can leave any more.
    Policies(Box<Reload>),
    /// Output to which the port's frames are written (`--pcap`).
    PcapOutput(Output),
    /// A new file for the port's frames (rotation).
    Pcap(Box<dyn Write + Send>),
    /// Ends flows. Answered when none of their packets can leave any more.
    Cut {
        /// Id of the request, returned with the answer.
        request: u64,
        /// The flows to end.
        what: Subject,
    },
    /// Starts a capture that writes packets to a socket.
    Capture {
        /// Id of the request, returned with the answer.
        request: u64,
        /// The packets to capture, and the socket that receives them.
        capture: CaptureRequest,
    },
    /// Sends the records of a VM to a stream socket.
    Listen {
        /// Id of the request, returned with the answer.
        request: u64,
        /// The VM's row in `VMS`.
        row: VmRow,
        /// The stream socket that receives the records.
        to: OwnedFd,
    },
    /// A frozen VM is about to be thawed: the timers of its flows start again.
    Thaw {
        /// Id of the request, returned with the answer.
        request: u64,
        /// The VM's row in `VMS`.
        row: VmRow,
    },
    /// Asks which rule decides about a destination, and what would happen to a flow to it.
    Why {
        /// Id of the request, returned with the answer.
        request: u64,
        /// The VM's row in `VMS`.
        row: VmRow,
        /// The destination. Its address is 0.0.0.0 when only a name is known.
        to: slipgate_policy::Destination,
        /// The name that the guest would resolve first, if any.
        name: Option<String>,
    },
    /// Asks for one page of the state that is kept by name.
    Names {
        /// Id of the request, returned with the answer.
        request: u64,
        /// Start of the page: 0, or [`NamesPage::next`] of the previous page.
        from: u64,
    },
    /// Answered when every earlier message is processed and every record is written.
    Sync {
        /// Id of the request, returned with the answer.
        request: u64,
    },
    /// Stops the engine, with this treatment of its flows.
    Shutdown(OnExit),
}

/// A message from the engine to the broker: the answer to a request.
#[derive(Clone, PartialEq, Debug)]
pub enum ControlReply {
    /// Answer to a [`ControlMessage::Why`] request.
    Why {
        /// Id of the request.
        request: u64,
        /// Fate of the flow, and the rule that decides it.
        answer: Why,
    },
    /// Answer to a [`ControlMessage::Names`] request.
    Names {
        /// Id of the request.
        request: u64,
        /// The page that was asked for.
        page: NamesPage,
    },
    /// Answer to a [`ControlMessage::Policies`] request.
    Applied {
        /// Id of the request.
        request: u64,
        /// Number of flows that were cut.
        cut: u64,
        /// Number of flows that live on.
        kept: u64,
        /// Number of flows among `kept` that the new policies would refuse.
        left: u64,
    },
    /// Answer to a [`ControlMessage::Cut`] request.
    Cut {
        /// Id of the request.
        request: u64,
        /// Number of flows that were ended; `None` when the flow is not in this engine.
        flows: Option<u64>,
    },
    /// Answer to a [`ControlMessage::Capture`] request.
    Capturing {
        /// Id of the request.
        request: u64,
        /// Why no capture was started; `None` when it was.
        refused: Option<NotCaptured>,
    },
    /// Answer to a [`ControlMessage::Listen`] request.
    Listening {
        /// Id of the request.
        request: u64,
        /// Why the records are not sent; `None` when they are.
        refused: Option<NotListening>,
    },
    /// Answer to a [`ControlMessage::Thaw`] request.
    Thawed {
        /// Id of the request.
        request: u64,
    },
    /// Answer to a [`ControlMessage::Sync`] request.
    Synced {
        /// Id of the request.
        request: u64,
        /// Counters and sizes of the engine at this moment.
        status: Status,
    },
}

/// The policies and VMs that replace the present ones.
#[derive(Debug)]
pub struct Reload {
    /// Id of the request, returned with the answer.
    pub request: u64,
    /// The compiled policies, in the order of their indices.
    pub policies: PolicySet,
    /// Index in `RULES` of the first rule of `policies`.
    pub rule_base: u32,
    /// Addresses of this host that the rules protect.
    pub local: LocalAddresses,
    /// Every VM, with its policy and quotas.
    pub vms: Vec<VmSpec>,
    /// Ids of VMs that keep no denied flow, whatever their policy says about live flows.
    pub strictly: Vec<VmId>,
}

/// Most listeners that receive records at once.
pub const MOST_LISTENERS: usize = 8;
/// Reason why a request to listen was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NotListening {
    /// No VM is served in that row.
    #[error("that VM is not served any more")]
    NoVm,
    /// [`MOST_LISTENERS`] listeners are connected already.
    #[error("{MOST_LISTENERS} listen already; end one of them")]
    TooMany,
    /// The descriptor is not a stream socket.
    #[error("the descriptor that was sent is no stream socket")]
    Socket,
}

/// Answer to `slipgate why`: the fate of a flow, and the rule that decides it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Why {
    /// Whether the flow would be admitted.
    pub admitted: bool,
    /// Text of the deciding rule, as written in the policy.
    pub rule: String,
    /// Name of the refusal; `None` when the flow would be admitted.
    pub refusal: Option<String>,
    /// One sentence: what happens to the packet.
    pub outcome: String,
    /// Sentences, one a line: why this rule decides and no other does.
    pub explanation: String,
    /// Source address, next hop and link of the route; `None` when there is no such route.
    pub via: Option<String>,
    /// No rule names the name that was asked for, and no address of it was given to judge.
    pub lacks_address: bool,
}

/// One page of the state that the engine keeps by name and that the kernel's tables lack.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct NamesPage {
    /// Counts of the name gate for each VM, by the VM's name.
    pub vms: Vec<(String, crate::name_gate::NameCounts)>,
    /// DNS refusals since the engine started, with the most recent sample of each kind. For each VM
    /// the most frequent kinds are kept.
    pub refused: Vec<RefusedSample>,
    /// Slot, generation and the name that opened the flow's address, in order of slots.
    pub flows: Vec<(u32, u32, String)>,
    /// Relayed traffic of each VM, by the VM's name.
    #[serde(default)]
    pub relayed: Vec<(String, RelayedCounts)>,
    /// The live relayed flows, in order of their ids.
    #[serde(default)]
    pub relayed_flows: Vec<LiveRelayed>,
    /// Start of the next page; `None` on the last page.
    pub next: Option<u64>,
}

/// Relayed flows and traffic of one VM.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct RelayedCounts {
    /// Number of live flows.
    pub flows: u64,
    /// Number of flows that were opened, live and ended.
    pub begun: u64,
    /// Number of flows among `begun` that have ended.
    pub ended: u64,
    /// Packets from the guest.
    pub tx_packets: u64,
    /// L3 bytes from the guest.
    pub tx_bytes: u64,
    /// Packets to the guest.
    pub rx_packets: u64,
    /// L3 bytes to the guest.
    pub rx_bytes: u64,
}

impl std::ops::AddAssign for RelayedCounts {
    fn add_assign(&mut self, other: Self) {
        self.flows += other.flows;
        self.begun += other.begun;
        self.ended += other.ended;
        self.tx_packets += other.tx_packets;
        self.tx_bytes += other.tx_bytes;
        self.rx_packets += other.rx_packets;
        self.rx_bytes += other.rx_bytes;
    }
}

/// One live relayed flow.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LiveRelayed {
    /// Id of the flow, as in the flow log.
    pub id: RelayedId,
    /// Name of the VM.
    pub vm: String,
    /// IP protocol number of the flow.
    pub protocol: u8,
    /// Address and port of the guest.
    pub guest: SocketAddrV4,
    /// Address and port of the peer.
    pub remote: SocketAddrV4,
    /// Source that the peer sees, or the engine's end toward the host's loopback.
    pub nat: Option<SocketAddrV4>,
    /// Service on the host's loopback, if the flow leads there.
    pub host: Option<SocketAddrV4>,
    /// Whether the world opened the flow, through a forward.
    pub inbound: bool,
    /// Text of the rule that admitted the flow; empty for DNS.
    pub rule: String,
    /// State of the TCP connection; for other protocols, whether the flow was answered.
    pub state: String,
    /// Packets and L3 bytes from the guest.
    pub tx: (u64, u64),
    /// Packets and L3 bytes to the guest.
    pub rx: (u64, u64),
    /// Time since the flow began, ms.
    pub age_ms: u64,
    /// Time since the last packet, ms.
    pub idle_ms: u64,
}

/// Counters and sizes of the engine, for tests and `stats`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Status {
    /// Flow slots of this engine that are in use.
    pub flows: u64,
    /// Flow records that were written.
    pub records_written: u64,
    /// Flow records that were lost because writing failed.
    pub records_lost: u64,
    /// Destinations toward which a translated port is busy.
    pub port_destinations: u64,
    /// Translated ports that rest before they are used again.
    pub ports_resting: u64,
    /// Frames that were read from the port.
    pub frames_read: u64,
    /// Frames among those that were returned to the kernel to be translated.
    pub frames_returned: u64,
    /// Frames among those that were dropped, and counted by reason.
    pub frames_dropped: u64,
    /// Frames among those that a service consumed.
    pub frames_consumed: u64,
    /// Frames that the port did not accept, of any origin.
    pub frames_unsent: u64,
}

/// The non-blocking channel to the broker.
pub trait Control {
    /// Returns the next message; `None` when none is waiting.
    ///
    /// # Errors
    /// Any error, including the end of the channel. It stops the engine, which must not run without
    /// its broker.
    fn recv(&mut self) -> io::Result<Option<ControlMessage>>;
    /// Sends an answer.
    ///
    /// # Errors
    /// When the channel is closed or does not take the message.
    fn send(&mut self, reply: ControlReply) -> io::Result<()>;
    /// Descriptor for the epoll set; `None` for implementations without one, in tests.
    fn fd(&self) -> Option<BorrowedFd<'_>>;
}
