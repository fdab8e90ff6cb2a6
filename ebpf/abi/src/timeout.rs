//! How long a silent flow lives, and how long what it used rests.

use crate::{
    Protocol,
    tcp::{Phase, TcpBits},
};

const SECOND: u64 = 1_000_000_000;

/// An established TCP connection: RFC 5382 REQ-5, 2 hours 4 minutes.
pub const TCP_ESTABLISHED_NS: u64 = 7_440 * SECOND;
/// Opening, closing or reset TCP: RFC 5382 REQ-5 and RFC 7857 section 2.2, 4 minutes.
pub const TCP_TRANSITORY_NS: u64 = 240 * SECOND;
/// What the world opened by a forward while nobody has shown to be there: TCP from the SYN on (Linux gives
/// up a SYN-ACK after as long; RFC 6146 section 3.5.2.2 asks for 6 s), UDP while the guest is silent.
pub const FROM_WORLD_OPENING_NS: u64 = 60 * SECOND;
/// UDP: RFC 4787 REQ-5 recommends 5 minutes.
pub const UDP_NS: u64 = 300 * SECOND;
/// ICMP query: RFC 5508 REQ-2, 60 seconds.
pub const ICMP_NS: u64 = 60 * SECOND;
/// A freed slot is not reused before this: far longer than a program can run.
pub const SLOT_REST_NS: u64 = SECOND;
/// A freed port rests (RFC 6888 REQ-8) unless TCP state shows that it is safe.
pub const PORT_REST_NS: u64 = 120 * SECOND;
/// Between the two phases of an end: what a running program may still do is done by then.
pub const CLOSING_GRACE_NS: u64 = SECOND / 20;

/// How long a flow in this state may be silent, ns.
pub const fn idle_ns(protocol: Protocol, tcp: TcpBits) -> u64 {
    match protocol {
        Protocol::Icmp => ICMP_NS,
        Protocol::Udp => UDP_NS,
        Protocol::Tcp => match tcp.phase() {
            Phase::Established => TCP_ESTABLISHED_NS,
            Phase::Opening | Phase::Closing | Phase::Closed | Phase::Reset => TCP_TRANSITORY_NS,
        },
    }
}
