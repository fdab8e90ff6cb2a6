//! What the broker tells the engine, and asks of it.
use std::{
    io::{self, Write},
    net::{SocketAddr, SocketAddrV4},
    os::fd::{BorrowedFd, OwnedFd},
};

use serde::{Deserialize, Serialize};
use slipgate_abi::Protocol;

use crate::{
    observe::{CaptureRequest, NotCaptured, Subject},
    record::{Output, RefusedSample, RelayedId},
    relay,
    route::RouteSnapshot,
    vm::VmSpec,
};
use slipgate_policy::{LocalAddresses, PolicySet};

mod why;

pub use crate::state::{Forward, Link};

/// What becomes of the flows when the engine stops.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum OnExit {
    /// They stay in the kernel for the next process.
    Keep,
    /// They are ended and recorded.
    Detach,
}

/// From the broker.
pub enum ControlMessage {
    /// A VM is there, or has changed.
    Vm(VmSpec),
    /// A VM is gone: its flows end.
    VmGone {
        /// Its row.
        row: u16,
        /// Its id.
        id: u32,
    },
    /// Routes, addresses or links changed: the whole new picture.
    Routes {
        /// Routes and addresses.
        routes: RouteSnapshot,
        /// What the rules protect on this host.
        local: LocalAddresses,
        /// Links and their MTUs.
        links: Vec<Link>,
    },
    /// A bound socket of the host that leads to a guest.
    RelayForward(relay::Forward),
    /// All forwards.
    Forwards(Vec<Forward>),
    /// The forwards' texts in `RULES`, which follow the policy's, for the flow log.
    ForwardTexts(Vec<String>),
    /// The host's resolvers, for policies that have none of their own.
    Resolvers(Vec<SocketAddr>),
    /// Ports in the translated range that sockets of the host hold.
    ReservedPorts(Vec<(Protocol, u16)>),
    /// Another file for the flow log (rotation).
    FlowLog(Option<Box<dyn Write + Send>>),
    /// Other policies. Answered when no packet of what they deny can leave any more.
    Policies(Box<Reload>),
    /// Where the port's frames are written (`--pcap`).
    PcapOutput(Output),
    /// Another file for them (rotation).
    Pcap(Box<dyn Write + Send>),
    /// End flows. Answered when no packet of theirs can leave any more.
    Cut {
        /// Returned with the answer.
        request: u64,
        /// Which.
        what: Subject,
    },
    /// Write packets to a socket.
    Capture {
        /// Returned with the answer.
        request: u64,
        /// Which, and where.
        capture: CaptureRequest,
    },
    /// Send what is recorded of a VM to a stream socket.
    Listen {
        /// Returned with the answer.
        request: u64,
        /// The VM's row.
        row: u16,
        /// The socket.
        to: OwnedFd,
    },
    /// A frozen VM is about to be thawed: the timers of its flows begin anew.
    Thaw {
        /// Returned with the answer.
        request: u64,
        /// The VM's row.
        row: u16,
    },
    /// Which rule decides about a destination, and what would happen.
    Why {
        /// Returned with the answer.
        request: u64,
        /// The VM's row.
        row: u16,
        /// The destination; its address is 0.0.0.0 when only a name is known.
        to: slipgate_policy::Destination,
        /// The name that the guest would ask for.
        name: Option<String>,
    },
    /// What is known by name: a page of it.
    Names {
        /// Returned with the answer.
        request: u64,
        /// Where the page begins: 0, or [`NamesPage::next`] of the one before.
        from: u64,
    },
    /// Answer when everything before this is done and every record is written.
    Sync {
        /// Returned with the answer.
        request: u64,
    },
    /// Stop.
    Shutdown(OnExit),
}

/// To the broker.
#[derive(Clone, PartialEq, Debug)]
pub enum ControlReply {
    /// Answer to [`ControlMessage::Why`].
    Why {
        /// The question's.
        request: u64,
        /// What would happen.
        answer: Why,
    },
    /// Answer to [`ControlMessage::Names`].
    Names {
        /// The question's.
        request: u64,
        /// What is known.
        page: NamesPage,
    },
    /// Answer to [`ControlMessage::Policies`].
    Applied {
        /// The request's.
        request: u64,
        /// How many flows were cut.
        cut: u64,
        /// How many live on.
        kept: u64,
        /// Of those, how many the policies would refuse now.
        left: u64,
    },
    /// Answer to [`ControlMessage::Cut`].
    Cut {
        /// The request's.
        request: u64,
        /// How many flows were ended; `None`: the one that was meant is not here.
        flows: Option<u64>,
    },
    /// Answer to [`ControlMessage::Capture`].
    Capturing {
        /// The request's.
        request: u64,
        /// Why none was begun.
        refused: Option<NotCaptured>,
    },
    /// Answer to [`ControlMessage::Listen`].
    Listening {
        /// The request's.
        request: u64,
        /// Why nobody does.
        refused: Option<NotListening>,
    },
    /// Answer to [`ControlMessage::Thaw`].
    Thawed {
        /// The request's.
        request: u64,
    },
    /// Answer to [`ControlMessage::Sync`].
    Synced {
        /// The question's.
        request: u64,
        /// How the engine stands.
        status: Status,
    },
}

