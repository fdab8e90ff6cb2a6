//! The link between VMM and user-mode engine.
use std::{fs::File, os::fd::OwnedFd};

use anyhow::Context as _;
use nix::{
    fcntl::{FcntlArg, SealFlag, fcntl},
    sys::{
        memfd::{MFdFlags, memfd_create},
        socket::{AddressFamily, SockFlag, SockType, setsockopt, socketpair, sockopt},
    },
};
use slipgate_ipc::{engine::UserspaceStart, vmm::NetRates};

use crate::config::{MachineSpec, VmmBounds};

/// Bytes that may wait in each direction between VMM and engine; the kernel gives what the host allows.
const BETWEEN: usize = 1 << 20;
/// Bytes behind the guest's memory, in which the engine counts what the rings carry
/// (`vmm/src/virtio/net/rings`).
const COUNTERS: u64 = 4_096;

/// Both ends of the link.
pub(super) struct LinkEnds {
    /// End that the engine gets.
    pub(super) ours: OwnedFd,
    /// End that the VMM gets.
    pub(super) theirs: OwnedFd,
    /// The file for the guest's memory, if the engine serves the card's rings.
    pub(super) memory: Option<OwnedFd>,
    pub(super) how: UserspaceStart,
}

impl LinkEnds {
    /// Makes the link that such a machine has.
    pub(super) fn make(machine: &MachineSpec, bounds: &VmmBounds) -> anyhow::Result<Self> {
        match has_rings(machine, bounds) {
            true => Self::rings(machine.memory_mib << 20),
            false => Self::packets(),
        }
    }

    /// The engine serves the rings, in memory that both have.
    fn rings(memory_bytes: u64) -> anyhow::Result<Self> {
        let (ours, theirs) = pair(SockType::Stream)?;
        Ok(Self {
            ours,
            theirs,
            memory: Some(memory_file(memory_bytes + COUNTERS)?),
            how: UserspaceStart::Rings,
        })
    }

    /// The VMM passes frames, a message each.
    fn packets() -> anyhow::Result<Self> {
        let (ours, theirs) = pair(SockType::SeqPacket)?;
        for socket in [&ours, &theirs] {
            setsockopt(socket, sockopt::SndBuf, &BETWEEN)
                .context("setting the buffers between VMM and engine")?;
        }
        Ok(Self {
            ours,
            theirs,
            memory: None,
            how: UserspaceStart::Packets,
        })
    }
}

/// Whether the engine can serve the card's rings.
fn has_rings(machine: &MachineSpec, bounds: &VmmBounds) -> bool {
    // The host charges a page of a shared file to the cgroup of the process that touches it first, and
    // the engine is in another one than the VMM. What that page takes of the swap is charged there too.
    let cgroup = bounds.cgroup.as_ref();
    let limits_memory =
        cgroup.is_some_and(|cgroup| cgroup.memory_bytes.is_some() || cgroup.swap_bytes.is_some());
    // Nor is that file of huge pages.
    let is_private = bounds.huge_pages || machine.restore.is_some();
    !is_private && machine.net_rates == NetRates::default() && !limits_memory
}

fn pair(kind: SockType) -> anyhow::Result<(OwnedFd, OwnedFd)> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let pair = socketpair(AddressFamily::Unix, kind, None, flags);
    pair.context("making the sockets between VMM and engine")
}

/// A file of zeroes, whose length nobody can change: a process that has it mapped would end by SIGBUS.
fn memory_file(bytes: u64) -> anyhow::Result<OwnedFd> {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let file = memfd_create(c"slipgate-guest", flags).context("making the guest's memory")?;
    let file = File::from(file);
    file.set_len(bytes).context("making the guest's memory")?;
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).context("sealing the guest's memory")?;
    Ok(file.into())
}

#[cfg(test)]
#[path = "link_test.rs"]
mod tests;
