//! Questions to the kernel about rules of the host (`ip rule`) by what a look-up does not consider:
//! ports, protocols, users, types of service.
//!
//! # Theory of operation
//! The rules choose a table, and a table the route. A look-up that comes to a rule which it can't
//! judge asks the kernel for the table, and then looks the destination up there as in any other: by
//! its own copy, so that next hops, their shares, source addresses and MTUs are found as for all
//! flows. An answer that names a table of which there is no copy decides nothing.
//!
//! An answer holds as long as the route table in use. When the rules or routes change, another table
//! replaces it, and the kernel is asked anew ([`Asked`]).
use std::{
    cell::Cell,
    fmt,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    net::IpAddr,
};

use slipgate_abi::Protocol;

use super::RouteKind;
use crate::FlowTuple;

/// What the kernel is asked: which table has the route of a packet that the host itself makes, user
/// 0's, of no type of service and bound to no device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Question {
    /// Mark of the packet; 0: none.
    pub mark: u32,
    /// Destination.
    pub to: IpAddr,
    /// Source address; `None`: it has none yet.
    pub from: Option<IpAddr>,
    /// The packet's protocol and ports.
    pub transport: Transport,
}

/// Protocol and ports of a packet, as rules compare them. The default is of a packet of which only
/// the addresses are known.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Transport {
    /// Protocol; `None`: not known.
    pub protocol: Option<Protocol>,
    /// Source port; 0: none.
    pub from_port: u16,
    /// Destination port; 0: none.
    pub to_port: u16,
}

/// The kernel's answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// The table with this number has the route.
    Table(u32),
    /// A rule or a route refuses or discards the packet.
    Refused(RouteKind),
    /// No table has a route.
    NoRoute,
}

/// Asks the kernel, at once and without waiting.
pub trait AskKernel: fmt::Debug {
    /// Returns the answer; `None`: it could not be asked, or its answer is not understood.
    fn ask(&self, question: &Question) -> Option<Answer>;
}

/// Gives the kernel's answer for the packet of one look-up, which is asked at most once.
pub type Ask<'a> = dyn FnMut() -> Option<Answer> + 'a;

/// Asks nobody: what a look-up can't judge stays undecided.
pub fn nobody() -> Option<Answer> {
    None
}

/// The kernel, and its recent answers.
#[derive(Debug)]
pub struct Asked {
    kernel: Box<dyn AskKernel>,
    /// Each question has one place here, and shares it with others: what was asked last is kept.
    recent: Vec<Cell<Option<(Question, Answer)>>>,
    questions: Cell<u64>,
}

/// Number of places, some KiB together.
const PLACES: usize = 64;

impl Asked {
    /// Creates it without answers.
    pub fn new(kernel: Box<dyn AskKernel>) -> Self {
        Self {
            kernel,
            recent: vec![Cell::new(None); PLACES],
            questions: Cell::new(0),
        }
    }

    /// Forgets all answers: the routes or the rules have changed.
    pub fn forget(&mut self) {
        self.recent.fill(Cell::new(None));
    }

    /// Returns how many questions the kernel was asked, answered or not.
    pub fn questions(&self) -> u64 {
        self.questions.get()
    }

    /// Returns the kernel's answer to a question, or the one that it gave before.
    pub fn answer(&self, question: Question) -> Option<Answer> {
        let mut hasher = DefaultHasher::new();
        question.hash(&mut hasher);
        let place = &self.recent[hasher.finish() as usize % PLACES];
        if let Some((known, answer)) = place.get()
            && known == question
        {
            return Some(answer);
        }
        self.questions.set(self.questions.get() + 1);
        let answer = self.kernel.ask(&question)?;
        place.set(Some((question, answer)));
        Some(answer)
    }
}

impl Transport {
    /// Returns those of packets to a port of which no more is known; 0: of a protocol without ports.
    pub fn to(protocol: Protocol, to_port: u16) -> Self {
        Self {
            protocol: Some(protocol),
            from_port: 0,
            to_port,
        }
    }

    /// Returns those of a flow's packets from the host to the world. The ids of ICMP are no ports.
    pub fn of(flow: &FlowTuple) -> Self {
        let protocol = flow.protocol();
        let has_ports = matches!(protocol, Some(Protocol::Tcp | Protocol::Udp));
        let port = |port: u16| if has_ports { port } else { 0 };
        Self {
            protocol,
            from_port: port(flow.local_port),
            to_port: port(flow.remote_port),
        }
    }
}

#[cfg(test)]
#[path = "ask_test.rs"]
mod tests;
