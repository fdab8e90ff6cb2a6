//! Addresses of IPv6 flows: elements of `ADDRESSES6`, beside the slots.
use crate::{Ip6, SlotRef, Tuple, Tuple6, handle::handle};

/// One element of `ADDRESSES6`: the addresses of the IPv6 flow in the slot with the same index.
/// Constant while the slot's generation is, as the slot's second cache line.
#[repr(C, align(64))]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Addresses6 {
    /// Address of the guest.
    pub guest: Ip6,
    /// Address of the peer.
    pub remote: Ip6,
    /// Translated address: the guest's as the world sees it.
    pub nat: Ip6,
    /// Explicit padding, always zero.
    pub pad: [u8; 16],
}

const _: () = assert!(size_of::<Addresses6>() == 64);

handle! {
    /// Handle to the addresses of a flow in use.
    Addresses6Ref(Addresses6);
    atomic {}
    constant {
        /// Address of the guest.
        guest: Ip6,
        /// Address of the peer.
        remote: Ip6,
        /// Translated address of the guest.
        nat: Ip6,
    }
}

impl Addresses6Ref {
    /// Writes the addresses, of a flow whose slot the caller is filling.
    pub fn set(&self, addresses: Addresses6) {
        // SAFETY: `new` promised a valid element; the slot is free and the caller's, so no program
        // reads it.
        unsafe { self.as_ptr().write_volatile(addresses) };
    }

    /// Returns a copy of the flow's addresses.
    pub fn copy(&self) -> Addresses6 {
        // SAFETY: `new` promised a valid element; octets have no invalid values.
        unsafe { self.as_ptr().read_volatile() }
    }

    /// Tuple of the flow on the guest's link: the key of one of its entries in `FLOWS6`.
    #[inline(always)]
    pub fn guest_tuple(&self, slot: SlotRef) -> Tuple6 {
        Tuple6 {
            scope: slot.vm(),
            local_port: slot.guest_port(),
            remote_port: slot.remote_port(),
            local: self.guest(),
            remote: self.remote(),
            protocol: slot.protocol(),
            pad: [0; 7],
        }
    }

    /// Tuple of the flow on the world's link: the key of its other entry in `FLOWS6`.
    #[inline(always)]
    pub fn world_tuple(&self, slot: SlotRef) -> Tuple6 {
        Tuple6 {
            scope: Tuple::WORLD,
            local_port: slot.nat_port(),
            remote_port: slot.remote_port(),
            local: self.nat(),
            remote: self.remote(),
            protocol: slot.protocol(),
            pad: [0; 7],
        }
    }
}
