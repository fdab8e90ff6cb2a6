//! Prefixes and single addresses that the network routes to VMs: which VM has which, among all
//! processes that share the maps.
//!
//! A VM has its own by an entry of `FORWARDS6`. No two VMs have the same, and none has a single address
//! of another's /64. The map tells two equal keys apart, but not a /64 from the addresses in it. So an
//! entry is looked for and made under a lock (`routed.lock`), which is held for a few system calls. The
//! kernel frees it if its holder dies.
//!
//! A living process's VM keeps what it has. A dead process's VM keeps nothing from another: its flows go
//! on, and its successor is refused. Whether a process lives is looked at where its VM is in the way
//! only. That takes the directory's lock too, so that nobody adopts the VM meanwhile; this lock is taken
//! first.
use std::{fmt, net::Ipv6Addr, time::Duration};

use slipgate_abi::{
    ForwardKey6, ForwardTarget, VmId, VmRow, cell::load32, maps::MAX_FORWARDS, vm6::Vm6Flags,
};

use crate::{
    Error, Paths, Result,
    lock::FileLock,
    maps::{Insert, InsertError, SharedMaps},
    pins::is_alive,
    vm::OpenVm,
    vm_rows::{id_of, name_of, owner_of},
};

/// What the network routes to one VM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Routed {
    /// The /64 of this address.
    Prefix(Ipv6Addr),
    /// This address alone.
    Address(Ipv6Addr),
}

impl Routed {
    /// Returns the key of its entry of `FORWARDS6`.
    pub fn key(self) -> ForwardKey6 {
        match self {
            Self::Prefix(first) => ForwardKey6::of_routed(first.into()),
            Self::Address(address) => ForwardKey6::of_routed_address(address.into()),
        }
    }
}

impl fmt::Display for Routed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Prefix(_) => write!(f, "{}/64", Ipv6Addr::from(self.key().host)),
            Self::Address(address) => write!(f, "{address}/128"),
        }
    }
}

/// Makes a prefix or an address a VM's own. What a dead process's VM had of it is the VM's then.
/// `ours`: the rows of `OWNERS` that this process holds; VMs in these are not in the way. `patience`:
/// time-out of each lock.
///
/// # Errors
/// A VM of another living process has it, a /64 around it or an address of it:
/// [`Error::RoutedInUse`]. Or a lock is not obtained, or the map is full or can't be read or changed.
pub fn take(
    maps: &SharedMaps,
    paths: &Paths,
    routed: Routed,
    open: &OpenVm,
    ours: &[u32],
    patience: Duration,
) -> Result<()> {
    let claim = Claim { maps, routed, ours };
    {
        let _entries = FileLock::of_routed(&paths.run_dir, patience)?;
        if claim.in_the_way()?.is_empty() {
            return claim.enter(open);
        }
    }
    let _all = FileLock::wait(&paths.run_dir.join("lock"), patience)?;
    let _entries = FileLock::of_routed(&paths.run_dir, patience)?;
    let others = claim.in_the_way()?;
    for other in &others {
        if is_alive(paths, other.owner)? {
            return Err(Error::RoutedInUse {
                wanted: routed.to_string(),
                has: other.has.to_string(),
                name: name_of(maps, other.row).unwrap_or_default(),
                pid: maps.owner_pid(other.owner),
            });
        }
    }
    // Of an address the programs ask first.
    let within = others.iter().filter(|other| other.is_within(routed));
    for other in within {
        maps.forwards6.remove(&other.has.key())?;
    }
    claim.enter(open)
}

/// A prefix or an address that is to be a VM's of this process.
struct Claim<'a> {
    maps: &'a SharedMaps,
    routed: Routed,
    ours: &'a [u32],
}

/// A VM of another process, dead or alive, and what it has.
struct Other {
    row: VmRow,
    owner: u32,
    has: Routed,
}

impl Other {
    /// Whether it has an address of a prefix.
    fn is_within(&self, routed: Routed) -> bool {
        matches!((self.has, routed), (Routed::Address(_), Routed::Prefix(_)))
    }
}

impl Claim<'_> {
    /// Returns the other processes' VMs that have it, a /64 around it or an address of it.
    fn in_the_way(&self) -> Result<Vec<Other>> {
        let mut others = Vec::new();
        others.extend(self.other_with(self.routed)?);
        match self.routed {
            Routed::Address(address) => {
                others.extend(self.other_with(Routed::Prefix(address))?);
            }
            // The rows are memory: only those of addresses within are looked up.
            Routed::Prefix(first) => {
                for row in self.maps.vm_rows() {
                    if let Some(address) = self.single_within(row, first) {
                        others.extend(self.other_with(Routed::Address(address))?);
                    }
                }
            }
        }
        Ok(others)
    }

    /// Returns the single address of an open row's VM if it is of the /64 of this address.
    fn single_within(&self, row: VmRow, first: Ipv6Addr) -> Option<Ipv6Addr> {
        id_of(self.maps, row)?;
        let vm = self.maps.vm6(row)?;
        let both = Vm6Flags::ON | Vm6Flags::SINGLE;
        let is_single = load32(vm.flags()) & both == both;
        let is_within = is_single && vm.prefix().same_prefix(first.into());
        is_within.then(|| vm.prefix().into())
    }

    /// Returns the VM that has this by an entry, if it is open and another process's.
    fn other_with(&self, has: Routed) -> Result<Option<Other>> {
        let Some(entry) = self.maps.forwards6.get(&has.key())? else {
            return Ok(None);
        };
        let open = entry
            .row()
            .filter(|row| id_of(self.maps, *row) == Some(entry.id()));
        let owned = open.and_then(|row| Some((row, owner_of(self.maps, row)?)));
        let other = owned.filter(|(_, owner)| !self.ours.contains(owner));
        Ok(other.map(|(row, owner)| Other { row, owner, has }))
    }

    /// Enters it for a VM, in the place of who has it no more. The caller holds the lock.
    fn enter(&self, open: &OpenVm) -> Result<()> {
        let target = ForwardTarget::new(open.id, open.row, 0);
        let done = self
            .maps
            .forwards6
            .insert(&self.routed.key(), &target, Insert::Any);
        done.map_err(|error| match error {
            InsertError::Os(error) => Error::os(format!("route {} to a VM", self.routed))(error),
            InsertError::Full | InsertError::Exists | InsertError::Missing => Error::Full {
                what: "routed prefix or forwarded port",
                most: MAX_FORWARDS,
                remedy: "remove a VM, or forwards",
            },
        })
    }
}

/// Leaves a prefix or an address to the host again, if this VM has it.
///
/// # Errors
/// The map can't be read or changed.
pub fn leave(maps: &SharedMaps, routed: Routed, vm: VmId) -> Result<()> {
    maps.forwards6.lead_no_more(&routed.key(), vm)
}

#[cfg(test)]
#[path = "routed_test.rs"]
mod tests;
