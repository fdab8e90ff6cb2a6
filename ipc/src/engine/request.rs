//! Requests of clients to an engine, and its replies.
//!
//! A new request is a variant of [`EngineRequest`], and of [`EngineReply`] where no reply fits yet.
//! The broker resolves names to subjects ([`Subject`](slipgate_model::Subject)), records which
//! client asked, and passes the rest on without change.
use std::{net::IpAddr, os::fd::OwnedFd};

use serde::{Deserialize, Serialize};
use slipgate_model::{ActivityPage, EngineInventory, WhyAnswer};

use crate::descriptors::maps_descriptors;

/// A request to an engine.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EngineRequest<F = OwnedFd> {
    /// Asks for the fate of a flow of the VM; answered by [`EngineReply::Why`].
    Why(FlowQuestion),
    /// Asks for engine state that the pinned maps do not show; answered by
    /// [`EngineReply::Inventory`].
    Inventory {
        /// Where the page begins: 0, or [`EngineInventory::next`] of the one before.
        from: u64,
    },
    /// Asks for the last packets of a VM that count as its activity, and the number of its flows;
    /// answered by [`EngineReply::Activity`].
    Activity {
        /// Where the page begins: 0, or [`ActivityPage::next`] of the one before.
        from: u64,
    },
    /// Restart the timers of a frozen VM's flows, just before it is thawed.
    Thaw,
    /// Hold what comes for a VM, whose guest is paused.
    Sleep,
    /// Deliver what was held for a VM, whose guest runs again.
    Resume,
    /// End flows; answered by [`EngineReply::Cut`] once none of their packets can leave.
    Cut,
    /// End the flows of a VM that goes on from another state of its memory, such as a snapshot's;
    /// answered by [`EngineReply::Cut`] once none of their packets can leave.
    EndGeneration,
    /// Write packets to a stream socket as pcapng.
    Capture {
        /// Socket to write to.
        to: F,
        /// Number of packets after which the capture ends.
        packets: Option<u64>,
        /// Time after which the capture ends, seconds.
        seconds: Option<u64>,
    },
    /// Write the records of a VM to a stream socket until it is closed.
    Record {
        /// Socket to write to.
        to: F,
    },
}

/// Reply of an engine to a request.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EngineReply {
    /// Decision about the flow in question.
    Why(WhyAnswer),
    /// A page of the engine's inventory.
    Inventory(EngineInventory),
    /// A page of a VM's activity.
    Activity(ActivityPage),
    /// The flows have ended.
    Cut {
        /// Number of flows that were ended.
        flows: u64,
    },
    /// The flow in question is not live in this engine.
    UnknownFlow,
    /// The request was understood, and is done or under way.
    Done,
    /// The request can't be served.
    Refused {
        /// Reason, as a sentence.
        why: String,
    },
}

/// Kind of subject that a request needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scope {
    /// The engine as a whole.
    Engine,
    /// One VM with all its flows.
    Vm,
    /// One flow, or all flows of a VM.
    Flows,
}

/// A flow that a guest might open.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FlowQuestion {
    /// Address of the destination.
    pub address: IpAddr,
    /// Destination port; 0 for ICMP.
    pub port: u16,
    /// IP protocol number, such as 6 (TCP).
    pub protocol: u8,
    /// The name that the guest would ask for. The address is then 0.0.0.0, unless the engine [needs
    /// one](WhyAnswer::lacks_address) and this host finds it.
    #[serde(default)]
    pub name: Option<String>,
}

impl<F> EngineRequest<F> {
    /// Kind of subject that the request needs.
    pub fn scope(&self) -> Scope {
        match self {
            Self::Inventory { .. } => Scope::Engine,
            Self::Why(_)
            | Self::Activity { .. }
            | Self::Thaw
            | Self::Sleep
            | Self::Resume
            | Self::EndGeneration
            | Self::Record { .. } => Scope::Vm,
            Self::Cut | Self::Capture { .. } => Scope::Flows,
        }
    }

    /// Whether the request changes nothing.
    pub fn is_read_only(&self) -> bool {
        match self {
            Self::Why(_) | Self::Inventory { .. } | Self::Activity { .. } => true,
            Self::Thaw
            | Self::Sleep
            | Self::Resume
            | Self::Cut
            | Self::EndGeneration
            | Self::Capture { .. }
            | Self::Record { .. } => false,
        }
    }
}

maps_descriptors!(enum EngineRequest {
    Why(question),
    Inventory { from },
    Activity { from },
    Thaw,
    Sleep,
    Resume,
    Cut,
    EndGeneration,
    Capture { to: fd, packets, seconds },
    Record { to: fd },
});
