//! Users that slipgate's own processes run as: ids that nothing else on the host uses, so that no
//! other process may stop, kill or trace them, nor they each other.
//!
//! # Theory of operation
//!
//! A slipgate process (a broker and those that it starts) takes a block of ids by locking
//! `/run/slipgate/users/<block>.lock`, which is common to all network namespaces. The kernel frees
//! the lock however the broker ends. No entry in a user database is needed. The blocks lie where no
//! distribution, container manager or directory service allocates users (systemd's `UIDS-GIDS.md`,
//! shadow's `SUB_UID_*`, sssd's ranges). The search begins at a random block, so that processes
//! that don't share a `/run` are unlikely to collide.
//!
//! A user namespace that does not map these ids, as in many containers, uses a few that systemd
//! leaves free among the 16-bit ones. If even these are not mapped, all processes run as the user
//! nobody, and a warning says so.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::{
    Result,
    load::random_word,
    lock::FileLock,
    paths::{RUN, make_private},
};

/// The user and group "nobody" of every distribution.
pub const NOBODY: u32 = 65_534;
/// Number of users in a block.
pub const USERS: u32 = 4;

/// Range of user ids that is divided into blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Range {
    first: u32,
    blocks: u32,
}

/// Ranges, in order of preference.
const RANGES: [Range; 2] = [
    // Behind sssd's last number, before systemd's foreign ones: 0x7C00_0000 to 0x7C00_FFFF.
    Range {
        first: 0x7c00_0000,
        blocks: 0x4000,
    },
    // "60706…61183: unused" (UIDS-GIDS.md).
    Range {
        first: 60_800,
        blocks: 95,
    },
];

/// A block of users, or the user nobody. The block is free for others when the last copy is dropped.
#[derive(Clone, Debug)]
pub struct Users {
    claim: Option<Arc<Claim>>,
}

#[derive(Debug)]
struct Claim {
    /// First user of the block.
    first: u32,
    path: PathBuf,
    _lock: FileLock,
}

impl Users {
    /// Takes a block. If none can be taken, the processes run as nobody, and a warning is logged.
    pub fn claim() -> Self {
        let maps = ["uid_map", "gid_map"];
        let maps = maps.map(|map| fs::read_to_string(format!("/proc/self/{map}")));
        let [Ok(users), Ok(groups)] = maps else {
            return Self::nobody("/proc/self/uid_map can't be read");
        };
        let has = |range: &&Range| {
            let last = range.first + range.blocks * USERS - 1;
            is_mapped(&users, range.first, last) && is_mapped(&groups, range.first, last)
        };
        let Some(range) = RANGES.iter().find(has) else {
            return Self::nobody("this user namespace has no numbers for them");
        };
        // Any start will do.
        let start = random_word().unwrap_or_else(|error| {
            tracing::debug!("{error}");
            std::process::id()
        });
        match claim_in(&Path::new(RUN).join("users"), *range, start) {
            Ok(Some(claim)) => Self {
                claim: Some(Arc::new(claim)),
            },
            Ok(None) => Self::nobody("all numbers for them are taken"),
            Err(error) => Self::nobody(&error.to_string()),
        }
    }

    /// For processes that run as who started them: without privileges there is no other user to become.
    pub fn of_the_caller() -> Self {
        Self { claim: None }
    }

    fn nobody(why: &str) -> Self {
        tracing::warn!(
            "{why}: slipgate's processes run as the user nobody, and other processes of nobody's \
             may stop and kill them"
        );
        Self { claim: None }
    }

    /// Returns one of the [`USERS`] user ids, which is also the group id.
    pub fn user(&self, which: u32) -> u32 {
        let claim = self.claim.as_ref();
        claim.map_or(NOBODY, |claim| claim.first + which % USERS)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // Under the lock: a process that waits for it finds that the path no longer names the file.
        let _ = fs::remove_file(&self.path);
    }
}

/// Takes the first free block from `start` on.
fn claim_in(dir: &Path, range: Range, start: u32) -> Result<Option<Claim>> {
    loop {
        let claimed = make_private(dir).and_then(|()| {
            remove_unlocked(dir);
            first_free(dir, range, start)
        });
        match claimed {
            // Another process has just removed the empty directory.
            Err(error) if error.errno() == Some(libc::ENOENT) => {}
            other => return other,
        }
    }
}

/// Removes the lock files of killed processes.
fn remove_unlocked(dir: &Path) {
    for file in fs::read_dir(dir).into_iter().flatten().flatten() {
        // A file that cannot be examined is not removed.
        if let Ok(Some(_lock)) = FileLock::take(&file.path()) {
            let _ = fs::remove_file(file.path());
        }
    }
}

fn first_free(dir: &Path, range: Range, start: u32) -> Result<Option<Claim>> {
    for turn in 0..range.blocks {
        let block = (start % range.blocks + turn) % range.blocks;
        let first = range.first + block * USERS;
        let path = dir.join(format!("{first}.lock"));
        if let Some(lock) = FileLock::take(&path)? {
            return Ok(Some(Claim {
                first,
                path,
                _lock: lock,
            }));
        }
    }
    Ok(None)
}

/// Whether an id map of user_namespaces(7) contains all of these ids. A line has the first id
/// inside, the first id outside, and the count.
fn is_mapped(map: &str, first: u32, last: u32) -> bool {
    let (first, last) = (u64::from(first), u64::from(last));
    map.lines().any(|line| {
        let mut fields = line.split_whitespace().map(str::parse::<u64>);
        let (Some(Ok(inside)), Some(Ok(_)), Some(Ok(count))) =
            (fields.next(), fields.next(), fields.next())
        else {
            return false;
        };
        inside <= first && last - inside < count
    })
}

#[cfg(test)]
#[path = "users_test.rs"]
mod tests;
