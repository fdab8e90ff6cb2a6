//! Which flows give way when their place is wanted: a port toward their destination, their part of
//! their VM's cap, or their slot.
//!
//! # Theory of operation
//! While there is room every flow lives as long as its RFC says. When there is none, somebody is
//! refused unless another flow goes, and a flow may only go if nothing that lives is harmed by it:
//!
//! | standing | what is so | has been silent for | gives way to |
//! | --- | --- | --- | --- |
//! | `Over` | TCP: each side has all that the other sent, and acknowledged its FIN | [`COPIES_NS`] | anybody |
//! | | TCP: a RST, and not both sides have sent a SYN: there never was a connection | [`REFUSED_NS`] | anybody |
//! | `Unanswered` | TCP: a SYN, and nothing came back; the next SYN opens another flow | [`UNANSWERED_SYN_NS`] | its VM |
//! | | others: nothing ever came back; what the guest sends next opens another flow | [`UNANSWERED_NS`] | its VM |
//! | `Reset` | TCP: a RST, and no other segment since | [`RESET_NS`] | its VM |
//! | `JustOver` | as `Over`, but a copy of the last FIN may still come | | anybody |
//! | `Silent` | one packet of the guest's, answered | [`UNANSWERED_NS`] | its VM |
//! | | UDP: at least as long as any mapping must live (RFC 4787 REQ-5) | [`UDP_LEAST_NS`] | its VM |
//!
//! The order is that of the table, and the one that was silent longest is the first of its kind. Of
//! what the world opened only what is over or was reset gives way (what nobody has shown to be behind
//! is [`super::proof`]'s). A RST is believed only by silence, because
//! anybody can forge one: a connection that lives says something, or was idle, and then only its
//! own VM can have wanted its place.
//!
//! To find them, some flows are looked at ([`LOOK_BUDGET`]), not all; the next search goes on where
//! the last one stopped.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{
    Protocol, SlotRef,
    tcp::{Phase, TcpBits},
};

use super::{EndReason, Entry, Flows, State, end::last_seen_ns};
use crate::{
    clock::{MILLISECOND_NS, SECOND_NS},
    datapath::Datapath,
    nat_ports::Destination,
};

/// Above the least retransmission timeout of Linux (200 ms).
pub(super) const COPIES_NS: u64 = 300 * MILLISECOND_NS;
/// Above the time to the server and back: an answer to the SYN shows that the RST was forged.
const REFUSED_NS: u64 = SECOND_NS;
/// A SYN is answered sooner, or was sent again meanwhile.
const UNANSWERED_SYN_NS: u64 = 10 * SECOND_NS;
/// As Linux's own NAT has it (`nf_conntrack_udp_timeout`).
const UNANSWERED_NS: u64 = 30 * SECOND_NS;
/// Whoever has data under way sends it again sooner.
const RESET_NS: u64 = 10 * SECOND_NS;
/// RFC 4787 REQ-5.
const UDP_LEAST_NS: u64 = 120 * SECOND_NS;

/// Flows looked at for one that gives way.
const LOOK_BUDGET: usize = 256;
/// Of those that are over so many end at once, so that the next need not look.
const MOST_AT_ONCE: usize = 32;

/// How little a flow that gives way has to lose, the least first. See the module's table.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Standing {
    Over,
    Unanswered,
    Reset,
    JustOver,
    Silent,
}

impl Standing {
    /// Where a flow stands; `None` where it gives way to nobody.
    pub(super) fn of(live: SlotRef, entry: &Entry, now_ns: u64) -> Option<Self> {
        let silent_ns = now_ns.saturating_sub(last_seen_ns(live));
        let after = |least_ns, standing| (silent_ns >= least_ns).then_some(standing);
        let protocol = entry.protocol();
        let bits = TcpBits(live.tcp().load(Relaxed));
        if protocol == Protocol::Tcp && bits.phase() == Phase::Closed {
            return after(COPIES_NS, Self::Over).or(Some(Self::JustOver));
        }
        if entry.from_world {
            let was_reset = protocol == Protocol::Tcp && bits.phase() == Phase::Reset;
            return was_reset.then(|| after(RESET_NS, Self::Reset)).flatten();
        }
        let is_answered = live.rx_packets().load(Relaxed) > 0;
        if protocol != Protocol::Tcp {
            return if !is_answered {
                after(UNANSWERED_NS, Self::Unanswered)
            } else if live.tx_packets().load(Relaxed) == 1 {
                after(UNANSWERED_NS, Self::Silent)
            } else {
                after(UDP_LEAST_NS, Self::Silent)
            };
        }
        match bits.phase() {
            Phase::Reset if has_both_syns(bits) => after(RESET_NS, Self::Reset),
            Phase::Reset => after(REFUSED_NS, Self::Over),
            Phase::Opening if !is_answered => after(UNANSWERED_SYN_NS, Self::Unanswered),
            _ => None,
        }
    }

