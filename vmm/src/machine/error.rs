//! Why a machine could not be made.
use std::io;

use crate::{
    acpi::AcpiError,
    boot::BootError,
    cpuid::CpuidError,
    kvm::KvmError,
    layout,
    memory::MemoryError,
    pci::PciError,
    vcpu::VcpuError,
    virtio::{net::NetError, transport::TransportError},
};

/// Why a machine could not be made.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// A number of vCPUs that can't be.
    #[error("{0} vCPUs were asked for: give 1 to {max}", max = layout::MAX_CPUS)]
    Cpus(u8),
    /// The host's KVM, or what is taken for it.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// A vCPU.
    #[error(transparent)]
    Vcpu(#[from] VcpuError),
    /// The guest's memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// More memory than the CPU has addresses for.
    #[error(
        "{bytes} bytes of memory were asked for; the addresses of this host's guests have \
         {physical_bits} bits: give less"
    )]
    AddressBits {
        /// Asked for.
        bytes: u64,
        /// As CPUID has it.
        physical_bits: u8,
    },
    /// Kernel, initrd or command line.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// The ACPI tables.
    #[error(transparent)]
    Acpi(#[from] AcpiError),
    /// The CPUs' description.
    #[error(transparent)]
    Cpuid(#[from] CpuidError),
    /// The PCI bus.
    #[error(transparent)]
    Pci(#[from] PciError),
    /// The network card.
    #[error("the network card")]
    Net(#[from] NetError),
    /// A virtio device's place on the PCI bus.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// A thread or a descriptor could not be had.
    #[error("{what}")]
    Host {
        /// What was tried.
        what: &'static str,
        /// What the host said.
        source: io::Error,
    },
}

impl MachineError {
    /// For `map_err`.
    pub(crate) fn host(what: &'static str) -> impl Fn(io::Error) -> MachineError {
        move |source| MachineError::Host { what, source }
    }
}

#[cfg(test)]
#[path = "error_test.rs"]
mod tests;
