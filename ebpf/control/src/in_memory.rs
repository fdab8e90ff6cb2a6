//! The maps of a user without privileges, in files of memory: `--mode userspace`.
//!
//! The processes of a user in a network namespace share them, as others share the pinned maps: each
//! has its row of `OWNERS`, its VMs and its slots, so that `flows` and `stats` show all. The first
//! makes the files, the last removes them. What a killed process has left is of nobody: its flows
//! ended with it.
use std::sync::atomic::Ordering::Release;

use slipgate_abi::{ABI_VERSION, maps::MAX_OWNERS};

use crate::{
    Owner, Paths, Result, SharedMaps,
    layout::Sizes,
    load::random_word,
    lock::FileLock,
    maps::memory_files,
    owner::{self, PATIENCE},
    paths::make_private,
};

/// The maps in files of memory.
#[derive(Debug)]
pub struct InMemory {
    /// The tables, mapped from the files.
    pub maps: SharedMaps,
    paths: Paths,
}

impl InMemory {
    /// Makes or joins the maps, with these sizes if they are made, and takes a row.
    ///
    /// # Errors
    /// The directory or a file cannot be made or opened, the files are of another version, or no row
    /// is free.
    pub fn open(paths: Paths, sizes: Sizes) -> Result<(Self, Owner)> {
        let dir = &paths.pin_dir;
        make_private(dir)?;
        let _all = FileLock::wait(&paths.run_dir.join("lock"), PATIENCE)?;
        let living = owner::living_under_lock(&paths)?;
        if living.is_empty() {
            memory_files::remove(dir)?;
            memory_files::make(dir, sizes)?;
            let maps = SharedMaps::assemble(memory_files::open(dir)?)?;
            maps.meta_slots().store(maps.slots(), Release);
            maps.meta_instance().store(random_word()?, Release);
            maps.next_vm_id().store(1, Release);
            maps.meta_abi_version().store(ABI_VERSION, Release);
        }
        let maps = SharedMaps::from_fds(memory_files::open(dir)?)?;
        for row in (0..MAX_OWNERS).filter(|row| !living.contains(row)) {
            owner::forget(&maps, row);
        }
        let owner = Owner::take_under_lock(&maps, &paths, &[], 1)?.remove(0);
        Ok((Self { maps, paths }, owner))
    }

    /// Returns the directories of the files and locks.
    pub fn paths(&self) -> &Paths {
        &self.paths
    }

    /// Releases the row, whose VMs are closed, and removes the files if no other process lives.
    ///
    /// # Errors
    /// The lock is not obtained, or a file cannot be removed.
    pub fn close(self, owner: Owner) -> Result<()> {
        let _all = FileLock::wait(&self.paths.run_dir.join("lock"), PATIENCE)?;
        let row = owner.row();
        owner.release(&self.maps);
        drop(owner);
        let living = owner::living_under_lock(&self.paths)?;
        if living.iter().all(|other| *other == row) {
            memory_files::remove(&self.paths.pin_dir)?;
            self.paths.remove_run_dir()?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "in_memory_test.rs"]
mod tests;
