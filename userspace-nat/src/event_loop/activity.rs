//! VMs that fall idle, and that are busy again.
//!
//! # Theory of operation
//! A VM is idle when no packet that counts was seen for as long as its description says. Two things
//! tell, and both are kept anyway: the slots have the times of their flows' last packets, which the
//! kernel's programs write, and the VM's row of `COUNTERS` has those of flows that have ended and of
//! what the engine itself answers. [`slipgate_abi::activity`] says which times of slots count. So
//! whoever reads both has the last packets of a VM at any time; a look only tells of changes.
//!
//! Every [`LOOK_INTERVAL_NS`] some VMs are looked at, and of these the slots only of those whose
//! silence may be over: idle ones, and ones of which the last known packet is old enough. Where
//! TCP keep-alives do not count, each look reads the slots and asks the programs for the next
//! segment with content ([`LastPackets::listen`]). Once they count again, the slots are read once more
//! to take that back. A look reads a limited number of slots, divided among the VMs, and the next one
//! continues where it ended.
use std::{
    collections::BTreeMap,
    ops::Bound::{Excluded, Unbounded},
};

use slipgate_abi::{SlotIndex, VmId, VmRow, activity::LastPackets};
use slipgate_model::{ActivityPage, Silence};

use crate::{
    clock::{Clock, SECOND_NS},
    control::ActivityChanges,
    datapath::Datapath,
    event_loop::Engine,
    flow::Flows,
    port::FrameIo,
    stats::VmStats,
    vm::VmNet,
};

/// Interval between two looks, ns.
const LOOK_INTERVAL_NS: u64 = SECOND_NS;
/// Slots that a look reads at most.
pub(super) const SLOTS_PER_LOOK: usize = 4_096;
/// Slots that a look reads of one VM at least, where it has so many: the others have their turn too.
const LEAST_SHARE: usize = 256;
/// VMs that a look visits at most.
const VMS_PER_LOOK: usize = 1_024;

/// VMs of which it is to be told when they are idle, and VMs whose keep-alives do not count.
#[derive(Debug, Default)]
pub(super) struct Activity {
    next_look_ns: u64,
    watched: BTreeMap<VmId, Watched>,
    /// The VM that was looked at last.
    last: Option<VmId>,
}

#[derive(Debug)]
struct Watched {
    row: VmRow,
    /// Silence after which it is idle, ns; `None`: it is not told.
    after_ns: Option<u64>,
    /// Whether TCP keep-alives do not count.
    ignores_keepalive: bool,
    /// Whether they did not count before, and slots of it may still say so.
    was_ignoring: bool,
    is_idle: bool,
    /// Time until which it counts as busy, ns.
    busy_until_ns: u64,
    /// What is left to read of its slots, where one look did not read them all.
    unread: Option<Unread>,
}

/// Slots of a VM that are left to read. They are read from the end to the begin: in the place of a flow
/// that ends meanwhile comes the last one, which was read already.
#[derive(Debug, Clone, Copy)]
struct Unread {
    /// Their number, from the begin on.
    slots: usize,
    /// Flows that the VM had opened when the reading began.
    opened: u64,
}

/// What a look reads, and what is left of it.
struct Look<'a, D> {
    flows: &'a Flows,
    datapath: &'a D,
    slots: usize,
    changes: ActivityChanges,
    now_ns: u64,
}

impl Activity {
    /// When the next look is due, ns.
    pub(super) fn next_deadline_ns(&self) -> Option<u64> {
        (!self.watched.is_empty()).then_some(self.next_look_ns)
    }

    /// Adds a VM, or changes the silence after which it is idle and whether TCP keep-alives do not
    /// count. One that is new counts as busy until now, unless it was idle when an earlier engine
    /// ended.
    pub(super) fn watch(&mut self, vm: &VmNet, ignores_keepalive: bool, now_ns: u64) {
        let after_ns = u64::from(vm.idle_after_s).saturating_mul(SECOND_NS);
        let after_ns = (after_ns > 0).then_some(after_ns);
        let known = self.watched.get(&vm.id);
        let was_ignoring =
            !ignores_keepalive && known.is_some_and(|it| it.ignores_keepalive || it.was_ignoring);
        if after_ns.is_none() && !ignores_keepalive && !was_ignoring {
            return self.forget(vm.id);
        }
        if self.watched.is_empty() {
            self.next_look_ns = now_ns + LOOK_INTERVAL_NS;
        }
        let is_idle = vm.is_idle && after_ns.is_some();
        let known = self.watched.entry(vm.id).or_insert(Watched {
            row: vm.row,
            after_ns,
            ignores_keepalive,
            was_ignoring,
            is_idle,
            busy_until_ns: if is_idle { 0 } else { now_ns },
            unread: None,
        });
        if known.after_ns.is_none() && after_ns.is_some() {
            (known.is_idle, known.busy_until_ns) = (false, now_ns);
        }
        if known.ignores_keepalive != ignores_keepalive {
            known.unread = None;
        }
        (known.after_ns, known.ignores_keepalive) = (after_ns, ignores_keepalive);
        known.was_ignoring = was_ignoring;
    }

    pub(super) fn forget(&mut self, id: VmId) {
        self.watched.remove(&id);
    }

