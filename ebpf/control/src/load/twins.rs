//! Twins: programs that do the same as those whose place in a chain matters ([`crate::attach::chain`]).
//!
//! # Theory of operation
//!
//! A chain of tcx programs has each program once, so that one of slipgate's can move to the front only
//! if another does its work meanwhile. A second copy would do, but the kernel's verifier takes as long
//! for it as for the program, and a broker that serves may load nothing any more. So a *twin* is six
//! instructions, loaded with the others: a tail call of the program by an array of programs. The
//! verifier does not go into what it calls.
//!
//! The array is pinned beside the twins, and open as long as this process uses them: the kernel empties
//! it when no pin and no process has it any more. A process that dies while a twin is in a program's
//! place so leaves one that works; the next start puts the program there again.
//!
//! Every build that is loaded has an array of its own: whether a program may be called by an array
//! depends on the first one that was put into it, and others may still run by the old one.
use std::{
    fs,
    os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd},
};

use super::{Loaded, find, no_program};
use crate::{
    Error, Paths, Result,
    attach::{Program, TWINS},
    bpf::{self, Kind, Shape, instruction},
    paths::remove_if_there,
};

/// The programs that have a twin, in the order of the array's elements, and the action if the array is
/// empty: a guest's packet is dropped, and one from the world is left to the next program, as by the
/// program.
const KINDS: [(Program, i32); 3] = [
    (Program::GuestEgress, TC_ACT_SHOT),
    (Program::UplinkIngress, TC_ACT_UNSPEC),
    (Program::UplinkIngressL3, TC_ACT_UNSPEC),
];
const TC_ACT_UNSPEC: i32 = -1;
const TC_ACT_SHOT: i32 = 2;

/// The twins, with what they need.
#[derive(Debug, Default)]
pub(super) struct Twins {
    pub(super) programs: Loaded,
    /// Keeps what the twins call.
    array: Option<OwnedFd>,
}

impl Twins {
    /// Makes the twins of loaded programs.
    pub(super) fn make(programs: &Loaded) -> Result<Self> {
        let shape = Shape {
            kind: Kind::PROGRAM_ARRAY,
            key: 4,
            value: 4,
            entries: KINDS.len() as u32,
        };
        let array =
            bpf::map_create(TWINS, shape).map_err(Error::os(format!("make the map {TWINS}")))?;
        let mut twins = Vec::new();
        for (index, (program, otherwise)) in (0..).zip(KINDS) {
            let calls = find(programs, program).ok_or_else(|| no_program(program.name()))?;
            let name = program.twin_name().unwrap_or_default();
            put(array.as_fd(), index, calls)
                .map_err(Error::os(format!("put {} into {TWINS}", program.name())))?;
            let twin = load(name, array.as_fd(), index, otherwise)
                .map_err(Error::os(format!("load the program {name}")))?;
            twins.push((program, twin));
        }
        Ok(Self {
            programs: twins,
            array: Some(array),
        })
    }

    /// Whether all are pinned.
    pub(super) fn are_pinned(paths: &Paths) -> bool {
        let names = Program::ALL.into_iter().filter_map(Program::twin_name);
        names.chain([TWINS]).all(|name| paths.pin(name).exists())
    }

    /// Opens the pinned ones.
    pub(super) fn open(paths: &Paths) -> Result<Self> {
        let open = |name: &str| {
            let pin = paths.pin(name);
            bpf::obj_get(&pin).map_err(Error::os(format!("open the pinned {}", pin.display())))
        };
        let array = open(TWINS)?;
        let mut programs = Vec::new();
        for program in Program::ALL {
            if let Some(name) = program.twin_name() {
                programs.push((program, open(name)?));
            }
        }
        Ok(Self {
            programs,
            array: Some(array),
        })
    }

    /// Pins the array in the place of the one before, which stays while others have it open.
    pub(super) fn pin_array(&self, paths: &Paths) -> Result<()> {
        let Some(array) = &self.array else {
            return Ok(());
        };
        let pin = paths.pin(TWINS);
        let id = |map: &OwnedFd| bpf::map_info(map.as_fd()).map(|info| info.id).ok();
        if bpf::obj_get(&pin).is_ok_and(|pinned| id(&pinned) == id(array)) {
            return Ok(());
        }
        remove_if_there(&pin, |path| fs::remove_file(path))?;
        bpf::obj_pin(array.as_fd(), &pin)
            .map_err(Error::os(format!("pin {TWINS} in {}", pin.display())))
    }
}

fn put(array: BorrowedFd<'_>, index: u32, program: BorrowedFd<'_>) -> std::io::Result<()> {
    let program = program.as_raw_fd();
    // SAFETY: an array of programs has words as keys, and as values descriptors.
    unsafe {
        bpf::update(
            array,
            (&raw const index).cast(),
            (&raw const program).cast(),
            0,
        )
    }
}

/// Loads a program that calls an element of the array, or returns an action if there is none.
fn load(name: &str, array: BorrowedFd<'_>, index: u32, otherwise: i32) -> std::io::Result<OwnedFd> {
    /// Source register of a 64-bit constant that is a map's descriptor (`BPF_PSEUDO_MAP_FD`).
    const MAP_FD: u8 = 1;
    const LOAD_CONSTANT: u8 = 0x18;
    const TAIL_CALL: i32 = 12;
    bpf::prog_load(
        name,
        bpf::SCHED_CLS,
        0,
        &[
            // The context is in r1 from the start. A 64-bit constant is two instructions.
            instruction(LOAD_CONSTANT, 2 | MAP_FD << 4, array.as_raw_fd()),
            0,
            bpf::set_register(3, index as i32),
            bpf::call_helper(TAIL_CALL),
            bpf::set_register(0, otherwise),
            bpf::EXIT,
        ],
    )
}

#[cfg(test)]
#[path = "twins_test.rs"]
mod tests;
