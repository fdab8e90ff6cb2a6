//! Resets and errors to both ends of a flow that is cut.
//!
//! # Theory of operation
//! From the cut on no packet of the flow passes in either direction: its verdict is `Closing`, its
//! packets come to the engine, and the engine sends none on. The request is answered after the
//! grace, when no program can be running any more that read the earlier verdict.
//!
//! So that neither end of a TCP connection hangs, both are reset. An RST that they accept needs the
//! present sequence numbers, which no table has; but every segment has them. So the first segment
//! that arrives in the grace, from either side, is answered with an RST to its sender, and followed
//! by an RST to its receiver. A silent guest is probed for a segment: by an acknowledgement that it
//! can't accept, which RFC 9293 section 3.10.7.4 requires it to answer. An end that is silent in
//! the grace is reset later: a guest by the RST for a segment of no connection, a peer by that of
//! the host, to which its segments go once the flow is gone. The latter is also true of the server
//! of a connection that was still inspected, unless its session reset it: nothing may be sent to
//! it, and a guest's sequence number would carry information.
//!
//! A VM that goes on from a snapshot has connections of which its peers know more, or less, than
//! it does, and it may not run yet. So its peers are probed too: each answers with the numbers that
//! it expects, and is reset by them. One whose answer comes after the grace is reset by the host.
//! An RST with the guest's former numbers is answered so too (RFC 5961 section 3.2).
//!
//! Datagrams have no end of which a socket would hear, but a socket that is connected waits for an
//! answer until its program gives up. So the guest of a VM that goes on from a snapshot is told, of
//! each exchange that it began and that was answered, that the port is unreachable: that is what
//! its kernel hands to such a socket. Toward the world nothing is sent: the peer's answers meet no
//! flow, which is what it sees of any client that has gone.
//!
//! To a destination that the host's routes do not lead to any more nothing is sent, not even an RST:
//! only the guest is told, as it is of a new flow there. The peer is told by the host.
//!
//! All of these answers are limited by a rate per VM. Guests whose connections were cut in one moment
//! repeat their segments in one moment too, and wait twice as long each time. So a guest that was silent
//! in the grace is reset by the rate of cuts, where that of refusals is exhausted
//! ([`VmState::reset_unknown`]): with the latter alone, each repetition would be a burst of refusals, and
//! the last of some thousand connections would hang for minutes.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{
    DropReason, Protocol, SlotIndex,
    slot::SlotFlags,
    tcp::{Flags, Phase, TcpBits},
};

use crate::{
    datapath::Datapath,
    flow::EndReason,
    packet::{Packet, Transport, build::Segment, icmp::Unreachable},
    packet_path::{Finish, Job},
    port::{Outbox, Side},
    reply::{IcmpError, reset_for},
    state::{Nat, VmState, VmTable},
};

/// From a guest's first sequence number to one that it has not come to, unless it has sent about
/// 1 GiB by the connection.
const NOT_SENT: u32 = 1 << 30;

impl<D: Datapath> Nat<D> {
    /// Whether the flow is a connection of which the guest would answer a probe.
    pub(crate) fn may_probe(&self, slot: SlotIndex) -> bool {
        let live = self.datapath.slot(slot);
        let phase = TcpBits(live.tcp().load(Relaxed)).phase();
        live.protocol() == Protocol::Tcp as u8
            && matches!(phase, Phase::Established | Phase::Closing)
    }

    /// Whether the flow is an exchange of datagrams that the guest began and that was answered: a
    /// socket of the guest may wait for more of it. One that was never answered has nothing to lose:
    /// who asks again opens a flow.
    pub(crate) fn may_be_awaited(&self, slot: SlotIndex) -> bool {
        let live = self.datapath.slot(slot);
        live.protocol() == Protocol::Udp as u8
            && live.flags() & SlotFlags::INBOUND == 0
            && live.rx_packets().load(Relaxed) > 0
    }

    /// Tells a guest that the peer of its datagrams is not there any more.
    pub(crate) fn tell_port_unreachable(
        &self,
        vms: &mut VmTable,
        slot: SlotIndex,
        out: &mut Outbox,
        now_ns: u64,
    ) {
        let live = self.datapath.slot(slot);
        let tuple = self.datapath.guest_tuple(slot);
        let vm = vms.get_mut(live.row());
        if let Some(vm) = vm.filter(|vm| vm.net.id == live.id()) {
            vm.cut_answers
                .port_unreachable(&vm.net, &tuple, out, now_ns);
        }
    }

