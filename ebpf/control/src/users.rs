//! Users that slipgate's own processes run as: numbers that nobody else on the host has, so that
//! nobody else may stop, kill or trace them, and they not each other.
//!
//! # Theory of operation
//!
//! A slipgate process (a broker and those that it starts) takes a block of numbers by locking
//! `/run/slipgate/users/<block>.lock`, one for all network namespaces; the kernel frees the lock
//! however the broker ends. No entry in a user database is needed. The blocks lie where no
//! distribution, container manager or directory service gives out users (systemd's
//! `UIDS-GIDS.md`, shadow's `SUB_UID_*`, sssd's ranges). The search begins anywhere, so that
//! processes that don't share a `/run` hardly meet either.
//!
//! In a user namespace that does not have these numbers, as in many containers, a few are taken
//! that systemd leaves free among the 16-bit ones. Where even they are not mapped, all is the user
//! nobody, as it is said in a warning.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{
    Result,
    load::random_word,
    lock::FileLock,
    paths::{RUN, make_private},
};

/// The user and group "nobody" of every distribution.
pub const NOBODY: u32 = 65_534;
/// Users of a block.
pub const USERS: u32 = 4;

/// Where blocks are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Range {
    first: u32,
    blocks: u32,
}

/// In this order.
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

/// A block that is ours, if there was one.
#[derive(Debug)]
pub struct Users {
    claim: Option<Claim>,
}

#[derive(Debug)]
struct Claim {
    /// The first user of the block.
    first: u32,
    path: PathBuf,
    _lock: FileLock,
}

impl Users {
    /// Takes a block. A host where there is none has its processes be nobody, with a warning.
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
        // Any number is as good.
        let start = random_word().unwrap_or_else(|error| {
            tracing::debug!("{error}");
            std::process::id()
        });
        match claim_in(&Path::new(RUN).join("users"), *range, start) {
            Ok(Some(claim)) => Self { claim: Some(claim) },
            Ok(None) => Self::nobody("all numbers for them are taken"),
            Err(error) => Self::nobody(&error.to_string()),
        }
    }

    fn nobody(why: &str) -> Self {
        tracing::warn!(
            "{why}: slipgate's processes run as the user nobody, and other processes of nobody's \
             may stop and kill them"
        );
        Self { claim: None }
    }

    /// One of the [`USERS`], which is a group's number too.
    pub fn user(&self, which: u32) -> u32 {
        let claim = self.claim.as_ref();
        claim.map_or(NOBODY, |claim| claim.first + which % USERS)
    }
}

impl Drop for Users {
    fn drop(&mut self) {
        // Under the lock: who waits for it sees that the file is not the named one any more.
        if let Some(claim) = &self.claim {
            let _ = fs::remove_file(&claim.path);
        }
    }
}

/// The first free block from `start` on.
fn claim_in(dir: &Path, range: Range, start: u32) -> Result<Option<Claim>> {
    loop {
        let claimed = make_private(dir).and_then(|()| {
            forget_dead(dir);
            first_free(dir, range, start)
        });
        match claimed {
            // Empty as it was, somebody has just removed it.
            Err(error) if error.errno() == Some(libc::ENOENT) => {}
            other => return other,
        }
    }
}

/// Removes what killed processes left.
fn forget_dead(dir: &Path) {
    for file in fs::read_dir(dir).into_iter().flatten().flatten() {
        // What can't be looked at is not ours to remove.
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

/// Whether a map of user_namespaces(7) has all of these: lines of a first number inside, one
/// outside, and how many.
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
