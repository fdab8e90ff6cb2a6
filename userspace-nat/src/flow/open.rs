//! Opens a flow: takes its slot and ports, and inserts its tuples.
#![expect(
    unsafe_code,
    reason = "fills a mapped slot in while nobody else reads it"
)]
use std::{
    net::IpAddr,
    sync::atomic::Ordering::{Acquire, Relaxed, Release},
};

use slipgate_abi::{
    Addresses6, Direction, FlowRef, IfIndex, Ip4, Protocol, RuleIndex, SlotIndex, Verdict, VmRow,
    portframe::Order,
    slot::{OrderState, SlotFlags},
};
use slipgate_model::FlowTuple;
use thiserror::Error;

use super::{Entry, Flows, end::delete, table::Marks};
use crate::{
    datapath::{Datapath, InsertError, Tables},
    nat_ports::Freed,
};

/// A flow to be opened, with all that was decided about it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NewFlow {
    /// Tuple of the flow on the guest's link.
    pub guest: FlowTuple,
    /// Row of the VM.
    pub vm_row: VmRow,
    /// Protocol of the flow, as in rules: ICMP in both families.
    pub protocol: Protocol,
    /// Translated address of the flow.
    pub nat: IpAddr,
    /// Translated port of the flow.
    pub nat_port: u16,
    /// Element of `RULES` that admitted the flow.
    pub rule: RuleIndex,
    /// Ifindex of the uplink.
    pub uplink_ifindex: IfIndex,
    /// Element of `NEXT_HOPS`, or 0.
    pub next_hop: u32,
    /// Sequence number of the opening SYN; 0 for other protocols.
    pub isn: u32,
    /// Whether the world opened the flow, through a forward.
    pub inbound: bool,
    /// Whether its peer is a guest of this engine, by its translated address: the engine carries the
    /// flow, which has no uplink.
    pub hairpin: bool,
    /// `Engine` when an inspect rule admitted the flow, and each packet comes to the engine until
    /// [`Flows::release`], and when it is a hairpin; otherwise `Fast`.
    pub verdict: Verdict,
    /// Who inserts the tuples.
    pub insertion: Insertion,
}

impl NewFlow {
    /// Whether an inspect rule admitted it.
    fn is_inspected(&self) -> bool {
        self.verdict == Verdict::Engine && !self.hairpin
    }
}

/// Who inserts a flow's tuples into `FLOWS`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Insertion {
    /// The engine, by system calls: the flow is open at once.
    Engine,
    /// The program at the port, with the flow's first packet: the flow is open once
    /// [`Flows::settle_order`] says so. Only for flows of a guest that are `Fast`.
    Ordered,
}

/// Reason why a flow was not opened. No state of it is left.
#[derive(Debug, Error)]
pub enum OpenError {
    /// No slot is left for this VM.
    #[error("no slot left for a flow of this VM")]
    NoSlot,
    /// Another flow has the tuple on the world's side; another port might be free.
    #[error("the translated tuple is taken")]
    WorldTaken,
    /// Another entry has the tuple on the guest's side.
    #[error("the guest's tuple is taken")]
    GuestTaken,
    /// The map `FLOWS` is full.
    #[error("the flow map is full")]
    MapFull,
    /// The kernel refused the insertion.
    #[error("insertion into the flow map failed")]
    Kernel(#[source] std::io::Error),
}

impl Flows {
    /// Opens a flow: on success its packets are translated from now on, unless its insertion is
    /// ordered. Returns its slot.
    ///
    /// # Errors
    /// When no slot is free, a tuple is taken, the map is full, or the kernel refuses.
    pub fn open(
        &mut self,
        datapath: &mut impl Datapath,
        flow: &NewFlow,
        now_ns: u64,
    ) -> Result<SlotIndex, OpenError> {
        let held = self.slots_of(flow.vm_row).len() + self.left_of(flow.vm_row);
        let share = (held, self.vms);
        let slot = self.slots.take(datapath, share, now_ns);
        let slot = slot.ok_or(OpenError::NoSlot)?;
        let is_ordered = flow.insertion == Insertion::Ordered;
        let generation = fill(datapath, slot, flow, now_ns);
        let marks = Marks::NONE
            .with(Marks::FROM_WORLD, flow.inbound)
            .with(Marks::HELD, flow.is_inspected())
            .with(Marks::HAIRPIN, flow.hairpin);
        let (nat, port, row) = (flow.nat, flow.nat_port, flow.vm_row);
        let entry = Entry::live(flow.guest, nat, port, row, generation, marks);
        if is_ordered {
            datapath
                .slot(slot)
                .order()
                .store(OrderState::GIVEN, Release);
            self.table.insert(slot, entry);
            self.mappings.joined(slot, &entry);
            self.ordered = Some(slot);
            return Ok(slot);
        }
        let reference = FlowRef::new(slot, generation);
        if let Err(error) = datapath.insert_noexist(&entry.world(), reference) {
            self.slots.put_back(slot);
            return Err(open_error(error, OpenError::WorldTaken));
        }
        if let Err(error) = datapath.insert_noexist(&entry.guest, reference) {
            // If even this fails, the entry points to a slot that is free: to programs a miss, and
            // swept at the next adoption.
            let _ = datapath.remove(&entry.world());
            self.slots.release(slot, now_ns);
            return Err(open_error(error, OpenError::GuestTaken));
        }
        datapath.slot(slot).set_verdict(entry.live_verdict());
        self.table.insert(slot, entry);
        self.mappings.joined(slot, &entry);
        self.await_proof(datapath, slot);
        Ok(SlotIndex::new(slot.get()))
    }

