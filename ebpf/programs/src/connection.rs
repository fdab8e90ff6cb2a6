//! What a TCP segment says about its connection; see [`slipgate_abi::tcp`] and, for connections that
//! were inspected, [`slipgate_abi::sequence`].
use aya_ebpf::helpers::generated::{bpf_ktime_get_coarse_ns, bpf_ktime_get_ns};
use slipgate_abi::{
    Direction, SlotRef,
    cell::load32,
    slot::SlotFlags,
    tcp::{self, Flags, Phase, TcpBits},
};

use crate::{
    lookup::Flow,
    maps,
    packet::{self, Packet},
    skb::Skb,
};

/// Whether a segment opens a connection.
#[inline(always)]
pub(crate) fn opens(packet: &Packet) -> bool {
    packet.is_tcp() && Flags::open(packet.tcp_flags)
}

/// Whether a segment's flags contradict each other.
#[inline(always)]
pub(crate) fn contradicts_itself(packet: &Packet) -> bool {
    packet.is_tcp() && Flags::are_contradictory(packet.tcp_flags)
}

/// Whether a SYN is the retransmission of the one that opened the flow.
#[inline(always)]
pub(crate) fn opener_again(packet: &Packet, slot: SlotRef, from: Direction) -> bool {
    let inbound = slot.flags() & SlotFlags::INBOUND != 0;
    inbound == matches!(from, Direction::Rx)
        && packet.sequence == slot.isn()
        && matches!(TcpBits(load32(slot.tcp())).phase(), Phase::Opening)
}

/// Whether a guest's segment is none of the connection that was inspected in this flow.
#[inline(always)]
pub(crate) fn is_strange(skb: Skb, packet: &Packet, flow: Flow) -> bool {
    packet.is_tcp()
        && load32(flow.slot.tcp()) & TcpBits::HELD != 0
        && is_none_of_guests(skb, flow.slot, flow.index, payload_len(packet)) != 0
}

/// Arguments in words, and an answer in one: that is what goes through a call.
#[inline(never)]
fn is_none_of_guests(skb: Skb, slot: SlotRef, index: u32, payload_len: u32) -> u32 {
    let (Some(segment), Some(sequences)) =
        (packet::segment(skb, payload_len), maps::sequences(index))
    else {
        return 1;
    };
    // SAFETY: no arguments.
    let now_ns = || unsafe { bpf_ktime_get_coarse_ns() };
    u32::from(!sequences.is_guests(slot, &segment, now_ns))
}

/// Notes what a segment says about its connection, after it was translated.
#[inline(always)]
pub(crate) fn note(skb: Skb, packet: &Packet, flow: Flow, direction: Direction) {
    if packet.is_tcp() && TcpBits(load32(flow.slot.tcp())).is_concerned_by(packet.tcp_flags) {
        note_segment(skb, packet, flow, direction);
    }
}

#[cold]
#[inline(always)]
fn note_segment(skb: Skb, packet: &Packet, flow: Flow, direction: Direction) {
    let rx = u32::from(matches!(direction, Direction::Rx));
    note_change(skb, flow.slot, flow.index, rx, payload_len(packet));
}

/// Arguments in words, so that there are no more than registers. Not marked as cold: it would be
/// put into a section of its own, where the loader does not find it.
#[inline(never)]
fn note_change(skb: Skb, slot: SlotRef, index: u32, rx: u32, payload_len: u32) {
    // What can't be read is as if it had not been seen: the timers are there for that.
    let (Some(segment), Some(sequences)) =
        (packet::segment(skb, payload_len), maps::sequences(index))
    else {
        return;
    };
    let direction = if rx != 0 {
        Direction::Rx
    } else {
        Direction::Tx
    };
    // SAFETY: no arguments.
    let now_ns = || unsafe { bpf_ktime_get_ns() };
    tcp::note(slot, sequences, direction, &segment, now_ns);
}

/// The TCP payload of a frame, bytes.
#[inline(always)]
pub(crate) fn payload_len(packet: &Packet) -> u32 {
    packet.l3_len.wrapping_sub(packet.headers_len)
}
