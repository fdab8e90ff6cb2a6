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
//! why` prints a plan without committing it. Rules come before quotas, so that denied flows do not
//! use up the quota. A flow that is refused after them still uses up its token of the rate, because
//! it caused work. Flows that the world opens are in [`inbound`], those to translated addresses of this
//! host in [`hairpin`].
mod commit;
pub(crate) mod hairpin;
pub(crate) mod inbound;
mod mapped;
pub(crate) mod plan;
pub(crate) mod rejudge;
pub(crate) mod room;

use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{
    Direction, Refusal, SlotIndex,
    slot::SlotFlags,
    tcp::{Phase, TcpBits},
};

use self::{
    commit::{commit_outbound, commit_to_loopback, has_timestamps},
    plan::Planner,
};
use crate::{
    datapath::Datapath,
    flow::EndReason,
    inspection::sessions::Inspected,
    packet::{Packet, Transport},
    relay::Opening,
    state::{Forwards, Journal, Nat, Rules, VmState},
};
use slipgate_model::FlowTuple;
use slipgate_policy::Destination;

/// Result of admission for a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Admission {
    /// The packet belongs to this flow: it goes back to the kernel.
    Flow {
        /// Index of the flow's slot.
        slot: SlotIndex,
    },
    /// The packet belongs to this flow, which was cut.
    Cut {
        /// Index of the flow's slot.
        slot: SlotIndex,
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
    World((FlowTuple, u32)),
}

/// First packet of a flow that may be opened.
struct FirstPacket<'a> {
    packet: &'a Packet<'a>,
    /// Tuple of the flow on the guest's link.
    tuple: FlowTuple,
    /// Sequence number of a SYN; 0 for other packets.
    isn: u32,
}

/// Decides about a packet of a guest.
pub(crate) fn admit_outbound<D: Datapath>(
    nat: &mut Nat<D>,
    (rules, forwards): (&mut Rules, &Forwards),
    inspected: &mut Inspected,
    journal: &mut Journal,
    vm: &mut VmState,
    packet: &Packet<'_>,
    now_ns: u64,
) -> Admission {
    let Some(tuple) = packet.tuple(vm.net.id.get(), Direction::Tx) else {
        return Admission::NoFlow;
    };
    let known = nat.flows.by_guest(&tuple);
    if let Some(admission) = admit_known(nat, rules, known, packet, Direction::Tx, now_ns) {
        return admission;
    }
    let (Some(isn), Some(to)) = (opens(packet), destination(&tuple)) else {
        return Admission::NoFlow;
    };
    let planner = Planner::new(nat, (rules, forwards), inspected, now_ns);
    let plan = planner.outbound(vm, to, has_timestamps(packet), Some(&tuple));
    let first = FirstPacket { packet, tuple, isn };
    match commit_outbound(nat, rules, inspected, vm, plan, &first, now_ns) {
        Ok(slot) => {
            // An ordered one starts once it is open.
            if !nat.flows.is_ordered(slot) {
                journal.flow_started(slot);
            }
            Admission::Flow { slot }
        }
        Err(refused) => {
            journal.flow_refused(&tuple, refused, now_ns);
            Admission::Refused(refused.reason)
        }
    }
}

/// Decides about a guest's packet to a port that leads to the host's loopback and that no relayed
/// connection has. The [relay](crate::relay) carries the connection then. Returns `None` when the
/// packet opens no connection or its port does not lead there.
pub(crate) fn admit_to_loopback<D: Datapath>(
    nat: &mut Nat<D>,
    (rules, forwards): (&Rules, &Forwards),
    inspected: &mut Inspected,
    journal: &mut Journal,
    vm: &mut VmState,
    packet: &Packet<'_>,
    now_ns: u64,
) -> Option<Result<Opening, Refusal>> {
    let tuple = packet.tuple(vm.net.id.get(), Direction::Tx)?;
    opens(packet)?;
    let to = destination(&tuple)?;
    let planner = Planner::new(nat, (rules, forwards), inspected, now_ns);
    let plan = planner.to_loopback(vm, to)?;
    let opening = commit_to_loopback(nat, inspected, vm, plan, to.protocol, now_ns);
    Some(opening.map_err(|refused| {
        journal.flow_refused(&tuple, refused, now_ns);
        refused.reason
    }))
}

/// Decides about a packet whose tuple a flow has. Returns `None` when it may open another flow; the
/// former one is unlinked then.
fn admit_known<D: Datapath>(
    nat: &mut Nat<D>,
    rules: &Rules,
    known: Option<SlotIndex>,
    packet: &Packet<'_>,
    from: Direction,
    now_ns: u64,
) -> Option<Admission> {
    let slot = known?;
    if belongs(nat, rules, slot, packet, from) {
        if nat.flows.revive(&mut nat.datapath, slot) {
            return Some(Admission::Flow { slot });
        }
        if nat.flows.is_cut(slot) {
            return Some(Admission::Cut { slot });
        }
    }
    let reason = EndReason::TupleReused;
    nat.flows.unlink(&mut nat.datapath, slot, reason, now_ns);
    None
}

/// Whether a packet belongs to the flow that has its tuple, and not to a new connection. The side
/// that opened a flow may have opened another with the same tuple. A SYN of the peer on a guest's
/// flow is a simultaneous open (RFC 5382 REQ-2), or its receiver's to challenge (RFC 5961). A SYN
/// of the guest on a flow from the world is a connection of the guest's own: a packet sent to a
/// forward, perhaps with a forged source, does not allow the guest to connect there.
fn belongs<D: Datapath>(
    nat: &Nat<D>,
    rules: &Rules,
    slot: SlotIndex,
    packet: &Packet<'_>,
    from: Direction,
) -> bool {
    let Transport::Tcp(tcp) = packet.transport else {
        return true;
    };
    if !tcp.is_opening_syn() {
        return true;
    }
    let live = nat.datapath.slot(slot);
    let again = live.isn() == tcp.sequence;
    let is_held = || nat.flows.entry(slot).is_some_and(|entry| entry.is_held());
    match (from, live.flags() & SlotFlags::INBOUND != 0) {
        // A retransmission, unless the connection was inspected and released to the kernel: its
        // opener has sent and received more since, and what it opens with the same number was not
        // inspected.
        (Direction::Tx, false) => again && (is_held() || !rules.has_inspect_rule(live)),
        (Direction::Tx, true) => false,
        // Anybody can send a SYN in the peer's name: it does not end a connection that lives.
        (Direction::Rx, true) => {
            again || TcpBits(live.tcp().load(Relaxed)).phase() == Phase::Established
        }
        (Direction::Rx, false) => true,
    }
}

/// Returns the destination of a guest's flow.
fn destination(guest: &FlowTuple) -> Option<Destination> {
    Some(Destination {
        addr: guest.remote,
        port: guest.remote_port,
        protocol: guest.protocol()?,
    })
}

/// Returns the SYN's sequence number, or 0, of a packet that may open a flow; `None` for others.
fn opens(packet: &Packet<'_>) -> Option<u32> {
    match packet.transport {
        Transport::Tcp(tcp) => tcp.is_opening_syn().then_some(tcp.sequence),
        Transport::Udp(udp) => (udp.source != 0 && udp.destination != 0).then_some(0),
        Transport::Icmp(icmp) => icmp.is_echo_request().then_some(0),
        Transport::Other => None,
    }
}