    /// Returns the flow whose insertion is ordered since the last call, with the order for the
    /// frame of its first packet.
    pub(crate) fn take_ordered(&mut self, tables: &impl Tables) -> Option<(SlotIndex, Order)> {
        let slot = self.ordered.take()?;
        let generation = tables.slot(slot).generation().load(Relaxed);
        Some((slot, Order::new(slot, generation)))
    }

    /// Whether a flow's insertion is ordered, and its first packet not yet written.
    pub(crate) fn is_ordered(&self, slot: SlotIndex) -> bool {
        self.ordered == Some(slot)
    }

    /// Returns whether the flow is open for which an order was written. If not, the order is
    /// withdrawn and the flow is gone, with all that it held. If the port accepted the frame and the program did
    /// not even run, no more orders are given: the kernel runs it after the write returns, on
    /// another CPU (RPS).
    pub(crate) fn settle_order(
        &mut self,
        datapath: &mut impl Datapath,
        slot: SlotIndex,
        is_accepted: bool,
        now_ns: u64,
    ) -> bool {
        let live = datapath.slot(slot);
        let order = live.order();
        let (given, failed) = (OrderState::GIVEN, OrderState::FAILED);
        // Mostly it is carried out, and a look is cheaper than the exchange.
        if order.load(Acquire) == given
            && order
                .compare_exchange(given, failed, Acquire, Acquire)
                .is_ok()
        {
            self.takes_orders &= !is_accepted;
        }
        // While it is taken, the program runs on another CPU, without being interrupted.
        while order.load(Acquire) == OrderState::TAKEN {
            std::hint::spin_loop();
        }
        // It is open as `Fast`, and may have got another verdict since.
        if live.verdict().load(Acquire) != Verdict::Free as u32 {
            return true;
        }
        order.store(OrderState::NONE, Relaxed);
        self.forget_unopened(slot, Freed::Taken, now_ns);
        false
    }

    /// Takes an order back whose frame was not written. The flow is gone.
    pub(crate) fn withdraw(&mut self, tables: &impl Tables, slot: SlotIndex, now_ns: u64) {
        self.ordered = None;
        tables.slot(slot).order().store(OrderState::NONE, Relaxed);
        self.forget_unopened(slot, Freed::Taken, now_ns);
    }

    /// Closes a flow of a guest that the engine has just opened and that no packet had: the host does not
    /// let it have its port. Nothing is recorded of it.
    pub(crate) fn take_back(
        &mut self,
        datapath: &mut impl Datapath,
        slot: SlotIndex,
        how: Freed,
        now_ns: u64,
    ) {
        let Some(entry) = self.entry(slot).copied() else {
            return;
        };
        if self.is_ordered(slot) {
            // Nothing is inserted yet, and the next frame must not carry its order.
            self.ordered = None;
            datapath.slot(slot).order().store(OrderState::NONE, Relaxed);
        } else {
            delete(datapath, &[entry.guest, entry.world()]);
            datapath.slot(slot).set_verdict(Verdict::Free);
        }
        self.forget_unopened(slot, how, now_ns);
    }

