//! State of one flow: an element of the map `SLOTS`, and the values of `FLOWS` that refer to it.
//!
//! | verdict | treatment of a packet of the flow | transitions, and who makes them |
//! | --- | --- | --- |
//! | `Free` | misses | the owner, to any other, after it wrote the whole second cache line and a new generation |
//! | `Fast` | is translated in the kernel | the owner, to `Engine`, `Drop`, `Closing` |
//! | `Engine` | goes to the engine, which may send it on with [`crate::Command::Forward`] | the owner, to any other |
//! | `Drop` | is dropped as `Denied` | the owner, to any other |
//! | `Closing` | goes to the engine | the owner, back to `Fast` (revived) or to `Free` (both tuples deleted) |
//!
//! A flow becomes `Fast` in one of two ways. The owner inserts both tuples and sets the verdict; or
//! it orders this of the program at its port, with the flow's first packet ([`OrderState`]).
#[cfg(not(target_arch = "bpf"))]
use core::sync::atomic::{
    AtomicU8,
    Ordering::{Acquire, Relaxed},
};
use core::sync::atomic::{AtomicU32, AtomicU64};

use crate::{
    Direction, IfIndex, Ip4, Protocol, RuleIndex, SlotIndex, Tuple, VmId, VmRow, handle::handle,
};

/// Treatment of a flow's packets. The module's table gives the transitions.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Verdict {
    /// The slot holds no flow.
    Free = 0,
    /// The kernel translates each packet.
    Fast = 1,
    /// Each packet goes to the engine.
    Engine = 2,
    /// Each packet is dropped and counted as `Denied`.
    Drop = 3,
    /// First phase of removal: packets go to the engine, which may revive the flow.
    Closing = 4,
}

impl Verdict {
    /// The verdict with this number; `None` if no verdict has it.
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

    /// Name of the verdict in output.
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

/// State of an order to insert a flow's tuples ([`crate::Command::Open`]), while the slot is still
/// `Free`. It is in the word of [`Slot::connect_us`], which has no other meaning then.
///
/// The engine gives the order, and writes the frame. The program at the engine port takes the order
/// by compare-and-swap, inserts the world's tuple and the guest's, clears the word, and sets the
/// verdict to `Fast`. After the write the engine reads the outcome. It withdraws an order that was
/// not taken, by compare-and-swap too: the program never runs for it later. So exactly one of the
/// two inserts the tuples, even where the kernel runs the program on another CPU, after the write.
#[derive(Debug)]
pub struct OrderState;

impl OrderState {
    /// No order, or one that was carried out.
    pub const NONE: u32 = 0;
    /// The engine has given it.
    pub const GIVEN: u32 = 1;
    /// The program has taken it.
    pub const TAKEN: u32 = 2;
    /// The program could not carry it out, and no tuple of it is left; or the engine withdrew it.
    pub const FAILED: u32 = 3;
}

/// Reference to a flow: the value of the maps `FLOWS` and `FLOWS6`. It is read and written as one 64-bit word, so
/// it never tears.
#[repr(C, align(8))]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FlowRef {
    /// Index of the slot in `SLOTS`.
    pub slot: u32,
    /// The slot's generation when the entry was made. A slot with another generation holds another
    /// flow.
    pub generation: u32,
}

impl FlowRef {
    /// Reference to the flow that a slot holds in this generation.
    pub const fn new(slot: SlotIndex, generation: u32) -> Self {
        Self {
            slot: slot.get(),
            generation,
        }
    }

    /// Index of the slot that the reference names.
    pub const fn index(&self) -> SlotIndex {
        SlotIndex::new(self.slot)
    }
}

