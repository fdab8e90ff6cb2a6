//! VMs that fall idle, and that are busy again.
//!
//! # Theory of operation
//! A VM is idle when no packet of its guest's or to it was seen for as long as its description
//! says. Two things tell, and both are kept anyway: each flow's slot has the times of its last
//! packets, which the kernel's programs write, and `COUNTERS` has the frames that the engine was
//! handed over, and among them the ARP requests that it answered and DHCP messages. These do not
//! count; ARP requests for the gateway, which the kernel answers, are in neither.
//!
//! Every [`LOOK_INTERVAL_NS`] some VMs are looked at, and of these only those whose silence may be
//! over: idle ones, and ones of which the last known packet is old enough. A look reads a limited
//! number of slots, and the next one continues where it ended.
use slipgate_abi::{VmId, VmRow};

use crate::{
    clock::{Clock, SECOND_NS},
    control::ActivityChanges,
    datapath::Datapath,
    event_loop::Engine,
    flow::{Flows, last_seen_ns},
    port::FrameIo,
    vm::VmNet,
};

/// Interval between two looks, ns.
const LOOK_INTERVAL_NS: u64 = SECOND_NS;
/// Slots that a look reads at most.
pub(super) const SLOTS_PER_LOOK: usize = 4_096;
/// VMs that a look visits at most.
const VMS_PER_LOOK: usize = 1_024;

/// VMs of which it is to be told when they are idle.
#[derive(Debug, Default)]
pub(super) struct Activity {
    next_look_ns: u64,
    watched: Vec<Watched>,
    /// The VM that is looked at next.
    at: usize,
}

#[derive(Debug)]
struct Watched {
    row: VmRow,
    id: VmId,
    /// Silence after which it is idle, ns.
    after_ns: u64,
    is_idle: bool,
    /// Time of the latest packet that is known, ns.
    last_ns: u64,
    /// Frames handed over at the last look.
    frames: u64,
    /// Number of its slots that were read since the look that began to read them.
    slots_read: usize,
}

impl Activity {
    /// When the next look is due, ns.
    pub(super) fn next_deadline_ns(&self) -> Option<u64> {
        (!self.watched.is_empty()).then_some(self.next_look_ns)
    }

    /// Adds a VM, or changes the silence after which it is idle. One that is new counts as busy
    /// until now, unless it was idle when an earlier engine ended.
    pub(super) fn watch(&mut self, vm: &VmNet, now_ns: u64) {
        let after_ns = u64::from(vm.idle_after_s).saturating_mul(SECOND_NS);
        if after_ns == 0 {
            return self.forget(vm.id);
        }
        if let Some(known) = self.watched.iter_mut().find(|known| known.id == vm.id) {
            known.after_ns = after_ns;
            return;
        }
        if self.watched.is_empty() {
            self.next_look_ns = now_ns + LOOK_INTERVAL_NS;
        }
        self.watched.push(Watched {
            row: vm.row,
            id: vm.id,
            after_ns,
            is_idle: vm.is_idle,
            last_ns: if vm.is_idle { 0 } else { now_ns },
            frames: vm.stats.frames_that_count(),
            slots_read: 0,
        });
    }

    pub(super) fn forget(&mut self, id: VmId) {
        self.watched.retain(|known| known.id != id);
    }

    fn look(&mut self, flows: &Flows, datapath: &impl Datapath, now_ns: u64) -> ActivityChanges {
        let mut changes = ActivityChanges::default();
        let mut slots = SLOTS_PER_LOOK;
        for _ in 0..self.watched.len().min(VMS_PER_LOOK) {
            if self.at >= self.watched.len() {
                self.at = 0;
            }
            let vm = &mut self.watched[self.at];
            if !vm.look(flows, datapath, &mut slots, &mut changes, now_ns) {
                // The rest of its slots at the next look.
                break;
            }
            self.at += 1;
        }
        self.next_look_ns = now_ns + LOOK_INTERVAL_NS;
        changes
    }
}

impl Watched {
    /// Looks whether its state has changed. Returns `false` when there are slots left to read.
    fn look(
        &mut self,
        flows: &Flows,
        datapath: &impl Datapath,
        slots: &mut usize,
        changes: &mut ActivityChanges,
        now_ns: u64,
    ) -> bool {
        let frames = datapath.stats(self.row).frames_that_count();
        if frames != self.frames {
            self.frames = frames;
            self.last_ns = now_ns;
        }
        let is_silent = |vm: &Self| now_ns >= vm.last_ns.saturating_add(vm.after_ns);
        if is_silent(self) {
            let all = flows.slots_of(self.row);
            let begin = self.slots_read.min(all.len());
            let end = all.len().min(begin + *slots);
            let read = all[begin..end].iter();
            let latest = read.map(|slot| last_seen_ns(datapath.slot(*slot))).max();
            self.last_ns = self.last_ns.max(latest.unwrap_or(0));
            *slots -= end - begin;
            self.slots_read = end;
            if end < all.len() && is_silent(self) {
                return false;
            }
        }
        self.slots_read = 0;
        let is_idle = is_silent(self);
        if self.is_idle != is_idle {
            self.is_idle = is_idle;
            match is_idle {
                true => changes.idle.push(self.id),
                false => changes.busy.push(self.id),
            }
        }
        true
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
        self.activity.look(&nat.flows, &nat.datapath, now_ns)
    }
}
