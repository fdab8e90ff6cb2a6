//! VMs that sleep: paused by their VMM, with peers that do not know it.
//!
//! # Theory of operation
//! While a VM sleeps, [`VmFlags::ASLEEP`](slipgate_abi::vm::VmFlags::ASLEEP) is set in its row, and
//! the programs hand over every packet from the world to its flows and forwards. The engine holds
//! these frames as they are, before it decides anything about them ([`Sleeping::hold`]), so a
//! peer's SYN is neither admitted nor answered. When the VM wakes, the frames are handled in their
//! order as if they came then, and after them those that came meanwhile. Only when none is left the
//! flag is cleared: what comes later goes by the kernel's path again.
//!
//! A peer repeats a segment that nobody acknowledges: a copy of a held one is dropped. Frames and
//! bytes of a VM, and the time for which a frame is held, are bounded by the VM's policy, the bytes
//! of all VMs by [`MOST_BYTES`]. What is beyond a bound is dropped and counted, and its peer is told
//! nothing, as if the VM were slow.
use std::collections::{BTreeSet, HashMap, VecDeque};

use slipgate_abi::{VmId, VmRow};
use slipgate_model::{FlowTuple, Knock, SleepChange};
use slipgate_policy::Sleep;

use crate::{clock::SECOND_NS, port::L3_AT};

/// Most bytes of memory that frames held for all VMs take together.
const MOST_BYTES: usize = 64 << 20;
/// Least time between two reports that something came for a VM, ns.
const KNOCK_INTERVAL_NS: u64 = SECOND_NS;

/// The VMs that sleep, with what is held for them.
#[derive(Debug, Default)]
pub(crate) struct Sleeping {
    vms: HashMap<VmRow, SleepingVm>,
    /// Time at which the first held frame of each VM that has one expires, ns.
    expiries: BTreeSet<(u64, VmRow)>,
    /// Bytes of memory that frames of all VMs take.
    bytes: usize,
    /// Changes that were not reported.
    changes: Vec<(VmId, SleepChange)>,
}

#[derive(Debug)]
struct SleepingVm {
    id: VmId,
    frames: VecDeque<HeldFrame>,
    /// Length of the packets in all `frames`, bytes from the IP header on.
    bytes: usize,
    /// Time from which the next knock is reported, ns.
    next_knock_ns: u64,
}

#[derive(Debug)]
struct HeldFrame {
    bytes: Vec<u8>,
    segment: Option<SegmentId>,
    expires_ns: u64,
}

impl HeldFrame {
    /// Returns the length of its packet, bytes from the IP header on.
    fn packet_len(&self) -> usize {
        packet_len(&self.bytes)
    }

    /// Returns how many bytes of memory it takes.
    fn memory(&self) -> usize {
        memory(&self.bytes)
    }
}

fn packet_len(frame: &[u8]) -> usize {
    frame.len().saturating_sub(L3_AT)
}

fn memory(frame: &[u8]) -> usize {
    frame.len() + size_of::<HeldFrame>()
}

/// Fields that a TCP segment shares with its retransmissions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SegmentId {
    pub(crate) tuple: FlowTuple,
    pub(crate) sequence: u32,
    pub(crate) flags: u8,
    pub(crate) payload_len: usize,
}

/// Why a frame is not held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NotHeld {
    /// It repeats a segment that is held.
    Repeated,
    /// A bound is reached.
    Full,
}

impl Sleeping {
    /// Whether no VM sleeps.
    pub(crate) fn is_empty(&self) -> bool {
        self.vms.is_empty()
    }

    /// Whether this VM sleeps.
    pub(crate) fn has(&self, row: VmRow, id: VmId) -> bool {
        self.vms.get(&row).is_some_and(|vm| vm.id == id)
    }

    /// Holds what comes for a VM from now on. `is_new`: that is to be reported.
    pub(crate) fn add(&mut self, row: VmRow, id: VmId, is_new: bool) {
        if self.has(row, id) {
            return;
        }
        let vm = SleepingVm {
            id,
            frames: VecDeque::new(),
            bytes: 0,
            next_knock_ns: 0,
        };
        self.vms.insert(row, vm);
        if is_new {
            self.changes.push((id, SleepChange::Asleep));
        }
    }

    /// Ends a VM's sleep. Returns the frames that were held, in their order.
    pub(crate) fn wake(&mut self, row: VmRow) -> Vec<Vec<u8>> {
        let frames = self.take(row);
        if let Some((id, _)) = frames {
            self.changes.push((id, SleepChange::Awake));
        }
        frames.map(|(_, frames)| frames).unwrap_or_default()
    }