/// One flow, 128 bytes. The first cache line changes with traffic. The second is constant while the
/// generation is, except its last three words, which change when a connection opens and ends, and
/// the owner's bit in `flags`.
///
/// Never make a Rust reference to a live slot: programs and userspace both change it. Use
/// [`SlotRef`].
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub struct Slot {
    /// Number of the allocation: incremented each time the slot is allocated.
    pub generation: u32,
    /// Treatment of the flow's packets.
    pub verdict: Verdict,
    /// TCP: events seen on the connection, as [`TcpBits`](crate::tcp::TcpBits). 0 for other
    /// protocols.
    pub tcp: u32,
    /// Index into `NEXT_HOPS`; with 0, the kernel resolves the neighbour for each packet.
    pub next_hop: u32,
    /// Packets from the guest, counted as if segmented.
    pub tx_packets: u64,
    /// L3 bytes from the guest, counted as if segmented.
    pub tx_bytes: u64,
    /// Packets to the guest, counted as if segmented.
    pub rx_packets: u64,
    /// L3 bytes to the guest, counted as if segmented.
    pub rx_bytes: u64,
    /// Time of the guest's last packet, `CLOCK_MONOTONIC_COARSE` ns; 0 if it sent none.
    pub tx_last_ns: u64,
    /// Time of the last packet from the world, `CLOCK_MONOTONIC_COARSE` ns; 0 if none came.
    pub rx_last_ns: u64,

    /// Id of the VM that the flow belongs to.
    pub vm: u32,
    /// Row in `VMS` of that VM.
    pub vm_row: u16,
    /// Row in `OWNERS` of the process that serves the flow.
    pub owner: u16,
    /// IPv4 address of the guest; zero for an IPv6 flow.
    pub guest: Ip4,
    /// IPv4 address of the peer; zero for an IPv6 flow.
    pub remote: Ip4,
    /// Translated address: the guest's as the world sees it; zero for an IPv6 flow.
    pub nat: Ip4,
    /// The guest's port or ICMP query id, host order.
    pub guest_port: u16,
    /// The peer's port, host order; 0 for ICMP.
    pub remote_port: u16,
    /// Translated port or ICMP query id, host order.
    pub nat_port: u16,
    /// Transport protocol of the flow.
    pub protocol: Protocol,
    /// [`SlotFlags`] bits of the flow.
    pub flags: u8,
    /// TCP: sequence number of the SYN that opened the flow, as its sender chose it.
    pub isn: u32,
    /// Time of admission, `CLOCK_MONOTONIC` ns.
    pub created_ns: u64,
    /// Index into `RULES` of the rule that admitted the flow.
    pub rule: u32,
    /// Ifindex of the uplink by which the flow leaves.
    pub uplink_ifindex: u32,
    /// The owner's epoch when the flow was admitted.
    pub epoch: u32,
    /// TCP: sequence number after the guest's FIN, once that FIN was seen. Before, for a flow that
    /// the world opened, the number after the guest's SYN ([`crate::handshake`]).
    pub fin_end_tx: u32,
    /// TCP: sequence number after the peer's FIN, once that FIN was seen.
    pub fin_end_rx: u32,
    /// TCP: time from admission to the SYN-ACK that answered, as the programs saw it, µs; 0 if no
    /// SYN-ACK was seen, or after more than 71 minutes. In a free slot, the state of an order
    /// ([`OrderState`]).
    pub connect_us: u32,
}

const _: () = assert!(size_of::<Slot>() == 128);
const _: () = assert!(core::mem::offset_of!(Slot, vm) == 64);

/// Names of the bits in [`Slot::flags`].
#[derive(Debug)]
pub struct SlotFlags;

impl SlotFlags {
    /// A forward admitted the flow: the world sent its first packet.
    pub const INBOUND: u8 = 1;
    /// The engine carries the flow only because of a packet capture, so a successor may return it
    /// to the kernel. The owner changes the bit while the flow lives; it may remain set on a flow
    /// that is `Fast`.
    pub const CAPTURED: u8 = 2;
    /// An inspect rule admitted the flow. Its translated port rests for the full time after the
    /// end, even if the process that ends the flow no longer knows the rule.
    pub const INSPECTED: u8 = 4;
    /// The flow is of IPv6: its addresses are in `ADDRESSES6`, its tuples in `FLOWS6`, and the
    /// slot's own addresses are zero.
    pub const IPV6: u8 = 8;
    /// The flow's peer is a guest of the same engine, by its translated address: each packet goes to
    /// the engine, which leads it back in. The flow has no uplink.
    pub const HAIRPIN: u8 = 16;
}

