//! Flows that give way when their place is needed: a port toward their destination, their part of
//! their VM's cap, or their slot.
//!
//! # Theory of operation
//! While there is room every flow lives as long as its RFC says. When there is none, a new flow is
//! refused unless another goes, and a flow may only go if that harms no live connection:
//!
//! | standing | condition | has been silent for | gives way to |
//! | --- | --- | --- | --- |
//! | `Over` | TCP: each side has all that the other sent, and acknowledged its FIN | [`COPIES_NS`] | any VM |
//! | | TCP: a RST, and not both sides have sent a SYN: there never was a connection | [`REFUSED_NS`] | any VM |
//! | `Unanswered` | TCP: a SYN without an answer; the next SYN opens another flow | [`UNANSWERED_SYN_NS`] | its VM |
//! | | others: no answer ever; the guest's next packet opens another flow | [`UNANSWERED_NS`] | its VM |
//! | `Reset` | TCP: a RST, and no other segment since | [`RESET_NS`] | its VM |
//! | `JustOver` | as `Over`, but a copy of the last FIN may still come | | any VM |
//! | `Silent` | one packet of the guest, answered | [`UNANSWERED_NS`] | its VM |
//! | | UDP: at least as long as any mapping must live (RFC 4787 REQ-5) | [`UDP_LEAST_NS`] | its VM |
//!
//! The order is that of the table; of one kind the flow that was silent longest is first. Of flows
//! that the world opened only those that are over or were reset give way (flows of unproven remotes
//! are [`super::proof`]'s). A RST is believed only after silence, because anybody can forge one: a
//! live connection sends something, or was idle, and then only its own VM can have needed its
//! place.
//!
//! Only some flows are examined in a search ([`SEARCH_BUDGET`]); the next search continues where the
//! last one stopped.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{
    Protocol, SlotIndex, SlotRef, VmId, VmRow,
    tcp::{Phase, TcpBits},
};

use super::{
    EndReason, Entry, Flows, State,
    end::{freed, last_seen_ns},
};
use crate::{
    clock::{MILLISECOND_NS, SECOND_NS},
    datapath::Datapath,
    nat_ports::{Destination, GivenBack},
};

/// Silence after which no copy of a FIN is expected, ns: above the least retransmission timeout of
/// Linux (200 ms).
pub(super) const COPIES_NS: u64 = 300 * MILLISECOND_NS;
/// Silence after which a RST to a SYN is believed, ns: above the round-trip time. An answer to the
/// SYN shows that the RST was forged.
const REFUSED_NS: u64 = SECOND_NS;
/// Silence after which a SYN counts as unanswered, ns: it is answered sooner, or was sent again
/// meanwhile.
const UNANSWERED_SYN_NS: u64 = 10 * SECOND_NS;
/// Silence after which a datagram counts as unanswered, ns: that of Linux's own NAT
/// (`nf_conntrack_udp_timeout`).
const UNANSWERED_NS: u64 = 30 * SECOND_NS;
/// Silence after which a RST is believed, ns: a side with data in flight sends it again sooner.
const RESET_NS: u64 = 10 * SECOND_NS;
/// Least lifetime of a UDP mapping, ns (RFC 4787 REQ-5).
const UDP_LEAST_NS: u64 = 120 * SECOND_NS;

/// Flows examined in a search for one that gives way.
const SEARCH_BUDGET: usize = 256;
/// Most flows with standing `Over` that end at once, so that the next search finds room.
const MOST_AT_ONCE: usize = 32;

/// How little a flow that gives way has to lose, the least first. The module's table defines each.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Standing {
    Over,
    Unanswered,
    Reset,
    JustOver,
    Silent,
}

