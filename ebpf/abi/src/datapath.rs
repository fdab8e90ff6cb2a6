//! Decisions of the BPF programs about a packet, step by step. This is the only implementation.
//!
//! The BPF programs run these functions on the kernel: an skb, BPF maps and helpers implement
//! [`Kernel`]. The engine's tests run the same functions on memory. So a test of the engine meets
//! the kernel's decisions, in the same order and with the same drop reasons.
//!
//! | function | program | input |
//! | --- | --- | --- |
//! | [`guest_egress::run`] | `guest_egress` | a frame of a guest |
//! | [`guest_shut::run`] | `guest_shut` | a frame of a guest whose TAP has lost that program |
//! | [`uplink_ingress::run`] | `uplink_ingress`, `uplink_ingress_l3` | a packet of the world |
//! | [`engine_port::run`] | `engine_port` | a frame that the engine writes |
//! | [`Program6::run`] | `guest_egress6` and others | an IPv6 packet, from one of these |
//! | [`pacer::run`] | `pacer` | a frame that the pacing device has let go |
//!
//! The trait hides the differences between the two: where headers and maps lie, how a packet is
//! rewritten and counted as dropped, and where it goes at the end. Functions are inlined into their
//! program unless marked otherwise: a BPF program has 512 bytes of stack, and the verifier walks
//! each copy of a function.
mod arp;
mod connection;
mod drops;
mod early_fragments;
mod egress_path;
pub mod engine_port;
pub mod family;
mod first_packets;
pub mod fragment_table;
mod fragments6;
mod fragments_and_options;
pub mod guest_egress;
pub mod guest_egress6;
pub mod guest_shut;
pub mod handover;
mod handshake;
pub mod identity;
pub mod ipv4;
pub mod ipv6;
pub mod lookup;
mod neighbour;
mod order;
pub mod pacer;
pub mod packet;
mod rate;
mod routed_prefix;
pub mod translate;
pub mod uplink_ingress;
mod uplink_ingress6;
mod world_fragments;

pub use self::drops::NOBODY;
use self::{
    fragment_table::{Fragment, Fragment6},
    ipv6::V6,
    pacer::Onward,
    packet::{ETHERNET_LEN, L4},
};
use crate::{
    Addresses6Ref, DropReason, EarlyFragmentRef, EarlyTagRef, FirstPacketRef, FlowRef, ForwardKey,
    ForwardKey6, ForwardTarget, Ip4, Ip6, NextHopRef, OwnerRef, SequencesRef, SlotRef, TapEntry,
    Tuple, Tuple6, Vm6Ref, VmRef, rate::RateRef, segment::Segments,
};

/// Access to the maps during one run of a program.
///
/// # Safety
/// Pointers to elements stay valid as long as the program runs.
pub unsafe trait Maps: Copy {
    /// Entry of `TAPS` for an ifindex. It may be recycled meanwhile, so its id must be compared
    /// with the row's.
    fn tap(self, ifindex: u32) -> Option<TapEntry>;
    /// Row of `VMS`, of any VM or none.
    fn vm_row(self, row: u32) -> Option<VmRef>;
    /// Row of `OWNERS`, of a worker or none.
    fn owner(self, row: u32) -> Option<OwnerRef>;
    /// Element of `FIRST_PACKETS`, by its index.
    fn first_packet(self, index: u32) -> Option<FirstPacketRef>;
    /// Element of `EARLY_CLAIMS`, by its index.
    fn early_claim(self, index: u32) -> Option<EarlyTagRef>;
    /// Element of `EARLY_TAGS`, by its place.
    fn early_tag(self, place: u32) -> Option<EarlyTagRef>;
    /// Element of `EARLY_FRAGMENTS`, by its place.
    fn early_fragment(self, place: u32) -> Option<EarlyFragmentRef>;
    /// Row of `RATES`, by the VM's row.
    fn rates(self, row: u32) -> Option<RateRef>;
    /// Entry of `FLOWS`, read by one load. It may be recycled meanwhile, so the slot must be
    /// compared.
    fn flow(self, tuple: &Tuple) -> Option<FlowRef>;
    /// Inserts an entry of `FLOWS` with `BPF_NOEXIST`. Returns whether it is in the map now. Only
    /// on an order of the engine.
    fn insert_flow(self, tuple: &Tuple, flow: FlowRef) -> bool;
    /// Deletes an entry of `FLOWS` that this run inserted.
    fn delete_flow(self, tuple: &Tuple);
    /// Row of `VMS6`, by the VM's row.
    fn vm6(self, row: u32) -> Option<Vm6Ref>;
    /// As [`Maps::flow`], of `FLOWS6`.
    fn flow6(self, tuple: &Tuple6) -> Option<FlowRef>;
    /// As [`Maps::insert_flow`], of `FLOWS6`.
    fn insert_flow6(self, tuple: &Tuple6, flow: FlowRef) -> bool;
    /// As [`Maps::delete_flow`], of `FLOWS6`.
    fn delete_flow6(self, tuple: &Tuple6);
    /// Element of `ADDRESSES6`: the addresses of the IPv6 flow in a slot.
    fn addresses6(self, slot: u32) -> Option<Addresses6Ref>;
    /// Element of `SLOTS`, by its index.
    fn slot(self, index: u32) -> Option<SlotRef>;
    /// Element of `SEQUENCES`: the sequence numbers of a slot's connection.
    fn sequences(self, slot: u32) -> Option<SequencesRef>;
    /// Element of `NEXT_HOPS`, by its index.
    fn next_hop(self, index: u32) -> Option<NextHopRef>;
    /// Entry of `FORWARDS`. It may be recycled meanwhile, so its id must be compared with the
    /// row's.
    fn forward(self, key: &ForwardKey) -> Option<ForwardTarget>;
    /// As [`Maps::forward`], of `FORWARDS6`.
    fn forward6(self, key: &ForwardKey6) -> Option<ForwardTarget>;
    /// Entry of the fragment table, by its index; there are [`fragment_table::PLACES`].
    fn fragment(self, place: u32) -> Option<*mut Fragment>;
    /// The same of IPv6's table, which is as large.
    fn fragment6(self, place: u32) -> Option<*mut Fragment6>;