    /// Removes a flow that was not opened. Nothing is recorded of it.
    fn forget_unopened(&mut self, slot: SlotIndex, how: Freed, now_ns: u64) {
        let Some(entry) = self.entry(slot).copied() else {
            return;
        };
        // Where another process may have the tuple: not again before it would have ended.
        let (to, port) = (entry.destination(), entry.nat_port);
        self.ports.free(to, port, entry.vm(), how, now_ns);
        self.mappings.left(slot, &entry, now_ns);
        self.table.unlink(slot);
        self.table.remove(slot);
        self.slots.release(slot, now_ns);
    }
}

fn open_error(error: InsertError, taken: OpenError) -> OpenError {
    match error {
        InsertError::Exists => taken,
        InsertError::Full => OpenError::MapFull,
        InsertError::Os(error) => OpenError::Kernel(error),
    }
}

/// Fills a free slot. Returns its new generation.
fn fill(datapath: &impl Datapath, slot: SlotIndex, flow: &NewFlow, now_ns: u64) -> u32 {
    let live = datapath.slot(slot);
    // 0 is a slot that was never used.
    let generation = live.generation().load(Relaxed).wrapping_add(1).max(1);
    let mut flags = match flow.inbound {
        true => SlotFlags::INBOUND,
        false => 0,
    };
    if flow.is_inspected() {
        flags |= SlotFlags::INSPECTED;
    }
    if flow.hairpin {
        flags |= SlotFlags::HAIRPIN;
    }
    let mut addresses = [Ip4::UNSPECIFIED; 3];
    match (flow.guest.local, flow.guest.remote, flow.nat) {
        (IpAddr::V4(guest), IpAddr::V4(remote), IpAddr::V4(nat)) => {
            addresses = [guest, remote, nat].map(Ip4::from);
        }
        (IpAddr::V6(guest), IpAddr::V6(remote), IpAddr::V6(nat)) => {
            flags |= SlotFlags::IPV6;
            datapath.addresses6(slot).set(Addresses6 {
                guest: guest.into(),
                remote: remote.into(),
                nat: nat.into(),
                pad: [0; 16],
            });
        }
        _ => debug_assert!(false, "the flow's addresses are of two families"),
    }
    let [guest, remote, nat] = addresses;
    let protocol = match (flow.protocol, flow.guest.remote) {
        (Protocol::Icmp, IpAddr::V6(_)) => Protocol::Icmpv6,
        (protocol, _) => protocol,
    };
    let p = live.as_ptr();
    // SAFETY: `Tables::slot` gives a mapped element, of a chunk that is ours; it is free and has
    // rested, so nobody reads its second line.
    unsafe {
        (&raw mut (*p).vm).write(flow.guest.scope);
        (&raw mut (*p).vm_row).write(flow.vm_row.get());
        (&raw mut (*p).guest).write(guest);
        (&raw mut (*p).remote).write(remote);
        (&raw mut (*p).nat).write(nat);
        (&raw mut (*p).guest_port).write(flow.guest.local_port);
        (&raw mut (*p).remote_port).write(flow.guest.remote_port);
        (&raw mut (*p).nat_port).write(flow.nat_port);
        (&raw mut (*p).protocol).write(protocol);
        (&raw mut (*p).flags).write(flags);
        (&raw mut (*p).isn).write(flow.isn);
        (&raw mut (*p).created_ns).write(now_ns);
        (&raw mut (*p).rule).write(flow.rule.get());
        (&raw mut (*p).uplink_ifindex).write(flow.uplink_ifindex.get());
        (&raw mut (*p).owner).write(datapath.owner() as u16);
        (&raw mut (*p).epoch).write(datapath.epoch());
    }
    for word in [
        live.tcp(),
        live.fin_end(Direction::Tx),
        live.fin_end(Direction::Rx),
        live.connect_us(),
    ] {
        word.store(0, Relaxed);
    }
    live.next_hop().store(flow.next_hop, Relaxed);
    for counter in [
        live.tx_packets(),
        live.tx_bytes(),
        live.rx_packets(),
        live.rx_bytes(),
        live.tx_last_ns(),
        live.rx_last_ns(),
    ] {
        counter.store(0, Relaxed);
    }
    live.generation().store(generation, Release);
    generation
}
