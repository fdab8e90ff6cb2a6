//! Messages between broker and a process that answers the API.
//!
//! The process takes requests of many clients. What it may ask for is set by the broker when it
//! starts the process: one for readers can change nothing.
use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};

use crate::{
    client::{ClientAnswer, ClientRequest, Target, VmDefinition},
    descriptors::{carries_descriptors, carries_none, try_map_all},
    engine::{EngineRequest, FlowQuestion},
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
        /// The answer.
        answer: Box<ClientAnswer>,
    },
    /// Something has happened.
    Event(Event),
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
    /// Level of messages on stderr.
    pub log: String,
}

/// A request of the process.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct FromApi {
    /// Number that the answer returns.
    pub id: u64,
    /// The request.
    pub request: ApiRequest,
}

/// Requests that the API can make of the broker.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum ApiRequest {
    /// [`ClientRequest::ListVms`].
    ListVms,
    /// [`ClientRequest::PutVm`].
    PutVm {
        /// The whole definition.
        vm: Box<VmDefinition>,
    },
    /// [`ClientRequest::ListPolicies`].
    ListPolicies,
    /// [`ClientRequest::PutPolicy`].
    PutPolicy {
        /// Name of the policy.
        name: String,
        /// Text of the policy.
        text: String,
        /// Generation that the policy must replace.
        replaces: Option<u64>,
    },
    /// [`ClientRequest::RemoveVm`].
    RemoveVm {
        /// Name of the VM.
        name: String,
    },
    /// [`ClientRequest::Freeze`].
    Freeze {
        /// Name of the VM.
        vm: String,
    },
    /// [`EngineRequest::Thaw`].
    Thaw {
        /// Name of the VM.
        vm: String,
    },
    /// [`EngineRequest::Cut`].
    Cut {
        /// The flow to be cut, or the VM all of whose flows are.
        what: Target,
    },
    /// [`EngineRequest::Why`].
    Why {
        /// Name of the VM.
        vm: String,
        /// The flow in question.
        question: FlowQuestion,
    },
    /// [`EngineRequest::Inventory`].
    Inventory {
        /// Where the page begins.
        from: u64,
    },
}

impl From<ApiRequest> for ClientRequest {
    fn from(request: ApiRequest) -> Self {
        let of = |about, ask| Self::Engine { about, ask };
        match request {
            ApiRequest::ListVms => Self::ListVms,
            ApiRequest::PutVm { vm } => Self::PutVm { vm },
            ApiRequest::ListPolicies => Self::ListPolicies,
            ApiRequest::PutPolicy {
                name,
                text,
                replaces,
            } => Self::PutPolicy {
                name,
                text,
                replaces,
            },
            ApiRequest::RemoveVm { name } => Self::RemoveVm { name },
            ApiRequest::Freeze { vm } => Self::Freeze { vm },
            ApiRequest::Thaw { vm } => of(Some(Target::Vm(vm)), EngineRequest::Thaw),
            ApiRequest::Cut { what } => of(Some(what), EngineRequest::Cut),
            ApiRequest::Why { vm, question } => {
                of(Some(Target::Vm(vm)), EngineRequest::Why(question))
            }
            ApiRequest::Inventory { from } => of(None, EngineRequest::Inventory { from }),
        }
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
}

impl<F> ToApi<F> {
    fn try_map<G, E>(self, f: &mut impl FnMut(F) -> Result<G, E>) -> Result<ToApi<G>, E> {
        Ok(match self {
            Self::Start(start) => ToApi::Start(Box::new(ApiStart {
                maps: try_map_all(start.maps, f)?,
                listener: f(start.listener)?,
                may_change: start.may_change,
                log: start.log,
            })),
            Self::Answer { id, answer } => ToApi::Answer { id, answer },
            Self::Event(event) => ToApi::Event(event),
        })
    }
}

carries_descriptors!(ToApi);
carries_none!(FromApi);
