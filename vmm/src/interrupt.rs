//! How a device reaches a CPU and a CPU reaches a device without the VMM in between: an eventfd
//! that the hypervisor turns into an MSI (irqfd), and a guest address whose write signals an
//! eventfd (ioeventfd). Traits, so that the PCI and virtio layers run without KVM in tests.
use std::io;

use vmm_sys_util::eventfd::EventFd;

/// What an MSI is: a 32-bit write to an address in the local APICs' window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MsiMessage {
    /// Message address, upper half included.
    pub address: u64,
    /// Message data.
    pub data: u32,
}

/// Turns the signal of an eventfd into an MSI.
pub trait MsiFabric: Send + Sync {
    /// Reserves an interrupt line (GSI) for one vector, and has `signal` raise it.
    /// Until [`MsiFabric::route`], a signal is lost.
    fn connect(&self, signal: &EventFd) -> io::Result<u32>;
    /// Says what the line sends from now on.
    fn route(&self, gsi: u32, message: MsiMessage) -> io::Result<()>;
    /// Undoes [`MsiFabric::connect`].
    fn disconnect(&self, gsi: u32, signal: &EventFd);
}

/// Turns a guest's write to an address into the signal of an eventfd.
pub trait Doorbells: Send + Sync {
    /// Any write of any width at the guest physical `address` signals `bell`.
    fn connect(&self, address: u64, bell: &EventFd) -> io::Result<()>;
    /// Undoes [`Doorbells::connect`].
    fn disconnect(&self, address: u64, bell: &EventFd);
}
