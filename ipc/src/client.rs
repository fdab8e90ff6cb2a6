//! The control socket: commands send one JSON object per line, and the broker answers each with
//! one.
//!
//! A request that an engine answers is an [`EngineRequest`]: the broker resolves its subject and
//! passes it on. The broker serves the other requests itself.
mod ask;
mod machine;
mod notice_lines;
mod server;
mod vms;

use std::{collections::BTreeMap, os::fd::OwnedFd, path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};

pub use self::{
    ask::{ClientError, Interrupt, ask, ask_within},
    machine::{
        MAX_BASES, MAX_NOTICE, MachineEvent, MachineNotice, MachineOrder, MachineState,
        MachineStatus, PassedOrder, SavedSnapshot, SnapshotBase,
    },
    notice_lines::NoticeLines,
    server::{ClientId, ControlServer, PermittedRequest},
    vms::{
        Filled, GuestIpv6Status, GuestNetwork, HostNatStatus, Ipv6Mode, MAX_LABEL_BYTES,
        MAX_LABELS, MAX_VM_FORWARDS, PolicyStatus, Replaces, Room, Version, VmChange, VmDefinition,
        VmState, VmStatus,
    },
};
use crate::{
    descriptors::{carries_descriptors, carries_none, maps_descriptors},
    engine::{EngineReply, EngineRequest},
};

/// Time within which a request that reads has to be answered.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// Time within which a change has to be answered: it may read files or end many flows.
const CHANGE_WITHIN: Duration = Duration::from_secs(120);
/// Time within which a snapshot has to be written: up to 512 GiB.
pub const SAVED_WITHIN: Duration = Duration::from_secs(3_600);

