//! Messages between broker and engine.
//!
//! What clients ask of an engine through the broker is an [`EngineRequest`], answered by an
//! [`EngineReply`] with the same number: the broker hands both on without a look at their contents.
//! The other messages are the two processes' own.
mod inventory;
mod network;
mod request;
mod start;

use std::net::SocketAddrV4;
use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};

pub use self::{
    inventory::{
        EngineInventory, LiveRelayed, NameCounts, RefusedQuestions, RefusedSample, RelayedCounts,
    },
    network::{HostAddress, Link, NetworkView, RouteEntry, RouteKind, RouteSnapshot},
    request::{EngineReply, EngineRequest, FlowQuestion, RelayedId, Scope, Subject, WhyAnswer},
    start::{FlowLogEvent, ForwardSocket, Policies, Start, VmSpec},
};
use crate::descriptors::{carries_descriptors, carries_none, try_map_all};

/// From the broker.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum ToEngine<F = OwnedFd> {
    /// First: how to work.
    Start(Box<Start<F>>),
    /// Ports of the host that lead to guests; before [`ToEngine::Begin`], as often as it takes.
    Forwards(Vec<ForwardSocket<F>>),
    /// Everything is there: confine yourself, adopt, serve.
    Begin,
    /// A VM has changed.
    Vm(VmSpec),
    /// Routes, addresses or links have changed.
    Network(NetworkView),
    /// The host's resolvers have changed.
    Resolvers(Vec<SocketAddrV4>),
    /// Ports among the translated ones that sockets of the host hold: IP protocol and port.
    ReservedPorts(Vec<(u8, u16)>),
    /// Another file for the flow log.
    FlowLog(F),
    /// Another file for `--pcap`.
    Pcap(F),
    /// Other policies; answered by [`FromEngine::Applied`] when nothing leaves any more that they
    /// refuse.
    Policies(Box<Policies<F>>),
    /// A request; answered by [`FromEngine::Reply`] with the same number.
    Request {
        /// Returned with the reply.
        id: u64,
        /// What it is about, as its [`EngineRequest::scope`] says.
        about: Option<Subject>,
        /// What is asked.
        request: EngineRequest<F>,
    },
    /// Answered by [`FromEngine::Pong`], from the loop that serves guests.
    Ping {
        /// Returned with the answer.
        id: u64,
    },
    /// Stop, and answer [`FromEngine::Stopped`].
    Shutdown(OnExit),
}

/// From the engine.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum FromEngine {
    /// Confined, adopted, about to serve.
    Ready {
        /// Flows taken over from a predecessor.
        adopted: u64,
    },
    /// New elements of `NEXT_HOPS` want to be filled.
    NextHopsWanted,
    /// The answer to [`ToEngine::Policies`].
    Applied {
        /// The number of [`Policies`].
        id: u64,
        /// Flows that were cut.
        cut: u64,
        /// Flows that go on.
        kept: u64,
        /// Of those, how many the policies would refuse now.
        left: u64,
    },
    /// The answer to [`ToEngine::Request`].
    Reply {
        /// The request's.
        id: u64,
        /// What is answered.
        reply: EngineReply,
    },
    /// The answer to [`ToEngine::Ping`].
    Pong {
        /// The ping's.
        id: u64,
    },
    /// The last message: the loop has ended as asked.
    Stopped,
}

/// What becomes of the flows when the engine stops.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum OnExit {
    /// They stay in the kernel for the next process.
    Keep,
    /// They are ended and recorded.
    Detach,
}

impl<F> ToEngine<F> {
    fn try_map<G, E>(self, f: &mut impl FnMut(F) -> Result<G, E>) -> Result<ToEngine<G>, E> {
        Ok(match self {
            Self::Start(start) => ToEngine::Start(Box::new(start.try_map(f)?)),
            Self::Forwards(all) => {
                let all = all.into_iter().map(|forward| forward.try_map(f));
                ToEngine::Forwards(all.collect::<Result<_, _>>()?)
            }
            Self::Begin => ToEngine::Begin,
            Self::Vm(vm) => ToEngine::Vm(vm),
            Self::Network(view) => ToEngine::Network(view),
            Self::Resolvers(all) => ToEngine::Resolvers(all),
            Self::ReservedPorts(ports) => ToEngine::ReservedPorts(ports),
            Self::FlowLog(file) => ToEngine::FlowLog(f(file)?),
            Self::Pcap(file) => ToEngine::Pcap(f(file)?),
            Self::Policies(policies) => ToEngine::Policies(Box::new(policies.try_map(f)?)),
            Self::Request { id, about, request } => ToEngine::Request {
                id,
                about,
                request: request.try_map(f)?,
            },
            Self::Ping { id } => ToEngine::Ping { id },
            Self::Shutdown(exit) => ToEngine::Shutdown(exit),
        })
    }
}

impl<F> Start<F> {
    fn try_map<G, E>(self, f: &mut impl FnMut(F) -> Result<G, E>) -> Result<Start<G>, E> {
        let Self {
            maps,
            port,
            flow_log,
            pcap,
            locks,
            owner_row,
            epoch,
            flow_log_events,
            vms,
            policies,
            rule_base,
            forward_texts,
            resolvers,
            nat_ports,
            reserved_ports,
            network,
            log,
        } = self;
        Ok(Start {
            maps: try_map_all(maps, f)?,
            port: f(port)?,
            flow_log: flow_log.map(&mut *f).transpose()?,
            pcap: pcap.map(&mut *f).transpose()?,
            locks: try_map_all(locks, f)?,
            owner_row,
            epoch,
            flow_log_events,
            vms,
            policies: f(policies)?,
            rule_base,
            forward_texts,
            resolvers,
            nat_ports,
            reserved_ports,
            network,
            log,
        })
    }
}

impl<F> Policies<F> {
    fn try_map<G, E>(self, f: &mut impl FnMut(F) -> Result<G, E>) -> Result<Policies<G>, E> {
        Ok(Policies {
            id: self.id,
            policies: f(self.policies)?,
            rule_base: self.rule_base,
            local: self.local,
            vms: self.vms,
            strictly: self.strictly,
        })
    }
}

impl<F> ForwardSocket<F> {
    fn try_map<G, E>(self, f: &mut impl FnMut(F) -> Result<G, E>) -> Result<ForwardSocket<G>, E> {
        Ok(ForwardSocket {
            socket: f(self.socket)?,
            vm: self.vm,
            vm_row: self.vm_row,
            protocol: self.protocol,
            host: self.host,
            guest_port: self.guest_port,
            rule: self.rule,
        })
    }
}

carries_descriptors!(ToEngine);
carries_none!(FromEngine);

#[cfg(test)]
#[path = "engine_test.rs"]
mod tests;
