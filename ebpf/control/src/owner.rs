//! Owners of VMs: a row of `OWNERS` per process, held by a lock that is freed when the process
//! dies.
//!
//! # Theory of operation
//!
//! A process takes a row by locking `owner-<row>.lock`; the kernel frees the lock however the
//! process ends. A row whose lock is free but that has VMs or chunks of slots belongs to a dead
//! process, whose established flows still run. A process that is to serve one of those VMs takes
//! that row, and with it everything of the dead process (adoption). If the requested VMs are spread
//! over several dead rows, all of these are locked, and their contents move to the first.
//!
//! A process with several engines holds a row for each. It takes as many of the dead rows as they
//! are, so that each engine goes on with the VMs and slots of one of before. The contents of further
//! dead rows move to those, in turn.
//!
//! Taking, releasing and sweeping hold the directory's lock, so no row changes its owner meanwhile.
//! The owner of a slot is that of its chunk. `Slot::owner` records the process that admitted the
//! flow, which adoption does not change.

mod hops;
mod sweep;
pub(crate) mod taps;

use std::{
    os::fd::BorrowedFd,
    path::Path,
    sync::atomic::{
        AtomicU32,
        Ordering::{AcqRel, Acquire, Relaxed, Release},
    },
    time::{Duration, Instant},
};

use slipgate_abi::{IfIndex, SlotIndex, Verdict, maps::MAX_OWNERS};

pub use self::{
    sweep::{Swept, sweep},
    taps::NotedTaps,
};
pub use crate::lock::{PATIENCE, WHILE_SERVING};
use crate::{
    Error, Paths, Result,
    load::Datapath,
    lock::FileLock,
    maps::SharedMaps,
    pacing::PacingDevice,
    paths::DAEMON_LOCK,
    pins::{is_alive, lock_path},
    tap::EnginePort,
    vm_rows,
};

/// Time for which a killed process's engine may hold the row after its broker has died.
pub const ENGINE_DIES_WITHIN: Duration = Duration::from_secs(2);

/// A row of `OWNERS` that this process holds.
#[derive(Debug)]
pub struct Owner {
    row: u32,
    /// The row, and those that were merged into it.
    rows: Vec<u32>,
    epoch: u32,
    adopted: bool,
    /// Locks of the row, and of rows merged into it: no other process may take those until they are
    /// found empty.
    locks: Vec<FileLock>,
}

impl Owner {
    /// Takes a row for the one engine of a process; see [`Owner::take_several`].
    ///
    /// # Errors
    /// As there.
    pub fn take(maps: &SharedMaps, paths: &Paths, names: &[&str]) -> Result<Self> {
        let mut taken = Self::take_several(maps, paths, names, 1)?;
        Ok(taken.remove(0))
    }

    /// Takes a row for each of so many engines, one at least: those that have the VMs
    /// of these names if their processes are dead, otherwise empty ones.
    ///
    /// # Errors
    /// A living process serves one of the VMs, too few rows are free, or a lock is not obtained.
    pub fn take_several(
        maps: &SharedMaps,
        paths: &Paths,
        names: &[&str],
        engines: usize,
    ) -> Result<Vec<Self>> {
        let _all = FileLock::wait(&paths.run_dir.join("lock"), PATIENCE)?;
        Self::take_under_lock(maps, paths, names, engines)
    }

    /// Takes rows as [`Owner::take_several`] does. The caller holds the lock of the directory.
    pub(crate) fn take_under_lock(
        maps: &SharedMaps,
        paths: &Paths,
        names: &[&str],
        engines: usize,
    ) -> Result<Vec<Self>> {
        let engines = engines.max(1);
        let mut held: Vec<Vec<(u32, FileLock)>> = Vec::new();
        for (at, row) in rows_with_vms(maps, names).into_iter().enumerate() {
            let Some(lock) = take_dead(maps, paths, row)? else {
                return Err(in_use(maps, row, names));
            };
            match at < engines {
                true => held.push(vec![(row, lock)]),
                false => held[at % engines].push((row, lock)),
            }
        }
        while held.len() < engines {
            held.push(vec![take_empty(maps, paths)?]);
        }
        let owners = held.into_iter().map(|held| Self::of(maps, held));
        Ok(owners.collect())
    }

    /// Makes one of the rows whose locks are held: the others' contents move to the first.
    fn of(maps: &SharedMaps, held: Vec<(u32, FileLock)>) -> Self {
        let (rows, locks): (Vec<u32>, Vec<FileLock>) = held.into_iter().unzip();
        let row = rows[0];
        for other in &rows[1..] {
            merge(maps, *other, row);
        }
        let adopted = has_anything(maps, row);
        if !adopted {
            begin_counts(maps, row);
        }
        let epoch = word(maps, row, Field::Epoch).fetch_add(1, AcqRel);
        let epoch = epoch.wrapping_add(1);
        word(maps, row, Field::Pid).store(std::process::id(), Release);
        Self {
            row,
            rows,
            epoch,
            adopted,
            locks,
        }
    }