    /// Whether other VMs may have its place too.
    const fn gives_way_to_all(self) -> bool {
        matches!(self, Self::Over | Self::JustOver)
    }

    /// What the record of one that gave way says.
    const fn reason(self, phase: Phase) -> EndReason {
        match (self, phase) {
            (Self::Over | Self::Reset, Phase::Reset) => EndReason::Reset,
            (Self::Over | Self::JustOver | Self::Reset, _) => EndReason::Closed,
            (Self::Unanswered | Self::Silent, _) => EndReason::Idle,
        }
    }
}

/// Whether each side has sent a SYN: there may have been a connection.
pub(super) const fn has_both_syns(bits: TcpBits) -> bool {
    const SYNS: u32 = TcpBits::SYN_TX | TcpBits::SYN_RX;
    bits.0 & SYNS == SYNS
}

impl Flows {
    /// Makes room among a VM's flows, of which it has as many as it may or can; `from_world`: among those
    /// that the world opened.
    pub fn make_room(
        &mut self,
        datapath: &mut impl Datapath,
        row: u16,
        from_world: bool,
        now_ns: u64,
    ) {
        let looks = self.slots_of(row).len().min(LOOK_BUDGET);
        let mut slots: Vec<u32> = (0..looks).filter_map(|_| self.table.next_of(row)).collect();
        slots.retain(|slot| !from_world || self.entry(*slot).is_some_and(|e| e.from_world));
        let Some(vm) = slots.first().and_then(|slot| self.entry(*slot)) else {
            return;
        };
        self.have_give_way(datapath, &slots, vm.guest.scope, now_ns);
    }

    /// Whether there is a flow of a VM's that would give way.
    pub fn could_make_room(&self, datapath: &impl Datapath, row: u16, now_ns: u64) -> bool {
        self.slots_of(row)
            .iter()
            .any(|slot| self.standing(datapath, *slot, now_ns).is_some())
    }

    /// Makes room among the ports toward a destination, of which there is none left for a VM. The
    /// port of a flow of its own, which is its again.
    pub fn reclaim_port(
        &mut self,
        datapath: &mut impl Datapath,
        to: Destination,
        vm: u32,
        now_ns: u64,
    ) -> Option<u16> {
        let ports = self.ports.next_ports(&to, LOOK_BUDGET);
        let slots: Vec<u32> = ports
            .filter_map(|port| self.by_world(&to.world(port)))
            .collect();
        let ended = self.have_give_way(datapath, &slots, vm, now_ns);
        // One for another of its own: nobody's share changes.
        let mut own = ended.iter().filter(|entry| entry.guest.scope == vm);
        own.find_map(|entry| {
            let is_ours = self.ports.take(to, entry.nat_port, vm);
            is_ours.then_some(entry.nat_port)
        })
    }

    /// Ends those of these flows that are over, or else the one that may best give way to a VM.
    fn have_give_way(
        &mut self,
        datapath: &mut impl Datapath,
        slots: &[u32],
        vm: u32,
        now_ns: u64,
    ) -> Vec<Entry> {
        let mut ended = Vec::new();
        let mut best: Option<(Standing, u64, u32)> = None;
        for slot in slots.iter().copied() {
            let Some(standing) = self.standing(datapath, slot, now_ns) else {
                continue;
            };
            let of_vm = self.entry(slot).is_some_and(|e| e.guest.scope == vm);
            if !of_vm && !standing.gives_way_to_all() {
                continue;
            }
            if standing == Standing::Over {
                ended.extend(self.end_for_room(datapath, slot, standing, now_ns));
                if ended.len() >= MOST_AT_ONCE {
                    break;
                }
            } else {
                let this = (standing, last_seen_ns(datapath.slot(slot)), slot);
                best = Some(best.map_or(this, |best| best.min(this)));
            }
        }
        if let Some((standing, _, slot)) = best.filter(|_| ended.is_empty()) {
            ended.extend(self.end_for_room(datapath, slot, standing, now_ns));
        }
        ended
    }

    fn standing(&self, datapath: &impl Datapath, slot: u32, now_ns: u64) -> Option<Standing> {
        let entry = self.entry(slot)?;
        let has_place = match entry.state {
            State::Live => true,
            // What is cut is answered to the end of its grace.
            State::Ending => !entry.end_reason.is_cut(),
            State::Unlinked | State::Finished => false,
        };
        let standing = || Standing::of(datapath.slot(slot), entry, now_ns);
        has_place.then(standing).flatten()
    }

    fn end_for_room(
        &mut self,
        datapath: &mut impl Datapath,
        slot: u32,
        standing: Standing,
        now_ns: u64,
    ) -> Option<Entry> {
        let entry = *self.entry(slot)?;
        let phase = TcpBits(datapath.slot(slot).tcp().load(Relaxed)).phase();
        self.unlink(datapath, slot, standing.reason(phase), now_ns);
        Some(entry)
    }
}
