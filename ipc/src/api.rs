//! Messages between broker and a process that answers the API.
//!
//! The process takes requests of many clients. What it may ask for is set by the broker when it
//! starts the process: one for readers can change nothing.
use std::{net::SocketAddr, os::fd::OwnedFd};

use serde::{Deserialize, Serialize};

use crate::{
    client::{ClientAnswer, ClientRequest, PassedOrder, Replaces, Target, VmDefinition},
    descriptors::{carries_descriptors, maps_descriptors},
    engine::{EngineRequest, FlowQuestion, Silence},
};

/// Message from the broker to the process.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum ToApi<F = OwnedFd> {
    /// First message: maps, socket and settings.
    Start(Box<ApiStart<F>>),
    /// Answer to a [`FromApi`].
    Answer {
        /// Number of the request.
        id: u64,
        /// The broker's answer to the request.
        answer: Box<ClientAnswer>,
        /// Non-blocking stream socket from which a capture is read.
        stream: Option<F>,
    },
    /// An event for the readers of `/v1/events`.
    Event(Event),
    /// Non-blocking stream socket to an engine, in the place of one before: the other end of
    /// [`ToEngine::Events`](crate::engine::ToEngine::Events).
    Records(F),
}

/// Settings that the process starts with.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ApiStart<F = OwnedFd> {
    /// The maps, in the order of their layout.
    pub maps: Vec<F>,
    /// Listening Unix socket for HTTP.
    pub listener: F,
    /// Whether its clients may change anything.
    pub may_change: bool,
    /// Rows in `OWNERS` whose VMs the metrics show.
    pub owner_rows: Vec<u32>,
    /// Keys of the VMs' labels that the metrics show.
    pub label_keys: Vec<String>,
    /// Level of messages on stderr.
    pub log: String,
}

/// A request of the process.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct FromApi<F = OwnedFd> {
    /// Number that the answer returns.
    pub id: u64,
    /// The request that a client of the API made.
    pub request: ApiRequest<F>,
}

/// Requests that the API can make of the broker.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum ApiRequest<F = OwnedFd> {
    /// As [`ClientRequest::ListVms`].
    ListVms,
    /// As [`ClientRequest::GetVm`].
    GetVm {
        /// Name of the VM.
        name: String,
    },
    /// As [`ClientRequest::PutVm`].
    PutVm {
        /// Definition of the VM in full.
        vm: Box<VmDefinition>,
        /// Condition: which earlier definition it may replace.
        replaces: Replaces,
        /// The VM's TAP, open, in place of its name.
        tap: Option<F>,
    },
    /// As [`ClientRequest::ListPolicies`].
    ListPolicies,
    /// As [`ClientRequest::PutPolicy`].
    PutPolicy {
        /// Name of the policy.
        name: String,
        /// Text of the policy.
        text: String,
        /// Condition: which earlier policy it may replace.
        replaces: Replaces,
    },
    /// As [`ClientRequest::RemovePolicy`].
    RemovePolicy {
        /// Name of the policy.
        name: String,
        /// Condition: which policy may be removed.
        replaces: Replaces,
    },
    /// As [`ClientRequest::RemoveVm`].
    RemoveVm {
        /// Name of the VM.
        name: String,
    },
    /// As [`ClientRequest::KeepVm`].
    KeepVm {
        /// Name of the VM.
        name: String,
    },
    /// As [`ClientRequest::Freeze`].
    Freeze {
        /// Name of the VM.
        vm: String,
    },
    /// As [`EngineRequest::Thaw`].
    Thaw {
        /// Name of the VM.
        vm: String,
    },
    /// As [`EngineRequest::Sleep`].
    Sleep {
        /// Name of the VM.
        vm: String,
    },
    /// As [`EngineRequest::Resume`].
    Resume {
        /// Name of the VM.
        vm: String,
    },
    /// As [`EngineRequest::Cut`].
    Cut {
        /// The flow to be cut, or the VM all of whose flows are.
        what: Target,
    },
    /// As [`EngineRequest::EndGeneration`].
    EndGeneration {
        /// Name of the VM.
        vm: String,
    },
    /// [`EngineRequest::Capture`], to a socket whose other end comes with the answer.
    Capture {
        /// A flow, or a VM of which all flows are meant.
        what: Target,
        /// Number of packets after which the capture ends.
        packets: Option<u64>,
        /// Time after which the capture ends, seconds.
        seconds: Option<u64>,
    },
    /// As [`ClientRequest::ListMachines`].
    ListMachines,
    /// As [`ClientRequest::OrderMachine`].
    OrderMachine {
        /// Name of the machine's VM.
        vm: String,
        /// The order for the machine.
        order: PassedOrder,
    },
    /// As [`EngineRequest::Why`].
    Why {
        /// Name of the VM.
        vm: String,
        /// The flow in question.
        question: FlowQuestion,
    },
    /// As [`EngineRequest::Inventory`].
    Inventory {
        /// Where the page begins.
        from: u64,
    },
    /// As [`EngineRequest::Activity`].
    Activity {
        /// Name of the VM.
        vm: String,
        /// Where the page begins.
        from: u64,
    },
}

