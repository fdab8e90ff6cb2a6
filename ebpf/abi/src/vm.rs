//! The VMs, and the TAP by which each is attached.
use core::sync::atomic::{AtomicU32, AtomicU64};

use crate::{Ip4, VmId, VmRow, handle::handle};

/// Value of `TAPS`, keyed by ifindex: the VM attached to a TAP.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TapEntry {
    /// Id of the VM. The entry is valid only while the row has the same id.
    pub vm: u32,
    /// Row of the VM in `VMS`, `DROPS` and `COUNTERS`.
    pub vm_row: u32,
}

impl TapEntry {
    /// Entry of a VM's TAP.
    pub const fn new(id: VmId, row: VmRow) -> Self {
        Self {
            vm: id.get(),
            vm_row: row.word(),
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

/// One row of `VMS`. Row 0 stays free: it counts packets that cannot be attributed to a VM.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub struct Vm {
    /// Id of the VM, never reused; 0 if the row is free.
    pub id: u32,
    /// Row in `OWNERS` of the process that serves the VM.
    pub owner: u32,
    /// Ifindex of the VM's TAP; 0 while it is detached.
    pub tap_ifindex: u32,
    /// Ifindex of the engine port to which the kernel redirects the VM's frames.
    pub port_ifindex: u32,
    /// Address that the guest must use.
    pub guest: Ip4,
    /// Address of the gateway, for which the kernel answers ARP.
    pub gateway: Ip4,
    /// MAC of the guest. Frames from the guest are checked against it if [`VmFlags::CHECK_MAC`] is
    /// set. Otherwise it is learned from them, and is [`VmRef::UNKNOWN_MAC`] until then.
    pub guest_mac: [u8; 6],
    /// MAC of the gateway.
    pub gateway_mac: [u8; 6],
    /// [`VmFlags`] bits of the VM.
    pub flags: u32,
    /// MTU of the TAP, L3 bytes.
    pub mtu: u32,
    /// Number of the guest's frames that may be queued for the engine at once, where others leave
    /// room ([`crate::maps::Owner`]).
    pub credits: u32,
    /// Number of the VM's policy: the scope of the keys in `DENY`.
    pub policy: u32,
    /// Prefix length of the guest's network.
    pub prefix_len: u32,
    /// Number of the world's frames for this VM that may be queued for the engine at once, in
    /// addition to `credits`. First packets to forwards may take half of them.
    pub world_credits: u32,

    /// Number of the guest's frames redirected to the engine port, as [`crate::segment::credits`]
    /// counts them. The programs count it.
    pub handed_over: u64,
    /// Number of those frames that the engine received or knows to be lost. The engine stores it;
    /// it never exceeds `handed_over`.
    pub taken_in: u64,
    /// ARP requests for the gateway that the kernel answered.
    pub arp_answered: u64,
    /// Start of the current window of the guard's allowance for denied packets, ns.
    pub guard_window_ns: u64,
    /// Denied packets counted in this window. The guard passes the first ones to the engine, so
    /// that it can answer them.
    pub guard_passed: u64,
    /// As `handed_over`, for frames from the world.
    pub world_handed_over: u64,
    /// As `taken_in`, for frames from the world.
    pub world_taken_in: u64,
    /// Source MAC of the last frame that was dropped because it is not `guest_mac`; zeroes before
    /// one was. The programs write it.
    pub foreign_mac: [u8; 6],
    /// Explicit padding, always zero.
    pub pad: [u8; 2],

    /// Name given by the user, UTF-8, zero-padded.
    pub name: [u8; 64],
}

const _: () = assert!(size_of::<Vm>() == 192);
const _: () = assert!(core::mem::offset_of!(Vm, handed_over) == 64);

impl Vm {
    /// Returns the MAC from which frames came that were dropped, because `guest_mac` is configured
    /// and another one; `None` if there were none.
    pub fn mac_mismatch(&self) -> Option<[u8; 6]> {
        let mac = self.foreign_mac;
        let is_checked = self.flags & VmFlags::CHECK_MAC != 0;
        (is_checked && mac != [0; 6] && mac != self.guest_mac).then_some(mac)
    }
}

/// Names of the bits in [`Vm::flags`].
#[derive(Debug)]
pub struct VmFlags;

impl VmFlags {
    /// Drop frames whose source MAC is not `guest_mac`.
    pub const CHECK_MAC: u32 = 1;
    /// Drop all packets in both directions.
    pub const FROZEN: u32 = 2;
    /// A rate limit is set in the VM's row of `RATES`, so programs must check it.
    pub const LIMITED: u32 = 4;
    /// The VM sleeps: hand everything from the world to the engine, which holds it.
    pub const ASLEEP: u32 = 8;
}

handle! {
    /// Handle to a live row. Fields that change are accessed by atomics.
    VmRef(Vm);
    atomic {
        /// Id of the VM; 0 if the row is free.
        id: AtomicU32,
        /// [`VmFlags`] bits of the VM.
        flags: AtomicU32,
        /// Ifindex of the VM's TAP; 0 while it is detached.
        tap_ifindex: AtomicU32,
        /// The guest's frames redirected to the engine port, in credits.
        handed_over: AtomicU64,
        /// The guest's frames that the engine received or knows to be lost, in credits.
        taken_in: AtomicU64,
        /// The world's frames redirected to the engine port, in credits.
        world_handed_over: AtomicU64,
        /// The world's frames that the engine received or knows to be lost, in credits.
        world_taken_in: AtomicU64,
        /// ARP requests for the gateway that the kernel answered.
        arp_answered: AtomicU64,
    }
    constant {}
}

impl VmRef {
    /// Value of the guest's MAC while it is unknown: the broadcast address, so that ARP and DHCP
    /// reach the guest.
    pub const UNKNOWN_MAC: [u8; 6] = [0xff; 6];

    /// Whether the guest's MAC is known. The programs may learn it at any moment.
    pub fn knows_guest_mac(&self) -> bool {
        // SAFETY: `new` promised a valid row; a mix of two values is neither harmful nor all ones.
        let mac = unsafe { (&raw const (*self.0).guest_mac).read_volatile() };
        mac != Self::UNKNOWN_MAC
    }

    /// Returns a copy of the row, of which a MAC that is changing may be a mix of two.
    pub fn copy(&self) -> Vm {
        // SAFETY: `new` promised a valid row; integers and bytes have no invalid values.
        unsafe { self.0.read_volatile() }
    }

    /// Counters of frames handed over and of frames taken in: of the world's frames if
    /// `from_world`, else of the guest's.
    #[inline(always)]
    pub fn under_way(&self, from_world: bool) -> (&AtomicU64, &AtomicU64) {
        if from_world {
            (self.world_handed_over(), self.world_taken_in())
        } else {
            (self.handed_over(), self.taken_in())
        }
    }
}
