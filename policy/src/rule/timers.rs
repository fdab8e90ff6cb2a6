//! Idle time-outs of a policy's flows.
use serde::{Deserialize, Serialize};
use slipgate_abi::{
    Protocol,
    tcp::{Phase, TcpBits},
    timeout,
};

const SECOND_NS: u64 = 1_000_000_000;

/// Idle time-outs of flows that a kernel translates, seconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Timers {
    /// Of an established TCP connection.
    pub tcp_established_s: u32,
    /// Of a TCP connection that is not established yet.
    pub tcp_opening_s: u32,
    /// Of a TCP connection that was closed by one side or both, or reset.
    pub tcp_closing_s: u32,
    /// Of a UDP flow.
    pub udp_s: u32,
    /// Of an ICMP query.
    pub icmp_s: u32,
}

impl Timers {
    /// The shortest that RFCs permit: RFC 5382 REQ-5 (7,440 s and 240 s), RFC 4787 REQ-5 (120 s),
    /// RFC 5508 REQ-2 (60 s).
    pub const LEAST: Self = Self {
        tcp_established_s: 7_440,
        tcp_opening_s: 240,
        tcp_closing_s: 240,
        udp_s: 120,
        icmp_s: 60,
    };
    /// The longest that may be configured, seconds: a week.
    pub const MOST_S: u32 = 7 * 24 * 3_600;

    /// Returns the idle time-out of a flow in this state, ns.
    pub fn idle_ns(&self, protocol: Protocol, tcp: TcpBits) -> u64 {
        let seconds = match protocol {
            Protocol::Icmp | Protocol::Icmpv6 => self.icmp_s,
            Protocol::Udp => self.udp_s,
            Protocol::Tcp => match tcp.phase() {
                Phase::Established => self.tcp_established_s,
                Phase::Opening => self.tcp_opening_s,
                Phase::Closing | Phase::Closed | Phase::Reset => self.tcp_closing_s,
            },
        };
        u64::from(seconds) * SECOND_NS
    }
}

impl Default for Timers {
    fn default() -> Self {
        let seconds = |ns: u64| (ns / SECOND_NS) as u32;
        Self {
            tcp_established_s: seconds(timeout::TCP_ESTABLISHED_NS),
            tcp_opening_s: seconds(timeout::TCP_TRANSITORY_NS),
            tcp_closing_s: seconds(timeout::TCP_TRANSITORY_NS),
            udp_s: seconds(timeout::UDP_NS),
            icmp_s: seconds(timeout::ICMP_NS),
        }
    }
}
