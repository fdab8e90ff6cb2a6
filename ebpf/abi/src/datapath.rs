//! What the programs do with a packet, step by step: the one description of the datapath.
//!
//! The BPF programs are these functions over the kernel ([`Kernel`] implemented by an skb, BPF maps
//! and helpers). The in-memory kernel of the engine's tests is these functions over memory. So a
//! test of the engine meets the decisions that the kernel takes, in their order, with their drop
//! reasons.
//!
//! | function | program | takes |
//! | --- | --- | --- |
//! | [`guest_egress::run`] | `guest_egress` | a frame of a guest |
//! | [`guest_shut::run`] | `guest_shut` | a frame of a guest whose TAP has lost that program |
//! | [`uplink_ingress::run`] | `uplink_ingress`, `uplink_ingress_l3` | a packet of the world |
//! | [`engine_port::run`] | `engine_port` | a frame that the engine writes |
//!
//! What differs between the two kernels stays behind the trait: where headers and maps lie, how a
//! packet is rewritten and counted as dropped, and where it goes in the end. All functions are
//! inlined into their program but for those that say otherwise: a BPF program has 512 bytes of
//! stack, and the verifier walks each copy of a function.
mod arp;
mod connection;
mod drops;
mod egress_path;
pub mod engine_port;
pub mod fragment_table;
mod fragments_and_options;
pub mod guest_egress;
pub mod guest_shut;
pub mod handover;
mod handshake;
pub mod identity;
pub mod lookup;
pub mod packet;
mod rate;
pub mod translate;
pub mod uplink_ingress;

pub use self::drops::NOBODY;
use self::{fragment_table::Fragment, packet::L4};
use crate::{
    DropReason, FlowRef, ForwardKey, ForwardTarget, Ip4, NextHopRef, SequencesRef, SlotRef,
    TapEntry, Tuple, VmRef, rate::RateRef, segment::Segments,
};

/// The maps as a program sees them.
///
/// # Safety
/// What points to elements stays good as long as the program runs.
pub unsafe trait Maps: Copy {
    /// Entry of `TAPS`. It may be recycled meanwhile: the row's id tells.
    fn tap(self, ifindex: u32) -> Option<TapEntry>;
    /// Row of `VMS`, whoever's it is.
    fn vm_row(self, row: u32) -> Option<VmRef>;
    /// Row of `RATES`.
    fn rates(self, row: u32) -> Option<RateRef>;
    /// Entry of `FLOWS`, read by one load. It may be recycled meanwhile: the slot tells.
    fn flow(self, tuple: &Tuple) -> Option<FlowRef>;
    /// Element of `SLOTS`.
    fn slot(self, index: u32) -> Option<SlotRef>;
    /// Element of `SEQUENCES`: where a slot's connection stands in sequence space.
    fn sequences(self, slot: u32) -> Option<SequencesRef>;
    /// Element of `NEXT_HOPS`.
    fn next_hop(self, index: u32) -> Option<NextHopRef>;
    /// Entry of `FORWARDS`. It may be recycled meanwhile: the row's id tells.
    fn forward(self, key: &ForwardKey) -> Option<ForwardTarget>;
    /// Element of the table of fragments; there are [`fragment_table::PLACES`].
    fn fragment(self, place: u32) -> Option<*mut Fragment>;

    /// Row of `VMS`, if it still is this VM's.
    #[inline(always)]
    fn vm(self, row: u32, id: u32) -> Option<VmRef> {
        let vm = self.vm_row(row)?;
        (id != 0 && crate::cell::load32(vm.id()) == id).then_some(vm)
    }
}

/// The kernel as a program sees it while it runs on one frame.
///
/// # Safety
/// Pointers that `header` returns are good for reads and writes of a `T` at two-byte alignment,
/// until a method is called that says that it moves the frame.
pub unsafe trait Kernel: Copy {
    /// How a run ends: what the program returns.
    type End;
    /// The maps.
    type Maps: Maps;

    /// The maps.
    fn maps(self) -> Self::Maps;

    /// The whole frame, L2 header included, bytes.
    fn frame_len(self) -> u32;
    /// L4 payload per segment; 0 when the frame is one packet.
    fn gso_size(self) -> u32;
    /// The device that it came in by.
    fn ifindex(self) -> u32;
    /// Whether the stack took an 802.1Q or 802.1ad tag out of it.
    fn is_untagged_by_stack(self) -> bool;
    /// Whether it was sent to the device's own L2 address.
    fn is_to_this_host(self) -> bool;
    /// The EtherType, host order.
    fn ether_type(self) -> u16;
    /// A header in the linear part; `None` if that ends before the header does.
    fn header<T>(self, offset: usize) -> Option<*mut T>;
    /// Makes the first bytes linear; `false` where the kernel refuses. Moves the frame.
    fn pull(self, len: u32) -> bool;
    /// Copies from an offset that only the packet tells; `false` if the frame ends before.
    fn load(self, offset: usize, header: &mut L4) -> bool;
    /// Makes room for an Ethernet header before an L3 packet. All of it but the EtherType is zero;
    /// the EtherType is the caller's to write. Moves the frame.
    fn push_ethernet(self) -> Result<(), Refused>;
    /// Replaces a word under the L4 checksum at `offset`, which may be full, partial or complete:
    /// `bpf_l4_csum_replace`, with its flags. Moves the frame.
    fn l4_checksum_replace(
        self,
        offset: usize,
        from: u32,
        to: u32,
        flags: u64,
    ) -> Result<(), Refused>;
    /// Where the kernel will store a partial checksum, bytes from the frame's start; negative
    /// before it.
    fn partial_checksum_place(self) -> Result<i32, Refused>;

    /// The MTU of a device; `None` when it is gone. May move the frame.
    fn mtu_of(self, ifindex: u32) -> Option<u32>;
    /// Whether the host would route the packet on: it came in by the host's MAC, but it is another's.
    fn is_routed_on(self, source: Ip4, destination: Ip4) -> bool;
    /// `CLOCK_MONOTONIC`, ns.
    fn now_ns(self) -> u64;
    /// `CLOCK_MONOTONIC_COARSE`, ns: cheap, and some milliseconds late.
    fn coarse_now_ns(self) -> u64;

    /// Counts the frame as dropped, in a VM's row or [`NOBODY`]'s, and drops it.
    fn drop_counted(self, row: u32, reason: DropReason, segments: Segments) -> Self::End;
    /// Leaves the frame to the host.
    fn pass(self) -> Self::End;
    /// Sends the frame out of a device.
    fn redirect(self, ifindex: u32) -> Self::End;
    /// As [`Kernel::redirect`], with the L2 header made by the kernel's neighbour table.
    fn redirect_by_neighbour(self, ifindex: u32) -> Self::End;
    /// Logs that a frame goes to the engine, where the program is a build that logs.
    #[inline(always)]
    fn log_hand_over(self, row: u32, code: u8, flags: u8) {
        let _ = (row, code, flags);
    }

    /// A header, made linear if need be; `None` if the frame ends before. Moves the frame.
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

/// The kernel refused to change or send a frame.
#[derive(Clone, Copy, Debug)]
pub struct Refused;

impl From<Refused> for DropReason {
    #[inline(always)]
    fn from(_: Refused) -> Self {
        Self::KernelRefused
    }
}