    fn look(&mut self, look: &mut Look<'_, impl Datapath>) {
        let share = (SLOTS_PER_LOOK / self.watched.len().max(1)).max(LEAST_SHARE);
        for _ in 0..self.watched.len().min(VMS_PER_LOOK) {
            let behind = self.last.map_or(Unbounded, Excluded);
            let next = self.watched.range((behind, Unbounded)).next();
            let next = next.or_else(|| self.watched.first_key_value());
            let Some(id) = next.map(|(id, _)| *id) else {
                break;
            };
            let Some(vm) = self.watched.get_mut(&id) else {
                break;
            };
            // The rest of its slots, if any, in its next turn.
            let is_done = vm.look(id, share, look);
            self.last = Some(id);
            if is_done && vm.after_ns.is_none() && !vm.ignores_keepalive {
                self.watched.remove(&id);
            }
            if look.slots == 0 {
                break;
            }
        }
        self.next_look_ns = look.now_ns + LOOK_INTERVAL_NS;
    }
}

impl Watched {
    /// Looks whether its state has changed, at no more than `share` slots. Returns `false` when there
    /// are slots left to read.
    fn look(&mut self, id: VmId, share: usize, look: &mut Look<'_, impl Datapath>) -> bool {
        let stats = look.datapath.stats(self.row);
        let now_ns = look.now_ns;
        let all = look.flows.slots_of(self.row);
        let opened = look.flows.opened_by(self.row);
        let reads_all = self.ignores_keepalive || self.was_ignoring;
        if reads_all || self.is_silent(&stats, now_ns) {
            let unread = self.unread.unwrap_or(Unread {
                slots: all.len(),
                opened,
            });
            let end = unread.slots.min(all.len());
            let begin = end.saturating_sub(look.slots.min(share));
            let mut last = LastPackets::default();
            for slot in &all[begin..end] {
                let live = look.datapath.slot(*slot);
                last = last.max(match self.ignores_keepalive {
                    true => LastPackets::listen(live, now_ns),
                    false => LastPackets::count_all(live, now_ns),
                });
            }
            stats.saw_until(last);
            look.slots -= end - begin;
            if begin > 0 && (reads_all || self.is_silent(&stats, now_ns)) {
                self.unread = Some(Unread {
                    slots: begin,
                    ..unread
                });
                return false;
            }
            self.was_ignoring = false;
        }
        // A flow that was opened meanwhile may not have been read.
        let has_opened = self.unread.take().is_some_and(|it| it.opened != opened);
        let is_idle = self.is_silent(&stats, now_ns) && !has_opened;
        if self.after_ns.is_some() && self.is_idle != is_idle {
            self.is_idle = is_idle;
            let silence = Silence::of(stats.last_packets(), all.len() as u64, now_ns);
            match is_idle {
                true => look.changes.idle.push((id, silence)),
                false => look.changes.busy.push((id, silence)),
            }
        }
        true
    }

    /// Whether all that is known is older than it may be.
    fn is_silent(&self, stats: &VmStats, now_ns: u64) -> bool {
        let last_ns = stats.last_packets().latest_ns().max(self.busy_until_ns);
        let until_ns = self
            .after_ns
            .map(|after_ns| last_ns.saturating_add(after_ns));
        until_ns.is_some_and(|until_ns| now_ns >= until_ns)
    }
}

impl<D: Datapath, P: FrameIo, C: Clock> Engine<D, P, C> {
    /// Looks at VMs, when it is time. Returns those whose state has changed.
    pub(super) fn look_at_activity(&mut self, now_ns: u64) -> ActivityChanges {
        let due = self.activity.next_deadline_ns();
        // Of a predecessor's flows the slots are known once they are adopted.
        if due.is_none_or(|due| now_ns < due) || self.core.nat.flows.are_left() {
            return ActivityChanges::default();
        }
        let nat = &self.core.nat;
        let mut look = Look {
            flows: &nat.flows,
            datapath: &nat.datapath,
            slots: SLOTS_PER_LOOK,
            changes: ActivityChanges::default(),
            now_ns,
        };
        self.activity.look(&mut look);
        look.changes
    }

    /// Returns a page of a VM's last packets that count as its activity, which its own flows' slots
    /// tell. `from`: 0, or [`ActivityPage::next`] of the page before. `None`: the VM is not here, or its
    /// flows are not all adopted yet.
    ///
    /// Pages go from the end of the VM's slots to their begin. In the place of a flow that ends in between
    /// comes the last one, which was read already, so no flow that lives throughout is missing. One that
    /// begins in between may be.
    pub fn activity_of(&self, row: VmRow, from: u64) -> Option<ActivityPage> {
        let (nat, vms) = (&self.core.nat, &self.core.vms);
        let vm = vms.get(row).filter(|_| !nat.flows.are_left())?.net.id;
        let now_ns = self.clock.now_ns();
        let all = nat.flows.slots_of(row);
        let end = match usize::try_from(from) {
            Ok(from @ 1..) => from.min(all.len()),
            _ => all.len(),
        };
        let begin = end.saturating_sub(SLOTS_PER_LOOK);
        let of = |slot: &SlotIndex| LastPackets::of_live(nat.datapath.slot(*slot), now_ns);
        let noted = nat.datapath.stats(row).last_packets();
        let last = all[begin..end].iter().map(of);
        let last = last.fold(noted, LastPackets::max);
        Some(ActivityPage {
            vm,
            silence: Silence::of(last, all.len() as u64, now_ns),
            next: (begin > 0).then_some(begin as u64),
        })
    }

    /// Watches a VM as its description and its policy say now.
    pub(super) fn watch_activity(&mut self, vm: &VmNet) {
        let ignores = self.core.rules.judge.borrow().idle(vm.id).ignores_keepalive;
        self.activity.watch(vm, ignores, self.clock.now_ns());
    }
}
