//! The user-mode engine's port, over maps in files of memory.
use std::{os::fd::OwnedFd, rc::Rc};

use anyhow::Context as _;
use slipgate_abi::{TapEntry, VmRow};
use slipgate_control::maps::{Insert, SharedMaps};
use slipgate_ipc::engine::{GuestProtocol, UserspaceStart, VmSpec};
use slipgate_model::USERSPACE_GUEST;
use userspace_nat::{
    guest_link::{GuestLink, PacketLink, RingLink, StreamLink},
    stats::VmStats,
    userspace_port::{MemoryTables, UserspacePort},
};

use super::kernel::stats_of;

/// The maps for the programs' functions.
#[derive(Debug)]
pub(super) struct Tables(Rc<SharedMaps>);

impl MemoryTables for Tables {
    type Maps<'t> = &'t SharedMaps;

    fn maps(&self) -> &SharedMaps {
        &self.0
    }

    fn stats(&self, row: VmRow) -> VmStats {
        stats_of(&self.0, row)
    }
}

/// Opens the port of the one VM that such an engine serves. `most_files`: descriptors that the process
/// may have.
pub(super) fn port(
    maps: Rc<SharedMaps>,
    link: OwnedFd,
    start: UserspaceStart,
    vms: &[VmSpec],
    most_files: u64,
) -> anyhow::Result<UserspacePort<Tables>> {
    let [vm] = vms else {
        anyhow::bail!("a user-mode engine serves one VM, not {}", vms.len());
    };
    // This process alone has that table.
    maps.taps
        .insert(
            &USERSPACE_GUEST.get(),
            &TapEntry::new(vm.id, vm.row),
            Insert::Any,
        )
        .context("entering the guest's link")?;
    let (link, takes_uso) = match start {
        UserspaceStart::Tap { takes_uso } => (GuestLink::Tap(link), takes_uso),
        // The engine segments by itself.
        UserspaceStart::Socket {
            protocol,
            is_for_one,
        } => {
            let link = match protocol {
                GuestProtocol::Frames => {
                    GuestLink::Stream(Box::new(StreamLink::new(link, is_for_one)))
                }
                GuestProtocol::VhostUser => {
                    GuestLink::Rings(Box::new(RingLink::new(link, is_for_one)))
                }
            };
            (link, true)
        }
        UserspaceStart::Connected => {
            let link = StreamLink::connected(link).context("the guest's connection")?;
            (GuestLink::Stream(Box::new(link)), true)
        }
        UserspaceStart::Rings => (GuestLink::Rings(Box::new(RingLink::of_own_vmm(link))), true),
        UserspaceStart::RecordOrphans => anyhow::bail!("an engine without a guest has no port"),
        UserspaceStart::Packets => (GuestLink::Packets(Box::new(PacketLink::new(link))), true),
    };
    UserspacePort::new(Tables(maps), link, takes_uso, vm.mtu, most_files)
        .context("waiting for the guest's link")
}