    /// Returns the index of the row.
    pub fn row(&self) -> u32 {
        self.row
    }

    /// Returns the row, and those whose contents moved to it.
    pub fn rows(&self) -> &[u32] {
        &self.rows
    }

    /// Removes the engine ports of merged rows, to which no VM's packets are handed over any more.
    ///
    /// # Errors
    /// A device cannot be removed.
    pub fn remove_merged_ports(&self) -> Result<()> {
        let mut merged = self.rows.iter().filter(|row| **row != self.row);
        merged.try_for_each(|row| {
            PacingDevice::remove(*row)?;
            EnginePort::remove(*row).map(drop)
        })
    }

    /// Returns how many processes have had the row, this one included.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// Whether the row had VMs or flows of a dead process.
    pub fn adopted(&self) -> bool {
        self.adopted
    }

    /// Returns the descriptors whose locks hold the row. A copy in the engine keeps the row as long
    /// as the engine lives: the kernel frees a killed broker's locks before it kills the engine.
    pub fn lock_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.locks.iter().map(FileLock::as_fd)
    }

    /// Records the ifindex of the engine port in the row.
    pub fn set_port(&self, maps: &SharedMaps, ifindex: IfIndex) {
        word(maps, self.row, Field::Port).store(ifindex.get(), Release);
    }

    /// Divides the engine port's queue among VMs: each may always have `share` frames queued in
    /// each direction, and more while fewer than `common` frames of all VMs are queued.
    pub fn divide_queue(&self, maps: &SharedMaps, share: u32, common: u32) {
        let owner = maps.owner_ref(self.row).expect("rows are below MAX_OWNERS");
        owner.share().store(share, Release);
        owner.common().store(common, Release);
    }

    /// Releases the row's chunks and next hops. Its flows have ended and its VMs are closed; a
    /// chunk with a slot that is not free is kept, for an adopter.
    pub(crate) fn release(&self, maps: &SharedMaps) {
        sweep::free_chunks(maps, self.row);
        if maps.chunks_of(self.row).is_empty() {
            sweep::free_next_hops(maps, self.row);
        }
        for field in [Field::Pid, Field::Port] {
            word(maps, self.row, field).store(0, Release);
        }
    }
}

/// The right to be the daemon of this network namespace, for as long as it is held.
#[derive(Debug)]
pub struct DaemonLock {
    _lock: FileLock,
}

impl DaemonLock {
    /// Takes the lock, waiting for it for so long. The run-time directory exists: the maps are open.
    ///
    /// # Errors
    /// Another daemon has it: [`Error::Locked`] names its process. Or the file cannot be locked.
    pub fn take(paths: &Paths, patience: Duration) -> Result<Self> {
        let path = paths.run_dir.join(DAEMON_LOCK);
        FileLock::wait(&path, patience).map(|lock| Self { _lock: lock })
    }
}

impl Datapath {
    /// Completes an orderly stop, after the engines have ended: removes the owners' engine ports and
    /// releases their rows. If no other process lives or has left VMs, it also detaches all programs
    /// and removes all pins. Returns whether it did the latter.
    ///
    /// # Errors
    /// The lock is not obtained, or a device, program or pin cannot be removed.
    pub fn remove_if_last(self, owners: Vec<Owner>) -> Result<bool> {
        let paths = self.paths.clone();
        for owner in &owners {
            EnginePort::remove(owner.row)?;
        }
        self.remove_defunct()?;
        {
            let _all = self.lock()?;
            owners.iter().for_each(|owner| owner.release(&self.maps));
            let ours = |row: u32| owners.iter().any(|owner| owner.rows.contains(&row));
            for row in 0..MAX_OWNERS {
                if has_anything(&self.maps, row) || !ours(row) && is_alive(&paths, row)? {
                    return Ok(false);
                }
            }
            drop(owners);
            self.detach_all()?;
            self.unpin_all()?;
        }
        Ok(true)
    }
}