    /// Row of `VMS`; `None` if it no longer belongs to this VM.
    #[inline(always)]
    fn vm(self, row: u32, id: u32) -> Option<VmRef> {
        let vm = self.vm_row(row)?;
        (id != 0 && crate::cell::load32(vm.id()) == id).then_some(vm)
    }
}

/// Access to the kernel and one frame during one run of a program.
///
/// # Safety
/// Pointers that `header` returns are valid for reads and writes of a `T` at two-byte alignment,
/// until a method is called whose description says that it moves the frame.
pub unsafe trait Kernel: Copy {
    /// Result of a program's run.
    type End;
    /// Access to the maps.
    type Maps: Maps;

    /// Handle to the maps.
    fn maps(self) -> Self::Maps;

    /// Length of the whole frame with its L2 header, bytes.
    fn frame_len(self) -> u32;
    /// L4 payload per segment, bytes; 0 if the frame is one packet.
    fn gso_size(self) -> u32;
    /// Ifindex of the device on which the frame arrived.
    fn ifindex(self) -> u32;
    /// Whether the frame arrived by this uplink.
    #[inline(always)]
    fn arrived_by(self, uplink: u32) -> bool {
        self.ifindex() == uplink
    }
    /// Whether the network stack removed an 802.1Q or 802.1ad tag from the frame.
    fn is_untagged_by_stack(self) -> bool;
    /// Whether the frame was sent to the device's own L2 address.
    fn is_to_this_host(self) -> bool;
    /// EtherType of the frame, host order.
    fn ether_type(self) -> u16;
    /// Pointer to a header in the linear part of the frame; `None` if that part ends before the
    /// header does.
    fn header<T>(self, offset: usize) -> Option<*mut T>;
    /// Makes the first `len` bytes linear. Returns `false` if the kernel refuses. Moves the frame.
    fn pull(self, len: u32) -> bool;
    /// Copies a header from an offset that depends on the packet. Returns `false` if the frame ends
    /// before the header does.
    fn load(self, offset: usize, header: &mut L4) -> bool;
    /// Copies `len` bytes of the frame from an offset. Returns `false` if the frame ends before.
    ///
    /// # Safety
    /// `to` is valid for writes of `len` bytes.
    unsafe fn copy(self, offset: usize, to: *mut u8, len: u32) -> bool;
    /// Inserts an Ethernet header before an L3 packet. All of it is zero except the EtherType,
    /// which the caller must write. Moves the frame.
    ///
    /// # Errors
    /// If the kernel refuses.
    fn push_ethernet(self) -> Result<(), Refused>;
    /// Makes the frame longer by this many bytes, which are zero and linear. Returns `false` if the kernel
    /// refuses. Moves the frame.
    fn grow(self, by: u32) -> bool;
    /// Updates the L4 checksum at `offset`, which may be full, partial or complete, for a word that
    /// changes: `bpf_l4_csum_replace`, with its flags. Moves the frame.
    ///
    /// # Errors
    /// If the kernel refuses.
    fn l4_checksum_replace(
        self,
        offset: usize,
        from: u32,
        to: u32,
        flags: u64,
    ) -> Result<(), Refused>;
    /// Place where the kernel will store a partial checksum, bytes from the frame's start; negative
    /// if it lies before it.
    ///
    /// # Errors
    /// If the kernel's struct cannot be read.
    fn partial_checksum_place(self) -> Result<i32, Refused>;
    /// The packet's partial checksum; `None` if it has none. What a packet with a complete checksum
    /// has there is any numbers.
    ///
    /// # Errors
    /// If the kernel's struct cannot be read.
    fn partial_checksum(self) -> Result<Option<PartialChecksum>, Refused>;

