//! Serves TAPs: the order in which a guest's link opens and shuts, and what happens when somebody
//! makes it anew.
//!
//! A TAP without its program carries nothing: it is brought up after attach, and taken down before
//! detach; and should somebody else take the program away while it is up, one that drops all stands
//! behind it. That one is a clsact filter also where there is tcx: it lives with the interface, and
//! removing all pins leaves it. A TAP that is removed and made again under its name is another interface, with another
//! index and no program; it is served again as soon as the notice comes. Its VM's flows go on,
//! since slots name the VM's row and the row names the TAP.

use crate::{
    Result,
    attach::{Hook, Program},
    device::Device,
    load::Datapath,
    netlink::Network,
    vm,
};

/// A VM and its TAP, as who serves it knows that: its row may say anything, for engines write there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Served {
    /// The VM's row.
    pub vm_row: u32,
    /// The TAP's name.
    pub tap: String,
    /// The index it had when it was served last; `None` while there is none.
    pub ifindex: Option<u32>,
    /// Its MTU then, L3 bytes.
    pub mtu: u32,
}

/// What became of a TAP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TapChange {
    /// It is gone. Its VM's packets are dropped until it is there again.
    Gone,
    /// It was made anew and is served again.
    Again {
        /// The new index.
        ifindex: u32,
    },
    /// Its MTU changed, L3 bytes.
    Mtu(u32),
}

/// Begins to serve a TAP: sees to it that the host routes nothing of it and sends nothing on it,
/// attaches, and only then brings it up. Its entry in `TAPS` is there before ([`vm::open`]).
pub fn serve_tap(datapath: &Datapath, ifindex: u32, hook: Hook) -> Result<()> {
    let tap = Device::with_index(ifindex)?;
    tap.set_forwarding(false)?;
    tap.disable_ipv6()?;
    shut_behind(datapath, ifindex, hook)?;
    datapath.attach(Program::GuestEgress, ifindex, hook)?;
    tap.set_up(true)
}

/// A kernel with tcx may be without clsact: there it is the last link, which falls with its pin.
fn shut_behind(datapath: &Datapath, ifindex: u32, hook: Hook) -> Result<()> {
    match datapath.attach(Program::GuestShut, ifindex, Hook::Clsact) {
        Err(error) if hook == Hook::Tcx => {
            tracing::debug!("{error}");
            datapath.attach(Program::GuestShut, ifindex, Hook::Tcx)
        }
        other => other,
    }
}

/// Ends serving a TAP: takes it down first, so that nothing passes without the program. A TAP that
/// is gone is fine.
pub fn shut_tap(datapath: &Datapath, ifindex: u32) -> Result<()> {
    if let Ok(tap) = Device::with_index(ifindex) {
        tap.set_up(false)?;
    }
    datapath.detach(Program::GuestEgress, ifindex)?;
    datapath.detach(Program::GuestShut, ifindex)?;
    Ok(())
}

/// Follows the TAPs after a change of links: what became of whose.
pub fn follow_taps(
    datapath: &Datapath,
    network: &Network,
    served: &[Served],
    hook: Hook,
) -> Result<Vec<(u32, TapChange)>> {
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
                vm::forget_tap(maps, *vm_row)?;
                changes.push((*vm_row, TapChange::Gone));
            }
            None => {}
            Some(link) if Some(link.ifindex) != *known => {
                let ifindex = link.ifindex;
                vm::set_tap(maps, *vm_row, ifindex)?;
                vm::set_mtu(maps, *vm_row, link.mtu);
                match serve_tap(datapath, ifindex, hook) {
                    Ok(()) => changes.push((*vm_row, TapChange::Again { ifindex })),
                    // Gone again meanwhile, something else by its name, or what passes: it stays shut
                    // until it is tried again, and everybody else is served.
                    Err(error) => {
                        tracing::warn!("{tap} can't be served now: {error}");
                        if let Ok(device) = Device::with_index(ifindex) {
                            let _ = device.set_up(false);
                        }
                        vm::forget_tap(maps, *vm_row)?;
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
    // In the way of nobody: what is left now goes another time.
    if let Err(error) = datapath.remove_defunct() {
        tracing::debug!("{error}");
    }
    Ok(changes)
}

#[cfg(test)]
#[path = "serve_test.rs"]
mod tests;
