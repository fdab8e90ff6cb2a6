//! The flow itself: one slot of `SLOTS`.
//!
//! | verdict | a packet of the flow | who leaves it, to where |
//! | --- | --- | --- |
//! | `Free` | misses | the owner, to any other, after writing the whole second line and a new generation |
//! | `Fast` | is translated in the kernel | the owner, to `Engine`, `Drop`, `Closing` |
//! | `Engine` | goes to the engine, which may send it on with [`crate::Command::Forward`] | the owner |
//! | `Drop` | is dropped as `Denied` | the owner |
//! | `Closing` | goes to the engine | the owner, back to `Fast` (revived) or to `Free` (both tuples deleted) |
#[cfg(not(target_arch = "bpf"))]
use core::sync::atomic::{AtomicU8, Ordering::Relaxed};
use core::sync::atomic::{AtomicU32, AtomicU64};

use crate::{Direction, IfIndex, Ip4, Protocol, RuleIndex, SlotIndex, Tuple, VmId, VmRow};

/// What happens to the packets of a flow. See the module's table.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Verdict {
    /// No flow here.
    Free = 0,
    /// Translated in the kernel.
    Fast = 1,
    /// Each packet goes to the engine.
    Engine = 2,
    /// Dropped and counted.
    Drop = 3,
    /// First phase of the end: packets go to the engine, which may revive the flow.
    Closing = 4,
}

impl Verdict {
    /// From its number; `None` for a number that is no verdict.
    #[inline(always)]
    pub const fn from_u32(number: u32) -> Option<Self> {
        match number {
            0 => Some(Self::Free),
            1 => Some(Self::Fast),
            2 => Some(Self::Engine),
            3 => Some(Self::Drop),
            4 => Some(Self::Closing),
            _ => None,
        }
    }

    /// The name used in output.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Free => "free",
            Self::Fast => "fast",
            Self::Engine => "engine",
            Self::Drop => "drop",
            Self::Closing => "closing",
        }
    }
}

/// Value of the map `FLOWS`. Read and written as one 64-bit word, so it never tears.
#[repr(C, align(8))]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FlowRef {
    /// Index into `SLOTS`.
    pub slot: u32,
    /// The slot's generation when the entry was made.
    pub generation: u32,
}

impl FlowRef {
    /// Which slot it is.
    pub const fn index(&self) -> SlotIndex {
        SlotIndex::new(self.slot)
    }
}

/// One flow. 128 bytes: the first cache line changes under traffic, the second is constant while
/// the generation is, but for its last three words, which change when a connection opens and ends,
/// and the owner's bit in its flags.
///
/// Never make a Rust reference to a live slot: both sides change it. Go through [`SlotRef`].
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub struct Slot {
    /// Raised by one at each allocation.
    pub generation: u32,
    /// What happens to packets.
    pub verdict: Verdict,
    /// [`TcpBits`](crate::tcp::TcpBits): what was seen of the connection. 0 for other protocols.
    pub tcp: u32,
    /// Index into `NEXT_HOPS`; 0 lets the kernel resolve the neighbour for each packet.
    pub next_hop: u32,
    /// Packets from the guest, as if segmented.
    pub tx_packets: u64,
    /// L3 bytes from the guest, as if segmented.
    pub tx_bytes: u64,
    /// Packets to the guest, as if segmented.
    pub rx_packets: u64,
    /// L3 bytes to the guest, as if segmented.
    pub rx_bytes: u64,
    /// When the guest last sent, `CLOCK_MONOTONIC_COARSE` ns; 0: never.
    pub tx_last_ns: u64,
    /// When the world last sent; as above.
    pub rx_last_ns: u64,

    /// The VM's id.
    pub vm: u32,
    /// The VM's row in `VMS`.
    pub vm_row: u16,
    /// The owner's row in `OWNERS`.
    pub owner: u16,
    /// The guest's address.
    pub guest: Ip4,
    /// The peer's address.
    pub remote: Ip4,
    /// The translated address.
    pub nat: Ip4,
    /// The guest's port or ICMP id.
    pub guest_port: u16,
    /// The peer's port; 0 for ICMP.
    pub remote_port: u16,
    /// The translated port or ICMP id.
    pub nat_port: u16,
    /// The protocol.
    pub protocol: Protocol,
    /// [`SlotFlags`] bits.
    pub flags: u8,
    /// Sequence number of the SYN that opened the flow (the opener's, untranslated).
    pub isn: u32,
    /// When it was admitted.
    pub created_ns: u64,
    /// Index into `RULES`: the rule that admitted it.
    pub rule: u32,
    /// The uplink it leaves by.
    pub uplink_ifindex: u32,
    /// The owner's epoch when the flow was admitted.
    pub epoch: u32,
    /// TCP: sequence number behind the guest's FIN, once that was seen; of a flow from the world before
    /// that, behind its SYN ([`crate::handshake`]).
    pub fin_end_tx: u32,
    /// TCP: sequence number behind the peer's FIN, once that was seen.
    pub fin_end_rx: u32,
    /// TCP: from admission to the answering SYN-ACK as the programs saw it, µs; 0: not seen, or
    /// over 71 minutes.
    pub connect_us: u32,
}

