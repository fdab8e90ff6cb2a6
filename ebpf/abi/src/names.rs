//! What DNS opened: an address, to a VM, by a name. Kept by engines for their successors, and for
//! people (`bpftool map dump`); no program reads it.

use crate::Ip4;

/// Longest name in wire form, octets (RFC 1035 section 3.1).
pub const MAX_NAME_LEN: usize = 255;

/// Key of `NAMES`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct NameKey {
    /// The VM's id.
    pub vm: u32,
    /// The address that was opened.
    pub addr: Ip4,
    /// FNV-1a of the name. Two names of one VM at one address that hash alike are one entry, the
    /// later one: a loss to that VM only.
    pub hash: u64,
}

impl NameKey {
    /// The key of a name in wire form, in lower case.
    pub fn new(vm: u32, addr: Ip4, name: &[u8]) -> Self {
        Self {
            vm,
            addr,
            hash: hash(name),
        }
    }
}

/// Value of `NAMES`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NameValue {
    /// Until when it is open.
    pub expires_ns: u64,
    /// Length of the name, octets.
    pub len: u8,
    /// The name in wire form, in lower case, zero-padded.
    pub name: [u8; MAX_NAME_LEN],
}

const _: () = assert!(size_of::<NameKey>() == 16 && size_of::<NameValue>() == 264);

impl NameValue {
    /// `None` when the name is longer than a name can be.
    pub fn new(name: &[u8], expires_ns: u64) -> Option<Self> {
        let mut value = Self {
            expires_ns,
            len: u8::try_from(name.len()).ok()?,
            name: [0; MAX_NAME_LEN],
        };
        value.name[..name.len()].copy_from_slice(name);
        Some(value)
    }

    /// The name in wire form.
    pub fn name(&self) -> &[u8] {
        &self.name[..usize::from(self.len)]
    }
}

/// FNV-1a, 64 bits, of a name in wire form, in lower case.
fn hash(name: &[u8]) -> u64 {
    name.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &octet| {
        (hash ^ u64::from(octet)).wrapping_mul(0x100_0000_01b3)
    })
}
