//! Attachments that are pinned links: tcx and XDP.

use std::{
    fs, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use aya_obj::generated::bpf_link_type;
use slipgate_abi::IfIndex;

use crate::{Error, Result, attach::program_id, bpf, paths};

/// Replaces the program of the pinned link, or makes and pins a link.
pub(crate) fn attach(
    pin: &Path,
    program: BorrowedFd<'_>,
    ifindex: IfIndex,
    create: impl FnOnce() -> io::Result<OwnedFd>,
) -> Result<()> {
    if pin.exists() {
        if target(pin)? == ifindex {
            return replace(pin, program, ifindex);
        }
        paths::remove_if_there(pin, |p| fs::remove_file(p))?;
    }
    let link = create().map_err(Error::os("make the link"))?;
    bpf::obj_pin(link.as_fd(), pin).map_err(Error::os(format!("pin it as {}", pin.display())))
}

/// Replaces the program of the pinned link, unless it has that program already or is defunct. The
/// pin stays: it is that of the link, not of the program.
pub(crate) fn replace(pin: &Path, program: BorrowedFd<'_>, ifindex: IfIndex) -> Result<()> {
    let link = open(pin)?;
    let (prog_id, target) = info(link.as_fd(), pin)?;
    if target != ifindex || prog_id == program_id(program)? {
        return Ok(());
    }
    bpf::link_update(link.as_fd(), program).map_err(Error::os(format!(
        "replace the program of {}",
        pin.display()
    )))
}

/// Whether the pinned link has this program and is attached to the interface.
pub(crate) fn is_attached(pin: &Path, program: BorrowedFd<'_>, ifindex: IfIndex) -> bool {
    let is = || -> Result<bool> {
        let (prog_id, target) = info(open(pin)?.as_fd(), pin)?;
        Ok(target == ifindex && prog_id == program_id(program)?)
    };
    pin.exists() && is().unwrap_or(false)
}

/// Whether an open link has this program. `pin`: where it is pinned, for messages.
pub(crate) fn has_program(
    link: BorrowedFd<'_>,
    pin: &Path,
    program: BorrowedFd<'_>,
) -> Result<bool> {
    Ok(info(link, pin)?.0 == program_id(program)?)
}

/// Path at which a link is pinned before it takes this pin's place. A process that dies in between
/// leaves it: whoever removes the pin, or replaces it next, removes that too.
pub(crate) fn successor_pin(pin: &Path) -> PathBuf {
    let mut path = pin.as_os_str().to_owned();
    path.push("-new");
    path.into()
}

/// Detaches a pinned link, if it is there, and removes its pin. Returns whether it was there.
/// Removing the pin alone does not detach it while another process has it open.
pub(crate) fn remove(pin: &Path) -> Result<bool> {
    if let Ok(link) = bpf::obj_get(pin) {
        bpf::link_detach(link.as_fd()).map_err(Error::os(format!("detach {}", pin.display())))?;
    }
    paths::remove_if_there(pin, |p| fs::remove_file(p))
}

/// Returns the id of the program that a pinned link at this interface has; `None` if there is none.
pub(crate) fn program_at(pin: &Path, ifindex: IfIndex) -> Option<u32> {
    let link = bpf::obj_get(pin).ok()?;
    let (program, target) = info(link.as_fd(), pin).ok()?;
    (target == ifindex).then_some(program)
}

/// Returns the index of the link's interface; [`IfIndex::NONE`] if the interface is gone.
pub(crate) fn target(pin: &Path) -> Result<IfIndex> {
    Ok(info(open(pin)?.as_fd(), pin)?.1)
}

fn open(pin: &Path) -> Result<OwnedFd> {
    bpf::obj_get(pin).map_err(Error::os(format!("open the pinned link {}", pin.display())))
}

fn info(link: BorrowedFd<'_>, pin: &Path) -> Result<(u32, IfIndex)> {
    let info = bpf::link_info(link).map_err(Error::os(format!("look at {}", pin.display())))?;
    const TCX: u32 = bpf_link_type::BPF_LINK_TYPE_TCX as u32;
    const XDP: u32 = bpf_link_type::BPF_LINK_TYPE_XDP as u32;
    let ifindex = match info.type_ {
        // SAFETY: the union's field for this type of link.
        TCX => unsafe { info.__bindgen_anon_1.tcx.ifindex },
        // SAFETY: as above.
        XDP => unsafe { info.__bindgen_anon_1.xdp.ifindex },
        _ => 0,
    };
    Ok((info.prog_id, IfIndex::new(ifindex)))
}
