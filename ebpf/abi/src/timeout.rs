//! Idle timeouts of flows, and rest times of the slots and ports that they used.

const SECOND: u64 = 1_000_000_000;

/// Idle timeout of an established TCP connection, ns: 2 hours 4 minutes (RFC 5382 REQ-5).
pub const TCP_ESTABLISHED_NS: u64 = 7_440 * SECOND;
/// Idle timeout of an opening, closing or reset TCP connection, ns: 4 minutes (RFC 5382 REQ-5 and
/// RFC 7857 section 2.2).
pub const TCP_TRANSITORY_NS: u64 = 240 * SECOND;
/// Timeout of a flow that the world opened by a forward, until the opener is proven to exist, ns.
/// TCP: counted from the SYN (Linux gives up a SYN-ACK after as long; RFC 6146 section 3.5.2.2 asks
/// for 6 s). UDP: while the guest is silent.
pub const FROM_WORLD_OPENING_NS: u64 = 60 * SECOND;
/// Idle timeout of a UDP flow, ns: the 5 minutes that RFC 4787 REQ-5 recommends.
pub const UDP_NS: u64 = 300 * SECOND;
/// Idle timeout of an ICMP query, ns: 60 seconds (RFC 5508 REQ-2).
pub const ICMP_NS: u64 = 60 * SECOND;
/// Time before a freed slot is reused, ns: far longer than a program can run.
pub const SLOT_REST_NS: u64 = SECOND;
/// Time before a freed port is reused, ns (RFC 6888 REQ-8), unless the TCP state shows that reuse
/// is safe.
pub const PORT_REST_NS: u64 = 120 * SECOND;
/// Time between the two phases of a flow's end, ns, in which every running program finishes.
pub const CLOSING_GRACE_NS: u64 = SECOND / 20;
