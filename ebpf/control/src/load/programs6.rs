//! The programs for IPv6, in the program array by which the others pass packets on to them.
//!
//! A process whose VMs cannot get IPv6 does not load them, because the kernel takes longer to verify
//! them than all others together. While the array is empty, the program at a TAP drops IPv6 packets,
//! and the one at an uplink leaves them to the host.
//!
//! The array is pinned: the kernel empties it when no process and no pin has it any more, even while
//! attached programs use it. It holds the programs, so these need no pins. Another build's programs
//! take the places of the old ones one by one, each by one atomic exchange, so there is no moment
//! without; both builds have the same maps. No process but a loader has the array's descriptor: an
//! engine could empty it.
use std::{
    collections::HashMap,
    io,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
};

use aya::EbpfLoader;
use slipgate_abi::datapath::{PROGRAMS6, Program6};

use super::no_program;
use crate::{Error, Paths, Result, bpf};

/// Has the loader make or join the array.
pub(super) fn pin(loader: &mut EbpfLoader<'_>, paths: &Paths) {
    loader.map_pin_path(PROGRAMS6, paths.pin(PROGRAMS6));
}

/// Names of the programs in the object.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    Program6::ALL.into_iter().map(Program6::name)
}

/// Puts the programs, which are loaded, into the array.
pub(super) fn fill(loaded: &HashMap<&str, OwnedFd>, paths: &Paths) -> Result<()> {
    let path = paths.pin(PROGRAMS6);
    let array =
        bpf::obj_get(&path).map_err(Error::os(format!("open the pinned {}", path.display())))?;
    for program in Program6::ALL {
        let name = program.name();
        let fd = loaded
            .get(name)
            .ok_or_else(|| no_program(name))?
            .as_raw_fd();
        let index = program as u32;
        // SAFETY: an array of programs has words as keys, and as values descriptors.
        unsafe {
            bpf::update(
                array.as_fd(),
                (&raw const index).cast(),
                (&raw const fd).cast(),
                0,
            )
        }
        .map_err(Error::os(format!("put {name} into {PROGRAMS6}")))?;
    }
    Ok(())
}

/// Whether the array is pinned and has every program.
pub(super) fn are_there(paths: &Paths) -> bool {
    present(paths) == Program6::ALL.len()
}

/// Whether any process has loaded one, of whatever build.
pub(super) fn are_in_use(paths: &Paths) -> bool {
    present(paths) != 0
}

/// Number of programs in the array.
fn present(paths: &Paths) -> usize {
    let Ok(array) = bpf::obj_get(&paths.pin(PROGRAMS6)) else {
        return 0;
    };
    let has = |program: Program6| -> io::Result<bool> {
        let (index, mut id) = (program as u32, 0_u32);
        // SAFETY: as above; the kernel returns a program's id.
        unsafe {
            bpf::lookup(
                array.as_fd(),
                (&raw const index).cast(),
                (&raw mut id).cast(),
            )
        }
    };
    Program6::ALL
        .into_iter()
        .filter(|program| has(*program).unwrap_or(false))
        .count()
}

#[cfg(test)]
#[path = "programs6_test.rs"]
mod tests;