impl Standing {
    /// Returns the standing of a flow; `None` when it gives way to no VM.
    pub(super) fn of(live: SlotRef, entry: &Entry, now_ns: u64) -> Option<Self> {
        let silent_ns = now_ns.saturating_sub(last_seen_ns(live));
        let after = |least_ns, standing| (silent_ns >= least_ns).then_some(standing);
        let protocol = entry.protocol();
        let bits = TcpBits(live.tcp().load(Relaxed));
        if protocol == Protocol::Tcp && bits.phase() == Phase::Closed {
            return after(COPIES_NS, Self::Over).or(Some(Self::JustOver));
        }
        if entry.is_from_world() {
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

    /// Whether other VMs may take its place too.
    const fn gives_way_to_all(self) -> bool {
        matches!(self, Self::Over | Self::JustOver)
    }

    /// Returns the reason that the record of a flow that gave way shows.
    const fn reason(self, phase: Phase) -> EndReason {
        match (self, phase) {
            (Self::Over | Self::Reset, Phase::Reset) => EndReason::Reset,
            (Self::Over | Self::JustOver | Self::Reset, _) => EndReason::Closed,
            (Self::Unanswered | Self::Silent, _) => EndReason::Idle,
        }
    }
}

/// Whether each side has sent a SYN, so that there may have been a connection.
pub(super) const fn has_both_syns(bits: TcpBits) -> bool {
    const SYNS: u32 = TcpBits::SYN_TX | TcpBits::SYN_RX;
    bits.0 & SYNS == SYNS
}

/// Flows of a VM that give way to another one, found by one search.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GivingWay {
    row: VmRow,
    /// Number of flows examined.
    looks: usize,
    flows: Vec<(SlotIndex, Standing)>,
}

impl GivingWay {
    /// Returns the slots of the flows.
    pub fn slots(&self) -> impl Iterator<Item = SlotIndex> {
        self.flows.iter().map(|(slot, _)| *slot)
    }
}

/// Result of a search for a port toward a destination.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PortSearch {
    /// `None`: a port was found. Otherwise the flows that give way, which do not help.
    in_vain: Option<Vec<(SlotIndex, Standing)>>,
}

impl PortSearch {
    /// Whether a port was found.
    pub fn has_found(&self) -> bool {
        self.in_vain.is_none()
    }
}

impl Flows {
    /// Searches for flows that give way among those of a VM that is at its cap or out of slots;
    /// `from_world`: among flows that the world opened. Changes nothing; [`Flows::make_room`] ends
    /// them.
    pub fn find_room(
        &self,
        datapath: &impl Datapath,
        row: VmRow,
        from_world: bool,
        now_ns: u64,
    ) -> GivingWay {
        let looked: Vec<_> = self.table.next_of(row, SEARCH_BUDGET).collect();
        let mut slots = looked.clone();
        slots.retain(|slot| !from_world || self.entry(*slot).is_some_and(|e| e.is_from_world()));
        let vm = slots.first().and_then(|slot| self.entry(*slot));
        let flows = vm.map_or_else(Vec::new, |vm| {
            self.giving_way(datapath, &slots, vm.vm(), now_ns)
        });
        GivingWay {
            row,
            looks: looked.len(),
            flows,
        }
    }

    /// Ends the flows that were found; the next search continues behind this one.
    pub fn make_room(&mut self, datapath: &mut impl Datapath, found: &GivingWay, now_ns: u64) {
        self.table.looked_at(found.row, found.looks);
        self.end_for_room(datapath, &found.flows, now_ns);
    }

    /// Returns whether a VM would have a port toward a destination once the flows in `leaving` have
    /// ended, if need be because others give way. `timestamps`: whether it is for a SYN with TCP
    /// timestamps.
    pub fn find_port(
        &self,
        datapath: &impl Datapath,
        (to, vm, timestamps): (Destination, VmId, bool),
        leaving: &[SlotIndex],
        now_ns: u64,
    ) -> PortSearch {
        let gives_back = |slot: SlotIndex, is_reclaimed| {
            let entry = self.entry(slot).filter(|e| e.destination() == to)?;
            Some(GivenBack {
                port: entry.nat_port,
                vm: entry.vm(),
                how: freed(datapath.slot(slot), entry, now_ns),
                is_reclaimed,
            })
        };
        let mut given_back: Vec<GivenBack> = leaving
            .iter()
            .filter_map(|slot| gives_back(*slot, false))
            .collect();
        let has_port =
            |given_back: &[GivenBack]| self.ports.has_port(to, vm, timestamps, now_ns, given_back);
        if has_port(&given_back) {
            return PortSearch { in_vain: None };
        }
        let mut slots = self.slots_toward(&to);
        slots.retain(|slot| !leaving.contains(slot));
        let giving_way = self.giving_way(datapath, &slots, vm, now_ns);
        let reclaimed = giving_way.iter().map(|(slot, _)| *slot);
        given_back.extend(reclaimed.filter_map(|slot| gives_back(slot, true)));
        let in_vain = (!has_port(&given_back)).then_some(giving_way);
        PortSearch { in_vain }
    }

