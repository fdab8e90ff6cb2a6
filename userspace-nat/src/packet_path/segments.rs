//! TCP segments that the engine translates itself: the rules that the programs apply to theirs.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{
    Direction, handshake,
    tcp::{self, TcpBits},
};

use crate::{
    datapath::Datapath,
    packet::{Packet, Transport},
    state::Core,
};

impl<D: Datapath> Core<D> {
    /// Whether a guest's segment is none of the connection that was inspected in this flow.
    pub(crate) fn is_strange(&self, slot: u32, packet: &Packet<'_>, now_ns: u64) -> bool {
        let Transport::Tcp(tcp) = packet.transport else {
            return false;
        };
        let live = self.datapath.slot(slot);
        let is_held = live.tcp().load(Relaxed) & TcpBits::HELD != 0;
        let sequences = self.datapath.sequences(slot);
        is_held && !sequences.is_guests(live, &tcp.segment(), || now_ns)
    }

    /// Notes what a segment that was translated here says about its connection.
    pub(crate) fn note_segment(
        &self,
        slot: u32,
        direction: Direction,
        packet: &Packet<'_>,
        now_ns: u64,
    ) {
        let Transport::Tcp(tcp) = packet.transport else {
            return;
        };
        let live = self.datapath.slot(slot);
        if TcpBits(live.tcp().load(Relaxed)).is_concerned_by(tcp.flags) {
            let sequences = self.datapath.sequences(slot);
            tcp::note(live, sequences, direction, &tcp.segment(), || now_ns);
        }
        if handshake::is_pending(live) {
            handshake::note(live, direction, &tcp.segment());
        }
    }
}