/// A request of a client to a broker.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "request")]
pub enum ClientRequest<F = OwnedFd> {
    /// Request to the engine; answered by [`ClientAnswer::Engine`].
    Engine {
        /// VM or flow that the request concerns, where [`EngineRequest::scope`] needs one.
        about: Option<Target>,
        /// The request to pass on.
        ask: EngineRequest<F>,
    },
    /// Counters of the machines that the broker runs.
    Machines,
    /// An order to the machine of `slipgate run`, at the machine's own socket.
    Machine {
        /// The order for the machine.
        order: MachineOrder<F>,
    },
    /// The machines of `slipgate run` whose VMs a daemon serves; answered by
    /// [`ClientAnswer::MachineList`].
    ListMachines,
    /// An order to one of these machines; answered by [`ClientAnswer::Done`], or
    /// [`ClientAnswer::SnapshotSaved`], once it is carried out.
    OrderMachine {
        /// Name of the machine's VM.
        vm: String,
        /// The order for the machine.
        order: PassedOrder,
    },
    /// Names of the VMs served here; answered by [`ClientAnswer::UnknownVm`].
    Vms,
    /// The VMs of a daemon with their states; answered by [`ClientAnswer::VmList`].
    ListVms,
    /// A VM of a daemon with its state; answered by [`ClientAnswer::Vm`], unchanged.
    GetVm {
        /// Name of the VM.
        name: String,
    },
    /// The TAPs of a daemon's VMs that are not there now; answered by [`ClientAnswer::AbsentTaps`].
    AbsentTaps,
    /// The network that guests see; answered by [`ClientAnswer::GuestNetwork`].
    GuestNetwork,
    /// Whether the host's own NAT keeps clear of guests' tuples; answered by [`ClientAnswer::HostNat`].
    HostNat,
    /// Add a VM to a daemon, or give one of this name another definition; answered by
    /// [`ClientAnswer::Vm`] once it is in force.
    PutVm {
        /// Definition of the VM in full.
        vm: Box<VmDefinition>,
        /// Condition: which earlier definition it may replace.
        #[serde(default)]
        replaces: Replaces,
        /// The VM's TAP, open, in place of its name.
        tap: Option<F>,
    },
    /// Add a VM to a daemon, for as long as the client lives; answered by [`ClientAnswer::Vm`] once
    /// it is in force.
    ServeVm {
        /// Definition of the VM in full.
        vm: Box<VmDefinition>,
        /// Device by which its flows are to leave; `None`: the daemon's, whichever that is.
        uplink: Option<String>,
        /// Whether the client had it served by a former daemon. If this daemon still has the VM, its
        /// definition stays as it is, for others may have changed it meanwhile.
        #[serde(default)]
        returns: bool,
        /// A socket: the VM is removed when the client's end of it is closed. A byte from it says
        /// that the VM was removed otherwise.
        lifeline: F,
    },
    /// The policies that clients gave to a daemon; answered by [`ClientAnswer::PolicyList`].
    ListPolicies,
    /// Give a daemon a named policy, in the place of one of this name; answered by
    /// [`ClientAnswer::PolicyPut`] once it is in force.
    PutPolicy {
        /// Name of the policy.
        name: String,
        /// Text of the policy: TOML, with the keys of `[policy.NAME]` in a policy file.
        text: String,
        /// Condition: which earlier policy it may replace.
        replaces: Replaces,
    },
    /// Take back a named policy that no VM uses; answered by [`ClientAnswer::Done`] once it is not in
    /// force any more.
    RemovePolicy {
        /// Name of the policy.
        name: String,
        /// Condition: which policy may be removed.
        #[serde(default)]
        replaces: Replaces,
    },
    /// Paths of the sockets on which a daemon answers the API; answered by
    /// [`ClientAnswer::ApiSockets`].
    ApiSockets,
    /// Remove a VM from a daemon; answered by [`ClientAnswer::Done`] once its flows have ended.
    RemoveVm {
        /// Name of the VM.
        name: String,
    },
    /// Take back a VM that this client brought by [`ClientRequest::ServeVm`]; answered by
    /// [`ClientAnswer::Done`] once its flows have ended, or at once where the VM is kept by now.
    LeaveVm {
        /// Name of the VM.
        name: String,
    },
    /// Keep a VM of a daemon whatever becomes of the client that brought it; answered by
    /// [`ClientAnswer::Vm`].
    KeepVm {
        /// Name of the VM.
        name: String,
    },
    /// Be the machine of a VM that a daemon keeps; answered by [`ClientAnswer::Vm`] once its TAP is
    /// served.
    RunVm {
        /// Name of the VM.
        name: String,
        /// A socket for the machine's notices: the VM has another machine when the client's end of it is
        /// closed. A byte from it says that the VM was removed.
        lifeline: F,
    },
    /// Give a daemon that is to take over copies of the descriptors that it has a use for; answered
    /// by [`ClientAnswer::Done`] after they were sent.
    HandOver {
        /// A [`Channel`](crate::channel::Channel) on which they are sent, as [`HandedOver`].
        to: F,
    },
    /// Stop in order, as on SIGTERM.
    Stop {
        /// Leave flows running for a successor.
        keep: bool,
    },
    /// Drop all packets from and to a VM from now on.
    Freeze {
        /// Name of the VM.
        vm: String,
    },
    /// Read the policy again, or another policy file, and put it in force.
    Apply {
        /// Policy file to read instead of the present one.
        file: Option<PathBuf>,
    },
    /// Admit from a VM everything that no rule denies.
    Open {
        /// Name of the VM.
        vm: String,
        /// A socket: the VM is open until the client's end of it is closed.
        lifeline: F,
    },
}

/// A flow, or all of a VM's.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// A flow by its id, as `flows` and the flow log show it.
    Flow(String),
    /// All flows of a VM, by its name.
    Vm(String),
}

