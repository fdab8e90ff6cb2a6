//! What is said to both ends of a flow that is cut.
//!
//! # Theory of operation
//! From the cut on no packet of the flow passes, whoever it is from: its verdict is `Closing`, its
//! packets come to the engine, and the engine sends none on. Whoever asked is answered after the
//! grace, when no program can be at work any more that read the verdict before.
//!
//! So that nobody hangs, both ends of a TCP connection are told. What they believe can't be made up
//! without the sequence numbers that they are at, which no table has; but every segment has them. So
//! the first segment that comes in the grace, from either side, is answered with an RST at its
//! sender, and continued by one at its receiver. A guest that is silent is asked for one: by an
//! acknowledgement that it can't accept, which RFC 9293 section 3.10.7.4 has it answer. Who says
//! nothing in the grace hears later: a guest by the RST for a segment of no connection, a peer by
//! that of the host, which is where its segments go once the flow is gone.
//! So does the server of a connection that was still inspected, unless its session told it: it may
//! not be spoken to, and a guest's sequence number would be a word.
//!
//! All of it is within a rate per VM.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{
    DropReason, Protocol,
    slot::SlotFlags,
    tcp::{Flags, Phase, TcpBits},
};

use crate::{
    datapath::Datapath,
    packet::{Packet, Transport, build::Segment, icmp::Unreachable},
    packet_path::Finish,
    reply::{IcmpError, reset_for},
    state::{Core, VmState},
};

impl<D: Datapath> Core<D> {
    /// Whether there is a connection that its guest would speak of.
    pub(crate) fn may_probe(&self, slot: u32) -> bool {
        let live = self.datapath.slot(slot);
        let phase = TcpBits(live.tcp().load(Relaxed)).phase();
        Protocol::from_ip(live.protocol()) == Some(Protocol::Tcp)
            && matches!(phase, Phase::Established | Phase::Closing)
    }

    /// Asks a guest where its connection stands.
    pub(crate) fn probe(&mut self, slot: u32, now_ns: u64) {
        let live = self.datapath.slot(slot);
        let (row, id) = (live.vm_row() as u16, live.vm());
        let tuple = live.guest_tuple();
        // The peer's first number lies before all that may come; of a peer that was called it is
        // not known, and any is as good: one within the window is answered for what it acknowledges.
        let inbound = live.flags() & SlotFlags::INBOUND != 0;
        let (sequence, acknowledgement) = match inbound {
            true => (live.isn(), 0),
            false => (0, live.isn()),
        };
        let segment = Segment {
            source: tuple.remote_port,
            destination: tuple.local_port,
            sequence,
            acknowledgement,
            flags: Flags::ACK,
        };
        let Some(mut vm) = self.take_vm(row, id) else {
            return;
        };
        vm.cut_answers
            .segment_to_guest(&vm.net, tuple.remote, segment, &mut self.out, now_ns);
        self.put_vm(vm);
    }

    /// A guest's packet of a flow that was cut.
    pub(crate) fn guest_sent_to_cut(
        &mut self,
        vm: &mut VmState,
        packet: &Packet<'_>,
        slot: u32,
        now_ns: u64,
    ) -> Finish {
        if let Transport::Tcp(tcp) = packet.transport {
            let out = &mut self.out;
            vm.cut_answers.reset(&vm.net, packet, out, now_ns);
            // One that was inspected was ended by its session, or is silent: the guest's number would
            // be a word to a server that it may not speak to.
            if !tcp.has(Flags::RST)
                && let Some(entry) = self.flows.entry(slot).copied()
                && !entry.is_held()
            {
                let on = Segment {
                    source: entry.nat_port,
                    destination: tcp.destination,
                    sequence: tcp.sequence,
                    acknowledgement: 0,
                    flags: Flags::RST,
                };
                self.tell_peer(vm, slot, on, now_ns);
            }
        } else {
            let error = IcmpError::Unreachable(Unreachable::Prohibited);
            vm.answers
                .icmp_to_guest(&vm.net, packet, error, &mut self.out, now_ns);
        }
        Finish::Drop(DropReason::Denied)
    }

    /// The world's packet of a flow that was cut.
    pub(crate) fn world_sent_to_cut(
        &mut self,
        vm: &mut VmState,
        packet: &Packet<'_>,
        slot: u32,
        now_ns: u64,
    ) -> Finish {
        if let Transport::Tcp(tcp) = packet.transport
            && let Some(back) = reset_for(&tcp)
            && let Some(entry) = self.flows.entry(slot).copied()
        {
            self.tell_peer(vm, slot, back, now_ns);
            let on = Segment {
                source: tcp.source,
                destination: entry.guest.local_port,
                sequence: tcp.sequence,
                acknowledgement: 0,
                flags: Flags::RST,
            };
            let out = &mut self.out;
            vm.cut_answers
                .segment_to_guest(&vm.net, entry.guest.remote, on, out, now_ns);
        }
        Finish::Drop(DropReason::Denied)
    }

    fn tell_peer(&mut self, vm: &mut VmState, slot: u32, segment: Segment, now_ns: u64) {
        let Some(entry) = self.flows.entry(slot).copied() else {
            return;
        };
        let exit = self.exit_of(slot);
        let (from, to) = (entry.nat, entry.guest.remote);
        let out = &mut self.out;
        vm.cut_answers
            .segment_to_world(&vm.net, from, to, segment, exit, out, now_ns);
    }
}
