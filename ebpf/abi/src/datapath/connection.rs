//! Tracking of a TCP connection by its segments; see [`crate::tcp`] and, for connections that were
//! inspected, [`crate::sequence`].
use super::{
    Kernel, Maps as _,
    family::Family,
    lookup::Flow,
    packet::{self, Packet},
};
use crate::{
    Direction, SlotRef,
    cell::load32,
    slot::SlotFlags,
    tcp::{Flags, Phase, TcpBits},
};

/// Whether a packet is a TCP segment that opens a connection.
#[inline(always)]
pub(super) fn opens<F: Family>(packet: &Packet<F>) -> bool {
    packet.is_tcp() && Flags::open(packet.tcp_flags)
}

/// Whether a segment's flags contradict each other.
#[inline(always)]
pub(super) fn contradicts_itself<F: Family>(packet: &Packet<F>) -> bool {
    packet.is_tcp() && Flags::are_contradictory(packet.tcp_flags)
}

/// Whether a SYN retransmits the one that opened the flow.
#[inline(always)]
pub(super) fn opener_again<F: Family>(packet: &Packet<F>, slot: SlotRef, from: Direction) -> bool {
    let inbound = slot.flags() & SlotFlags::INBOUND != 0;
    inbound == matches!(from, Direction::Rx)
        && packet.sequence == slot.isn()
        && matches!(TcpBits(load32(slot.tcp())).phase(), Phase::Opening)
}

/// Whether a peer's segment acknowledges something of a former connection, while the guest waits for the
/// answer to its SYN.
#[inline(always)]
pub(super) fn is_challenged<F: Family>(packet: &Packet<F>, slot: SlotRef) -> bool {
    packet.is_tcp() && TcpBits(load32(slot.tcp())).is_challenged_by(packet.tcp_flags)
}

/// Whether a guest's segment does not belong to the connection that was inspected in this flow.
#[inline(always)]
pub(super) fn is_strange<K: Kernel, F: Family>(
    kernel: K,
    packet: &Packet<F>,
    flow: Flow<F>,
) -> bool {
    packet.is_tcp()
        && load32(flow.slot.tcp()) & TcpBits::HELD != 0
        && is_none_of_guests::<K, F>(kernel, flow.slot, flow.index, payload_len(packet)) != 0
}

/// Returns 1 if the segment does not belong to the connection, else 0. Arguments and result are
/// words, as a BPF function call requires.
#[inline(never)]
fn is_none_of_guests<K: Kernel, F: Family>(
    kernel: K,
    slot: SlotRef,
    index: u32,
    payload_len: u32,
) -> u32 {
    let (Some(segment), Some(sequences)) = (
        packet::segment::<K, F>(kernel, payload_len),
        kernel.maps().sequences(index),
    ) else {
        return 1;
    };
    let now_ns = || kernel.coarse_now_ns();
    u32::from(!sequences.is_guests(slot, &segment, now_ns))
}

/// Records a translated segment in its flow's slot, if it can change the connection's state.
#[inline(always)]
pub(super) fn note<K: Kernel, F: Family>(
    kernel: K,
    packet: &Packet<F>,
    flow: Flow<F>,
    direction: Direction,
) {
    if packet.is_tcp() && TcpBits(load32(flow.slot.tcp())).is_concerned_by(packet.tcp_flags) {
        note_segment(kernel, packet, flow, direction);
    }
}

#[cold]
#[inline(always)]
fn note_segment<K: Kernel, F: Family>(
    kernel: K,
    packet: &Packet<F>,
    flow: Flow<F>,
    direction: Direction,
) {
    let rx = u32::from(matches!(direction, Direction::Rx));
    note_change::<K, F>(kernel, flow.slot, flow.index, rx, payload_len(packet));
}

/// Records the segment. Arguments are words, so that they fit the five registers of a call. Not
/// marked as cold: it would then be put into a section of its own, where the loader does not find
/// it.
#[inline(never)]
fn note_change<K: Kernel, F: Family>(
    kernel: K,
    slot: SlotRef,
    index: u32,
    rx: u32,
    payload_len: u32,
) {
    // An unreadable segment is treated as unseen: the timers cover that case.
    let (Some(segment), Some(sequences)) = (
        packet::segment::<K, F>(kernel, payload_len),
        kernel.maps().sequences(index),
    ) else {
        return;
    };
    let direction = if rx != 0 {
        Direction::Rx
    } else {
        Direction::Tx
    };
    let now_ns = || kernel.now_ns();
    crate::connection::note(slot, sequences, direction, &segment, now_ns);
}

/// Length of a frame's TCP payload, bytes.
#[inline(always)]
pub(super) fn payload_len<F: Family>(packet: &Packet<F>) -> u32 {
    packet.l3_len.wrapping_sub(packet.headers_len)
}