/// Answer of a broker to a request.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "answer")]
pub enum ClientAnswer {
    /// Reply of the engine.
    Engine {
        /// The reply as the engine sent it.
        reply: EngineReply,
    },
    /// Counters of the machines that the broker runs.
    Machines {
        /// Counters by the name of the VM; a VM whose VMM is another program is absent.
        machines: BTreeMap<String, serde_json::Value>,
    },
    /// A machine of `slipgate run`.
    Machine {
        /// Specification and state of the machine.
        machine: Box<MachineStatus>,
    },
    /// A snapshot is written.
    Saved {
        /// Description of the machine, kept for the one that is restored.
        machine: serde_json::Value,
    },
    /// The machines whose VMs a daemon serves, by name.
    MachineList {
        /// The machines, sorted by name.
        machines: Vec<MachineStatus>,
    },
    /// A snapshot that a daemon was asked for is on its disk.
    SnapshotSaved {
        /// Name and directory of the snapshot.
        snapshot: SavedSnapshot,
    },
    /// No VM has that name, or the request named none.
    UnknownVm {
        /// Names of the VMs served here.
        served: Vec<String>,
    },
    /// The TAPs of VMs that are not there now, or are not served.
    AbsentTaps {
        /// Names of the devices.
        taps: Vec<String>,
    },
    /// The VM's definition is in force.
    Vm {
        /// The VM as it is now.
        vm: Box<VmStatus>,
        /// Effect of the request.
        change: VmChange,
    },
    /// The policies that clients gave to a daemon, by name.
    PolicyList {
        /// The policies, sorted by name.
        policies: Vec<PolicyStatus>,
    },
    /// A named policy is in force.
    PolicyPut {
        /// Generation of the policy.
        generation: u64,
        /// Version of the policy's text.
        version: Version,
        /// Number of flows that were cut.
        cut: u64,
        /// Number of flows that continue.
        kept: u64,
    },
    /// The network that guests see.
    GuestNetwork {
        /// Addresses that DHCP gives guests.
        network: GuestNetwork,
    },
    /// The host's own NAT beside guests' flows.
    HostNat {
        /// What they share.
        status: HostNatStatus,
    },
    /// The VMs of a daemon, by name.
    VmList {
        /// The VMs, sorted by name.
        vms: Vec<VmStatus>,
        /// How much more there can be.
        #[serde(default)]
        room: Room,
        /// Devices at which somebody else's program runs before slipgate's.
        displaced: Vec<String>,
    },
    /// The sockets on which a daemon answers the API.
    ApiSockets {
        /// Their paths, those for reading first.
        paths: Vec<PathBuf>,
    },
    /// The policy is in force.
    Applied {
        /// Number of flows that were cut.
        cut: u64,
        /// Number of flows that continue.
        kept: u64,
        /// Number of continuing flows that the policy would now refuse.
        left: u64,
    },
    /// The request was understood and is under way.
    Done,
    /// The request can't be served.
    Error {
        /// Reason, as a sentence.
        error: String,
        /// Kind of the reason.
        #[serde(default)]
        kind: ErrorKind,
    },
}

/// Kind of a reason why a request can't be served.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// The request can't be carried out as it is.
    #[default]
    Invalid,
    /// The same request may be carried out a little later.
    Busy,
    /// The client may not make this request.
    Forbidden,
    /// The condition of the change does not hold ([`Replaces`]).
    Replaced,
    /// Another VM or process has the requested resource, or uses what is to be removed.
    Taken,
    /// There is nothing of the given name.
    Unknown,
    /// Another client has removed the VM while the request was carried out.
    Removed,
}

/// Permissions of a peer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Role {
    Reader,
    Admin,
}

impl Role {
    /// Role of a user. `owners`: that of the owner.
    fn of(uid: u32, owner: u32, owners: Self) -> Option<Self> {
        match uid {
            0 => Some(Self::Admin),
            uid if uid == owner => Some(owners),
            _ => None,
        }
    }
}

impl<F> ClientRequest<F> {
    /// Lowest role that may send this request.
    fn needs(&self) -> Role {
        match self {
            Self::Engine { ask, .. } if ask.is_read_only() => Role::Reader,
            Self::Machine { order } if order.is_read_only() => Role::Reader,
            Self::Machines
            | Self::Vms
            | Self::ListVms
            | Self::GetVm { .. }
            | Self::AbsentTaps
            | Self::ListMachines
            | Self::GuestNetwork
            | Self::HostNat
            | Self::ListPolicies
            | Self::ApiSockets => Role::Reader,
            Self::Engine { .. }
            | Self::Machine { .. }
            | Self::OrderMachine { .. }
            | Self::PutVm { .. }
            | Self::ServeVm { .. }
            | Self::PutPolicy { .. }
            | Self::RemovePolicy { .. }
            | Self::RemoveVm { .. }
            | Self::LeaveVm { .. }
            | Self::KeepVm { .. }
            | Self::RunVm { .. }
            | Self::HandOver { .. }
            | Self::Stop { .. }
            | Self::Freeze { .. }
            | Self::Apply { .. }
            | Self::Open { .. } => Role::Admin,
        }
    }

    /// Whether the request changes nothing, so that a reader may make it.
    pub fn is_read_only(&self) -> bool {
        self.needs() == Role::Reader
    }

