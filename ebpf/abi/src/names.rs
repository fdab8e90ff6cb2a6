//! Addresses that DNS answers opened to a VM, and the names that opened them. Engines store them
//! for their successors and for display (`bpftool map dump`); no program reads them.

use core::net::IpAddr;

use crate::{Ip4, Ip6, VmId};

/// Longest name in wire form, octets (RFC 1035 section 3.1).
pub const MAX_NAME_LEN: usize = 255;

/// Key of `NAMES`: a VM, an address and a name.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct NameKey {
    /// Id of the VM.
    pub vm: u32,
    /// IPv4 address that the name opened; 0.0.0.0 if it is an IPv6 address.
    pub addr: Ip4,
    /// FNV-1a hash of the name. If two names of one VM at one address have the same hash, the later
    /// one replaces the other: a loss to that VM only.
    pub hash: u64,
    /// IPv6 address that the name opened; `::` if it is an IPv4 address.
    pub addr6: Ip6,
}

impl NameKey {
    /// Key of a name in wire form, in lower case.
    pub fn new(vm: VmId, addr: IpAddr, name: &[u8]) -> Self {
        let (addr, addr6) = match addr {
            IpAddr::V4(addr) => (addr.into(), Ip6::UNSPECIFIED),
            IpAddr::V6(addr) => (Ip4::UNSPECIFIED, addr.into()),
        };
        Self {
            vm: vm.get(),
            addr,
            hash: hash(name),
            addr6,
        }
    }

    /// Id of the VM.
    pub const fn id(&self) -> VmId {
        VmId::new(self.vm)
    }

    /// Address that the name opened.
    pub fn address(&self) -> IpAddr {
        match self.addr6 {
            Ip6::UNSPECIFIED => self.addr.into(),
            addr6 => addr6.into(),
        }
    }
}

/// Value of `NAMES`: the name, and how long it opens the address.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NameValue {
    /// Time until which the address is open, `CLOCK_MONOTONIC` ns.
    pub expires_ns: u64,
    /// Length of the name, octets.
    pub len: u8,
    /// The name in wire form, in lower case, zero-padded.
    pub name: [u8; MAX_NAME_LEN],
}

const _: () = assert!(size_of::<NameKey>() == 32 && size_of::<NameValue>() == 264);

impl NameValue {
    /// Value for a name in wire form, in lower case. `None` if it is longer than [`MAX_NAME_LEN`]
    /// octets.
    pub fn new(name: &[u8], expires_ns: u64) -> Option<Self> {
        let mut value = Self {
            expires_ns,
            len: u8::try_from(name.len()).ok()?,
            name: [0; MAX_NAME_LEN],
        };
        value.name[..name.len()].copy_from_slice(name);
        Some(value)
    }

    /// The name in wire form, in lower case.
    pub fn name(&self) -> &[u8] {
        &self.name[..usize::from(self.len)]
    }
}

/// FNV-1a hash, 64 bits, of a name in wire form, in lower case.
fn hash(name: &[u8]) -> u64 {
    name.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &octet| {
        (hash ^ u64::from(octet)).wrapping_mul(0x100_0000_01b3)
    })
}

#[cfg(test)]
#[path = "names_test.rs"]
mod tests;
