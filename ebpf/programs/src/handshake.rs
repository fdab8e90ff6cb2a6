//! What a segment says of a handshake that the world began; see [`slipgate_abi::handshake`].
use slipgate_abi::{
    Direction, SlotRef, handshake,
    tcp::{Segment, end_of},
};

use crate::{
    packet::{self, Packet},
    skb::Skb,
};

/// Notes it, after the segment was translated.
#[inline(always)]
pub(crate) fn note(skb: Skb, packet: &Packet, slot: SlotRef, direction: Direction) {
    if packet.is_tcp() && handshake::is_pending(slot) {
        let payload_len = packet.l3_len - packet.headers_len;
        let end = end_of(packet.sequence, packet.tcp_flags, payload_len);
        let rx = u32::from(matches!(direction, Direction::Rx));
        note_pending(skb, slot, rx, u32::from(packet.tcp_flags), end);
    }
}

/// Arguments in words, so that there are no more than registers.
#[inline(never)]
fn note_pending(skb: Skb, slot: SlotRef, rx: u32, flags: u32, end: u32) {
    // What can't be read is as if it had not been seen: it is sent again.
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
    handshake::note(slot, direction, &segment);
}