handle! {
    /// Handle to a live slot. Fields that change are accessed by atomics only; the second cache line
    /// is constant, but for `uplink_ifindex`, which seldom changes.
    SlotRef(Slot);
    atomic {
        /// Generation of the slot now.
        generation: AtomicU32,
        /// Number of the verdict now; see [`Verdict::from_u32`].
        verdict: AtomicU32,
        /// [`TcpBits`](crate::tcp::TcpBits) of the connection so far.
        tcp: AtomicU32,
        /// Index into `NEXT_HOPS`; with 0, the kernel resolves the neighbour.
        next_hop: AtomicU32,
        /// Packets from the guest, counted as if segmented.
        tx_packets: AtomicU64,
        /// L3 bytes from the guest, counted as if segmented.
        tx_bytes: AtomicU64,
        /// Packets to the guest, counted as if segmented.
        rx_packets: AtomicU64,
        /// L3 bytes to the guest, counted as if segmented.
        rx_bytes: AtomicU64,
        /// Time of the guest's last packet, `CLOCK_MONOTONIC_COARSE` ns; 0 if it sent none.
        tx_last_ns: AtomicU64,
        /// Time of the last packet from the world, `CLOCK_MONOTONIC_COARSE` ns; 0 if none came.
        rx_last_ns: AtomicU64,
        /// Time from admission to the SYN-ACK, µs; 0 if unknown.
        connect_us: AtomicU32,
        /// Ifindex of the uplink by which the flow leaves. It changes with the host's routes.
        uplink_ifindex: AtomicU32,
    }
    constant {
        /// Id of the VM that the flow belongs to.
        vm: u32,
        /// IPv4 address of the guest.
        guest: Ip4,
        /// The guest's port or ICMP query id, host order.
        guest_port: u16,
        /// Translated address of the guest.
        nat: Ip4,
        /// Translated port or ICMP query id, host order.
        nat_port: u16,
        /// IPv4 address of the peer.
        remote: Ip4,
        /// The peer's port, host order; 0 for ICMP.
        remote_port: u16,
        /// TCP: sequence number of the SYN that opened the flow.
        isn: u32,
        /// Time of admission, `CLOCK_MONOTONIC` ns.
        created_ns: u64,
        /// Index into `RULES` of the rule that admitted the flow.
        rule: u32,
        /// The owner's epoch when the flow was admitted.
        epoch: u32,
    }
}

impl SlotRef {
    /// State of an order to insert the flow's tuples, while the slot is free: see [`OrderState`].
    #[inline(always)]
    pub fn order(&self) -> &AtomicU32 {
        self.connect_us()
    }

    /// Stores the verdict with release ordering.
    #[inline(always)]
    pub fn set_verdict(&self, verdict: Verdict) {
        self.verdict()
            .store(verdict as u32, core::sync::atomic::Ordering::Release);
    }

    /// Row in `VMS` of that VM, as stored.
    #[inline(always)]
    pub fn vm_row(&self) -> u32 {
        self.row().word()
    }

    /// Number of the IP protocol. It is not the enum, because a slot of another version may hold
    /// any number.
    #[inline(always)]
    pub fn protocol(&self) -> u8 {
        // SAFETY: as for `owner`; a u8 has no invalid value.
        unsafe { (&raw const (*self.0).protocol).cast::<u8>().read() }
    }

    /// [`SlotFlags`] bits of the flow.
    #[inline(always)]
    pub fn flags(&self) -> u8 {
        // BPF has no atomic byte, and a byte never tears.
        #[cfg(target_arch = "bpf")]
        // SAFETY: `new` promised a valid slot.
        return unsafe { (&raw const (*self.0).flags).read_volatile() };
        #[cfg(not(target_arch = "bpf"))]
        return self.flags_cell().load(Relaxed);
    }

