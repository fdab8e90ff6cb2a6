//! IPv6 of the VMs: a row of `VMS6` beside each row of `VMS`.
//!
//! A guest configures its addresses itself (RFC 4862), so they are not known before it uses them.
//! The engine binds an address to the VM at its first packet or at duplicate address detection, if
//! it is of the VM's /64 or link-local. The programs let a guest open flows only from addresses that
//! are bound; a packet from another address of these prefixes is handed over.
//!
//! A VM may have a single address (/128) in the place of a /64. The guest does not make it but gets it
//! by DHCPv6; it and a link-local one are the only ones that can be bound.
#[cfg(not(target_arch = "bpf"))]
use core::sync::atomic::Ordering::Release;
use core::sync::atomic::{AtomicU32, AtomicU64};

use crate::{Ip6, handle::handle};

/// Number of addresses that a VM may have bound: a link-local one, and eight of its /64. A host with
/// temporary addresses (RFC 8981) has one stable one and up to seven of these.
pub const GUEST_ADDRESSES: usize = 9;

/// One row of `VMS6`.
#[repr(C, align(64))]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Vm6 {
    /// [`Vm6Flags`] bits of the VM.
    pub flags: u32,
    /// Explicit padding, always zero.
    pub pad: u32,
    /// Neighbour solicitations that the kernel answered: the guest's for the gateway, and the uplink's
    /// neighbours' for the guest.
    pub neighbours_answered: u64,
    /// First address of the VM's /64, from which the guest makes its own; or its single address
    /// ([`Vm6Flags::SINGLE`]).
    pub prefix: Ip6,
    /// The gateway's address: of that /64, or of another one if the VM has a single address. All of
    /// the gateway's /64 is the gateway's to answer.
    pub gateway: Ip6,
    /// The gateway's link-local address.
    pub gateway_local: Ip6,
    /// Addresses bound to the guest: the link-local one first. `::` where none is.
    pub guests: [Ip6; GUEST_ADDRESSES],
    /// For each, the time of the last packet from it that was handed over, `CLOCK_MONOTONIC_COARSE`
    /// ns; 0 if none was. What the programs translate is noted in the flows' slots.
    pub used_ns: [u64; GUEST_ADDRESSES],
    /// Link on which neighbours that ask for the guest's addresses are answered; 0: on none.
    pub proxy_ifindex: u32,
    /// MAC address with which they are answered.
    pub proxy_mac: [u16; 3],
    /// Explicit padding, always zero.
    pub pad_end: [u8; 30],
}

const _: () = assert!(size_of::<Vm6>() == 320);

impl Vm6 {
    /// Row of a VM without IPv6.
    pub const OFF: Self = Self {
        flags: 0,
        pad: 0,
        neighbours_answered: 0,
        prefix: Ip6::UNSPECIFIED,
        gateway: Ip6::UNSPECIFIED,
        gateway_local: Ip6::UNSPECIFIED,
        guests: [Ip6::UNSPECIFIED; GUEST_ADDRESSES],
        used_ns: [0; GUEST_ADDRESSES],
        proxy_ifindex: 0,
        proxy_mac: [0; 3],
        pad_end: [0; 30],
    };
}

/// Names of the bits in [`Vm6::flags`].
#[derive(Debug)]
pub struct Vm6Flags;

impl Vm6Flags {
    /// The VM has IPv6. Without it, its IPv6 packets are dropped.
    pub const ON: u32 = 1;
    /// The VM has a single address, which is [`Vm6::prefix`], and no /64.
    pub const SINGLE: u32 = 1 << 1;
}

handle! {
    /// Handle to a live row of `VMS6`. Fields that change are accessed by atomics; the prefix and the
    /// gateway's addresses change only while [`Vm6Flags::ON`] is clear.
    Vm6Ref(Vm6);
    atomic {
        /// [`Vm6Flags`] bits of the VM.
        flags: AtomicU32,
        /// Neighbour solicitations for the gateway that the kernel answered.
        neighbours_answered: AtomicU64,
        /// Link on which neighbours that ask for the guest's addresses are answered; 0: on none.
        proxy_ifindex: AtomicU32,
    }
    constant {
        /// First address of the VM's /64, or its single address.
        prefix: Ip6,
        /// The gateway's address.
        gateway: Ip6,
        /// The gateway's link-local address.
        gateway_local: Ip6,
    }
}

impl Vm6Ref {
    /// Address bound at this place, or `::`. It may be a mix of two addresses of the same guest
    /// while the place gets another one; both are of its own prefixes.
    #[inline(always)]
    pub fn guest_address(&self, place: usize) -> Ip6 {
        let place = place % GUEST_ADDRESSES;
        // By words: a volatile read of octets is one by one.
        // SAFETY: `new` promised a valid row; in bounds, and aligned as a word is; any bits are an
        // address.
        unsafe {
            let halves = (&raw const (*self.as_ptr()).guests[place]).cast::<u64>();
            Ip6::from_halves([halves.read_volatile(), halves.add(1).read_volatile()])
        }
    }

