//! Errors of creating a machine.
use std::io;

use crate::{
    acpi::AcpiError,
    boot::BootError,
    cpuid::CpuidError,
    kvm::KvmError,
    layout,
    memory::MemoryError,
    pci::PciError,
    snapshot::SnapshotError,
    virtio::{
        balloon::BalloonError, block::DiskError, net::NetError, transport::TransportError,
        vsock::VsockError,
    },
};

/// Reason why a machine could not be created.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// The number of vCPUs is 0 or above [`layout::MAX_CPUS`].
    #[error("{0} vCPUs were asked for: give 1 to {max}", max = layout::MAX_CPUS)]
    Cpus(u8),
    /// The host's KVM can't be used, or the descriptor is not `/dev/kvm`.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// The guest's memory could not be created.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The memory exceeds the addresses that the CPU can reach.
    #[error(
        "{bytes} bytes of memory were asked for; the addresses of this host's guests have \
         {physical_bits} bits: give less"
    )]
    AddressBits {
        /// Requested size of the memory, bytes.
        bytes: u64,
        /// Bits of a guest physical address, by CPUID.
        physical_bits: u8,
    },
    /// The kernel, initrd or command line can't be used.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// The ACPI tables could not be written.
    #[error(transparent)]
    Acpi(#[from] AcpiError),
    /// The guest's CPUID could not be determined.
    #[error(transparent)]
    Cpuid(#[from] CpuidError),
    /// A device does not fit the PCI bus.
    #[error(transparent)]
    Pci(#[from] PciError),
    /// The network card could not be created.
    #[error("the network card")]
    Net(#[from] NetError),
    /// A disk could not be created.
    #[error("disk {number}")]
    Disk {
        /// Place of the disk among those that were asked for, from 0.
        number: usize,
        /// Reason of the disk's failure.
        source: DiskError,
    },
    /// The vsock device could not be created.
    #[error("the vsock device")]
    Vsock(#[from] VsockError),
    /// The balloon could not be created.
    #[error("the balloon")]
    Balloon(#[from] BalloonError),
    /// A virtio device could not be connected to the PCI bus.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// The snapshot can't be restored.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// The host refused a thread, a descriptor or another resource.
    #[error("{what}")]
    Host {
        /// Operation that was tried.
        what: &'static str,
        /// Error from the host.
        source: io::Error,
    },
}

impl MachineError {
    /// Returns a function for `map_err` that makes an error of operation `what` and the host's
    /// error.
    pub(crate) fn host(what: &'static str) -> impl Fn(io::Error) -> MachineError {
        move |source| MachineError::Host { what, source }
    }
}

#[cfg(test)]
#[path = "error_test.rs"]
mod tests;
