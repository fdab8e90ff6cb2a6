//! What a TCP segment says about its connection; see [`slipgate_abi::tcp`].
use core::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{
    Direction, SlotRef,
    cell::load32,
    slot::SlotFlags,
    tcp::{Flags, Phase, TcpBits},
};

use crate::packet::Packet;

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

/// Notes what a segment says about its connection.
#[inline(always)]
pub(crate) fn note(packet: &Packet, slot: SlotRef, direction: Direction) {
    if !packet.is_tcp() {
        return;
    }
    let (add, clear) = TcpBits(load32(slot.tcp())).observe(direction, packet.tcp_flags);
    slot.note_tcp(add);
    if clear.0 != 0 {
        slot.tcp().fetch_and(!clear.0, Relaxed);
    }
}
