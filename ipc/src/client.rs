//! The control socket: what commands ask a broker, one JSON object per line and one answer per
//! request.
//!
//! What an engine answers is an [`EngineRequest`]: the broker resolves whom it is about and hands it
//! on. The other requests are the broker's own.
mod ask;
mod server;

use std::{collections::BTreeMap, os::fd::OwnedFd, path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};

pub use self::{
    ask::{ClientError, ask},
    server::{Asked, ClientId, ControlServer},
};
use crate::{
    descriptors::{carries_descriptors, carries_none},
    engine::{EngineReply, EngineRequest},
};

/// How long a client waits for an answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// And for one that takes the reading of files, or the end of many flows.
const CHANGE_WITHIN: Duration = Duration::from_secs(120);

/// A request to a broker.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "request")]
pub enum ClientRequest<F = OwnedFd> {
    /// Ask the engine; answered by [`ClientAnswer::Engine`].
    Engine {
        /// The VM or flow, where [`EngineRequest::scope`] wants one.
        about: Option<Target>,
        /// What is asked.
        ask: EngineRequest<F>,
    },
    /// The counters of the machines that the broker runs.
    Machines,
    /// Who is served here; answered by [`ClientAnswer::UnknownVm`].
    Vms,
    /// Stop in order, as by SIGTERM.
    Stop {
        /// Leave flows running for a successor.
        keep: bool,
    },
    /// Drop everything from and to a VM from now on.
    Freeze {
        /// The VM's name.
        vm: String,
    },
    /// Read the policy anew, or another policy file, and put it in force.
    Apply {
        /// The other file.
        file: Option<PathBuf>,
    },
    /// Let a VM do what nothing denies it.
    Open {
        /// The VM's name.
        vm: String,
        /// A socket: the VM is open until the client's end of it is closed.
        lifeline: F,
    },
}

/// A flow, or all of a VM's.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// By its id, as `flows` and the flow log have it.
    Flow(String),
    /// By the VM's name.
    Vm(String),
}

/// A broker's answer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "answer")]
pub enum ClientAnswer {
    /// The engine's reply.
    Engine {
        /// As the engine gave it.
        reply: EngineReply,
    },
    /// Counters of machines.
    Machines {
        /// By the VM's name; none for a VM that is another's.
        machines: BTreeMap<String, serde_json::Value>,
    },
    /// No VM of that name, or none was named.
    UnknownVm {
        /// Those that are.
        served: Vec<String>,
    },
    /// A policy is in force.
    Applied {
        /// Flows that were cut.
        cut: u64,
        /// Flows that go on.
        kept: u64,
        /// Of those, how many it would refuse now.
        left: u64,
    },
    /// Understood, and being done.
    Done,
    /// The request can't be served.
    Error {
        /// Why not, in words.
        error: String,
    },
}

/// What a peer may do.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Role {
    Reader,
    Admin,
}

impl Role {
    fn of(uid: u32, owner: u32) -> Option<Self> {
        match uid {
            0 => Some(Self::Admin),
            uid if uid == owner => Some(Self::Reader),
            _ => None,
        }
    }
}

impl<F> ClientRequest<F> {
    /// The least role that may ask this.
    fn needs(&self) -> Role {
        match self {
            Self::Engine { ask, .. } if ask.is_read_only() => Role::Reader,
            Self::Machines | Self::Vms => Role::Reader,
            Self::Engine { .. }
            | Self::Stop { .. }
            | Self::Freeze { .. }
            | Self::Apply { .. }
            | Self::Open { .. } => Role::Admin,
        }
    }

    /// Whether the engine has to be told of it.
    pub fn asks_engine(&self) -> bool {
        match self {
            Self::Engine { .. } | Self::Apply { .. } | Self::Open { .. } => true,
            Self::Machines | Self::Vms | Self::Stop { .. } | Self::Freeze { .. } => false,
        }
    }

    /// How long its answer may take.
    fn within(&self) -> Duration {
        match self.needs() {
            Role::Reader => ANSWER_WITHIN,
            Role::Admin => CHANGE_WITHIN,
        }
    }

    fn try_map<G, E>(self, f: &mut impl FnMut(F) -> Result<G, E>) -> Result<ClientRequest<G>, E> {
        Ok(match self {
            Self::Engine { about, ask } => ClientRequest::Engine {
                about,
                ask: ask.try_map(f)?,
            },
            Self::Machines => ClientRequest::Machines,
            Self::Vms => ClientRequest::Vms,
            Self::Stop { keep } => ClientRequest::Stop { keep },
            Self::Freeze { vm } => ClientRequest::Freeze { vm },
            Self::Apply { file } => ClientRequest::Apply { file },
            Self::Open { vm, lifeline } => ClientRequest::Open {
                vm,
                lifeline: f(lifeline)?,
            },
        })
    }
}

impl ClientAnswer {
    /// An answer that says why a request can't be served.
    pub fn error(why: impl Into<String>) -> Self {
        Self::Error { error: why.into() }
    }
}

impl From<EngineReply> for ClientAnswer {
    fn from(reply: EngineReply) -> Self {
        match reply {
            EngineReply::Done => Self::Done,
            EngineReply::Refused { why } => Self::Error { error: why },
            reply => Self::Engine { reply },
        }
    }
}

carries_descriptors!(ClientRequest);
carries_none!(ClientAnswer);
