//! Signals between devices and CPUs that bypass the VMM: an eventfd that the hypervisor turns into
//! an MSI (irqfd), and a guest address whose write signals an eventfd (ioeventfd). They are traits,
//! so that the PCI and virtio layers run without KVM in tests.
use std::io;

use vmm_sys_util::eventfd::EventFd;

/// Message of an MSI: a 32-bit write to an address in the local APICs' window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MsiMessage {
    /// Message address, upper half included.
    pub address: u64,
    /// Message data, which holds the vector.
    pub data: u32,
}

/// Delivery of MSIs by eventfds.
pub trait MsiFabric: Send + Sync {
    /// Reserves an interrupt line (GSI) for one vector, which `signal` raises. Returns the GSI.
    /// Until [`MsiFabric::route`], a signal is lost.
    ///
    /// # Errors
    /// No line is free, or the hypervisor refuses the eventfd.
    fn connect(&self, signal: &EventFd) -> io::Result<u32>;
    /// Sets the message that the line sends from now on.
    ///
    /// # Errors
    /// The line is not connected, or the hypervisor refuses the route.
    fn route(&self, gsi: u32, message: MsiMessage) -> io::Result<()>;
    /// Disconnects the line's `signal`, or connects it again: what is signalled meanwhile is kept, and
    /// raises the line once then.
    ///
    /// # Errors
    /// The hypervisor refuses the eventfd.
    fn set_held(&self, gsi: u32, signal: &EventFd, is_held: bool) -> io::Result<()>;
    /// Releases the line, undoing [`MsiFabric::connect`].
    fn disconnect(&self, gsi: u32, signal: &EventFd);
}

/// Delivery of a guest's notifications by eventfds.
pub trait Doorbells: Send + Sync {
    /// Has any write of any width at the guest physical `address` signal `bell`.
    ///
    /// # Errors
    /// The hypervisor refuses it, for instance because the address is taken.
    fn connect(&self, address: u64, bell: &EventFd) -> io::Result<()>;
    /// Frees the address, undoing [`Doorbells::connect`].
    fn disconnect(&self, address: u64, bell: &EventFd);
}
