//! Admission: whether a packet that has no flow opens one.
//!
//! # Theory of operation
//! A guest's SYN, first datagram or echo request, or the world's first packet to a forward, arrives
//! here as it was sent. These questions are asked in order: does it belong to a known flow (a
//! retransmission, or a packet in flight while the first was handled: it is sent on as it is); does
//! it open a flow at all; do the rules allow it; is the VM below its cap and rate; does a route
//! lead there by an uplink; is a port left; a slot; the kernel's two entries. Only then is the
//! packet returned to the kernel, which translates and counts it like all that follow.
//!
//! So admission is idempotent: a repeated packet finds the flow. A SYN with another sequence number
//! on a tuple in use is a new connection: the old flow is unlinked and recorded, and the new one
//! decided on its own. The same applies to any SYN on the tuple of a connection that was inspected
//! and then released to the kernel.
//!
//! Decisions are made in a [`plan`], which changes nothing, and executed by a commit: `slipgate
//! why` prints a plan that nobody commits. Rules come before quotas, so that denied flows do not
//! use up the quota. A flow that is refused after them was work all the same, and keeps its token
//! of the rate. Flows that the world opens are in [`inbound`].
mod commit;
mod inbound;
mod inspected;
mod loopback;
pub(crate) mod plan;
mod rejudge;
mod room;

use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{
    Direction, Protocol, Refusal, Tuple,
    slot::SlotFlags,
    tcp::{Phase, TcpBits},
};

use crate::{
    datapath::Datapath,
    flow::EndReason,
    packet::{Packet, Transport, icmp::ECHO_REQUEST},
    relay::Opening,
    state::{Core, VmState},
};
use slipgate_policy::Destination;

/// Result of admission for a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Admission {
    /// The packet belongs to this flow: it goes back to the kernel.
    Flow {
        /// Index of the flow's slot.
        slot: u32,
    },
    /// The packet belongs to this flow, which was cut.
    Cut {
        /// Index of the flow's slot.
        slot: u32,
    },
    /// The packet opens no flow and belongs to none.
    NoFlow,
    /// The packet would open a flow that is refused.
    Refused(Refusal),
}

/// Side that opens a flow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Opener {
    /// The guest, by its own packet.
    Guest,
    /// The world, with the tuple and sequence number of its first packet.
    World((Tuple, u32)),
}

/// A refusal, and the element of `RULES` that caused it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Refused {
    pub(crate) reason: Refusal,
    pub(crate) rule: Option<u32>,
}

impl From<Refusal> for Refused {
    fn from(reason: Refusal) -> Self {
        Self { reason, rule: None }
    }
}

impl<D: Datapath> Core<D> {
    /// Decides about a packet of a guest.
    pub(crate) fn admit_outbound(
        &mut self,
        vm: &mut VmState,
        packet: &Packet<'_>,
        now_ns: u64,
    ) -> Admission {
        let Some(tuple) = packet.tuple(vm.net.id, Direction::Tx) else {
            return Admission::NoFlow;
        };
        let known = self.flows.by_guest(&tuple);
        if let Some(admission) = self.admit_known(known, packet, Direction::Tx, now_ns) {
            return admission;
        }
        let Some(isn) = opens(packet) else {
            return Admission::NoFlow;
        };
        let Some(to) = destination(&tuple) else {
            return Admission::NoFlow;
        };
        let plan = self.plan_outbound(vm, to, commit::has_timestamps(packet), now_ns);
        match self.commit_outbound(vm, plan, packet, (tuple, isn), now_ns) {
            Ok(slot) => Admission::Flow { slot },
            Err(refused) => self.refuse(vm.net.id, &tuple, refused, now_ns),
        }
    }