    /// Ends the flows found in a search for a port that failed; the next search continues behind
    /// them.
    pub fn note_failed_search(
        &mut self,
        datapath: &mut impl Datapath,
        to: Destination,
        look: &PortSearch,
        now_ns: u64,
    ) {
        if let Some(giving_way) = &look.in_vain {
            self.ports.looked_at(&to, SEARCH_BUDGET);
            self.end_for_room(datapath, giving_way, now_ns);
        }
    }

    /// Makes room among the ports toward a destination when a VM can have none. Returns the port of
    /// a flow of the same VM that was ended, which the VM may use again at once.
    pub fn reclaim_port(
        &mut self,
        datapath: &mut impl Datapath,
        to: Destination,
        vm: VmId,
        now_ns: u64,
    ) -> Option<u16> {
        let slots = self.slots_toward(&to);
        self.ports.looked_at(&to, SEARCH_BUDGET);
        let giving_way = self.giving_way(datapath, &slots, vm, now_ns);
        let ended = self.end_for_room(datapath, &giving_way, now_ns);
        // One port for another of the same VM: no share changes.
        let mut own = ended.iter().filter(|entry| entry.vm() == vm);
        own.find_map(|entry| {
            let is_ours = self.ports.take(to, entry.nat_port, vm);
            is_ours.then_some(entry.nat_port)
        })
    }

    /// Returns some of the flows toward a destination; successive searches cover all of them in
    /// turn.
    fn slots_toward(&self, to: &Destination) -> Vec<SlotIndex> {
        let ports = self.ports.next_ports(to, SEARCH_BUDGET);
        let slots = ports.filter_map(|port| self.by_world(&to.world(port)));
        slots.collect()
    }

    /// Returns those of these flows that are over, or otherwise the one that may best give way to a
    /// VM.
    fn giving_way(
        &self,
        datapath: &impl Datapath,
        slots: &[SlotIndex],
        vm: VmId,
        now_ns: u64,
    ) -> Vec<(SlotIndex, Standing)> {
        let mut over = Vec::new();
        let mut best: Option<(Standing, u64, SlotIndex)> = None;
        for slot in slots.iter().copied() {
            let Some(standing) = self.standing(datapath, slot, now_ns) else {
                continue;
            };
            let of_vm = self.entry(slot).is_some_and(|e| e.vm() == vm);
            if !of_vm && !standing.gives_way_to_all() {
                continue;
            }
            if standing == Standing::Over {
                over.push((slot, standing));
                if over.len() >= MOST_AT_ONCE {
                    break;
                }
            } else {
                let this = (standing, last_seen_ns(datapath.slot(slot)), slot);
                best = Some(best.map_or(this, |best| best.min(this)));
            }
        }
        if over.is_empty() {
            over.extend(best.map(|(standing, _, slot)| (slot, standing)));
        }
        over
    }

    fn standing(&self, datapath: &impl Datapath, slot: SlotIndex, now_ns: u64) -> Option<Standing> {
        let entry = self.entry(slot)?;
        let has_place = match entry.state {
            State::Live => true,
            // A flow that was cut is answered until the end of its grace.
            State::Ending => !entry.end_reason.is_cut(),
            State::Unlinked | State::Finished => false,
        };
        let standing = || Standing::of(datapath.slot(slot), entry, now_ns);
        has_place.then(standing).flatten()
    }

    /// Ends flows that give way. Returns their entries.
    fn end_for_room(
        &mut self,
        datapath: &mut impl Datapath,
        flows: &[(SlotIndex, Standing)],
        now_ns: u64,
    ) -> Vec<Entry> {
        let mut ended = Vec::new();
        for (slot, standing) in flows.iter().copied() {
            ended.extend(self.entry(slot).copied());
            let phase = TcpBits(datapath.slot(slot).tcp().load(Relaxed)).phase();
            self.unlink(datapath, slot, standing.reason(phase), now_ns);
        }
        ended
    }
}