const _: () = assert!(size_of::<Slot>() == 128);
const _: () = assert!(core::mem::offset_of!(Slot, vm) == 64);

/// Bits of [`Slot::flags`].
#[derive(Debug)]
pub struct SlotFlags;

impl SlotFlags {
    /// Opened from the world by a forward: the first packet was received, not sent.
    pub const INBOUND: u8 = 1;
    /// Nothing but a capture has the engine carry it: a successor gives it back to the kernel. The
    /// owner changes it while the flow lives; it may stay behind on a flow that is `Fast`.
    pub const CAPTURED: u8 = 2;
    /// An inspect rule let it in: its port rests to the end, whoever knows it by then.
    pub const INSPECTED: u8 = 4;
}

/// A live slot, reached by atomics only.
#[derive(Clone, Copy, Debug)]
pub struct SlotRef(*mut Slot);

// SAFETY: every access goes through atomics, or reads the second line, which is constant.
unsafe impl Send for SlotRef {}
// SAFETY: as above.
unsafe impl Sync for SlotRef {}

macro_rules! atomic {
    ($self:ident, $field:ident, $t:ty) => {
        // SAFETY: `new` promised a valid, aligned slot; the field has the atomic's size and
        // alignment, and both sides use atomics on it.
        unsafe { <$t>::from_ptr((&raw mut (*$self.0).$field).cast()) }
    };
}

macro_rules! constant {
    ($self:ident, $field:ident) => {
        // SAFETY: `new` promised a valid slot; its second line is constant while in use.
        unsafe { (&raw const (*$self.0).$field).read() }
    };
}

impl SlotRef {
    /// # Safety
    /// `slot` points to an element of `SLOTS` and stays mapped as long as the result is used.
    #[inline(always)]
    pub const unsafe fn new(slot: *mut Slot) -> Self {
        Self(slot)
    }

    /// The element itself, for its owner to fill while it is `Free`.
    #[inline(always)]
    pub const fn as_ptr(self) -> *mut Slot {
        self.0
    }

    /// Current generation.
    #[inline(always)]
    pub fn generation(&self) -> &AtomicU32 {
        atomic!(self, generation, AtomicU32)
    }

    /// Current verdict as a number; [`Verdict::from_u32`].
    #[inline(always)]
    pub fn verdict(&self) -> &AtomicU32 {
        atomic!(self, verdict, AtomicU32)
    }

    /// [`TcpBits`](crate::tcp::TcpBits) seen so far.
    #[inline(always)]
    pub fn tcp(&self) -> &AtomicU32 {
        atomic!(self, tcp, AtomicU32)
    }

    /// Index into `NEXT_HOPS`.
    #[inline(always)]
    pub fn next_hop(&self) -> &AtomicU32 {
        atomic!(self, next_hop, AtomicU32)
    }

    /// Packets from the guest.
    #[inline(always)]
    pub fn tx_packets(&self) -> &AtomicU64 {
        atomic!(self, tx_packets, AtomicU64)
    }

    /// Bytes from the guest.
    #[inline(always)]
    pub fn tx_bytes(&self) -> &AtomicU64 {
        atomic!(self, tx_bytes, AtomicU64)
    }

    /// Packets to the guest.
    #[inline(always)]
    pub fn rx_packets(&self) -> &AtomicU64 {
        atomic!(self, rx_packets, AtomicU64)
    }

    /// Bytes to the guest.
    #[inline(always)]
    pub fn rx_bytes(&self) -> &AtomicU64 {
        atomic!(self, rx_bytes, AtomicU64)
    }

    /// When the guest last sent.
    #[inline(always)]
    pub fn tx_last_ns(&self) -> &AtomicU64 {
        atomic!(self, tx_last_ns, AtomicU64)
    }

    /// When the world last sent.
    #[inline(always)]
    pub fn rx_last_ns(&self) -> &AtomicU64 {
        atomic!(self, rx_last_ns, AtomicU64)
    }

    /// Sets the verdict.
    #[inline(always)]
    pub fn set_verdict(&self, verdict: Verdict) {
        self.verdict()
            .store(verdict as u32, core::sync::atomic::Ordering::Release);
    }

    /// The VM's id.
    #[inline(always)]
    pub fn vm(&self) -> u32 {
        constant!(self, vm)
    }

    /// The VM's row in `VMS`.
    #[inline(always)]
    pub fn vm_row(&self) -> u32 {
        constant!(self, vm_row) as u32
    }

    /// The guest's address.
    #[inline(always)]
    pub fn guest(&self) -> Ip4 {
        constant!(self, guest)
    }

    /// The guest's port.
    #[inline(always)]
    pub fn guest_port(&self) -> u16 {
        constant!(self, guest_port)
    }

