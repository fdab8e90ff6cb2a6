//! Guest addresses whose write signals an eventfd (ioeventfd), without an exit to the VMM.
use std::{io, sync::Arc};

use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use vmm_sys_util::eventfd::EventFd;

use crate::interrupt::Doorbells;

/// Implements [`Doorbells`]. The ioeventfds have length 0 and match no data: a write of any width
/// and value signals (`KVM_CAP_IOEVENTFD_ANY_LENGTH`), and KVM can skip the emulation of the
/// instruction.
pub(crate) struct KvmDoorbells(pub(crate) Arc<VmFd>);

impl Doorbells for KvmDoorbells {
    fn connect(&self, address: u64, bell: &EventFd) -> io::Result<()> {
        let address = IoEventAddress::Mmio(address);
        Ok(self.0.register_ioevent(bell, &address, NoDatamatch)?)
    }

    fn disconnect(&self, address: u64, bell: &EventFd) {
        let address = IoEventAddress::Mmio(address);
        // The call fails only where nothing is connected: then there is nothing to undo.
        let _ = self.0.unregister_ioevent(bell, &address, NoDatamatch);
    }
}