/// Takes the lock of a row that has requested VMs, unless its process lives. The engine of a
/// process that was just killed may hold the lock for a moment: the kernel kills it after the
/// broker.
fn take_dead(maps: &SharedMaps, paths: &Paths, row: u32) -> Result<Option<FileLock>> {
    let path = lock_path(paths, row);
    let deadline = Instant::now() + ENGINE_DIES_WITHIN;
    loop {
        let lock = FileLock::take(&path)?;
        if lock.is_some() || is_process(maps.owner_pid(row)) || Instant::now() >= deadline {
            return Ok(lock);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether a process with this pid exists.
pub(crate) fn is_process(pid: u32) -> bool {
    Path::new("/proc").join(pid.to_string()).exists()
}

/// Returns the rows that living processes hold. `patience`: time-out of the lock.
///
/// # Errors
/// The directory's lock is not obtained, or a row's lock file cannot be opened.
pub fn living(paths: &Paths, patience: Duration) -> Result<Vec<u32>> {
    let _all = FileLock::wait(&paths.run_dir.join("lock"), patience)?;
    living_under_lock(paths)
}

/// Returns the rows that living processes hold. The caller holds the lock of the directory.
pub(crate) fn living_under_lock(paths: &Paths) -> Result<Vec<u32>> {
    let mut living = Vec::new();
    for row in 0..MAX_OWNERS {
        if is_alive(paths, row)? {
            living.push(row);
        }
    }
    Ok(living)
}

/// Frees what a killed process has left in its row, where its flows ended with it.
pub(crate) fn forget(maps: &SharedMaps, row: u32) {
    for index in maps.chunks_of(row).into_iter().flatten() {
        if let Some(slot) = maps.slot(SlotIndex::new(index)) {
            slot.set_verdict(Verdict::Free);
        }
    }
    for vm in vm_rows::rows_of(maps, row).filter_map(|row| maps.vm(row)) {
        vm.id().store(0, Release);
    }
    sweep::free_chunks(maps, row);
    word(maps, row, Field::Pid).store(0, Release);
}

/// Returns the rows that have VMs of these names, without duplicates.
fn rows_with_vms(maps: &SharedMaps, names: &[&str]) -> Vec<u32> {
    let mut rows: Vec<u32> = names
        .iter()
        .filter_map(|name| vm_rows::row_named(maps, name))
        .filter_map(|vm_row| vm_rows::owner_of(maps, vm_row))
        .filter(|row| *row < MAX_OWNERS)
        .collect();
    rows.sort_unstable();
    rows.dedup();
    rows
}

fn in_use(maps: &SharedMaps, row: u32, names: &[&str]) -> Error {
    let name = names
        .iter()
        .find(|name| {
            vm_rows::row_named(maps, name).and_then(|vm_row| vm_rows::owner_of(maps, vm_row))
                == Some(row)
        })
        .copied()
        .unwrap_or_default();
    Error::VmInUse {
        name: name.into(),
        pid: word(maps, row, Field::Pid).load(Acquire),
    }
}

fn take_empty(maps: &SharedMaps, paths: &Paths) -> Result<(u32, FileLock)> {
    for row in (0..MAX_OWNERS).filter(|row| !has_anything(maps, *row)) {
        if let Some(lock) = FileLock::take(&lock_path(paths, row))? {
            return Ok((row, lock));
        }
    }
    Err(Error::Full {
        what: "slipgate process",
        most: MAX_OWNERS,
        remedy: "serve many VMs by one process: `slipgate serve`, to which `attach` and `run` add theirs; or stop a process, or start one for VMs that a dead one left",
    })
}

/// Clears the counters of the row's previous processes, which have no VM any more, and shuts and empties
/// its ring of first packets: what is left there may be of VMs that another row has now.
fn begin_counts(maps: &SharedMaps, row: u32) {
    let owner = maps.owner_ref(row).expect("rows are below MAX_OWNERS");
    for from_world in [false, true] {
        let (handed_over, taken_in) = owner.under_way(from_world);
        handed_over.store(0, Release);
        taken_in.store(0, Release);
    }
    owner.ring_open().store(0, Release);
    let claimed = owner.ring_tail().load(Acquire);
    owner.ring_head().store(claimed, Release);
    let handed = owner.port_handed().load(Acquire);
    owner.port_taken().store(handed, Release);
}

/// Whether the row has VMs or chunks of slots.
fn has_anything(maps: &SharedMaps, row: u32) -> bool {
    vm_rows::rows_of(maps, row).next().is_some() || !maps.chunks_of(row).is_empty()
}

/// Moves chunks, next hops and VMs from a dead owner's row to another.
fn merge(maps: &SharedMaps, from: u32, to: u32) {
    for index in 0..maps.chunks() {
        maps.move_chunk(index, from, to);
    }
    for hop in maps.next_hops_of(from) {
        if let Some(hop) = maps.next_hop(hop) {
            let _ = hop
                .owner()
                .compare_exchange(from + 1, to + 1, AcqRel, Relaxed);
        }
    }
    for vm_row in vm_rows::rows_of(maps, from) {
        vm_rows::set_owner(maps, vm_row, to);
    }
}

/// A word of a row of `OWNERS`.
#[derive(Clone, Copy)]
enum Field {
    Epoch,
    Pid,
    Port,
}

/// Returns a word of an existing row.
fn word(maps: &SharedMaps, row: u32, field: Field) -> &AtomicU32 {
    let owner = maps.owner(row).expect("rows are below MAX_OWNERS");
    // SAFETY: words of a mapped element, reached by atomics on all sides.
    unsafe {
        AtomicU32::from_ptr(match field {
            Field::Epoch => &raw mut (*owner).epoch,
            Field::Pid => &raw mut (*owner).pid,
            Field::Port => &raw mut (*owner).port_ifindex,
        })
    }
}

#[cfg(test)]
#[path = "owner_test.rs"]
mod tests;

#[cfg(test)]
#[path = "owner/nonsense_test.rs"]
mod nonsense_tests;