impl ApiRequest {
    /// The request in the form that all clients' have. `stream` makes the socket to which a capture
    /// is written, if this is one.
    ///
    /// # Errors
    /// Those of `stream`.
    pub fn into_client_request<E>(
        self,
        stream: impl FnOnce() -> Result<OwnedFd, E>,
    ) -> Result<ClientRequest, E> {
        let of = |about, ask| ClientRequest::Engine { about, ask };
        Ok(match self {
            Self::ListVms => ClientRequest::ListVms,
            Self::GetVm { name } => ClientRequest::GetVm { name },
            Self::PutVm { vm, replaces, tap } => ClientRequest::PutVm { vm, replaces, tap },
            Self::ListPolicies => ClientRequest::ListPolicies,
            Self::PutPolicy {
                name,
                text,
                replaces,
            } => ClientRequest::PutPolicy {
                name,
                text,
                replaces,
            },
            Self::RemovePolicy { name, replaces } => ClientRequest::RemovePolicy { name, replaces },
            Self::RemoveVm { name } => ClientRequest::RemoveVm { name },
            Self::KeepVm { name } => ClientRequest::KeepVm { name },
            Self::Freeze { vm } => ClientRequest::Freeze { vm },
            Self::Thaw { vm } => of(Some(Target::Vm(vm)), EngineRequest::Thaw),
            Self::Sleep { vm } => of(Some(Target::Vm(vm)), EngineRequest::Sleep),
            Self::Resume { vm } => of(Some(Target::Vm(vm)), EngineRequest::Resume),
            Self::Cut { what } => of(Some(what), EngineRequest::Cut),
            Self::EndGeneration { vm } => of(Some(Target::Vm(vm)), EngineRequest::EndGeneration),
            Self::Capture {
                what,
                packets,
                seconds,
            } => {
                let capture = EngineRequest::Capture {
                    to: stream()?,
                    packets,
                    seconds,
                };
                of(Some(what), capture)
            }
            Self::ListMachines => ClientRequest::ListMachines,
            Self::OrderMachine { vm, order } => ClientRequest::OrderMachine { vm, order },
            Self::Why { vm, question } => of(Some(Target::Vm(vm)), EngineRequest::Why(question)),
            Self::Inventory { from } => of(None, EngineRequest::Inventory { from }),
            Self::Activity { vm, from } => {
                of(Some(Target::Vm(vm)), EngineRequest::Activity { from })
            }
        })
    }
}

/// Something that happened, as clients of the API get it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "event")]
pub enum Event {
    /// A VM was added.
    VmAdded {
        /// Name of the VM.
        vm: String,
    },
    /// A VM's definition was changed.
    VmChanged {
        /// Name of the VM.
        vm: String,
    },
    /// A VM was removed, and its flows have ended.
    VmRemoved {
        /// Name of the VM.
        vm: String,
    },
    /// A VM's TAP came: its guest is served.
    TapCame {
        /// Name of the VM.
        vm: String,
    },
    /// A VM's TAP is gone: the VM waits for it.
    TapGone {
        /// Name of the VM.
        vm: String,
    },
    /// A VM was frozen.
    VmFrozen {
        /// Name of the VM.
        vm: String,
    },
    /// A VM was thawed.
    VmThawed {
        /// Name of the VM.
        vm: String,
    },
    /// A VM has spent a budget of bytes.
    BudgetSpent {
        /// Name of the VM.
        vm: String,
        /// Direction of the budget: `tx` (from the guest) or `rx`.
        direction: String,
        /// The budget, L3 bytes.
        bytes: u64,
    },
    /// A VM sleeps: what comes for it is held.
    VmAsleep {
        /// Name of the VM.
        vm: String,
    },
    /// A VM is awake again, and has what was held for it.
    VmAwake {
        /// Name of the VM.
        vm: String,
    },
    /// Something came for a VM that sleeps.
    Wake {
        /// Name of the VM.
        vm: String,
        /// Protocol of the packet.
        proto: String,
        /// Address and port of its sender.
        from: SocketAddr,
        /// Address and port that it was sent to.
        to: SocketAddr,
    },
    /// No packet of the VM's guest or to it that counts was seen for as long as its definition says.
    VmIdle {
        /// Name of the VM.
        vm: String,
        /// How long it has been silent.
        #[serde(flatten)]
        silence: Silence,
    },
    /// A VM that was idle is not any more.
    VmBusy {
        /// Name of the VM.
        vm: String,
        /// How long it has been silent.
        #[serde(flatten)]
        silence: Silence,
    },
    /// The guest of a machine of `slipgate run` was paused.
    MachinePaused {
        /// Name of the machine's VM.
        vm: String,
    },
    /// The guest of a machine goes on.
    MachineResumed {
        /// Name of the machine's VM.
        vm: String,
    },
    /// A snapshot of a machine was written.
    MachineSaved {
        /// Name of the machine's VM.
        vm: String,
    },
    /// A machine has ended.
    MachineEnded {
        /// Name of the machine's VM.
        vm: String,
        /// The outcome, as in the report of `slipgate run`; `None`: its process has not said.
        outcome: Option<String>,
        /// Exit status of `slipgate run`.
        exit_code: Option<u8>,
    },
    /// Another policy is in force.
    PolicyApplied {
        /// Number of flows that were cut.
        cut: u64,
        /// Number of flows that continue.
        kept: u64,
    },
    /// The engine has ended; established flows go on, and another one is started.
    EngineEnded {
        /// Description of how the engine ended.
        how: String,
    },
    /// An engine is there again.
    EngineServes {
        /// Number of flows that it took over.
        adopted: u64,
    },
    /// Somebody else's program runs before slipgate's at a device, or has taken it away.
    Displaced {
        /// Name of the device.
        device: String,
        /// Description of slipgate's place there.
        place: String,
    },
    /// Slipgate's program is the first at a device again.
    FirstAgain {
        /// Name of the device.
        device: String,
    },
}

