//! Port forwards from the host to a guest, and the guard's deny list.

use crate::{Ip4, Ip6, Protocol, VmId, VmRow};

/// Key of `FORWARDS`. A packet is looked up by its destination address, then by 0.0.0.0.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ForwardKey {
    /// Address of the host; 0.0.0.0 stands for any.
    pub host: Ip4,
    /// Port of the host, host order.
    pub port: u16,
    /// Number of a [`crate::Protocol`].
    pub protocol: u8,
    /// Explicit padding, always zero.
    pub pad: u8,
}

impl ForwardKey {
    /// Key of a port, host order, of an address of the host. `protocol`: number of a [`Protocol`].
    #[inline(always)]
    pub const fn new(host: Ip4, port: u16, protocol: u8) -> Self {
        Self {
            host,
            port,
            protocol,
            pad: 0,
        }
    }
}

/// Key of `FORWARDS6`. A packet is looked up by its destination address, then by the /64 of a guest's own
/// addresses ([`ForwardKey6::of_routed_port`]), then by `::`. The map also has what is routed to VMs:
/// prefixes ([`ForwardKey6::of_routed`]) and single addresses ([`ForwardKey6::of_routed_address`]).
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ForwardKey6 {
    /// Address of the host; `::` stands for any.
    pub host: Ip6,
    /// Port of the host, host order.
    pub port: u16,
    /// Number of a [`crate::Protocol`].
    pub protocol: u8,
    /// Explicit padding, always zero.
    pub pad: [u8; 5],
}

impl ForwardKey6 {
    /// Key of a port, host order, of an address of the host. `protocol`: number of a [`Protocol`].
    #[inline(always)]
    pub const fn new(host: Ip6, port: u16, protocol: u8) -> Self {
        Self {
            host,
            port,
            protocol,
            pad: [0; 5],
        }
    }

    /// Key of the /64 that has this address, as one that the network routes to a VM: its first
    /// address, and no port. No forward has such a key.
    #[inline(always)]
    pub const fn of_routed(address: Ip6) -> Self {
        let [upper, _] = address.halves();
        Self {
            host: Ip6::from_halves([upper, 0]),
            port: 0,
            protocol: Protocol::Icmpv6 as u8,
            pad: [0; 5],
        }
    }

    /// Key of a single address that the network routes to a VM: its length in the place of the port.
    /// No forward has such a key either.
    #[inline(always)]
    pub const fn of_routed_address(address: Ip6) -> Self {
        Self {
            host: address,
            port: 128,
            protocol: Protocol::Icmpv6 as u8,
            pad: [0; 5],
        }
    }

    /// Key of a port, host order, of all addresses of the /64 that has this one, which the network
    /// routes to a VM: its first address, and a protocol of its own, so that no forward of an address has
    /// such a key.
    #[inline(always)]
    pub const fn of_routed_port(address: Ip6, port: u16, protocol: u8) -> Self {
        let [upper, _] = address.halves();
        Self {
            host: Ip6::from_halves([upper, 0]),
            port,
            protocol: protocol | Self::OF_PREFIX,
            pad: [0; 5],
        }
    }

    /// Set in the protocol of a port of a whole /64.
    const OF_PREFIX: u8 = 0x80;

    /// Number of the [`crate::Protocol`] of a port, whether of one address or of a /64.
    pub const fn transport(&self) -> u8 {
        self.protocol & !Self::OF_PREFIX
    }

    /// Whether it is the key of a prefix or an address that the network routes to a VM.
    pub const fn is_routed(&self) -> bool {
        self.protocol == Protocol::Icmpv6 as u8
    }
}

/// Value of `FORWARDS` and `FORWARDS6`: the guest port that receives the packets.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ForwardTarget {
    /// Id of the VM. The entry is valid only while the row has the same id.
    pub vm: u32,
    /// Row of the VM in `VMS`.
    pub vm_row: u32,
    /// Port of the guest, host order.
    pub guest_port: u16,
    /// Explicit padding, always zero.
    pub pad: [u8; 6],
}

impl ForwardTarget {
    /// Target of a port of a VM's guest, host order.
    pub const fn new(id: VmId, row: VmRow, guest_port: u16) -> Self {
        Self {
            vm: id.get(),
            vm_row: row.word(),
            guest_port,
            pad: [0; 6],
        }
    }

    /// Id of the VM.
    pub const fn id(&self) -> VmId {
        VmId::new(self.vm)
    }

    /// Row of the VM; `None` if the entry names no existing row.
    pub const fn row(&self) -> Option<VmRow> {
        VmRow::from_word(self.vm_row)
    }
}

/// Key of the LPM trie `DENY`: destinations that the guard may drop without the engine.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct DenyKey {
    /// [`crate::Vm::policy`] in network order. All 32 bits are matched.
    pub policy: [u8; 4],
    /// Destination address or prefix.
    pub remote: Ip4,
}

/// Key of the LPM trie `DENY6`: the same for IPv6.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct DenyKey6 {
    /// As in [`DenyKey`].
    pub policy: [u8; 4],
    /// Octets of the destination address or prefix, directly behind the policy: an [`Ip6`] is aligned.
    pub remote: [u8; 16],
}