    /// Sets the verdict of a live flow to `Fast` or `Engine`. `captured` says that only a packet
    /// capture makes the engine carry the flow. Only the owner calls this. The two stores are
    /// ordered: if the owner dies between them, a flow that the engine carries for another reason
    /// is never marked as captured.
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
        // SAFETY: `new` promised a valid slot; userspace changes the flags by atomics only.
        unsafe { AtomicU8::from_ptr(&raw mut (*self.0).flags) }
    }

    /// Whether the flow is of IPv6.
    #[inline(always)]
    pub fn is_ipv6(&self) -> bool {
        self.flags() & SlotFlags::IPV6 != 0
    }

    /// Row in `OWNERS` of the process that serves the flow.
    #[inline(always)]
    pub fn owner(&self) -> u32 {
        // SAFETY: `new` promised a valid slot, whose second line is constant while it is in use.
        unsafe { (&raw const (*self.0).owner).read() as u32 }
    }

    /// Sequence number after the FIN that was sent in a direction; see [`crate::tcp`].
    #[inline(always)]
    pub fn fin_end(&self, of: Direction) -> &AtomicU32 {
        // SAFETY: `new` promised a valid slot; both sides use atomics on these fields.
        unsafe {
            AtomicU32::from_ptr(match of {
                Direction::Tx => &raw mut (*self.0).fin_end_tx,
                Direction::Rx => &raw mut (*self.0).fin_end_rx,
            })
        }
    }

    /// Id of the VM that the flow belongs to.
    pub fn id(&self) -> VmId {
        VmId::new(self.vm())
    }

    /// The VM's row. It may be out of range if the map was corrupted.
    #[inline(always)]
    pub fn row(&self) -> VmRow {
        // SAFETY: as for `owner`.
        VmRow::new(unsafe { (&raw const (*self.0).vm_row).read() })
    }

    /// Index into `RULES` of the rule that admitted the flow.
    pub fn rule_index(&self) -> RuleIndex {
        RuleIndex::new(self.rule())
    }

    /// Interface by which the flow leaves.
    pub fn uplink(&self) -> IfIndex {
        IfIndex::new(
            self.uplink_ifindex()
                .load(core::sync::atomic::Ordering::Relaxed),
        )
    }

    /// Copies the slot, with the verdict and the protocol that the caller has read of it. The
    /// fields are read one by one.
    #[cfg(not(target_arch = "bpf"))]
    pub fn copy_as(&self, verdict: Verdict, protocol: Protocol) -> Slot {
        Slot {
            generation: self.generation().load(Acquire),
            verdict,
            tcp: self.tcp().load(Acquire),
            next_hop: self.next_hop().load(Acquire),
            tx_packets: self.tx_packets().load(Acquire),
            tx_bytes: self.tx_bytes().load(Acquire),
            rx_packets: self.rx_packets().load(Acquire),
            rx_bytes: self.rx_bytes().load(Acquire),
            tx_last_ns: self.tx_last_ns().load(Acquire),
            rx_last_ns: self.rx_last_ns().load(Acquire),
            vm: self.vm(),
            vm_row: self.row().get(),
            guest: self.guest(),
            remote: self.remote(),
            nat: self.nat(),
            guest_port: self.guest_port(),
            remote_port: self.remote_port(),
            nat_port: self.nat_port(),
            protocol,
            flags: self.flags(),
            isn: self.isn(),
            created_ns: self.created_ns(),
            rule: self.rule(),
            uplink_ifindex: self.uplink().get(),
            owner: self.owner() as u16,
            epoch: self.epoch(),
            fin_end_tx: self.fin_end(Direction::Tx).load(Acquire),
            fin_end_rx: self.fin_end(Direction::Rx).load(Acquire),
            connect_us: self.connect_us().load(Acquire),
        }
    }

    /// Tuple of the flow on the guest's link: the key of one of its entries in `FLOWS`. Of an IPv6
    /// flow, no key ([`crate::Addresses6Ref::guest_tuple`]).
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

    /// Tuple of the flow on the world's link: the key of its other entry in `FLOWS`. Of an IPv6
    /// flow, no key ([`crate::Addresses6Ref::world_tuple`]).
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