impl Event {
    /// Names of all kinds.
    pub const KINDS: [&'static str; 22] = [
        "vm_added",
        "vm_changed",
        "vm_removed",
        "tap_came",
        "tap_gone",
        "vm_frozen",
        "vm_thawed",
        "budget_spent",
        "vm_asleep",
        "vm_awake",
        "wake",
        "vm_idle",
        "vm_busy",
        "machine_paused",
        "machine_resumed",
        "machine_saved",
        "machine_ended",
        "policy_applied",
        "engine_ended",
        "engine_serves",
        "displaced",
        "first_again",
    ];

    /// Name of the event's kind, as in its field `event`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::VmAdded { .. } => "vm_added",
            Self::VmChanged { .. } => "vm_changed",
            Self::VmRemoved { .. } => "vm_removed",
            Self::TapCame { .. } => "tap_came",
            Self::TapGone { .. } => "tap_gone",
            Self::VmFrozen { .. } => "vm_frozen",
            Self::VmThawed { .. } => "vm_thawed",
            Self::BudgetSpent { .. } => "budget_spent",
            Self::VmAsleep { .. } => "vm_asleep",
            Self::VmAwake { .. } => "vm_awake",
            Self::Wake { .. } => "wake",
            Self::VmIdle { .. } => "vm_idle",
            Self::VmBusy { .. } => "vm_busy",
            Self::MachinePaused { .. } => "machine_paused",
            Self::MachineResumed { .. } => "machine_resumed",
            Self::MachineSaved { .. } => "machine_saved",
            Self::MachineEnded { .. } => "machine_ended",
            Self::PolicyApplied { .. } => "policy_applied",
            Self::EngineEnded { .. } => "engine_ended",
            Self::EngineServes { .. } => "engine_serves",
            Self::Displaced { .. } => "displaced",
            Self::FirstAgain { .. } => "first_again",
        }
    }

    /// Name of the VM that it is about; `None`: it is about none in particular.
    pub fn vm(&self) -> Option<&str> {
        match self {
            Self::VmAdded { vm }
            | Self::VmChanged { vm }
            | Self::VmRemoved { vm }
            | Self::TapCame { vm }
            | Self::TapGone { vm }
            | Self::VmFrozen { vm }
            | Self::VmThawed { vm }
            | Self::BudgetSpent { vm, .. }
            | Self::VmAsleep { vm }
            | Self::VmAwake { vm }
            | Self::Wake { vm, .. }
            | Self::VmIdle { vm, .. }
            | Self::VmBusy { vm, .. }
            | Self::MachinePaused { vm }
            | Self::MachineResumed { vm }
            | Self::MachineSaved { vm }
            | Self::MachineEnded { vm, .. } => Some(vm),
            Self::PolicyApplied { .. }
            | Self::EngineEnded { .. }
            | Self::EngineServes { .. }
            | Self::Displaced { .. }
            | Self::FirstAgain { .. } => None,
        }
    }
}

maps_descriptors!(struct ApiStart {
    maps: all, listener: fd, may_change, owner_rows, label_keys, log,
});
maps_descriptors!(enum ToApi {
    Start(start: boxed),
    Answer { id, answer, stream: optional },
    Event(event),
    Records(stream: fd),
});
maps_descriptors!(struct FromApi { id, request: nested });
maps_descriptors!(enum ApiRequest {
    ListVms,
    GetVm { name },
    PutVm { vm, replaces, tap: optional },
    ListPolicies,
    PutPolicy { name, text, replaces },
    RemovePolicy { name, replaces },
    RemoveVm { name },
    KeepVm { name },
    Freeze { vm },
    Thaw { vm },
    Sleep { vm },
    Resume { vm },
    Cut { what },
    EndGeneration { vm },
    Capture { what, packets, seconds },
    ListMachines,
    OrderMachine { vm, order },
    Why { vm, question },
    Inventory { from },
    Activity { vm, from },
});
carries_descriptors!(ToApi);
carries_descriptors!(FromApi);

#[cfg(test)]
#[path = "api_test.rs"]
mod tests;
