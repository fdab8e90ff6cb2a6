//! Bounds of the relay, and what it counts.
use slipgate_abi::{segment::Segments, timeout};

use crate::record::RelayedFlow;

const SECOND_NS: u64 = 1_000_000_000;

/// Bounds, per VM where not said otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Sockets of the host, of all VMs: connections of forwards, and what leads to the host's
    /// loopback. Of a quarter each VM has an equal part.
    pub sockets: usize,
    /// Forwarded TCP connections at once.
    pub streams_per_vm: u32,
    /// Clients of forwarded UDP ports at once.
    pub associations_per_vm: u32,
    /// DNS connections of the guest at once.
    pub dns_connections_per_vm: u32,
    /// The guest's connections to the host's loopback at once.
    pub loopback_streams_per_vm: u32,
    /// The guest's ports with exchanges of datagrams with the host's loopback at once.
    pub loopback_exchanges_per_vm: u32,
    /// Each of the two buffers of a forwarded connection or one to the host's loopback, bytes. Above 64 KiB the window is scaled
    /// (RFC 7323).
    pub stream_buffer: usize,
    /// Each of the two buffers of a DNS connection, bytes.
    pub dns_buffer: usize,
    /// How long the guest may take to accept a forwarded connection, and the host one to its
    /// loopback, ns.
    pub connect_ns: u64,
    /// How long the guest may leave data unacknowledged, ns.
    pub silence_ns: u64,
    /// How long a forwarded connection may be idle, ns.
    pub stream_idle_ns: u64,
    /// The same when one side has ended its direction, ns.
    pub half_closed_idle_ns: u64,
    /// How long a DNS connection may be idle, ns (RFC 7766 section 6.2.3: a few seconds).
    pub dns_idle_ns: u64,
    /// How long a client of a forwarded UDP port, or an exchange with the host's loopback, may be
    /// silent, ns.
    pub association_idle_ns: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            sockets: 32_768,
            streams_per_vm: 512,
            associations_per_vm: 1_024,
            dns_connections_per_vm: 32,
            loopback_streams_per_vm: 256,
            loopback_exchanges_per_vm: 256,
            stream_buffer: 128 << 10,
            dns_buffer: 16 << 10,
            connect_ns: 5 * SECOND_NS,
            silence_ns: 60 * SECOND_NS,
            stream_idle_ns: timeout::TCP_ESTABLISHED_NS,
            half_closed_idle_ns: timeout::TCP_TRANSITORY_NS,
            dns_idle_ns: 10 * SECOND_NS,
            association_idle_ns: timeout::UDP_NS,
        }
    }
}

/// What was relayed for a VM.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// Forwarded TCP connections now.
    pub streams: u32,
    /// Clients of forwarded UDP ports now.
    pub associations: u32,
    /// DNS connections now.
    pub dns_connections: u32,
    /// Connections to the host's loopback now, those that it has not accepted yet included.
    pub loopback_streams: u32,
    /// Exchanges of datagrams with it now.
    pub loopback_exchanges: u32,
    /// Flows that have begun.
    pub begun: u64,
    /// Of those, how many have ended.
    pub ended: u64,
    /// From the guest, in these flows: packets, L3 bytes.
    pub tx: (u64, u64),
    /// To the guest.
    pub rx: (u64, u64),
    /// Forwarded TCP connections accepted so far.
    pub streams_accepted: u64,
    /// Of those, reset by one side, or timed out.
    pub streams_reset: u64,
    /// Forwarded TCP connections reset at once, for want of room.
    pub streams_refused: u64,
    /// Datagrams of new clients dropped, for want of room.
    pub associations_refused: u64,
    /// Connections to the host's loopback and exchanges with it refused, for want of room.
    pub loopback_refused: u64,
    /// DNS connections refused, for want of room.
    pub dns_refused: u64,
    /// Payload from the host to the guest, TCP and UDP, bytes.
    pub bytes_to_guest: u64,
    /// Payload from the guest to the host, TCP and UDP, bytes.
    pub bytes_from_guest: u64,
}

impl Counts {
    /// The guest has sent this in that flow.
    pub(super) fn sent(&mut self, flow: &mut RelayedFlow, what: Segments, now_ns: u64) {
        for sum in [&mut flow.tx, &mut self.tx] {
            sum.0 += what.packets;
            sum.1 += what.bytes;
        }
        flow.last_ns = now_ns;
    }

    /// The guest is sent this.
    pub(super) fn told(&mut self, flow: &mut RelayedFlow, what: Segments, now_ns: u64) {
        for sum in [&mut flow.rx, &mut self.rx] {
            sum.0 += what.packets;
            sum.1 += what.bytes;
        }
        flow.last_ns = now_ns;
    }
}

impl Counts {
    /// Sockets of the host now, without those that are all VMs'.
    pub(super) const fn sockets(&self) -> usize {
        (self.streams + self.loopback_streams + self.loopback_exchanges) as usize
    }
}
