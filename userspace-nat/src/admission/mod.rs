//! Admission: whether a packet that has no flow opens one.
//!
//! # Theory of operation
//! A guest's SYN, first datagram or echo request, or the world's first packet to a forward, comes
//! here as it was sent. In order: is it known already (a retransmission, a packet that was on its
//! way while the first was handled: sent on as it is); does it open a flow at all; do the rules
//! allow it; is the VM below its cap and rate; does a route lead there by an uplink; is a port
//! left; a slot; the kernel's two entries. Only then is the packet given back to the kernel, which
//! translates and counts it like all that follow.
//!
//! So admission is idempotent: what a repeated packet finds is the flow. A SYN with another
//! sequence number on a tuple in use is a new connection: the old flow is unlinked and recorded,
//! the new one decided on its own. So is any SYN on the tuple of a connection that was inspected and
//! that the kernel has.
//!
//! What is decided is a [`plan`], made without changing anything, and what is done about it a commit:
//! `slipgate why` prints a plan that nobody commits to. Rules come before quotas, so that what may
//! never be does not use up what may. What is refused after them was work all the same, and keeps its
//! token of the rate. What the world opens by a forward is in [`inbound`].
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

/// What becomes of a packet that came here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Admission {
    /// It belongs to this flow: back to the kernel with it.
    Flow {
        /// The flow's slot.
        slot: u32,
    },
    /// It belongs to this flow, which was cut.
    Cut {
        /// The flow's slot.
        slot: u32,
    },
    /// It opens no flow and belongs to none.
    NoFlow,
    /// It would open a flow that may not be.
    Refused(Refusal),
}

/// Who opens a flow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Opener {
    /// The guest.
    Guest,
    /// The world, by this tuple and number of its SYN.
    World((Tuple, u32)),
}

/// A refusal, and the element of `RULES` that it is due to.
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

    /// Decides about a guest's packet that no relayed connection has; `None`: it opens none, or is
    /// for no port that leads to the host's loopback.
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

    /// What becomes of a packet whose tuple a flow has; `None`: it may open another, and what was there
    /// is unlinked.
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

    /// Notes what is refused, for the records.
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

    /// Whether a packet is of the flow that has its tuple, and not of a new connection. The side that
    /// opened a flow may have opened another by the same name; a SYN of the peer on a flow of the
    /// guest's is a simultaneous open (RFC 5382 REQ-2), or its receiver's to challenge (RFC 5961). A SYN
    /// of the guest on a flow of the world's is a connection of the guest's own: that somebody has sent
    /// a packet in a remote's name to a forward does not mean that the guest may connect there.
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
            // A retransmission, unless the connection was inspected and let go: its opener has said and
            // heard more than that since, and what it opens by the same number nobody has looked at.
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

/// Where a guest's flow leads.
fn destination(guest: &Tuple) -> Option<Destination> {
    Some(Destination {
        addr: guest.remote.into(),
        port: guest.remote_port,
        protocol: Protocol::from_ip(guest.protocol)?,
    })
}

/// Whether a packet may open a flow; the SYN's sequence number, or 0.
fn opens(packet: &Packet<'_>) -> Option<u32> {
    match packet.transport {
        Transport::Tcp(tcp) => tcp.is_opening_syn().then_some(tcp.sequence),
        Transport::Udp(udp) => (udp.source != 0 && udp.destination != 0).then_some(0),
        Transport::Icmp(icmp) => (icmp.kind == ECHO_REQUEST).then_some(0),
        Transport::Other => None,
    }
}