    /// Whether the request involves the engine.
    pub fn asks_engine(&self) -> bool {
        match self {
            Self::Engine { .. }
            | Self::Apply { .. }
            | Self::Open { .. }
            | Self::PutVm { .. }
            | Self::ServeVm { .. }
            | Self::PutPolicy { .. }
            | Self::RemovePolicy { .. }
            | Self::RemoveVm { .. }
            | Self::LeaveVm { .. } => true,
            Self::Machines
            | Self::Machine { .. }
            | Self::ListMachines
            | Self::OrderMachine { .. }
            | Self::Vms
            | Self::ListVms
            | Self::GetVm { .. }
            | Self::AbsentTaps
            | Self::GuestNetwork
            | Self::HostNat
            | Self::ListPolicies
            | Self::ApiSockets
            | Self::KeepVm { .. }
            | Self::RunVm { .. }
            | Self::HandOver { .. }
            | Self::Stop { .. }
            | Self::Freeze { .. } => false,
        }
    }

    /// Time that the answer may take.
    fn within(&self) -> Duration {
        match self {
            Self::Machine {
                order: MachineOrder::Snapshot { .. } | MachineOrder::Differences { .. },
            }
            | Self::OrderMachine {
                order: PassedOrder::Snapshot { .. },
                ..
            } => SAVED_WITHIN,
            // The snapshot is complete by then, and nothing depends on the answer.
            Self::Machine {
                order: MachineOrder::Finished,
            } => ANSWER_WITHIN,
            request if request.needs() == Role::Reader => ANSWER_WITHIN,
            _ => CHANGE_WITHIN,
        }
    }
}

impl ClientAnswer {
    /// Makes an answer that says why a request can't be served.
    pub fn error(why: impl Into<String>) -> Self {
        Self::Error {
            error: why.into(),
            kind: ErrorKind::Invalid,
        }
    }

    /// Makes the answer to a change whose condition does not hold. `exists`: whether there is
    /// something to replace.
    pub fn replaced(what: &str, exists: bool) -> Self {
        let error = match exists {
            true => format!(
                "{what} exists, and is not the one that the request is to replace: read it again"
            ),
            false => format!("{what} does not exist, and the request is to replace it"),
        };
        Self::Error {
            error,
            kind: ErrorKind::Replaced,
        }
    }

    /// Makes an answer that says why a request can't be served now.
    pub fn busy(why: impl Into<String>) -> Self {
        Self::Error {
            error: why.into(),
            kind: ErrorKind::Busy,
        }
    }

    /// Makes an answer that names the holder of the requested resource.
    pub fn taken(why: impl Into<String>) -> Self {
        Self::Error {
            error: why.into(),
            kind: ErrorKind::Taken,
        }
    }

    /// Makes an answer that says that something of the given name does not exist.
    pub fn unknown(why: impl Into<String>) -> Self {
        Self::Error {
            error: why.into(),
            kind: ErrorKind::Unknown,
        }
    }

    /// Makes the answer to a change of a VM that another client has removed meanwhile.
    pub fn removed() -> Self {
        Self::Error {
            error: "the VM was removed meanwhile".into(),
            kind: ErrorKind::Removed,
        }
    }

    /// Makes the answer to a client that may not make the request.
    pub fn forbidden() -> Self {
        Self::Error {
            error: "that is not permitted to who only reads".into(),
            kind: ErrorKind::Forbidden,
        }
    }
}

impl From<EngineReply> for ClientAnswer {
    fn from(reply: EngineReply) -> Self {
        match reply {
            EngineReply::Done => Self::Done,
            EngineReply::Refused { why } => Self::error(why),
            reply => Self::Engine { reply },
        }
    }
}

/// Descriptors of a daemon for the one that is to take over, which recognises each by what it is.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HandedOver<F = OwnedFd> {
    /// As many as fit a message.
    pub descriptors: Vec<F>,
}

maps_descriptors!(enum ClientRequest {
    Engine { about, ask: nested },
    Machines,
    Machine { order: nested },
    ListMachines,
    OrderMachine { vm, order },
    Vms,
    ListVms,
    GetVm { name },
    AbsentTaps,
    GuestNetwork,
    HostNat,
    ListPolicies,
    ApiSockets,
    PutPolicy { name, text, replaces },
    RemovePolicy { name, replaces },
    PutVm { vm, replaces, tap: optional },
    ServeVm { vm, uplink, returns, lifeline: fd },
    RemoveVm { name },
    LeaveVm { name },
    KeepVm { name },
    RunVm { name, lifeline: fd },
    HandOver { to: fd },
    Stop { keep },
    Freeze { vm },
    Apply { file },
    Open { vm, lifeline: fd },
});
maps_descriptors!(
    struct HandedOver {
        descriptors: all,
    }
);
carries_descriptors!(ClientRequest);
carries_descriptors!(HandedOver);
carries_none!(ClientAnswer);
