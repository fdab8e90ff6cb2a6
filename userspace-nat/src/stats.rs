//! Counters that the engine updates: the mapped rows of `COUNTERS` and `DROPS`.
#![expect(
    unsafe_code,
    reason = "counts in mapped rows that the kernel's programs and other processes change too"
)]

use std::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

use slipgate_abi::{
    Counter, Direction, DropCounters, DropReason, EndedBefore, Refusal, RuleIndex, RuleRefusals,
    SlotIndex, VmCounters,
    activity::LastPackets,
    count::{self, COUNTED_RULES},
    segment::Segments,
};

/// A VM's rows of `COUNTERS` and `DROPS`. Cheap to copy.
#[derive(Clone, Copy, Debug)]
pub struct VmStats {
    counters: *mut VmCounters,
    drops: *mut DropCounters,
}

// SAFETY: the rows are changed by atomics only.
unsafe impl Send for VmStats {}
// SAFETY: as above.
unsafe impl Sync for VmStats {}

/// A counter of events in `COUNTERS`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tally {
    /// A frame lost between a program's redirect and the engine.
    LostAfterRedirect,
    /// A flow that was admitted.
    Admitted,
    /// A flow that ended.
    Ended,
    /// A DNS question from the guest.
    DnsQuery,
    /// A DNS question that was answered from the cache.
    DnsCacheHit,
    /// A DNS question that was answered SERVFAIL for lack of an upstream answer.
    DnsFailure,
    /// A DHCP message from the guest.
    DhcpMessage,
    /// An ARP request that the engine answered.
    ArpAnswer,
    /// A neighbour solicitation that the engine answered.
    NdpAnswer,
    /// A router advertisement to the guest.
    RouterAdvertisement,
    /// An echo request to an address of the engine that was answered.
    EchoAnswer,
    /// An RST or ICMP error sent for a refused flow.
    RefusalAnswered,
    /// A record that the flow log did not write.
    RecordLost,
    /// A packet for which `--pcap` or a capture had no room.
    PcapLost,
}

/// A counter of packets and bytes in `COUNTERS`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Traffic {
    /// Read from the port, sent by the guest.
    RxFromGuest,
    /// Read from the port, received from the world.
    RxFromWorld,
    /// Answers of the engine to the guest.
    TxToGuest,
    /// Packets that the engine sent to the world unchanged.
    TxToWorld,
    /// Guest-to-world traffic of ended flows.
    EndedTx,
    /// World-to-guest traffic of ended flows.
    EndedRx,
}

impl VmStats {
    /// Creates the counters from a VM's two rows.
    ///
    /// # Safety
    /// Both pointers are to rows that stay mapped as long as the result is used, and that are
    /// changed by atomic operations only.
    pub const unsafe fn new(counters: *mut VmCounters, drops: *mut DropCounters) -> Self {
        Self { counters, drops }
    }

    /// Counts a dropped packet.
    pub fn dropped(&self, reason: DropReason, segments: Segments) {
        // SAFETY: `new`'s promise.
        unsafe { count::drop_packet(self.drops, reason, segments.packets, segments.bytes) }
    }

    /// Adds `by` to a counter of events.
    pub fn tally(&self, what: Tally, by: u64) {
        let c = self.counters;
        // SAFETY: `new`'s promise; field addresses only.
        let field = unsafe {
            match what {
                Tally::LostAfterRedirect => &raw mut (*c).lost_after_redirect,
                Tally::Admitted => &raw mut (*c).admitted,
                Tally::Ended => &raw mut (*c).ended,
                Tally::DnsQuery => &raw mut (*c).dns_queries,
                Tally::DnsCacheHit => &raw mut (*c).dns_cache_hits,
                Tally::DnsFailure => &raw mut (*c).dns_failures,
                Tally::DhcpMessage => &raw mut (*c).dhcp_messages,
                Tally::ArpAnswer => &raw mut (*c).arp_answers,
                Tally::NdpAnswer => &raw mut (*c).ndp_answers,
                Tally::RouterAdvertisement => &raw mut (*c).router_advertisements,
                Tally::EchoAnswer => &raw mut (*c).echo_answers,
                Tally::RefusalAnswered => &raw mut (*c).refusals_answered,
                Tally::RecordLost => &raw mut (*c).records_lost,
                Tally::PcapLost => &raw mut (*c).pcap_lost,
            }
        };
        // SAFETY: as above; the field has the atomic's size and alignment.
        unsafe { AtomicU64::from_ptr(field) }.fetch_add(by, Relaxed);
    }

    /// Adds packets and bytes to a counter of traffic.
    pub fn traffic(&self, what: Traffic, packets: u64, bytes: u64) {
        let c = self.counters;
        // SAFETY: `new`'s promise.
        unsafe {
            let counter = match what {
                Traffic::RxFromGuest => &raw mut (*c).engine_rx_from_guest,
                Traffic::RxFromWorld => &raw mut (*c).engine_rx_from_world,
                Traffic::TxToGuest => &raw mut (*c).engine_tx_to_guest,
                Traffic::TxToWorld => &raw mut (*c).engine_tx_to_world,
                Traffic::EndedTx => &raw mut (*c).ended_tx,
                Traffic::EndedRx => &raw mut (*c).ended_rx,
            };
            count::add(counter, packets, bytes);
        }
    }