    /// The translated address.
    #[inline(always)]
    pub fn nat(&self) -> Ip4 {
        constant!(self, nat)
    }

    /// The translated port.
    #[inline(always)]
    pub fn nat_port(&self) -> u16 {
        constant!(self, nat_port)
    }

    /// The peer's address.
    #[inline(always)]
    pub fn remote(&self) -> Ip4 {
        constant!(self, remote)
    }

    /// The peer's port.
    #[inline(always)]
    pub fn remote_port(&self) -> u16 {
        constant!(self, remote_port)
    }

    /// The protocol's number (not the enum: a slot read from another version may hold anything).
    #[inline(always)]
    pub fn protocol(&self) -> u8 {
        // SAFETY: as for `constant!`; a u8 has no invalid value.
        unsafe { (&raw const (*self.0).protocol).cast::<u8>().read() }
    }

    /// [`SlotFlags`].
    #[inline(always)]
    pub fn flags(&self) -> u8 {
        // BPF has no atomic byte, and a byte never tears.
        #[cfg(target_arch = "bpf")]
        // SAFETY: `new` promised a valid slot.
        return unsafe { (&raw const (*self.0).flags).read_volatile() };
        #[cfg(not(target_arch = "bpf"))]
        return self.flags_cell().load(Relaxed);
    }

    /// Sets the verdict of a flow that lives: `Fast`, or `Engine`, `captured` if for nothing but a
    /// capture. Only the owner calls this. Whenever it dies, a flow is taken for captured only when
    /// it was not carried for anything else.
    #[cfg(not(target_arch = "bpf"))]
    pub fn set_live_verdict(&self, verdict: Verdict, captured: bool) {
        if verdict != Verdict::Engine {
            self.set_verdict(verdict);
        }
        let captured = if captured { SlotFlags::CAPTURED } else { 0 };
        let flags = self.flags() & !SlotFlags::CAPTURED | captured;
        self.flags_cell().store(flags, Relaxed);
        if verdict == Verdict::Engine {
            self.set_verdict(verdict);
        }
    }

    #[cfg(not(target_arch = "bpf"))]
    fn flags_cell(&self) -> &AtomicU8 {
        atomic!(self, flags, AtomicU8)
    }

    /// Sequence number of the opening SYN.
    #[inline(always)]
    pub fn isn(&self) -> u32 {
        constant!(self, isn)
    }

    /// When it was admitted.
    #[inline(always)]
    pub fn created_ns(&self) -> u64 {
        constant!(self, created_ns)
    }

    /// The rule that admitted it.
    #[inline(always)]
    pub fn rule(&self) -> u32 {
        constant!(self, rule)
    }

    /// The uplink's ifindex.
    #[inline(always)]
    pub fn uplink_ifindex(&self) -> u32 {
        constant!(self, uplink_ifindex)
    }

    /// The owner's row.
    #[inline(always)]
    pub fn owner(&self) -> u32 {
        constant!(self, owner) as u32
    }

    /// The owner's epoch at admission.
    #[inline(always)]
    pub fn epoch(&self) -> u32 {
        constant!(self, epoch)
    }

    /// Sequence number behind the FIN that was sent in a direction; see [`crate::tcp`].
    #[inline(always)]
    pub fn fin_end(&self, of: Direction) -> &AtomicU32 {
        match of {
            Direction::Tx => atomic!(self, fin_end_tx, AtomicU32),
            Direction::Rx => atomic!(self, fin_end_rx, AtomicU32),
        }
    }

    /// How long it took to connect, µs.
    #[inline(always)]
    pub fn connect_us(&self) -> &AtomicU32 {
        atomic!(self, connect_us, AtomicU32)
    }

    /// Whose flow it is.
    pub fn id(&self) -> VmId {
        VmId::new(self.vm())
    }

    /// The VM's row. It may be beyond the last where somebody wrote nonsense.
    pub fn row(&self) -> VmRow {
        VmRow::new(constant!(self, vm_row))
    }

    /// The element of the rule that admitted it.
    pub fn rule_index(&self) -> RuleIndex {
        RuleIndex::new(self.rule())
    }

    /// The uplink it leaves by.
    pub fn uplink(&self) -> IfIndex {
        IfIndex::new(self.uplink_ifindex())
    }

    /// The flow as the guest's link sees it.
    #[inline(always)]
    pub fn guest_tuple(&self) -> Tuple {
        Tuple {
            scope: self.vm(),
            local: self.guest(),
            remote: self.remote(),
            local_port: self.guest_port(),
            remote_port: self.remote_port(),
            protocol: self.protocol(),
            pad: [0; 3],
        }
    }

    /// The flow as the world's link sees it.
    #[inline(always)]
    pub fn world_tuple(&self) -> Tuple {
        Tuple {
            scope: Tuple::WORLD,
            local: self.nat(),
            remote: self.remote(),
            local_port: self.nat_port(),
            remote_port: self.remote_port(),
            protocol: self.protocol(),
            pad: [0; 3],
        }
    }
}
