//! Limits of the relay, and its counters.
use slipgate_abi::{segment::Segments, timeout};

use super::spliced::MORE_SOCKETS;
use crate::record::RelayedFlow;

const SECOND_NS: u64 = 1_000_000_000;

/// Limits of the relay, per VM unless stated otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Most sockets of the host, for all VMs together: connections of forwards, and connections and
    /// exchanges with the host's loopback. A quarter of them is divided into equal shares of the
    /// VMs.
    pub sockets: usize,
    /// Most forwarded TCP connections at once.
    pub streams_per_vm: u32,
    /// Most clients of forwarded UDP ports at once.
    pub associations_per_vm: u32,
    /// Most DNS connections of the guest at once.
    pub dns_connections_per_vm: u32,
    /// Most connections from the guest to the host's loopback at once.
    pub loopback_streams_per_vm: u32,
    /// Most exchanges of datagrams between a guest's port and the host's loopback at once.
    pub loopback_exchanges_per_vm: u32,
    /// Bytes of questions that a DNS connection takes before they are asked, and bytes of answers that
    /// the guest has not taken at which no more is asked.
    pub dns_buffer: usize,
    /// Longest time for the guest to accept a forwarded connection, and for the host to accept one
    /// to its loopback, ns.
    pub connect_ns: u64,
    /// Longest time for which the guest may leave data unacknowledged, ns.
    pub silence_ns: u64,
    /// Longest idle time of a forwarded connection, ns.
    pub stream_idle_ns: u64,
    /// Longest idle time of a forwarded connection after one side has ended its direction, ns.
    pub half_closed_idle_ns: u64,
    /// Longest idle time of a DNS connection, ns (RFC 7766 section 6.2.3: a few seconds).
    pub dns_idle_ns: u64,
    /// Longest idle time of a client of a forwarded UDP port, or of an exchange with the host's
    /// loopback, ns.
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

/// Counters of a VM's relayed traffic.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// Forwarded TCP connections that are live.
    pub streams: u32,
    /// Those of them that are spliced to a socket of the guest's namespace.
    pub spliced: u32,
    /// Clients of forwarded UDP ports that are live.
    pub associations: u32,
    /// DNS connections that are live.
    pub dns_connections: u32,
    /// Connections to the host's loopback that are live, including those not accepted yet.
    pub loopback_streams: u32,
    /// Exchanges of datagrams with the host's loopback that are live.
    pub loopback_exchanges: u32,
    /// Number of flows that have begun.
    pub begun: u64,
    /// Number of flows that have ended.
    pub ended: u64,
    /// Packets and L3 bytes from the guest in these flows.
    pub tx: (u64, u64),
    /// Packets and L3 bytes to the guest in these flows.
    pub rx: (u64, u64),
    /// Forwarded TCP connections accepted so far.
    pub streams_accepted: u64,
    /// Accepted connections that one side reset, or that timed out.
    pub streams_reset: u64,
    /// Forwarded TCP connections reset at once because a limit was reached.
    pub streams_refused: u64,
    /// Datagrams of new clients dropped because a limit was reached.
    pub associations_refused: u64,
    /// Connections and exchanges with the host's loopback refused because a limit was reached.
    pub loopback_refused: u64,
    /// DNS connections refused because a limit was reached.
    pub dns_refused: u64,
    /// Payload from the host to the guest, TCP and UDP, bytes.
    pub bytes_to_guest: u64,
    /// Payload from the guest to the host, TCP and UDP, bytes.
    pub bytes_from_guest: u64,
}

impl Counts {
    /// Counts packets that the guest sent in a flow.
    pub(super) fn sent(&mut self, flow: &mut RelayedFlow, what: Segments, now_ns: u64) {
        for sum in [&mut flow.tx, &mut self.tx] {
            sum.0 += what.packets;
            sum.1 += what.bytes;
        }
        flow.last_ns = now_ns;
    }

    /// Counts packets that the guest receives in a flow.
    pub(super) fn received(&mut self, flow: &mut RelayedFlow, what: Segments, now_ns: u64) {
        for sum in [&mut flow.rx, &mut self.rx] {
            sum.0 += what.packets;
            sum.1 += what.bytes;
        }
        flow.last_ns = now_ns;
    }
}

impl Counts {
    /// Number of the host's sockets and pipes in use for this VM, without listeners and UDP sockets that its
    /// clients share.
    pub(super) const fn sockets(&self) -> usize {
        (self.streams
            + self.spliced * MORE_SOCKETS
            + self.loopback_streams
            + self.loopback_exchanges) as usize
    }
}
