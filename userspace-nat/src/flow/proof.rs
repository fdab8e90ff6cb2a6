//! Flows from the world whose remote has not been proven to exist: how they are recognized, how
//! long they live, and that the oldest makes room.
//!
//! # Theory of operation
//! A sender of forged sources opens a flow through a forward with each packet. Such a flow is
//! *unproven* until its remote has shown that it receives what is sent to it. By TCP it
//! acknowledges the guest's SYN ([`slipgate_abi::handshake`]). UDP has no handshake: the remote
//! sends again after the guest has answered. A real client needs one round trip for it.
//!
//! An unproven connection lives for [`FROM_WORLD_OPENING_NS`] from its SYN on, whatever is
//! retransmitted meanwhile; an unproven flow of UDP as long from its last packet on, unless the
//! guest has answered. When its VM has no room for another flow the oldest unproven one is ended at
//! once, if it has had [`ROUND_TRIP_NS`]. So a flood of forged packets shortens the time for a
//! handshake to the world's share of the VM's flows divided by the packets a second, and harms no
//! proven flow. A client that was too slow receives the host's RST, or opens a flow again with its
//! next packet.
//!
//! Each VM's flows from the world are in a queue in the order in which they were opened. Flows that
//! have ended or are proven stay in it until they reach the front or the queue is twice as long as
//! needed, so that the cost of a flow does not depend on their number.
use std::{collections::VecDeque, sync::atomic::Ordering::Relaxed};

use slipgate_abi::{
    Protocol, SlotIndex, SlotRef, VmRow, handshake, slot::SlotFlags, timeout::FROM_WORLD_OPENING_NS,
};

use super::{EndReason, Flows, end::last_seen_ns, table::FlowTable};
use crate::{clock::MILLISECOND_NS, datapath::Datapath};

/// Time for which an unproven flow is left alone, ns: a handshake around the world. Otherwise, when
/// proven flows take most of a VM's room, clients would displace each other before any is proven.
const ROUND_TRIP_NS: u64 = 250 * MILLISECOND_NS;

/// Flows that the queue may hold beside twice those that count.
const SLACK: usize = 64;

/// A VM's flows from the world, oldest first: slot and generation.
#[derive(Clone, Debug, Default)]
pub(super) struct FromWorld {
    opened: VecDeque<(SlotIndex, u32)>,
}

impl Flows {
    /// Adds a flow to its VM's queue if the world opened it.
    pub(super) fn await_proof(&mut self, datapath: &impl Datapath, slot: SlotIndex) {
        let Some(entry) = self.entry(slot).filter(|entry| entry.is_from_world()) else {
            return;
        };
        let (row, generation) = (entry.vm_row, entry.generation);
        let most = 2 * self.count_from_world(row) + SLACK;
        let mut queue = self.table.take_from_world(row);
        if queue.opened.len() >= most {
            let table = &self.table;
            let awaits = |of: &(SlotIndex, u32)| is_unproven(table, datapath, *of);
            queue.opened.retain(awaits);
        }
        queue.opened.push_back((slot, generation));
        self.table.put_from_world(row, queue);
    }

    /// Returns the oldest unproven flow that the world opened to a VM, if it has had
    /// `ROUND_TRIP_NS`. The caller then calls [`Flows::forget_proven`].
    pub fn oldest_unproven(
        &self,
        datapath: &impl Datapath,
        row: VmRow,
        now_ns: u64,
    ) -> Option<SlotIndex> {
        let mut opened = self.table.awaiting_proof(row)?.opened.iter();
        let oldest = opened.find(|of| is_unproven(&self.table, datapath, **of));
        let age_ns = |slot: SlotIndex| now_ns.saturating_sub(datapath.slot(slot).created_ns());
        let oldest = oldest.map(|(slot, _)| *slot);
        oldest.filter(|slot| age_ns(*slot) >= ROUND_TRIP_NS)
    }

    /// Removes proven and ended flows from the front of a VM's queue, so that they are not examined
    /// again.
    pub fn forget_proven(&mut self, datapath: &impl Datapath, row: VmRow) {
        let mut queue = self.table.take_from_world(row);
        let table = &self.table;
        let is_over = |of: &mut (SlotIndex, u32)| !is_unproven(table, datapath, *of);
        while queue.opened.pop_front_if(is_over).is_some() {}
        self.table.put_from_world(row, queue);
    }

    /// Ends an unproven flow to make room for a new one.
    pub fn end_unproven(&mut self, datapath: &mut impl Datapath, slot: SlotIndex, now_ns: u64) {
        self.unlink(datapath, slot, EndReason::MadeRoom, now_ns);
    }
}

fn is_unproven(
    table: &FlowTable,
    datapath: &impl Datapath,
    (slot, generation): (SlotIndex, u32),
) -> bool {
    let entry = table
        .get(slot)
        .filter(|entry| entry.generation == generation && entry.state.is_linked());
    entry.is_some_and(|entry| !is_proven(datapath.slot(slot), entry.protocol()))
}

/// Whether the remote of a flow from the world has proven that it exists. This is never revoked.
fn is_proven(live: SlotRef, protocol: Protocol) -> bool {
    match protocol {
        Protocol::Tcp => handshake::is_proven(live),
        Protocol::Udp => live.tx_packets().load(Relaxed) > 0 && live.rx_packets().load(Relaxed) > 1,
        Protocol::Icmp | Protocol::Icmpv6 => true,
    }
}

/// Returns how long a flow may still be unproven, ns; `None` when only its idle timeout applies.
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
