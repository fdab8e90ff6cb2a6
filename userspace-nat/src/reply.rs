//! Packets by which the engine answers a guest or a peer: RST segments and ICMP errors. One of these
//! answers no packet that came: a guest's flows that end with a generation are told of by errors.
//!
//! The rate of each VM's answers is bounded ([`Answers`]). None is sent for packets that RFC 1122
//! section 3.2.2 and RFC 4443 section 2.4 exclude: ICMP errors, fragments, group addresses.
use std::net::{IpAddr, SocketAddr};

use slipgate_abi::tcp::Flags;
use slipgate_model::FlowTuple;

use crate::{
    datagram::Datagram,
    packet::{
        Packet, Transport, Version,
        build::{self, Segment},
        icmp::{self, FRAGMENTATION_NEEDED, Unreachable},
        transport::Tcp,
    },
    port::{Outbox, Side},
    quota::TokenBucket,
    vm::VmNet,
};

/// Answers of a kind per second and VM.
pub const RATE_PER_SECOND: u32 = 1_000;
/// Largest burst of answers of a kind.
pub const BURST: u32 = 200;
/// Segments about flows that are cut, per second and VM, and largest burst of them; and as many
/// messages. A policy change cuts many flows in one moment, and the guest does not choose it.
/// Segments of no connection are answered by it too, where the allowance for refusals is exhausted.
pub const CUT_RATE_PER_SECOND: u32 = 4_000;

/// Builder and rate limiter of a VM's answers. Segments have an allowance of their own: refused
/// datagrams, which a guest may repeat without end, must not leave its connections unanswered.
#[derive(Clone, Debug)]
pub struct Answers {
    segments: TokenBucket,
    messages: TokenBucket,
    packet: Vec<u8>,
}

/// Error that an ICMP message reports.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IcmpError {
    /// Destination unreachable, with its code.
    Unreachable(Unreachable),
    /// Fragmentation needed, or packet too big, with the MTU of the next link, bytes.
    TooBig(u32),
    /// TTL or hop limit exceeded in transit.
    TtlExceeded,
    /// The time for the reassembly of a datagram is over.
    ReassemblyTime,
    /// The first fragment of an IPv6 datagram has not all headers (RFC 7112).
    IncompleteHeaders,
    /// Parameter problem, with the offset of the octet that is refused (RFC 792).
    ParameterProblem(u8),
}

impl IcmpError {
    /// The first IPv4 option is refused.
    pub const FIRST_OPTION: Self = Self::ParameterProblem(20);

    /// Returns type, code and second word of the header.
    pub(crate) fn header(self, version: Version) -> (u8, u8, u32) {
        match version {
            Version::V4 => {
                use icmp::v4::{PARAMETER_PROBLEM, TIME_EXCEEDED, UNREACHABLE};
                match self {
                    Self::Unreachable(why) => (UNREACHABLE, why.code(version), 0),
                    // RFC 1191 section 4: the low half is the MTU.
                    Self::TooBig(mtu) => (UNREACHABLE, FRAGMENTATION_NEEDED, mtu.min(0xffff)),
                    Self::TtlExceeded => (TIME_EXCEEDED, 0, 0),
                    Self::ReassemblyTime => (TIME_EXCEEDED, 1, 0),
                    Self::IncompleteHeaders => (PARAMETER_PROBLEM, 0, 0),
                    Self::ParameterProblem(pointer) => {
                        (PARAMETER_PROBLEM, 0, u32::from(pointer) << 24)
                    }
                }
            }
            Version::V6 => {
                use icmp::v6::{PARAMETER_PROBLEM, TIME_EXCEEDED, TOO_BIG, UNREACHABLE};
                match self {
                    Self::Unreachable(why) => (UNREACHABLE, why.code(version), 0),
                    // A smaller one would change nothing (RFC 8201 section 4).
                    Self::TooBig(mtu) => (TOO_BIG, 0, mtu.max(version.least_mtu())),
                    Self::TtlExceeded => (TIME_EXCEEDED, 0, 0),
                    Self::ReassemblyTime => (TIME_EXCEEDED, 1, 0),
                    Self::IncompleteHeaders => (PARAMETER_PROBLEM, 3, 0),
                    Self::ParameterProblem(pointer) => (PARAMETER_PROBLEM, 0, pointer.into()),
                }
            }
        }
    }

