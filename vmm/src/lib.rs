//! A virtual machine monitor for microVMs: KVM, a PC's few devices, PCI with MSI-X, and a
//! multi-queue virtio-net. Frames pass between the guest's buffers and a TAP with one copy, the
//! kernel's.
//!
//! Input from the guest (descriptors, indices, registers, offload headers) is hostile. Invalid
//! input ends in a counted error or in DEVICE_NEEDS_RESET, never in a panic, a hang, or an access
//! outside the guest's memory.
//!
//! The library does not depend on NAT, on policy, or on how its process is confined: it gets open
//! descriptors, and calls [`ThreadSetup`] first on each thread that it starts.
pub mod acpi;
pub mod boot;
pub mod counters;
pub mod cpuid;
#[cfg(any(test, feature = "fake"))]
pub mod fake;
pub mod interrupt;
mod kick;
pub mod kvm;
pub mod layout;
mod legacy;
pub mod machine;
pub mod memory;
pub mod pci;
pub mod report;
pub mod snapshot;
pub mod thread;
pub mod virtio;

pub use counters::Counters;
pub use machine::vcpu;
pub use machine::{
    Control, Devices, Machine, MachineConfig, MachineError, Origin, Outcome, SerialIo,
    SnapshotFiles, StopHandle,
};
pub use report::Report;
pub use thread::{Starting, ThreadKind, ThreadSetup};

/// Guest memory, in one or two regions around the hole below 4 GiB.
pub type GuestMemory = vm_memory::GuestMemoryMmap<()>;
