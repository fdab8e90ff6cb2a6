//! Where the engine counts: the mapped rows of `COUNTERS` and `DROPS`.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use slipgate_abi::{DropCounters, DropReason, Refusal, VmCounters, count, segment::Segments};

/// A VM's two rows. Cheap to copy.
#[derive(Clone, Copy, Debug)]
pub struct VmStats {
    counters: *mut VmCounters,
    drops: *mut DropCounters,
}

// SAFETY: the rows are changed by atomics only.
unsafe impl Send for VmStats {}
// SAFETY: as above.
unsafe impl Sync for VmStats {}

/// A single count of `COUNTERS`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tally {
    /// A frame lost between a program's redirect and the engine.
    LostAfterRedirect,
    /// A flow admitted.
    Admitted,
    /// A flow ended.
    Ended,
    /// A DNS question from the guest.
    DnsQuery,
    /// One of those answered from the cache.
    DnsCacheHit,
    /// One of those answered SERVFAIL for want of an upstream answer.
    DnsFailure,
    /// A DHCP message from the guest.
    DhcpMessage,
    /// An ARP request that the engine answered.
    ArpAnswer,
    /// An echo request to an address of ours answered.
    EchoAnswer,
    /// An RST or ICMP error sent for a refused flow.
    RefusalAnswered,
}

/// A packet-and-byte count of `COUNTERS`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Traffic {
    /// Over the port, from the guest.
    RxFromGuest,
    /// Over the port, from the world.
    RxFromWorld,
    /// The engine's own answers to the guest.
    TxToGuest,
    /// As-is emissions to the world.
    TxToWorld,
    /// Guest to world, of a flow that ended.
    EndedTx,
    /// World to guest, of a flow that ended.
    EndedRx,
}

impl VmStats {
    /// # Safety
    /// Both point to rows that stay mapped as long as the result is used, and that everybody
    /// changes by atomics only.
    pub const unsafe fn new(counters: *mut VmCounters, drops: *mut DropCounters) -> Self {
        Self { counters, drops }
    }

    /// Counts a dropped packet.
    pub fn dropped(&self, reason: DropReason, segments: Segments) {
        // SAFETY: `new`'s promise.
        unsafe { count::drop_packet(self.drops, reason, segments.packets, segments.bytes) }
    }

    /// Counts something that happened.
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
                Tally::EchoAnswer => &raw mut (*c).echo_answers,
                Tally::RefusalAnswered => &raw mut (*c).refusals_answered,
            }
        };
        // SAFETY: as above; the field has the atomic's size and alignment.
        unsafe { AtomicU64::from_ptr(field) }.fetch_add(by, Relaxed);
    }

    /// Counts packets and bytes.
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

    /// Counts a refused flow.
    pub fn refused(&self, reason: Refusal) {
        // SAFETY: `new`'s promise; `RefusalCounters` is an array of u64 in the enum's order.
        unsafe {
            let first = (&raw mut (*self.counters).refused).cast::<u64>();
            AtomicU64::from_ptr(first.add(reason as usize)).fetch_add(1, Relaxed);
        }
    }

    /// The rows' present values, for tests and reports. Single words, not one instant.
    pub fn snapshot(&self) -> (VmCounters, DropCounters) {
        // SAFETY: `new`'s promise; the types are plain words.
        unsafe { (self.counters.read_volatile(), self.drops.read_volatile()) }
    }
}
