//! When router advertisements are sent that nobody asked for.
//!
//! # Theory of operation
//! A guest that boots asks for an advertisement, and is answered at once. Advertisements that nobody
//! asked for renew lifetimes, and tell a guest that runs already of a VM's IPv6 that is new. A VM
//! gets the first one a moment after it was added, and then one about every hour: so rarely, because
//! lifetimes are long, and each wakes a guest that is idle (RFC 7772).
//!
//! VMs are added by the thousand, and an engine starts with all at once. So the times are spread
//! (RFC 4861 section 6.2.4 requires it too), and the loop takes them one at a time, a few in each
//! turn. Each VM is in the schedule once: adding, removing and taking one are a search in a tree.
use std::collections::{BTreeSet, HashMap};

use slipgate_abi::VmId;

use crate::clock::{MILLISECOND_NS, SECOND_NS};

/// Longest time from one to the next, ns; the shortest is half of it.
pub const LONGEST_NS: u64 = 3_600 * SECOND_NS;
/// Time within which the first one is sent, ns.
pub const FIRST_WITHIN_NS: u64 = 500 * MILLISECOND_NS;

/// The VMs that get advertisements, by the time of the next one.
#[derive(Clone, Debug, Default)]
pub struct Schedule {
    due: BTreeSet<(u64, VmId)>,
    of: HashMap<VmId, u64>,
    /// Number of times that were chosen: no two VMs keep in step.
    chosen: u64,
}

impl Schedule {
    /// Adds a VM, whose first advertisement is due soon. One that is there already is not changed.
    pub fn add(&mut self, vm: VmId, now_ns: u64) {
        if !self.of.contains_key(&vm) {
            let wait = self.choose(vm, FIRST_WITHIN_NS);
            self.set(vm, now_ns + wait);
        }
    }

    /// Removes a VM, if it is there.
    pub fn remove(&mut self, vm: VmId) {
        if let Some(at) = self.of.remove(&vm) {
            self.due.remove(&(at, vm));
        }
    }

    /// Whether a VM is in the schedule.
    pub fn has(&self, vm: VmId) -> bool {
        self.of.contains_key(&vm)
    }

    /// Returns the time at which the next one is due, ns; `None` if no VM gets any.
    pub fn next_deadline_ns(&self) -> Option<u64> {
        self.due.first().map(|(at, _)| *at)
    }

    /// Returns a VM whose advertisement is due, and sets the time of its next one.
    pub fn take(&mut self, now_ns: u64) -> Option<VmId> {
        let vm = self.due.first().filter(|(at, _)| *at <= now_ns)?.1;
        let wait = LONGEST_NS / 2 + self.choose(vm, LONGEST_NS / 2);
        self.set(vm, now_ns + wait);
        Some(vm)
    }

    fn set(&mut self, vm: VmId, at_ns: u64) {
        if let Some(before) = self.of.insert(vm, at_ns) {
            self.due.remove(&(before, vm));
        }
        self.due.insert((at_ns, vm));
    }

    /// Chooses a time below `bound_ns`, different from VM to VM and from time to time.
    fn choose(&mut self, vm: VmId, bound_ns: u64) -> u64 {
        self.chosen += 1;
        // The finalizer of MurmurHash3: the times need not be secret.
        let mut bits = u64::from(vm.get()) << 32 ^ self.chosen;
        for factor in [0xff51_afd7_ed55_8ccd_u64, 0xc4ce_b9fe_1a85_ec53] {
            bits = (bits ^ bits >> 33).wrapping_mul(factor);
        }
        (bits ^ bits >> 33) % bound_ns.max(1)
    }
}

#[cfg(test)]
#[path = "schedule_test.rs"]
mod tests;