    /// Whether the error may be sent about a packet to a group: that is how a sender learns the
    /// path's MTU (RFC 4443 section 2.4, e.3).
    fn may_be_about_group(self, version: Version) -> bool {
        version == Version::V6 && matches!(self, Self::TooBig(_))
    }
}

impl Default for Answers {
    fn default() -> Self {
        Self::new()
    }
}

impl Answers {
    /// Creates a builder with a full allowance.
    pub fn new() -> Self {
        Self {
            segments: TokenBucket::new(RATE_PER_SECOND, BURST),
            messages: TokenBucket::new(RATE_PER_SECOND, BURST),
            packet: Vec::with_capacity(600),
        }
    }

    /// Creates a builder for answers about flows that are cut, with a full allowance.
    pub fn about_cuts() -> Self {
        let allowance = TokenBucket::new(CUT_RATE_PER_SECOND, CUT_RATE_PER_SECOND);
        Self {
            segments: allowance,
            messages: allowance,
            packet: Vec::new(),
        }
    }

    /// Sends a segment of a connection to one of its ends, as if from the other. `addresses`: source
    /// and destination. Returns whether it was queued.
    pub fn segment(
        &mut self,
        vm: &VmNet,
        to: Side,
        addresses: (IpAddr, IpAddr),
        segment: Segment,
        out: &mut Outbox,
        now_ns: u64,
    ) -> bool {
        if !self.segments.take(now_ns) {
            return false;
        }
        build::tcp(&mut self.packet, addresses.0, addresses.1, segment);
        out.packet(vm, to, &self.packet).is_ok()
    }

    /// Answers a guest's segment to a connection that does not exist or is denied (RFC 9293 section
    /// 3.10.7.1) with RST, as if from the peer. Returns whether it was queued.
    pub fn reset(
        &mut self,
        vm: &VmNet,
        packet: &Packet<'_>,
        out: &mut Outbox,
        now_ns: u64,
    ) -> bool {
        let Transport::Tcp(tcp) = packet.transport else {
            return false;
        };
        let addresses = (packet.ip.destination, packet.ip.source);
        reset_for(&tcp)
            .is_some_and(|reset| self.segment(vm, Side::Guest, addresses, reset, out, now_ns))
    }

    /// Answers a guest's packet that is refused: a segment with RST, another one with an ICMP error.
    /// Returns whether the answer was queued.
    pub fn refuse(
        &mut self,
        vm: &VmNet,
        packet: &Packet<'_>,
        code: Unreachable,
        out: &mut Outbox,
        now_ns: u64,
    ) -> bool {
        match packet.transport {
            Transport::Tcp(_) => self.reset(vm, packet, out, now_ns),
            _ => {
                let error = IcmpError::Unreachable(code);
                self.icmp(vm, Side::Guest, packet, error, out, now_ns)
            }
        }
    }

    /// Sends an ICMP error about a packet to its sender: to a guest from the gateway, to a peer from
    /// the translated address to which the packet was sent. Returns whether it was queued.
    pub fn icmp(
        &mut self,
        vm: &VmNet,
        to: Side,
        packet: &Packet<'_>,
        error: IcmpError,
        out: &mut Outbox,
        now_ns: u64,
    ) -> bool {
        let source = match to {
            Side::Guest => vm.gateway_of(packet.ip.source),
            Side::World(_) => Some(packet.ip.destination),
        };
        let Some(source) = source.filter(|_| may_be_answered(packet, error)) else {
            return false;
        };
        if !self.messages.take(now_ns) {
            return false;
        }
        let buffer = &mut self.packet;
        let addresses = (source, packet.ip.source);
        let header = error.header(packet.ip.version());
        build::icmp_error(buffer, addresses, header, packet.ip.bytes);
        out.packet(vm, to, buffer).is_ok()
    }

