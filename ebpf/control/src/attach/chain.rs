//! Finds the programs that run before slipgate's at an interface's TC ingress, and makes slipgate's
//! the first again.
//!
//! # Theory of operation
//!
//! A packet meets the tcx programs of the interface in their order, then the filters of the clsact
//! qdisc in that of their priorities. One that runs before slipgate's may withhold packets from it,
//! change them, or take them for itself. Who attaches later may ask for a place before it.
//!
//! The kernel does not move a link, and does not attach one program twice to a chain. So each
//! program that may have to move has a *twin*, a tail call of it ([`crate::load`]). The twin is attached
//! in front, then the old link is detached, and then the program put in the twin's place. In between
//! both run; what the first lets pass, the second lets pass too. A filter becomes a tcx link, which runs
//! before all filters.

use std::{
    fmt, fs,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    path::Path,
};

use slipgate_abi::IfIndex;

use super::{Attached, AttachedBy, Program, clsact, link, pinned, program_id};
use crate::{Error, Paths, Result, bpf, device::Device, netlink::Requests};

/// The place of slipgate's program at an interface.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Standing {
    /// It runs before all others.
    First,
    /// These run before it, in this order.
    Behind(Vec<Foreign>),
    /// Somebody has detached it.
    Missing,
}

/// A program of somebody else's at an interface.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Foreign {
    /// A program attached by tcx.
    Tcx {
        /// The kernel's id of the program.
        id: u32,
        /// Its name; `None` if this process may not ask for it.
        name: Option<String>,
    },
    /// A filter of the clsact qdisc.
    Filter {
        /// Its kind, as `tc filter show` prints it.
        kind: String,
        /// Priority of the filter; a lower number runs earlier.
        priority: u16,
    },
}

impl fmt::Display for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcx {
                id,
                name: Some(name),
            } => write!(f, "the tcx program {name} (id {id})"),
            Self::Tcx { id, name: None } => write!(f, "the tcx program with id {id}"),
            Self::Filter { kind, priority } => {
                write!(f, "the tc filter {kind} with pref {priority}")
            }
        }
    }
}

impl Standing {
    /// Whether nothing runs before slipgate's program.
    pub fn is_first(&self) -> bool {
        *self == Self::First
    }
}

impl fmt::Display for Standing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::First => f.write_str("runs first"),
            Self::Missing => f.write_str("was detached by somebody"),
            Self::Behind(before) => {
                let before: Vec<_> = before.iter().map(ToString::to_string).collect();
                write!(f, "runs behind {}", before.join(", "))
            }
        }
    }
}

/// Returns the place of a program at an interface. `ours`: the ids of the program and of its twin, of
/// each build that may be there.
pub(crate) fn standing(
    ours: &[u32],
    ifindex: IfIndex,
    requests: &mut Requests,
) -> Result<Standing> {
    // A kernel without tcx has none of its programs.
    let by_tcx = bpf::tcx_programs(ifindex).unwrap_or_default();
    let at = by_tcx.iter().position(|id| ours.contains(id));
    let foreign = |ids: &[u32]| -> Vec<_> {
        let named = |id: &u32| Foreign::Tcx {
            id: *id,
            name: bpf::program_name(*id),
        };
        ids.iter().map(named).collect()
    };
    let mut before = match at {
        Some(0) => return Ok(Standing::First),
        Some(at) => return Ok(Standing::Behind(foreign(&by_tcx[..at]))),
        None => foreign(&by_tcx),
    };
    let Some(filters) = clsact::before_ours(requests, ifindex)? else {
        return Ok(Standing::Missing);
    };
    before.extend((filters.into_iter()).map(|(kind, priority)| Foreign::Filter { kind, priority }));
    Ok(match before.is_empty() {
        true => Standing::First,
        false => Standing::Behind(before),
    })
}

/// Puts a new link in the place of the pinned one, which need not have the program: it may be another
/// build's, or a twin, where a process died while it moved the program. If this fails at the old link,
/// that stays as it is. The caller holds the lock.
pub(crate) fn move_to_front(
    pin: &Path,
    [program, twin]: [BorrowedFd<'_>; 2],
    ifindex: IfIndex,
) -> Result<()> {
    let old =
        bpf::obj_get(pin).map_err(Error::os(format!("open the pinned link {}", pin.display())))?;
    let by_twin = link::has_program(old.as_fd(), pin, program)?;
    let next = match by_twin {
        true => twin,
        false => program,
    };
    let new_pin = link::successor_pin(pin);
    link::remove(&new_pin)?;
    let new = bpf::link_create_tcx(next, ifindex, bpf::ChainPosition::First)
        .map_err(Error::os("make a link in front"))?;
    // At every moment one of the two is pinned as the interface's.
    bpf::obj_pin(new.as_fd(), &new_pin)
        .map_err(Error::os(format!("pin it as {}", new_pin.display())))?;
    fs::rename(&new_pin, pin).map_err(Error::os(format!(
        "rename {} to {}",
        new_pin.display(),
        pin.display()
    )))?;
    bpf::link_detach(old.as_fd()).map_err(Error::os("detach the link behind"))?;
    match by_twin {
        true => bpf::link_update(new.as_fd(), program)
            .map_err(Error::os("put the program in its twin's place")),
        false => Ok(()),
    }
}

/// Looks at every pinned attachment whose place matters, as a process that serves nothing. Returns
/// the name of each interface with the place of the program there.
///
/// # Errors
/// The pins cannot be read, which are for root, or the kernel does not answer.
pub fn examine(paths: &Paths) -> Result<Vec<(String, Program, Standing)>> {
    let id_of = |pin: &Path| -> Result<Option<u32>> {
        match pin.exists() {
            true => program_id(open(pin)?.as_fd()).map(Some),
            false => Ok(None),
        }
    };
    let mut requests = Requests::open()?;
    let mut found = Vec::new();
    for Attached {
        program,
        ifindex,
        by,
    } in pinned(paths)?
    {
        let pin = paths.pin(
            &Attached {
                program,
                ifindex,
                by,
            }
            .pin_name(),
        );
        let is_gone = match by {
            AttachedBy::Link => link::target(&pin)? != ifindex,
            AttachedBy::Clsact => false,
        };
        let (Some(twin), false) = (program.twin_name(), is_gone) else {
            continue;
        };
        let Ok(device) = Device::with_index(ifindex) else {
            continue;
        };
        let pins = [paths.pin(program.name()), paths.pin(twin)];
        let ours = [id_of(&pins[0])?, id_of(&pins[1])?];
        let ours: Vec<u32> = ours.into_iter().flatten().collect();
        let standing = standing(&ours, ifindex, &mut requests)?;
        found.push((device.name().to_owned(), program, standing));
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(found)
}

fn open(pin: &Path) -> Result<OwnedFd> {
    bpf::obj_get(pin).map_err(Error::os(format!("open {}", pin.display())))
}

#[cfg(test)]
#[path = "chain_test.rs"]
mod tests;
