//! What clients ask of an engine, and what it answers.
//!
//! A new request is a variant of [`EngineRequest`], and of [`EngineReply`] where no answer fits yet.
//! The broker resolves names to [`Subject`]s, keeps who asked, and hands the rest on: it needs no
//! change.
use std::{net::Ipv4Addr, os::fd::OwnedFd};

use serde::{Deserialize, Serialize};

use super::EngineInventory;

/// A request to an engine.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EngineRequest<F = OwnedFd> {
    /// What would become of a flow of the VM; answered by [`EngineReply::Why`].
    Why(FlowQuestion),
    /// What the engine knows and the pinned maps do not show; answered by
    /// [`EngineReply::Inventory`].
    Inventory {
        /// Where the page begins: 0, or [`EngineInventory::next`] of the one before.
        from: u64,
    },
    /// Begin the timers of a frozen VM's flows anew, for it is about to be thawed.
    Thaw,
    /// End flows; answered by [`EngineReply::Cut`] when no packet of theirs can leave any more.
    Cut,
    /// Write packets to a stream socket, as pcapng.
    Capture {
        /// The socket.
        to: F,
        /// End after so many packets.
        packets: Option<u64>,
        /// End after so long, seconds.
        seconds: Option<u64>,
    },
    /// Write the records of a VM to a stream socket until that is closed.
    Record {
        /// The socket.
        to: F,
    },
}

/// An engine's reply.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EngineReply {
    /// What would become of the flow.
    Why(WhyAnswer),
    /// A page of what is known.
    Inventory(EngineInventory),
    /// Flows were ended.
    Cut {
        /// How many.
        flows: u64,
    },
    /// The flow that is meant does not live here.
    UnknownFlow,
    /// Understood, and done or being done.
    Done,
    /// The request can't be served.
    Refused {
        /// Why not, in words.
        why: String,
    },
}

/// What a request is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scope {
    /// The engine as a whole.
    Engine,
    /// One VM.
    Vm,
    /// One flow, or all of a VM's.
    Flows,
}

/// A VM or a flow, as the engine knows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Subject {
    /// Everything of a VM.
    Vm {
        /// Its row.
        row: u16,
    },
    /// One translated flow.
    Flow {
        /// Its slot.
        slot: u32,
        /// The slot's generation.
        generation: u32,
    },
    /// One relayed flow.
    Relayed(RelayedId),
}

/// A relayed flow's id.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RelayedId {
    /// Its engine's random number.
    pub run: u32,
    /// Which of that engine's relayed flows.
    pub number: u64,
}

/// A flow that a guest might open.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FlowQuestion {
    /// The destination.
    pub address: Ipv4Addr,
    /// 0 for ICMP.
    pub port: u16,
    /// IP protocol number.
    pub protocol: u8,
    /// The name that the guest would ask for; then the address is 0.0.0.0 unless it
    /// [turned out](WhyAnswer::lacks_address) to be wanted, and this host finds one.
    #[serde(default)]
    pub name: Option<String>,
}

/// What would become of it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct WhyAnswer {
    /// Whether it would be admitted.
    pub admitted: bool,
    /// The rule that decides, as typed.
    pub rule: String,
    /// The refusal's name in `stats`.
    pub refusal: Option<String>,
    /// In words: what would happen.
    pub outcome: String,
    /// In sentences, one a line: why that rule, and no other.
    pub explanation: String,
    /// Where it would leave.
    pub via: Option<String>,
    /// It was not judged: an address of the name is wanted, too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lacks_address: bool,
}

impl<F> EngineRequest<F> {
    /// What has to be named with it.
    pub fn scope(&self) -> Scope {
        match self {
            Self::Inventory { .. } => Scope::Engine,
            Self::Why(_) | Self::Thaw | Self::Record { .. } => Scope::Vm,
            Self::Cut | Self::Capture { .. } => Scope::Flows,
        }
    }

    /// Whether it only reads.
    pub fn is_read_only(&self) -> bool {
        match self {
            Self::Why(_) | Self::Inventory { .. } => true,
            Self::Thaw | Self::Cut | Self::Capture { .. } | Self::Record { .. } => false,
        }
    }

    pub(crate) fn try_map<G, E>(
        self,
        f: &mut impl FnMut(F) -> Result<G, E>,
    ) -> Result<EngineRequest<G>, E> {
        Ok(match self {
            Self::Why(question) => EngineRequest::Why(question),
            Self::Inventory { from } => EngineRequest::Inventory { from },
            Self::Thaw => EngineRequest::Thaw,
            Self::Cut => EngineRequest::Cut,
            Self::Capture {
                to,
                packets,
                seconds,
            } => EngineRequest::Capture {
                to: f(to)?,
                packets,
                seconds,
            },
            Self::Record { to } => EngineRequest::Record { to: f(to)? },
        })
    }
}
