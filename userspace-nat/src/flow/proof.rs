//! Flows of the world that nobody has shown to be behind: which they are, how long they live, and that
//! the oldest makes room.
//!
//! # Theory of operation
//! Whoever can forge a source opens a flow by a forward with each packet. Such a flow is *unproven*
//! until its remote has shown that it gets what is sent to it: by TCP it acknowledges the guest's
//! SYN ([`slipgate_abi::handshake`]); by UDP, which has nothing of the kind, it sends again after
//! the guest has answered. It takes a real client one round trip.
//!
//! An unproven connection lives for [`FROM_WORLD_OPENING_NS`] from its SYN on, whatever is sent again
//! meanwhile; an unproven flow of UDP as long since it was last seen, unless the guest has answered.
//! When its VM has no room for another flow the oldest unproven one is ended at once, if it has had
//! [`ROUND_TRIP_NS`]. So a flood of forged packets shortens the time that a handshake may take, to the
//! world's share of the VM's flows divided by the packets a second, and harms nothing that is proven. A
//! client that was too slow is told by the host's RST, or comes in again with what it sends next.
//!
//! Each VM's flows from the world stand in a queue in the order in which they were opened. What has
//! ended or is proven by now stays in it until it comes to the front or the queue is twice as long as
//! needed, so that a flow costs the same however many there are.
use std::{collections::VecDeque, sync::atomic::Ordering::Relaxed};

use slipgate_abi::{Protocol, SlotRef, handshake, slot::SlotFlags, timeout::FROM_WORLD_OPENING_NS};

use super::{EndReason, Flows, end::last_seen_ns, table::FlowTable};
use crate::{clock::MILLISECOND_NS, datapath::Datapath};

/// How long an unproven flow is left alone: a handshake around the world. Otherwise, where most of a
/// VM's room is of proven flows, clients would push each other out before any is through.
const ROUND_TRIP_NS: u64 = 250 * MILLISECOND_NS;

/// How many flows the queue may have beside twice those that count.
const SLACK: usize = 64;

/// A VM's flows from the world, the oldest first: slot and generation.
#[derive(Clone, Debug, Default)]
pub(super) struct FromWorld {
    opened: VecDeque<(u32, u32)>,
}

impl Flows {
    /// Notes that a flow was opened, if by the world.
    pub(super) fn await_proof(&mut self, datapath: &impl Datapath, slot: u32) {
        let Some(entry) = self.entry(slot).filter(|entry| entry.from_world) else {
            return;
        };
        let (row, generation) = (entry.vm_row, entry.generation);
        let most = 2 * self.count_from_world(row) + SLACK;
        let mut queue = self.table.take_from_world(row);
        if queue.opened.len() >= most {
            let table = &self.table;
            let awaits = |of: &(u32, u32)| is_unproven(table, datapath, *of);
            queue.opened.retain(awaits);
        }
        queue.opened.push_back((slot, generation));
        self.table.put_from_world(row, queue);
    }

    /// The oldest flow that the world opened to a VM and that is unproven, and had time to be not.
    /// Whoever asks calls [`Flows::forget_proven`] then.
    pub fn oldest_unproven(&self, datapath: &impl Datapath, row: u16, now_ns: u64) -> Option<u32> {
        let mut opened = self.table.from_world(row)?.opened.iter();
        let oldest = opened.find(|of| is_unproven(&self.table, datapath, **of));
        let age_ns = |slot: u32| now_ns.saturating_sub(datapath.slot(slot).created_ns());
        let oldest = oldest.map(|(slot, _)| *slot);
        oldest.filter(|slot| age_ns(*slot) >= ROUND_TRIP_NS)
    }

    /// Takes what is proven or has ended from the front of a VM's queue: nobody passes it again.
    pub fn forget_proven(&mut self, datapath: &impl Datapath, row: u16) {
        let mut queue = self.table.take_from_world(row);
        let table = &self.table;
        let is_over = |of: &mut (u32, u32)| !is_unproven(table, datapath, *of);
        while queue.opened.pop_front_if(is_over).is_some() {}
        self.table.put_from_world(row, queue);
    }

    /// Ends an unproven flow for the sake of a new one.
    pub fn end_unproven(&mut self, datapath: &mut impl Datapath, slot: u32, now_ns: u64) {
        self.unlink(datapath, slot, EndReason::MadeRoom, now_ns);
    }
}

fn is_unproven(
    table: &FlowTable,
    datapath: &impl Datapath,
    (slot, generation): (u32, u32),
) -> bool {
    let entry = table
        .get(slot)
        .filter(|entry| entry.generation == generation && entry.state.is_linked());
    entry.is_some_and(|entry| !is_proven(datapath.slot(slot), entry.protocol()))
}

/// Whether the remote of a flow from the world has shown that it is there. Never taken back.
fn is_proven(live: SlotRef, protocol: Protocol) -> bool {
    match protocol {
        Protocol::Tcp => handshake::is_proven(live),
        Protocol::Udp => live.tx_packets().load(Relaxed) > 0 && live.rx_packets().load(Relaxed) > 1,
        Protocol::Icmp => true,
    }
}

/// How long a flow may still be unproven, ns; `None`: as long as it is not silent for too long.
pub(super) fn proof_left_ns(live: SlotRef, protocol: Protocol, now_ns: u64) -> Option<u64> {
    if live.flags() & SlotFlags::INBOUND == 0 || is_proven(live, protocol) {
        return None;
    }
    let since_ns = match protocol {
        Protocol::Udp if live.tx_packets().load(Relaxed) > 0 => return None,
        Protocol::Udp => last_seen_ns(live),
        _ => live.created_ns(),
    };
    Some(FROM_WORLD_OPENING_NS.saturating_sub(now_ns.saturating_sub(since_ns)))
}