    /// Tells a guest that nobody has the port to which a flow's datagrams go, as if its peer's host
    /// did. No datagram is at hand, so an empty one of the flow is quoted. Returns whether it was
    /// queued.
    pub fn port_unreachable(
        &mut self,
        vm: &VmNet,
        flow: &FlowTuple,
        out: &mut Outbox,
        now_ns: u64,
    ) -> bool {
        if !is_host(flow.remote) || !self.messages.take(now_ns) {
            return false;
        }
        let quoted = Datagram {
            from: SocketAddr::new(flow.local, flow.local_port),
            to: SocketAddr::new(flow.remote, flow.remote_port),
            payload: &[],
        };
        let error = IcmpError::Unreachable(Unreachable::Port);
        let header = error.header(Version::of(flow.remote));
        let addresses = (flow.remote, flow.local);
        build::icmp_error(&mut self.packet, addresses, header, &quoted.emit());
        out.packet(vm, Side::Guest, &self.packet).is_ok()
    }

    /// Answers an echo request to an address of the engine. Returns whether the answer was queued.
    pub fn echo(&mut self, vm: &VmNet, packet: &Packet<'_>, out: &mut Outbox, now_ns: u64) -> bool {
        if !self.messages.take(now_ns) {
            return false;
        }
        let (ours, guest) = (packet.ip.destination, packet.ip.source);
        let version = packet.ip.version();
        build::ip(&mut self.packet, ours, guest, version.icmp(), |p| {
            let begin = p.len();
            p.extend_from_slice(packet.ip.payload());
            p[begin] = icmp::echo_reply(version);
            build::fill_icmp_checksum(ours, guest, &mut p[begin..]);
        });
        out.packet(vm, Side::Guest, &self.packet).is_ok()
    }
}

/// Returns the RST that answers a segment to a closed port; `None` when the segment is an RST
/// itself.
pub fn reset_for(tcp: &Tcp) -> Option<Segment> {
    if tcp.has(Flags::RST) {
        return None;
    }
    let (sequence, acknowledgement, flags) = if tcp.has(Flags::ACK) {
        (tcp.acknowledgement, 0, Flags::RST)
    } else {
        (
            0,
            tcp.sequence.wrapping_add(tcp.sequence_len()),
            Flags::RST | Flags::ACK,
        )
    };
    Some(Segment {
        source: tcp.destination,
        destination: tcp.source,
        sequence,
        acknowledgement,
        flags,
    })
}

/// Whether RFC 1122 section 3.2.2, and in IPv6 RFC 4443 section 2.4, allow this error about a
/// packet, which is no fragment.
fn may_be_answered(packet: &Packet<'_>, error: IcmpError) -> bool {
    let is_error = matches!(packet.transport, Transport::Icmp(icmp) if icmp.is_error());
    let to_host = is_host(packet.ip.destination)
        || error.may_be_about_group(packet.ip.version()) && packet.ip.destination.is_multicast();
    !is_error && is_host(packet.ip.source) && to_host
}

/// Whether an address is of one host: not unspecified, or in 0.0.0.0/8, nor multicast, reserved or
/// broadcast (224.0.0.0/3).
fn is_host(addr: IpAddr) -> bool {
    match addr {
        IpAddr::V4(addr) => (1..224).contains(&addr.octets()[0]),
        IpAddr::V6(addr) => !addr.is_unspecified() && !addr.is_multicast(),
    }
}

#[cfg(test)]
#[path = "reply_test.rs"]
mod tests;
