//! What a segment says of a handshake that the world began; see [`slipgate_abi::handshake`].
use slipgate_abi::{Direction, SlotRef, handshake};

use crate::{
    connection,
    packet::{self, Packet},
    skb::Skb,
};

/// Notes it, after the segment was translated.
#[inline(always)]
pub(crate) fn note(skb: Skb, packet: &Packet, slot: SlotRef, direction: Direction) {
    if packet.is_tcp() && handshake::is_pending(slot) {
        let rx = u32::from(matches!(direction, Direction::Rx));
        note_pending(skb, slot, rx, connection::payload_len(packet));
    }
}

/// Arguments in words, so that there are no more than registers.
#[inline(never)]
fn note_pending(skb: Skb, slot: SlotRef, rx: u32, payload_len: u32) {
    // What can't be read is as if it had not been seen: it is sent again.
    let Some(segment) = packet::segment(skb, payload_len) else {
        return;
    };
    let direction = if rx != 0 {
        Direction::Rx
    } else {
        Direction::Tx
    };
    handshake::note(slot, direction, &segment);
}
