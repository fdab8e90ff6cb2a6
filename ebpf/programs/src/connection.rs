//! What a TCP segment says about its connection; see [`slipgate_abi::tcp`].
use aya_ebpf::helpers::generated::bpf_ktime_get_ns;
use slipgate_abi::{
    Direction, SlotRef,
    cell::load32,
    slot::SlotFlags,
    tcp::{self, Flags, Phase, Segment, TcpBits},
};

use crate::{
    packet::{self, Packet},
    skb::Skb,
};

/// Whether a segment is a SYN without ACK.
#[inline(always)]
pub(crate) fn opens(packet: &Packet) -> bool {
    packet.is_tcp() && packet.tcp_flags & (Flags::SYN | Flags::ACK | Flags::RST) == Flags::SYN
}

/// Whether a SYN is the retransmission of the one that opened the flow.
#[inline(always)]
pub(crate) fn opener_again(packet: &Packet, slot: SlotRef, from: Direction) -> bool {
    let inbound = slot.flags() & SlotFlags::INBOUND != 0;
    inbound == matches!(from, Direction::Rx)
        && packet.sequence == slot.isn()
        && matches!(TcpBits(load32(slot.tcp())).phase(), Phase::Opening)
}

/// Notes what a segment says about its connection, after it was translated.
#[inline(always)]
pub(crate) fn note(skb: Skb, packet: &Packet, slot: SlotRef, direction: Direction) {
    if packet.is_tcp() && TcpBits(load32(slot.tcp())).is_concerned_by(packet.tcp_flags) {
        note_end(skb, packet, slot, direction);
    }
}

#[cold]
#[inline(always)]
fn note_end(skb: Skb, packet: &Packet, slot: SlotRef, direction: Direction) {
    let payload_len = packet.l3_len - packet.headers_len;
    let end = tcp::end_of(packet.sequence, packet.tcp_flags, payload_len);
    let rx = u32::from(matches!(direction, Direction::Rx));
    note_change(skb, slot, rx, u32::from(packet.tcp_flags), end);
}

/// Arguments in words, so that there are no more than registers. Not marked as cold: it would be
/// put into a section of its own, where the loader does not find it.
#[inline(never)]
fn note_change(skb: Skb, slot: SlotRef, rx: u32, flags: u32, end: u32) {
    // What can't be read is as if it had not been seen: the timers are there for that.
    let Some(acknowledgement) = packet::acknowledgement(skb) else {
        return;
    };
    let direction = if rx != 0 {
        Direction::Rx
    } else {
        Direction::Tx
    };
    let segment = Segment {
        flags: flags as u8,
        end,
        acknowledgement,
    };
    // SAFETY: no arguments.
    tcp::note(slot, direction, &segment, || unsafe { bpf_ktime_get_ns() });
}