/// What is to be in force from now on.
#[derive(Debug)]
pub struct Reload {
    /// Returned with the answer.
    pub request: u64,
    /// The policies.
    pub policies: PolicySet,
    /// Where their run begins in `RULES`.
    pub rule_base: u32,
    /// What the rules protect on this host.
    pub local: LocalAddresses,
    /// All VMs, with their policy and quotas.
    pub vms: Vec<VmSpec>,
    /// VMs, by id, of whose flows none is left that may not be, whatever their policy says.
    pub strictly: Vec<u32>,
}

/// Listeners at once.
pub const MOST_LISTENERS: usize = 8;
/// Why nobody listens.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NotListening {
    /// There is no such VM.
    #[error("that VM is not served any more")]
    NoVm,
    /// [`MOST_LISTENERS`] do.
    #[error("{MOST_LISTENERS} listen already; end one of them")]
    TooMany,
    /// The descriptor is of no use.
    #[error("the descriptor that was sent is no stream socket")]
    Socket,
}

/// What would become of a flow.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Why {
    /// Whether it would be admitted.
    pub admitted: bool,
    /// The deciding rule, as typed.
    pub rule: String,
    /// Why not: the refusal's name.
    pub refusal: Option<String>,
    /// In a sentence: what happens to the packet.
    pub outcome: String,
    /// In sentences, one a line: why that rule, and no other.
    pub explanation: String,
    /// Where it would leave.
    pub via: Option<String>,
    /// No rule speaks of the name that was asked for: what is to be judged is an address of it, and
    /// none was given.
    pub lacks_address: bool,
}

/// Part of what the engine knows by name and the kernel's tables do not show.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct NamesPage {
    /// What was refused in each VM's DNS, by the VM's name.
    pub vms: Vec<(String, crate::name_gate::NameCounts)>,
    /// What was refused of them since the engine began, with the last of each kind; of each VM the
    /// most frequent kinds.
    pub refused: Vec<RefusedSample>,
    /// Slot, generation and the name that opened its address, by slot.
    pub flows: Vec<(u32, u32, String)>,
    /// What was relayed for each VM, by its name.
    #[serde(default)]
    pub relayed: Vec<(String, RelayedCounts)>,
    /// The relayed flows that live, by their ids.
    #[serde(default)]
    pub relayed_flows: Vec<LiveRelayed>,
    /// There is more, from here.
    pub next: Option<u64>,
}

/// What was relayed for a VM.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct RelayedCounts {
    /// Flows that live.
    pub flows: u64,
    /// Flows that have begun.
    pub begun: u64,
    /// Of those, how many have ended.
    pub ended: u64,
    /// From the guest.
    pub tx_packets: u64,
    /// L3.
    pub tx_bytes: u64,
    /// To the guest.
    pub rx_packets: u64,
    /// L3.
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

/// A relayed flow that lives.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LiveRelayed {
    /// As in records.
    pub id: RelayedId,
    /// The VM's name.
    pub vm: String,
    /// IP protocol number.
    pub protocol: u8,
    /// The guest's end.
    pub guest: SocketAddrV4,
    /// The peer's.
    pub remote: SocketAddrV4,
    /// What the peer sees, or our end toward the host's loopback.
    pub nat: Option<SocketAddrV4>,
    /// The service on the host's loopback.
    pub host: Option<SocketAddrV4>,
    /// Whether the world opened it, by a forward.
    pub inbound: bool,
    /// What let it in; empty for DNS.
    pub rule: String,
    /// TCP's phase; of others whether they were answered.
    pub state: String,
    /// Packets and L3 bytes from the guest.
    pub tx: (u64, u64),
    /// To the guest.
    pub rx: (u64, u64),
    /// Since it began, ms.
    pub age_ms: u64,
    /// Since its last packet, ms.
    pub idle_ms: u64,
}

/// How the engine stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Status {
    /// Own slots in use.
    pub flows: u64,
    /// Flow records written.
    pub records_written: u64,
    /// Flow records lost because writing failed.
    pub records_lost: u64,
    /// Destinations with a busy translated port.
    pub port_destinations: u64,
    /// Translated ports that rest.
    pub ports_resting: u64,
    /// Frames read from the port.
    pub frames_read: u64,
    /// Of those, given back to the kernel to be translated.
    pub frames_returned: u64,
    /// Of those, dropped and counted by reason.
    pub frames_dropped: u64,
    /// Of those, taken by a service.
    pub frames_consumed: u64,
    /// Frames that the port did not take, whoever made them.
    pub frames_unsent: u64,
}

/// The channel to the broker. Non-blocking.
pub trait Control {
    /// The next message; `None` when there is none now. An error, the end of the channel included,
    /// stops the engine: without its broker it must not go on.
    fn recv(&mut self) -> io::Result<Option<ControlMessage>>;
    /// Sends an answer.
    fn send(&mut self, reply: ControlReply) -> io::Result<()>;
    /// For the epoll set; `None` in tests without one.
    fn fd(&self) -> Option<BorrowedFd<'_>>;
}
