//! A virtual machine monitor for microVMs: KVM, a PC's few devices, PCI with MSI-X, and a
//! multi-queue virtio-net whose frames go between the guest's buffers and a TAP with one copy, the
//! kernel's.
//!
//! What the guest writes (descriptors, indices, registers, offload headers) is hostile: it ends in
//! a counted error or in DEVICE_NEEDS_RESET, never in a panic, a hang, or an access outside the
//! guest's memory.
//!
//! The library knows nothing of NAT, of policy, or of how its process is confined: it is handed
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
pub mod thread;
pub mod virtio;

pub use counters::Counters;
pub use machine::vcpu;
pub use machine::{Machine, MachineConfig, MachineError, Outcome, SerialIo, StopHandle};
pub use report::Report;
pub use thread::{ThreadKind, ThreadSetup};

/// The guest's memory, in one or two pieces around the hole below 4 GiB.
pub type GuestMemory = vm_memory::GuestMemoryMmap<()>;
