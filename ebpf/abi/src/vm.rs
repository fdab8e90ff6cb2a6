//! The guests: who is behind which TAP.
use core::sync::atomic::{AtomicU32, AtomicU64};

use crate::{Ip4, VmId, VmRow};

/// Value of `TAPS`, keyed by ifindex.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TapEntry {
    /// The VM's id; must equal the row's.
    pub vm: u32,
    /// Row in `VMS`, `DROPS` and `COUNTERS`.
    pub vm_row: u32,
}

impl TapEntry {
    /// The VM's id.
    pub const fn id(&self) -> VmId {
        VmId::new(self.vm)
    }

    /// The VM's row; `None` where the entry names none that exists.
    pub const fn row(&self) -> Option<VmRow> {
        VmRow::from_word(self.vm_row)
    }
}

/// One row of `VMS`. Row 0 stays free: what can't be attributed to a VM is counted there.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub struct Vm {
    /// The VM's id, never reused; 0: the row is free.
    pub id: u32,
    /// Row in `OWNERS` of the process that serves it.
    pub owner: u32,
    /// Its TAP.
    pub tap_ifindex: u32,
    /// The engine port that takes what the kernel hands over.
    pub port_ifindex: u32,
    /// The address the guest must use.
    pub guest: Ip4,
    /// The gateway's address, for which ARP is answered in the kernel.
    pub gateway: Ip4,
    /// The guest's MAC; checked on what it sends when [`VmFlags::CHECK_MAC`] is set, else learned
    /// from it, and [`VmRef::UNKNOWN_MAC`] until then.
    pub guest_mac: [u8; 6],
    /// The gateway's MAC.
    pub gateway_mac: [u8; 6],
    /// [`VmFlags`] bits.
    pub flags: u32,
    /// The TAP's MTU, L3 bytes.
    pub mtu: u32,
    /// How many of the guest's frames may be on their way to the engine at once.
    pub credits: u32,
    /// Policy number: scope of the keys in `DENY`.
    pub policy: u32,
    /// Prefix length of the guest's network.
    pub prefix_len: u32,
    /// How many of the world's frames for it, beside those; half of them at most first packets to
    /// forwards.
    pub world_credits: u32,

    /// The guest's frames that were redirected to the engine port so far, as
    /// [`crate::segment::credits`] counts them. Counted by the programs.
    pub handed_over: u64,
    /// Of those, how many came out at the engine or are known to be lost. Stored by the engine;
    /// never more.
    pub taken_in: u64,
    /// Gateway ARP requests that the kernel answered.
    pub arp_answered: u64,
    /// Window start of the guard's allowance for denied packets, ns.
    pub guard_window_ns: u64,
    /// Denied packets let through to the engine in this window, so that it can answer them.
    pub guard_passed: u64,
    /// As `handed_over`, of the world's frames.
    pub world_handed_over: u64,
    /// As `taken_in`, of the world's frames.
    pub world_taken_in: u64,
    /// Zero.
    pub pad: [u8; 8],

    /// Name given by the user, UTF-8, zero-padded.
    pub name: [u8; 64],
}

const _: () = assert!(size_of::<Vm>() == 192);
const _: () = assert!(core::mem::offset_of!(Vm, handed_over) == 64);

/// Bits of [`Vm::flags`].
#[derive(Debug)]
pub struct VmFlags;

impl VmFlags {
    /// Drop what has another source MAC than `guest_mac`.
    pub const CHECK_MAC: u32 = 1;
    /// Drop everything both ways.
    pub const FROZEN: u32 = 2;
    /// Its row of `RATES` is looked at.
    pub const LIMITED: u32 = 4;
}

/// A live row, reached by atomics where it changes.
#[derive(Clone, Copy, Debug)]
pub struct VmRef(*mut Vm);

// SAFETY: changing fields are reached by atomics only.
unsafe impl Send for VmRef {}
// SAFETY: as above.
unsafe impl Sync for VmRef {}

impl VmRef {
    /// The guest's MAC while it is not known: everybody's, so that ARP and DHCP reach it.
    pub const UNKNOWN_MAC: [u8; 6] = [0xff; 6];

    /// Whether the guest's MAC is known. It may be learned at any moment.
    pub fn knows_guest_mac(&self) -> bool {
        // SAFETY: `new` promised a valid row; a mix of two values is neither harmful nor all ones.
        let mac = unsafe { (&raw const (*self.0).guest_mac).read_volatile() };
        mac != Self::UNKNOWN_MAC
    }

    /// # Safety
    /// `vm` points to an element of `VMS` and stays mapped as long as the result is used.
    #[inline(always)]
    pub const unsafe fn new(vm: *mut Vm) -> Self {
        Self(vm)
    }

    /// The row itself.
    #[inline(always)]
    pub const fn as_ptr(self) -> *mut Vm {
        self.0
    }

    /// The VM's id; 0: free.
    #[inline(always)]
    pub fn id(&self) -> &AtomicU32 {
        // SAFETY: `new` promised a valid row; both sides use atomics on this field.
        unsafe { AtomicU32::from_ptr(&raw mut (*self.0).id) }
    }

    /// [`VmFlags`].
    #[inline(always)]
    pub fn flags(&self) -> &AtomicU32 {
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(&raw mut (*self.0).flags) }
    }

    /// Its TAP's ifindex.
    #[inline(always)]
    pub fn tap_ifindex(&self) -> &AtomicU32 {
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(&raw mut (*self.0).tap_ifindex) }
    }

    /// The guest's frames redirected to the engine port.
    #[inline(always)]
    pub fn handed_over(&self) -> &AtomicU64 {
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(&raw mut (*self.0).handed_over) }
    }

    /// Those that came out, or are known to be lost.
    #[inline(always)]
    pub fn taken_in(&self) -> &AtomicU64 {
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(&raw mut (*self.0).taken_in) }
    }

    /// The world's frames redirected to the engine port.
    #[inline(always)]
    pub fn world_handed_over(&self) -> &AtomicU64 {
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(&raw mut (*self.0).world_handed_over) }
    }

    /// Those that came out, or are known to be lost.
    #[inline(always)]
    pub fn world_taken_in(&self) -> &AtomicU64 {
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(&raw mut (*self.0).world_taken_in) }
    }

    /// Counts of frames handed over and taken in: the world's, or the guest's.
    #[inline(always)]
    pub fn under_way(&self, from_world: bool) -> (&AtomicU64, &AtomicU64) {
        if from_world {
            (self.world_handed_over(), self.world_taken_in())
        } else {
            (self.handed_over(), self.taken_in())
        }
    }

    /// Gateway ARP requests answered in the kernel.
    #[inline(always)]
    pub fn arp_answered(&self) -> &AtomicU64 {
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(&raw mut (*self.0).arp_answered) }
    }
}
