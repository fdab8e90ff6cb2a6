//! Ports of the host that lead to a guest.

use crate::{Ip4, VmId, VmRow};

/// Key of `FORWARDS`. A packet is looked up with its destination address, then with 0.0.0.0.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ForwardKey {
    /// The host's address, or 0.0.0.0 for any.
    pub host: Ip4,
    /// The host's port.
    pub port: u16,
    /// A [`crate::Protocol`] as its number.
    pub protocol: u8,
    /// Zero.
    pub pad: u8,
}

/// Value of `FORWARDS`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ForwardTarget {
    /// The VM's id.
    pub vm: u32,
    /// Its row in `VMS`.
    pub vm_row: u32,
    /// The guest's port.
    pub guest_port: u16,
    /// Zero.
    pub pad: [u8; 6],
}

impl ForwardTarget {
    /// The VM's id.
    pub const fn id(&self) -> VmId {
        VmId::new(self.vm)
    }

    /// The VM's row; `None` where the entry names none that exists.
    pub const fn row(&self) -> Option<VmRow> {
        VmRow::from_word(self.vm_row)
    }
}

/// Key of the LPM trie `DENY`: destinations that the guard may drop on its own.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct DenyKey {
    /// [`crate::Vm::policy`], network order, matched whole.
    pub policy: [u8; 4],
    /// Destination.
    pub remote: Ip4,
}
