//! The kernel as the engine asks it for routes, where rules of the host are by what the engine does
//! not look at.
use std::net::IpAddr;

use slipgate_abi::Protocol;
use slipgate_control::netlink::{Packet, RouteQuestions, Routing};
use userspace_nat::route::{
    RouteKind,
    ask::{Answer, AskKernel, Question},
};

/// A socket for questions, opened without a privilege.
#[derive(Debug)]
pub(super) struct KernelRoutes(RouteQuestions);

impl KernelRoutes {
    /// Opens the socket; `None`: the host gives none, and what is undecided stays so.
    pub(super) fn open() -> Option<Self> {
        match RouteQuestions::open() {
            Ok(questions) => Some(Self(questions)),
            Err(e) => {
                tracing::warn!(
                    "{e}: the kernel is not asked about routes, so flows that come to a rule of `ip \
                     rule` by ports or users are refused"
                );
                None
            }
        }
    }
}

impl AskKernel for KernelRoutes {
    fn ask(&self, question: &Question) -> Option<Answer> {
        let Question {
            mark,
            to,
            from,
            transport,
        } = *question;
        let number = |protocol| match (protocol, to) {
            (Protocol::Icmp, IpAddr::V6(_)) => Protocol::Icmpv6 as u8,
            (protocol, _) => protocol as u8,
        };
        let packet = Packet {
            to,
            from,
            mark,
            protocol: transport.protocol.map(number),
            from_port: transport.from_port,
            to_port: transport.to_port,
        };
        Some(match self.0.ask(&packet).ok()? {
            Routing::ByTable(table) => Answer::Table(table),
            Routing::Blackhole => Answer::Refused(RouteKind::Blackhole),
            Routing::Unreachable => Answer::Refused(RouteKind::Unreachable),
            Routing::Prohibited => Answer::Refused(RouteKind::Prohibit),
            Routing::NoRoute => Answer::NoRoute,
        })
    }
}