    /// Probes a guest for a segment of its connection.
    pub(crate) fn probe(&self, vms: &mut VmTable, slot: SlotIndex, out: &mut Outbox, now_ns: u64) {
        let live = self.datapath.slot(slot);
        let tuple = self.datapath.guest_tuple(slot);
        // The peer's first number precedes all that may come. If the guest opened the connection it
        // is not known, and any will do: a segment within the window is answered because of its
        // acknowledgement, of what the guest has not sent. (One of before is no reason to answer,
        // and some look at it first.)
        let inbound = live.flags() & SlotFlags::INBOUND != 0;
        let (sequence, acknowledgement) = match inbound {
            true => (live.isn(), 0),
            false => (0, live.isn().wrapping_add(NOT_SENT)),
        };
        let segment = Segment {
            source: tuple.remote_port,
            destination: tuple.local_port,
            sequence,
            acknowledgement,
            flags: Flags::ACK,
        };
        let vm = vms.get_mut(live.row());
        if let Some(vm) = vm.filter(|vm| vm.net.id == live.id()) {
            let (to, addresses) = (Side::Guest, (tuple.remote, tuple.local));
            vm.cut_answers
                .segment(&vm.net, to, addresses, segment, out, now_ns);
        }
    }

    /// Probes the peer of a connection for a segment, unless the connection is inspected.
    pub(crate) fn probe_peer(
        &mut self,
        vms: &mut VmTable,
        slot: SlotIndex,
        out: &mut Outbox,
        now_ns: u64,
    ) {
        let live = self.datapath.slot(slot);
        let (id, isn) = (live.id(), live.isn());
        let inbound = live.flags() & SlotFlags::INBOUND != 0;
        let Some(entry) = self.flows.entry(slot).filter(|entry| !entry.is_held()) else {
            return;
        };
        // Before what it expects, or with an acknowledgement of before.
        let (sequence, acknowledgement) = match inbound {
            true => (0, isn),
            false => (isn, 0),
        };
        let segment = Segment {
            source: entry.nat_port,
            destination: entry.guest.remote_port,
            sequence,
            acknowledgement,
            flags: Flags::ACK,
        };
        let vm = vms.get_mut(entry.vm_row);
        if let Some(vm) = vm.filter(|vm| vm.net.id == id) {
            self.send_to_peer(vm, slot, segment, out, now_ns);
        }
    }

    /// Handles a guest's packet of a flow that was cut.
    pub(super) fn guest_sent_to_cut(
        &mut self,
        vm: &mut VmState,
        job: &Job<'_>,
        slot: SlotIndex,
        out: &mut Outbox,
    ) -> Finish {
        let (packet, now_ns) = (&job.packet, job.now_ns);
        if let Transport::Tcp(tcp) = packet.transport {
            vm.cut_answers.reset(&vm.net, packet, out, now_ns);
            // An inspected connection was ended by its session, or stays silent: the guest's
            // sequence number would carry information to a server to which nothing may be sent.
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
                self.send_to_peer(vm, slot, on, out, now_ns);
            }
        } else {
            // As of a new flow there.
            let code = match self.flows.cut_by(slot) {
                Some(EndReason::Route) => Unreachable::Net,
                // As was said when its generation ended.
                Some(EndReason::Generation) => Unreachable::Port,
                _ => Unreachable::Prohibited,
            };
            let error = IcmpError::Unreachable(code);
            vm.answers
                .icmp(&vm.net, Side::Guest, packet, error, out, now_ns);
        }
        Finish::Drop(DropReason::Denied)
    }

    /// Handles a packet from the world of a flow that was cut.
    pub(super) fn world_sent_to_cut(
        &mut self,
        vm: &mut VmState,
        job: &Job<'_>,
        slot: SlotIndex,
        out: &mut Outbox,
    ) -> Finish {
        let now_ns = job.now_ns;
        if let Transport::Tcp(tcp) = job.packet.transport
            && let Some(back) = reset_for(&tcp)
            && let Some(entry) = self.flows.entry(slot).copied()
        {
            self.send_to_peer(vm, slot, back, out, now_ns);
            let on = Segment {
                source: tcp.source,
                destination: entry.guest.local_port,
                sequence: tcp.sequence,
                acknowledgement: 0,
                flags: Flags::RST,
            };
            let addresses = (entry.guest.remote, entry.guest.local);
            vm.cut_answers
                .segment(&vm.net, Side::Guest, addresses, on, out, now_ns);
        }
        Finish::Drop(DropReason::Denied)
    }

    fn send_to_peer(
        &mut self,
        vm: &mut VmState,
        slot: SlotIndex,
        segment: Segment,
        out: &mut Outbox,
        now_ns: u64,
    ) {
        let entry = self.flows.entry(slot).copied();
        let Some(entry) = entry.filter(|_| !self.flows.is_astray(slot)) else {
            return;
        };
        let to = Side::World(self.exit_of(slot));
        let addresses = (entry.nat, entry.guest.remote);
        vm.cut_answers
            .segment(&vm.net, to, addresses, segment, out, now_ns);
    }
}

impl VmState {
    /// Answers a guest's segment of no connection with RST: it may be of one that was cut.
    pub(super) fn reset_unknown(&mut self, packet: &Packet<'_>, out: &mut Outbox, now_ns: u64) {
        if !self.answers.reset(&self.net, packet, out, now_ns) {
            self.cut_answers.reset(&self.net, packet, out, now_ns);
        }
    }
}