    /// MAC address with which neighbours are answered on the link of the prefix.
    #[inline(always)]
    pub fn proxy_mac(&self) -> [u16; 3] {
        // SAFETY: `new` promised a valid row; any bits are an address.
        unsafe { (&raw const (*self.as_ptr()).proxy_mac).read_volatile() }
    }

    /// Has neighbours on a link answered that ask for the guest's addresses; `None`: on none.
    #[cfg(not(target_arch = "bpf"))]
    pub fn set_proxy(&self, link: Option<(u32, [u8; 6])>) {
        let (ifindex, mac) = link.unwrap_or_default();
        let [a, b, c, d, e, f] = mac;
        let words = [[a, b], [c, d], [e, f]].map(u16::from_ne_bytes);
        if self.proxy_mac() != words {
            self.proxy_ifindex().store(0, Release);
            // SAFETY: as above; programs do not use it while there is no link.
            unsafe { (&raw mut (*self.as_ptr()).proxy_mac).write_volatile(words) };
        }
        self.proxy_ifindex().store(ifindex, Release);
    }

    /// Time of the last packet from the address at this place that was handed over, ns.
    #[inline(always)]
    pub fn used_ns(&self, place: usize) -> &AtomicU64 {
        let place = place % GUEST_ADDRESSES;
        // SAFETY: `new` promised a valid row; in bounds; both sides use atomics on it.
        unsafe { AtomicU64::from_ptr(&raw mut (*self.as_ptr()).used_ns[place]) }
    }

    /// Whether an address is of the VM's /64, or its single address.
    #[inline(always)]
    pub fn has_in_prefix(&self, address: Ip6) -> bool {
        let prefix = self.prefix();
        let is_single = crate::cell::load32(self.flags()) & Vm6Flags::SINGLE != 0;
        address.same_prefix(prefix) && (!is_single || address.is(prefix))
    }

    /// Place of an address that is bound; `None` if it is not.
    #[inline(always)]
    pub fn place_of(&self, address: Ip6) -> Option<usize> {
        (0..GUEST_ADDRESSES).find(|place| self.guest_address(*place).is(address))
    }

    /// Binds an address at a place, or none if it is `::`. The engine calls this.
    #[cfg(not(target_arch = "bpf"))]
    pub fn bind(&self, place: usize, address: Ip6, now_ns: u64) {
        let place = place % GUEST_ADDRESSES;
        // SAFETY: as for `guest_address`; only the engine that serves the VM writes it.
        unsafe { (&raw mut (*self.as_ptr()).guests[place]).write_volatile(address) };
        self.used_ns(place).store(now_ns, Release);
    }

    /// Gives the VM IPv6 with this prefix and these addresses of the gateway, or takes it away. The
    /// prefix is the first address of a /64 with the gateway in it, or else a single address. Bound
    /// addresses of another prefix are forgotten.
    #[cfg(not(target_arch = "bpf"))]
    pub fn set(&self, network: Option<(Ip6, Ip6, Ip6)>) {
        self.flags().store(0, Release);
        let Some((prefix, gateway, gateway_local)) = network else {
            return;
        };
        let keeps = self.prefix().is(prefix);
        let row = self.as_ptr();
        // SAFETY: `new` promised a valid row; programs do not use these fields while IPv6 is off.
        unsafe {
            (&raw mut (*row).prefix).write_volatile(prefix);
            (&raw mut (*row).gateway).write_volatile(gateway);
            (&raw mut (*row).gateway_local).write_volatile(gateway_local);
        }
        if !keeps {
            for place in 1..GUEST_ADDRESSES {
                self.bind(place, Ip6::UNSPECIFIED, 0);
            }
        }
        let single = match prefix.same_prefix(gateway) {
            true => 0,
            false => Vm6Flags::SINGLE,
        };
        self.flags().store(Vm6Flags::ON | single, Release);
    }

    /// Forgets everything, for the row's next VM.
    #[cfg(not(target_arch = "bpf"))]
    pub fn clear(&self) {
        self.flags().store(0, Release);
        // SAFETY: `new` promised a valid row; IPv6 is off.
        unsafe { self.as_ptr().write_volatile(Vm6::OFF) };
    }

    /// Returns a copy of the row, of which an address that is changing may be a mix of two.
    pub fn copy(&self) -> Vm6 {
        // SAFETY: `new` promised a valid row; integers and octets have no invalid values.
        unsafe { self.as_ptr().read_volatile() }
    }
}
