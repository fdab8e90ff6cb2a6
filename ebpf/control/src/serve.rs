//! Service of TAPs: the order in which a guest's link is opened and closed, and the reaction when
//! its device is made again.
//!
//! A TAP without its program must carry nothing: it is brought up after the attachment, and down
//! before the detachment. If another process detaches the program while the TAP is up, a program
//! behind it drops everything. That one is a clsact filter even where there is tcx: it lives with
//! the interface, and survives the removal of all pins. A TAP that is removed and made again under
//! its name is another interface, with another index and no program. It is served again as soon as
//! the notification arrives. Its VM's flows continue, since slots name the VM's row and the row
//! names the TAP.

use slipgate_abi::{IfIndex, VmRow};

use crate::{
    Result,
    attach::{Hook, Program},
    device::Device,
    load::Datapath,
    netlink::Network,
    pacing::PacingDevice,
    vm,
};

/// A VM and its TAP, as the broker knows them. The VM's row is not trusted: engines write there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Served {
    /// Row of the VM.
    pub vm_row: VmRow,
    /// Name of the TAP.
    pub tap: String,
    /// Index of the TAP when it was last served; `None` while there is none.
    pub ifindex: Option<IfIndex>,
    /// MTU of the TAP at that time, L3 bytes.
    pub mtu: u32,
}

/// Change of a TAP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TapChange {
    /// The TAP is gone. Its VM's packets are dropped until it exists again.
    Gone,
    /// The TAP was made again and is served again.
    Again {
        /// New index of the TAP.
        ifindex: IfIndex,
    },
    /// The MTU changed to this value, L3 bytes.
    Mtu(u32),
}

/// Begins to serve a TAP: keeps the host from forwarding its packets and from sending IPv6 on it,
/// attaches the programs, and only then brings it up. Its entry in `TAPS` must exist before
/// ([`vm::open`]).
///
/// `hook` is that of the guest's program. With [`Hook::Clsact`] it is a tcx link all the same where
/// it is one already, where others use the TAP's hooks, and where clsact is missing.
///
/// # Errors
/// The TAP is gone, its sysctls cannot be written, or a program cannot be attached.
pub fn serve_tap(datapath: &Datapath, ifindex: IfIndex, hook: Hook) -> Result<()> {
    let tap = Device::with_index(ifindex)?;
    tap.set_forwarding(false)?;
    tap.disable_ipv6()?;
    attach_programs(datapath, ifindex, hook)?;
    tap.set_up(true)
}

/// Begins to serve a pacing device: attaches the program at its far end, and only then brings it up.
///
/// # Errors
/// The program cannot be attached, or an end cannot be brought up.
pub fn serve_pacer(datapath: &Datapath, pacer: &PacingDevice, hook: Hook) -> Result<()> {
    datapath.attach(Program::Pacer, pacer.far, hook)?;
    Device::with_index(pacer.far)?.set_up(true)?;
    Device::with_index(pacer.near)?.set_up(true)
}

fn attach_programs(datapath: &Datapath, ifindex: IfIndex, hook: Hook) -> Result<()> {
    let by_link = || {
        attach_fallback(datapath, ifindex)?;
        datapath.attach(Program::GuestEgress, ifindex, Hook::Tcx)
    };
    if hook == Hook::Tcx {
        return by_link();
    }
    match datapath.attach_filters(ifindex) {
        Ok(true) => Ok(()),
        Ok(false) => by_link(),
        Err(error) if error.is_locked() => Err(error),
        // A kernel without tcx has nothing better to say.
        Err(error) => by_link().map_err(|_| error),
    }
}

/// Attaches the program that drops everything behind all others. A kernel with tcx may lack clsact:
/// there it is the last link, which is removed with its pin.
fn attach_fallback(datapath: &Datapath, ifindex: IfIndex) -> Result<()> {
    match datapath.attach(Program::GuestShut, ifindex, Hook::Clsact) {
        Err(error) if !error.is_locked() => {
            tracing::debug!("{error}");
            datapath.attach(Program::GuestShut, ifindex, Hook::Tcx)
        }
        other => other,
    }
}

/// Ends the service of a TAP. It is brought down first, so that nothing passes without the program.
/// A missing TAP is no error.
///
/// # Errors
/// The TAP cannot be brought down, or a program cannot be detached.
pub fn shut_tap(datapath: &Datapath, ifindex: IfIndex) -> Result<()> {
    if let Ok(tap) = Device::with_index(ifindex) {
        tap.set_up(false)?;
    }
    datapath.detach_from_tap(ifindex)
}

/// Leaves a TAP that could not be served down, and without what was attached until then: nobody
/// knows it as a served one, so nobody else would remove that.
pub fn leave_tap(datapath: &Datapath, ifindex: IfIndex) {
    let shut = shut_tap(datapath, ifindex);
    let guard = datapath.detach(Program::Guard, ifindex).map(drop);
    if let Err(error) = shut.and(guard) {
        tracing::debug!("{error}");
    }
}

/// Follows TAPs after a change of links: those whose names changed, or all. Returns the change of
/// each, by the VM's row.
///
/// # Errors
/// An entry of `TAPS` cannot be changed.
pub fn follow_taps(
    datapath: &Datapath,
    network: &Network,
    served: &[Served],
    hook: Hook,
) -> Result<Vec<(VmRow, TapChange)>> {
    let mut changes = Vec::new();
    let maps = datapath.maps();
    for Served {
        vm_row,
        tap,
        ifindex: known,
        mtu,
    } in served
    {
        match network.link_by_name(tap) {
            None if known.is_some() => {
                remove_defunct(datapath, *known);
                vm::forget_tap(maps, *vm_row, *known)?;
                changes.push((*vm_row, TapChange::Gone));
            }
            None => {}
            Some(link) if Some(link.ifindex) != *known => {
                let ifindex = link.ifindex;
                remove_defunct(datapath, *known);
                vm::set_tap(maps, *vm_row, ifindex)?;
                vm::set_mtu(maps, *vm_row, link.mtu);
                match serve_tap(datapath, ifindex, hook) {
                    Ok(()) => changes.push((*vm_row, TapChange::Again { ifindex })),
                    // Gone again meanwhile, another kind of device by its name, or a temporary
                    // error: the TAP stays down until the next attempt, and the other TAPs are
                    // served.
                    Err(error) => {
                        tracing::warn!("{tap} can't be served now: {error}");
                        if error.is_locked() {
                            // The lock would be waited for once more, and nothing is attached.
                            let device = Device::with_index(ifindex);
                            let _ = device.and_then(|tap| tap.set_up(false));
                        } else {
                            leave_tap(datapath, ifindex);
                        }
                        vm::forget_tap(maps, *vm_row, Some(ifindex))?;
                        changes.push((*vm_row, TapChange::Gone));
                    }
                }
            }
            Some(link) if *mtu != link.mtu => {
                vm::set_mtu(maps, *vm_row, link.mtu);
                changes.push((*vm_row, TapChange::Mtu(link.mtu)));
            }
            Some(_) => {}
        }
    }
    Ok(changes)
}

/// Removes the pins of a TAP that is gone.
fn remove_defunct(datapath: &Datapath, tap: Option<IfIndex>) {
    let removed = tap.map_or(Ok(0), |tap| datapath.remove_defunct_at(tap));
    // What is left hinders nothing, and is removed at the next start.
    if let Err(error) = removed {
        tracing::debug!("{error}");
    }
}

#[cfg(test)]
#[path = "serve_test.rs"]
mod tests;
