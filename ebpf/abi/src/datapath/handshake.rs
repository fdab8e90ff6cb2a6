//! What a segment says of a handshake that the world began; see [`crate::handshake`].
use super::{
    Kernel, connection,
    packet::{self, Packet},
};
use crate::{Direction, SlotRef, handshake};

/// Notes it, after the segment was translated.
#[inline(always)]
pub(super) fn note<K: Kernel>(kernel: K, packet: &Packet, slot: SlotRef, direction: Direction) {
    if packet.is_tcp() && handshake::is_pending(slot) {
        let rx = u32::from(matches!(direction, Direction::Rx));
        note_pending(kernel, slot, rx, connection::payload_len(packet));
    }
}

/// Arguments in words, so that there are no more than registers.
#[inline(never)]
fn note_pending<K: Kernel>(kernel: K, slot: SlotRef, rx: u32, payload_len: u32) {
    // What can't be read is as if it had not been seen: it is sent again.
    let Some(segment) = packet::segment(kernel, payload_len) else {
        return;
    };
    let direction = if rx != 0 {
        Direction::Rx
    } else {
        Direction::Tx
    };
    handshake::note(slot, direction, &segment);
}