    /// Removes a VM that is gone. Returns the frames that were held.
    pub(crate) fn forget(&mut self, row: VmRow) -> Vec<Vec<u8>> {
        self.take(row).map(|(_, frames)| frames).unwrap_or_default()
    }

    fn take(&mut self, row: VmRow) -> Option<(VmId, Vec<Vec<u8>>)> {
        let vm = self.vms.remove(&row)?;
        self.bytes -= vm.frames.iter().map(HeldFrame::memory).sum::<usize>();
        if let Some(first) = vm.frames.front() {
            self.expiries.remove(&(first.expires_ns, row));
        }
        let frames = vm.frames.into_iter().map(|frame| frame.bytes);
        Some((vm.id, frames.collect()))
    }

    /// Rows of the VMs that sleep.
    pub(crate) fn rows(&self) -> Vec<VmRow> {
        self.vms.keys().copied().collect()
    }

    /// Holds a frame with all its headers for a VM that sleeps.
    ///
    /// # Errors
    /// It is not held, and is to be dropped.
    pub(crate) fn hold(
        &mut self,
        row: VmRow,
        bytes: &[u8],
        segment: Option<SegmentId>,
        bounds: &Sleep,
        now_ns: u64,
    ) -> Result<(), NotHeld> {
        let Some(vm) = self.vms.get_mut(&row) else {
            return Err(NotHeld::Full);
        };
        if segment.is_some() && vm.frames.iter().any(|held| held.segment == segment) {
            return Err(NotHeld::Repeated);
        }
        let has_room = vm.frames.len() < bounds.packets as usize
            && vm.bytes + packet_len(bytes) <= bounds.bytes as usize
            && self.bytes + memory(bytes) <= MOST_BYTES;
        if !has_room {
            return Err(NotHeld::Full);
        }
        // A policy that was replaced meanwhile must not let a later frame expire before this one.
        let last_ns = vm.frames.back().map_or(0, |last| last.expires_ns);
        let expires_ns = (now_ns + u64::from(bounds.patience_s) * SECOND_NS).max(last_ns);
        if vm.frames.is_empty() {
            self.expiries.insert((expires_ns, row));
        }
        vm.bytes += packet_len(bytes);
        self.bytes += memory(bytes);
        vm.frames.push_back(HeldFrame {
            bytes: bytes.to_vec(),
            segment,
            expires_ns,
        });
        Ok(())
    }

    /// Notes that a packet of this tuple, as on the uplink or the guest's link, came for a VM. Of
    /// those that follow each other closely only the first is reported.
    pub(crate) fn knock(&mut self, row: VmRow, tuple: &FlowTuple, now_ns: u64) {
        let Some(vm) = self.vms.get_mut(&row) else {
            return;
        };
        if now_ns < vm.next_knock_ns {
            return;
        }
        vm.next_knock_ns = now_ns + KNOCK_INTERVAL_NS;
        let knock = Knock {
            protocol: tuple.protocol,
            from: tuple.remote_addr(),
            to: tuple.local_addr(),
        };
        self.changes.push((vm.id, SleepChange::Knock(knock)));
    }

    /// Returns when [`Sleeping::expire`] is due, ns.
    pub(crate) fn next_deadline_ns(&self) -> Option<u64> {
        self.expiries.first().map(|(at, _)| *at)
    }

    /// Returns a frame that was held for as long as its policy has patience, with its VM's row.
    pub(crate) fn expire(&mut self, now_ns: u64) -> Option<(VmRow, Vec<u8>)> {
        let &(at, row) = self.expiries.first().filter(|(at, _)| *at <= now_ns)?;
        self.expiries.remove(&(at, row));
        let vm = self.vms.get_mut(&row)?;
        let frame = vm.frames.pop_front()?;
        vm.bytes -= frame.packet_len();
        self.bytes -= frame.memory();
        if let Some(next) = vm.frames.front() {
            self.expiries.insert((next.expires_ns, row));
        }
        Some((row, frame.bytes))
    }

    /// Returns what has changed since the last call, in its order.
    pub(crate) fn take_changes(&mut self) -> Vec<(VmId, SleepChange)> {
        std::mem::take(&mut self.changes)
    }
}

#[cfg(test)]
#[path = "sleeping_test.rs"]
mod tests;