    /// MTU of a device, bytes; `None` if the device is gone. May move the frame.
    fn mtu_of(self, ifindex: u32) -> Option<u32>;
    /// Whether the host would route the packet to another host: it arrived with the host's MAC as
    /// destination, but another host's address.
    fn is_routed_on(self, source: Ip4, destination: Ip4) -> bool;
    /// As [`Kernel::is_routed_on`], for IPv6.
    fn is_routed_on6(self, source: Ip6, destination: Ip6) -> bool;
    /// Current `CLOCK_MONOTONIC` time, ns.
    fn now_ns(self) -> u64;
    /// Current `CLOCK_MONOTONIC_COARSE` time, ns: cheap to read, and some milliseconds late.
    fn coarse_now_ns(self) -> u64;

    /// Runs a program for IPv6 on the frame, in the place of this one.
    ///
    /// # Errors
    /// If there is no such program.
    fn go_on(self, program: Program6) -> Result<Self::End, Refused>;
    /// Drops the frame and counts it in a VM's row, or in that of [`NOBODY`].
    fn drop_counted(self, row: u32, reason: DropReason, segments: Segments) -> Self::End;
    /// Drops the frame without a count: the engine handles the packet itself.
    fn discard(self) -> Self::End;
    /// Frees the frame: the engine has a copy.
    fn copied(self) -> Self::End;
    /// Leaves the frame to the host's stack.
    fn pass(self) -> Self::End;
    /// Sends the frame out of a device, with the L2 header it has.
    fn redirect(self, ifindex: u32) -> Self::End;
    /// Sends the frame out of a device, with an L2 header from the kernel's neighbour table.
    fn redirect_by_neighbour(self, ifindex: u32) -> Self::End;
    /// Sends the frame by the pacing device, in the queue of the VM of this row. Its far end sends it
    /// on ([`pacer::run`]).
    fn redirect_paced(self, pacer: u32, row: u32, onward: Onward) -> Self::End;
    /// Mark with which the frame came by the pacing device; it has none afterwards.
    fn take_mark(self) -> u32;
    /// Logs that a frame goes to the engine, if the build has logging.
    #[inline(always)]
    fn log_hand_over(self, row: u32, code: u8, flags: u8) {
        let _ = (row, code, flags);
    }

    /// Pointer to a header, which is made linear if need be; `None` if the frame ends before it
    /// does. Moves the frame.
    #[inline(always)]
    fn pulled_header<T>(self, offset: usize) -> Option<*mut T> {
        if let Some(header) = self.header(offset) {
            return Some(header);
        }
        let needed = (offset + size_of::<T>()) as u32;
        if self.frame_len() < needed || !self.pull(needed) {
            return None;
        }
        self.header(offset)
    }
}

/// A program for IPv6 packets, in the place of the one that they came to: an index of the program
/// array `PROGRAMS6`. Each program of TC passes them on at once, before anything of IPv4's.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Program6 {
    /// In the place of `guest_egress`.
    GuestEgress = 0,
    /// In the place of `uplink_ingress`.
    UplinkIngress = 1,
    /// In the place of `uplink_ingress_l3`.
    UplinkIngressL3 = 2,
    /// In the place of `engine_port`.
    EnginePort = 3,
}

impl Program6 {
    /// Every program, in the order of the array.
    pub const ALL: [Self; 4] = [
        Self::GuestEgress,
        Self::UplinkIngress,
        Self::UplinkIngressL3,
        Self::EnginePort,
    ];

    /// Name of the program in the object.
    pub const fn name(self) -> &'static str {
        match self {
            Self::GuestEgress => "guest_egress6",
            Self::UplinkIngress => "uplink_ingress6",
            Self::UplinkIngressL3 => "uplink_ingress6_l3",
            Self::EnginePort => "engine_port6",
        }
    }

    /// Runs the program on one packet; the end is what the kernel is to do with it.
    #[inline(always)]
    pub fn run<K: Kernel>(self, kernel: K) -> K::End {
        match self {
            Self::GuestEgress => guest_egress6::run(kernel),
            Self::UplinkIngress => uplink_ingress6::run::<K, ETHERNET_LEN>(kernel),
            Self::UplinkIngressL3 => uplink_ingress6::run::<K, 0>(kernel),
            Self::EnginePort => engine_port::run_of::<V6, K>(kernel),
        }
    }
}

/// Partial checksum of a frame: the field has the pseudo-header's sum only.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PartialChecksum {
    /// Start of the checksummed bytes, from the frame's start.
    pub start: u16,
    /// Place of the checksum, bytes from `start`.
    pub offset: u16,
}

/// Name of the program array whose elements [`Program6`] numbers.
pub const PROGRAMS6: &str = "PROGRAMS6";

/// Error: the kernel refused to change or send a frame.
#[derive(Clone, Copy, Debug)]
pub struct Refused;

impl From<Refused> for DropReason {
    #[inline(always)]
    fn from(_: Refused) -> Self {
        Self::KernelRefused
    }
}
