//! Tracking of a handshake that the world began; see [`crate::handshake`].
use super::{
    Kernel, connection,
    family::Family,
    packet::{self, Packet},
};
use crate::{Direction, SlotRef, handshake};

/// Records a translated segment if the flow's handshake is pending.
#[inline(always)]
pub(super) fn note<K: Kernel, F: Family>(
    kernel: K,
    packet: &Packet<F>,
    slot: SlotRef,
    direction: Direction,
) {
    if packet.is_tcp() && handshake::is_pending(slot) {
        let rx = u32::from(matches!(direction, Direction::Rx));
        note_pending::<K, F>(kernel, slot, rx, connection::payload_len(packet));
    }
}

/// Records the segment. Arguments are words, so that they fit the five registers of a call.
#[inline(never)]
fn note_pending<K: Kernel, F: Family>(kernel: K, slot: SlotRef, rx: u32, payload_len: u32) {
    // An unreadable segment is treated as unseen: it will be retransmitted.
    let Some(segment) = packet::segment::<K, F>(kernel, payload_len) else {
        return;
    };
    let direction = if rx != 0 {
        Direction::Rx
    } else {
        Direction::Tx
    };
    handshake::note(slot, direction, &segment);
}
