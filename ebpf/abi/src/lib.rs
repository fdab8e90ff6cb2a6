//! Types and rules that the BPF programs and userspace share.
//!
//! Each type is defined once and used by both sides, and so is every rule that both sides apply
//! (TCP tracking, timeouts, checksum deltas, segment counts). The crate is `no_std`.
//!
//! # How a flow is stored
//!
//! [`Slot`] is the flow: one element of the memory-mappable array `SLOTS`. The two entries of the
//! hash `FLOWS` ([`Tuple`] as the guest's link sees it, and as the world's link sees it) are eight
//! bytes each, a [`FlowRef`]: the slot's index and generation. Hash elements are recycled under
//! running programs, so a program reads the reference in one 64-bit load, and believes the slot
//! only when its generation and its tuple are the packet's: anything else is a miss. Fields of a
//! flow change in place, by atomics, from either side; nothing is updated through the map.
//!
//! Slots rest before reuse ([`timeout::SLOT_REST_NS`]), far longer than a program can run, so the
//! second cache line of a slot is constant for as long as a program may read it.
//!
//! An IPv6 flow is a slot too, with [`slot::SlotFlags::IPV6`]. Its addresses are in the element of
//! `ADDRESSES6` with the slot's index ([`Addresses6`]), and its tuples in `FLOWS6` ([`Tuple6`]). So a
//! slot keeps its two cache lines, and what IPv4 reads does not grow.
//!
//! # Conventions
//!
//! Addresses are in network order ([`Ip4`], [`Ip6`]), ports and everything else in host order. Padding is
//! explicit and zero. Times are `CLOCK_MONOTONIC` nanoseconds. Bytes and packets are L3, as if
//! segmented ([`segment`]).
#![no_std]
#![deny(unsafe_op_in_unsafe_fn)]

pub mod activity;
pub mod addresses6;
pub mod cell;
pub mod checksum;
pub mod connection;
pub mod count;
pub mod datapath;
pub mod early_fragment;
pub mod first_packet;
pub mod forward;
mod handle;
pub mod handshake;
pub mod ids;
pub mod link;
pub mod maps;
pub mod names;
pub mod portframe;
pub mod rate;
pub mod segment;
pub mod sequence;
pub mod skb;
pub mod slot;
pub mod tcp;
pub mod timeout;
pub mod tuple;
pub mod vm;
pub mod vm6;

pub use addresses6::{Addresses6, Addresses6Ref};
pub use count::{
    Counter, DropCounters, DropReason, EndedBefore, Refusal, RefusalCounters, RuleRefusals,
    VmCounters,
};
pub use early_fragment::{EarlyFragment, EarlyFragmentRef, EarlyTag, EarlyTagRef};
pub use first_packet::{FirstPacket, FirstPacketRef};
pub use forward::{ForwardKey, ForwardKey6, ForwardTarget};
pub use ids::{IfIndex, RuleIndex, SlotIndex, VmId, VmRow};
pub use link::{NextHop, NextHopRef};
pub use maps::OwnerRef;
pub use names::{NameKey, NameValue};
pub use portframe::{Command, Handover, PortHeader};
pub use rate::{AtEnd, Budget, Rate, RateLimits, VmRates};
pub use sequence::{Sequences, SequencesRef};
pub use slot::{FlowRef, Slot, SlotRef, Verdict};
pub use tuple::{Direction, Ip4, Ip6, Protocol, Tuple, Tuple6};
pub use vm::{TapEntry, Vm, VmRef};
pub use vm6::{Vm6, Vm6Ref};

/// Version of all layouts and meanings in this crate. Increase it with any change of either; a
/// process refuses pinned maps of another version.
pub const ABI_VERSION: u32 = 6;

#[cfg(feature = "user")]
mod pod;