    /// Notes a packet that counts as the VM's activity, and that is not a live flow's. `now_ns`:
    /// `CLOCK_MONOTONIC`.
    pub fn saw(&self, direction: Direction, now_ns: u64) {
        let last = match direction {
            Direction::Tx => LastPackets {
                from_guest_ns: now_ns,
                to_guest_ns: 0,
            },
            Direction::Rx => LastPackets {
                from_guest_ns: 0,
                to_guest_ns: now_ns,
            },
        };
        self.saw_until(last);
    }

    /// Notes times of packets that count as the VM's activity. Earlier ones change nothing.
    pub fn saw_until(&self, last: LastPackets) {
        let [from_guest, to_guest] = self.last();
        from_guest.fetch_max(last.from_guest_ns, Relaxed);
        to_guest.fetch_max(last.to_guest_ns, Relaxed);
    }

    /// Times of the last packets that count as the VM's activity, as far as they were noted: those
    /// of live flows may be later.
    pub fn last_packets(&self) -> LastPackets {
        let [from_guest_ns, to_guest_ns] = self.last().map(|last| last.load(Relaxed));
        LastPackets {
            from_guest_ns,
            to_guest_ns,
        }
    }

    fn last(&self) -> [&AtomicU64; 2] {
        let c = self.counters;
        // SAFETY: `new`'s promise; the fields have the atomic's size and alignment.
        unsafe {
            [
                AtomicU64::from_ptr(&raw mut (*c).last_from_guest_ns),
                AtomicU64::from_ptr(&raw mut (*c).last_to_guest_ns),
            ]
        }
    }

    /// Counts a refused flow.
    pub fn refused(&self, reason: Refusal) {
        // SAFETY: `new`'s promise; `RefusalCounters` is an array of u64 in the enum's order.
        unsafe {
            let first = (&raw mut (*self.counters).refused).cast::<u64>();
            AtomicU64::from_ptr(first.add(reason as usize)).fetch_add(1, Relaxed);
        }
    }

    /// Counts a flow that this element of `RULES` refused. Only the row's owner calls this.
    pub fn refused_by(&self, rule: RuleIndex) {
        let named = rule.get().saturating_add(1);
        // SAFETY: `new`'s promise; elements of an array of the row, changed by atomics.
        unsafe {
            let first = (&raw mut (*self.counters).refused_by_rule).cast::<RuleRefusals>();
            let places = || (0..COUNTED_RULES).map(|place| first.add(place));
            let of = |place: *mut RuleRefusals| AtomicU32::from_ptr(&raw mut (*place).rule);
            // An earlier place may have become free since this rule was given its own.
            let its = places().find(|place| of(*place).load(Relaxed) == named);
            let place = its.or_else(|| places().find(|place| of(*place).load(Relaxed) == 0));
            if let Some(place) = place {
                of(place).store(named, Release);
                AtomicU64::from_ptr(&raw mut (*place).flows).fetch_add(1, Relaxed);
                return;
            }
            let other = &raw mut (*self.counters).refused_by_other_rules;
            AtomicU64::from_ptr(other).fetch_add(1, Relaxed);
        }
    }

    /// Adds the counts of a flow that ends, and counts the flow as ended. If the process dies
    /// before the flow's slot is free, [`VmStats::take_back_ended`] undoes this.
    pub fn ended(&self, slot: SlotIndex, generation: u32, tx: Counter, rx: Counter) {
        let c = self.counters;
        // SAFETY: `new`'s promise; only the row's owner changes these, so a copy is as good as an
        // atomic load, and the stores are in this order.
        unsafe {
            let before = &raw mut (*c).ended_before;
            let of = AtomicU32::from_ptr(&raw mut (*before).slot);
            of.store(0, Release);
            std::sync::atomic::fence(Release);
            (&raw mut (*before).generation).write_volatile(generation);
            (&raw mut (*before).tx).write_volatile((&raw const (*c).ended_tx).read_volatile());
            (&raw mut (*before).rx).write_volatile((&raw const (*c).ended_rx).read_volatile());
            (&raw mut (*before).ended).write_volatile((&raw const (*c).ended).read_volatile());
            of.store(slot.get().saturating_add(1), Release);
            std::sync::atomic::fence(Release);
        }
        self.traffic(Traffic::EndedTx, tx.packets, tx.bytes);
        self.traffic(Traffic::EndedRx, rx.packets, rx.bytes);
        self.tally(Tally::Ended, 1);
    }

    /// Undoes what a dead owner had begun to add for a flow whose slot is not free.
    pub fn take_back_ended(&self, slot: SlotIndex, generation: u32) {
        let c = self.counters;
        // SAFETY: as above; the process that wrote it is dead.
        unsafe {
            let before: *mut EndedBefore = &raw mut (*c).ended_before;
            let of = AtomicU32::from_ptr(&raw mut (*before).slot);
            let same = (&raw const (*before).generation).read_volatile() == generation;
            if of.load(Acquire) != slot.get().saturating_add(1) || !same {
                return;
            }
            (&raw mut (*c).ended_tx).write_volatile((&raw const (*before).tx).read_volatile());
            (&raw mut (*c).ended_rx).write_volatile((&raw const (*before).rx).read_volatile());
            (&raw mut (*c).ended).write_volatile((&raw const (*before).ended).read_volatile());
            of.store(0, Release);
        }
    }

    /// Returns the rows' present values, for tests and reports. They are read word by word, not at
    /// one instant.
    pub fn snapshot(&self) -> (VmCounters, DropCounters) {
        // SAFETY: `new`'s promise; the types are plain words.
        unsafe { (self.counters.read_volatile(), self.drops.read_volatile()) }
    }
}

#[cfg(test)]
#[path = "stats_test.rs"]
mod tests;
