//! Messages between broker and engine.
//!
//! Requests of clients that the broker passes to an engine are [`EngineRequest`]s, answered by an
//! [`EngineReply`] with the same number: the broker passes both on without reading their contents.
//! The other messages are between the two processes only.
mod request;
mod start;

use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};

pub use slipgate_model::{
    ActivityPage, EngineInventory, FlowLogEvent, FlowLogEvents, FurtherRoutes, GuestTcpCounts,
    HopShare, HostAddress, Link, LiveRelayed, MappingCounts, NameCounts, NetworkView, OnExit,
    OpenQuestion, RefusedQuestions, RefusedSample, RelayedCounts, RelayedId, RouteDomain,
    RouteEntry, RouteKind, RouteSnapshot, RouteStep, Silence, SleepChange, SourceUse, StepAction,
    Subject, VmId, VmRow, VmSpec, WhyAnswer,
};

pub use self::{
    request::{EngineReply, EngineRequest, FlowQuestion, Scope},
    start::{ForwardSocket, GuestProtocol, Policies, Start, UserspaceStart},
};
use crate::descriptors::{carries_descriptors, carries_none, maps_descriptors};

/// Message from the broker to the engine.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum ToEngine<F = OwnedFd> {
    /// First message: maps, policies and settings.
    Start(Box<Start<F>>),
    /// Forwarded ports of the host. Sent before [`ToEngine::Begin`], in as many messages as needed.
    Forwards(Vec<ForwardSocket<F>>),
    /// Setup is complete: confine the process, adopt the predecessor's flows, and serve.
    Begin,
    /// Changed specification of a VM; without an answer.
    Vm(VmSpec),
    /// A VM to serve besides the others, or a changed specification; answered by [`FromEngine::Done`].
    AddVm {
        /// Number that the answer returns.
        id: u64,
        /// The VM; its row is already filled.
        vm: VmSpec,
    },
    /// A VM that is no longer served; answered by [`FromEngine::Done`] once its flows have ended.
    RemoveVm {
        /// Number that the answer returns.
        id: u64,
        /// Id of the VM.
        vm: VmId,
        /// Row of the VM.
        row: VmRow,
    },
    /// Changed forwards of a VM; answered by [`FromEngine::Done`] once no packet of a flow through
    /// a removed one can leave.
    ChangeForwards {
        /// Number that the answer returns.
        id: u64,
        /// Id of the VM.
        vm: VmId,
        /// Row of the VM.
        row: VmRow,
        /// Protocol and address on the host of the forwards to be removed.
        removed: Vec<(u8, SocketAddr)>,
        /// Forwards to be added.
        added: Vec<ForwardSocket<F>>,
    },
    /// Changed routes, addresses or links of the host.
    Network(NetworkView),
    /// Changed resolvers of the host.
    Resolvers(Vec<SocketAddr>),
    /// Ports among the translated ones that sockets of the host hold: IP protocol and port.
    ReservedPorts(Vec<(u8, u16)>),
    /// Reopened or replaced file of the flow log.
    FlowLog(F),
    /// Reopened or replaced file of `--pcap`.
    Pcap(F),
    /// Stream socket to a process that answers the API: it sends the set of events that it wants
    /// records of ([`FlowLogEvents::bits`]) whenever this changes, and receives them as lines.
    Events(F),
    /// Changed policies; answered by [`FromEngine::Applied`] once no packet that they refuse can
    /// leave.
    Policies(Box<Policies<F>>),
    /// A request; answered by [`FromEngine::Reply`] with the same number.
    Request {
        /// Returned with the reply.
        id: u64,
        /// Subject of the request, as its [`EngineRequest::scope`] requires.
        about: Option<Subject>,
        /// The request, with its target already resolved.
        request: EngineRequest<F>,
    },
    /// Liveness check; answered by [`FromEngine::Pong`] from the loop that serves guests.
    Ping {
        /// Returned with the answer.
        id: u64,
    },
    /// Stop, and answer [`FromEngine::Stopped`].
    Shutdown(OnExit),
}

/// Message from the engine to the broker.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum FromEngine {
    /// The engine is confined, has adopted flows, and is about to serve.
    Ready {
        /// Flows taken over from a predecessor.
        adopted: u64,
    },
    /// New elements of `NEXT_HOPS` need to be filled.
    NextHopsWanted,
    /// Answer to [`ToEngine::Policies`]: the policies are in force.
    Applied {
        /// Number of the [`Policies`].
        id: u64,
        /// Flows that were cut.
        cut: u64,
        /// Number of flows that continue.
        kept: u64,
        /// Number of continuing flows that the policies would now refuse.
        left: u64,
    },
    /// Answer to [`ToEngine::Request`], by its number.
    Reply {
        /// Number of the request.
        id: u64,
        /// Reply to the client.
        reply: EngineReply,
    },
    /// Answer to [`ToEngine::AddVm`], [`ToEngine::RemoveVm`] and [`ToEngine::ChangeForwards`].
    Done {
        /// Number of the message.
        id: u64,
    },
    /// Answer to [`ToEngine::Ping`]: the engine's loop still turns.
    Pong {
        /// Number of the ping.
        id: u64,
    },
    /// VMs that are idle, and VMs that are not any more, by id.
    Activity {
        /// VMs that are idle now.
        idle: Vec<(VmId, Silence)>,
        /// VMs that are busy again.
        busy: Vec<(VmId, Silence)>,
    },
    /// VMs, by id, that fell asleep or woke up, or that a packet came for while they slept.
    Sleep(Vec<(VmId, SleepChange)>),
    /// Guests' questions that have no reply yet, for a successor; sent before
    /// [`FromEngine::Stopped`], in as many messages as needed.
    OpenQuestions(Vec<OpenQuestion>),
    /// The last message: the loop has ended as asked.
    Stopped,
}

maps_descriptors!(enum ToEngine {
    Start(start: boxed),
    Forwards(all: each),
    Begin,
    Vm(vm),
    AddVm { id, vm },
    RemoveVm { id, vm, row },
    ChangeForwards { id, vm, row, removed, added: each },
    Network(view),
    Resolvers(all),
    ReservedPorts(ports),
    FlowLog(file: fd),
    Pcap(file: fd),
    Events(stream: fd),
    Policies(policies: boxed),
    Request { id, about, request: nested },
    Ping { id },
    Shutdown(exit),
});
carries_descriptors!(ToEngine);
carries_none!(FromEngine);

#[cfg(test)]
#[path = "engine_test.rs"]
mod tests;