    /// Decides about a guest's packet to a port that leads to the host's loopback and that no
    /// relayed connection has. Returns `None` when it opens no connection or its port does not lead
    /// there.
    pub(crate) fn admit_to_loopback(
        &mut self,
        vm: &mut VmState,
        packet: &Packet<'_>,
        now_ns: u64,
    ) -> Option<Result<Opening, Refusal>> {
        let tuple = packet.tuple(vm.net.id, Direction::Tx)?;
        opens(packet)?;
        let to = destination(&tuple)?;
        let plan = self.plan_to_loopback(vm, to, now_ns)?;
        let opening = self.commit_to_loopback(vm, plan, to.protocol, now_ns);
        Some(opening.map_err(|refused| {
            self.refuse(vm.net.id, &tuple, refused, now_ns);
            refused.reason
        }))
    }

    /// Decides about a packet whose tuple a flow has. Returns `None` when it may open another flow;
    /// the former one is unlinked then.
    fn admit_known(
        &mut self,
        known: Option<u32>,
        packet: &Packet<'_>,
        from: Direction,
        now_ns: u64,
    ) -> Option<Admission> {
        let slot = known?;
        if self.belongs(slot, packet, from) {
            if self.flows.revive(&mut self.datapath, slot) {
                return Some(Admission::Flow { slot });
            }
            if self.flows.is_cut(slot) {
                return Some(Admission::Cut { slot });
            }
        }
        let reason = EndReason::TupleReused;
        self.flows.unlink(&mut self.datapath, slot, reason, now_ns);
        None
    }

    /// Notes a refusal for the records. Returns it as an admission.
    pub(crate) fn refuse(
        &mut self,
        vm: u32,
        tuple: &Tuple,
        refused: Refused,
        now_ns: u64,
    ) -> Admission {
        let Refused { reason, rule } = refused;
        self.refusals.note(vm, reason.name(), rule, tuple, now_ns);
        Admission::Refused(reason)
    }

    /// Whether a packet belongs to the flow that has its tuple, and not to a new connection. The
    /// side that opened a flow may have opened another with the same tuple. A SYN of the peer on a
    /// guest's flow is a simultaneous open (RFC 5382 REQ-2), or its receiver's to challenge (RFC
    /// 5961). A SYN of the guest on a flow from the world is a connection of the guest's own: a
    /// packet sent to a forward, perhaps with a forged source, does not allow the guest to connect
    /// there.
    fn belongs(&self, slot: u32, packet: &Packet<'_>, from: Direction) -> bool {
        let Transport::Tcp(tcp) = packet.transport else {
            return true;
        };
        if !tcp.is_opening_syn() {
            return true;
        }
        let live = self.datapath.slot(slot);
        let again = live.isn() == tcp.sequence;
        match (from, live.flags() & SlotFlags::INBOUND != 0) {
            // A retransmission, unless the connection was inspected and released: its opener has
            // sent and received more since, and what it opens with the same number was not
            // inspected.
            (Direction::Tx, false) => again && !self.was_let_go(slot),
            (Direction::Tx, true) => false,
            // Anybody can send a SYN in the peer's name: it does not end a connection that lives.
            (Direction::Rx, true) => {
                again || TcpBits(live.tcp().load(Relaxed)).phase() == Phase::Established
            }
            (Direction::Rx, false) => true,
        }
    }
}

/// Returns the destination of a guest's flow.
fn destination(guest: &Tuple) -> Option<Destination> {
    Some(Destination {
        addr: guest.remote.into(),
        port: guest.remote_port,
        protocol: Protocol::from_ip(guest.protocol)?,
    })
}

/// Returns the SYN's sequence number, or 0, of a packet that may open a flow; `None` for others.
fn opens(packet: &Packet<'_>) -> Option<u32> {
    match packet.transport {
        Transport::Tcp(tcp) => tcp.is_opening_syn().then_some(tcp.sequence),
        Transport::Udp(udp) => (udp.source != 0 && udp.destination != 0).then_some(0),
        Transport::Icmp(icmp) => (icmp.kind == ECHO_REQUEST).then_some(0),
        Transport::Other => None,
    }
}
