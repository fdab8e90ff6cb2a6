//! ICMP errors: those that pass through, and those of our own about packets that can't.
use slipgate_abi::{Direction, DropReason, Tuple};

use crate::{
    datapath::Datapath,
    icmp::{self, Quoted, Untranslatable},
    packet::{
        Packet,
        ipv4::{self, End},
    },
    packet_path::{Disposition, Finish},
    port::{ETHERTYPE_IPV4, Exit, VirtioNetHdr, single},
    reply::IcmpError,
    state::{Core, VmState},
};

impl<D: Datapath> Core<D> {
    /// From the world, about what a guest sent.
    pub(crate) fn icmp_from_world(
        &mut self,
        vm: &VmState,
        vnet: VirtioNetHdr,
        packet: Packet<'_>,
        now_ns: u64,
    ) -> Finish {
        let quoted = match Quoted::parse(&packet.ip, !vnet.needs_csum()) {
            Ok(quoted) => quoted,
            Err(error) => return Finish::Drop(reason(error)),
        };
        let Some(slot) = self.flows.by_world(&quoted.tuple_as_sent(Tuple::WORLD)) else {
            return Finish::Drop(DropReason::NoFlow);
        };
        let Some(entry) = self.flows.entry(slot).copied() else {
            return Finish::Drop(DropReason::NoFlow);
        };
        if entry.guest.scope != vm.net.id || packet.ip.destination != entry.nat {
            return Finish::Drop(DropReason::NoFlow);
        }
        if self.flows.is_cut(slot) {
            return Finish::Drop(DropReason::Denied);
        }
        if packet.ip.ttl <= 1 {
            return Finish::Drop(DropReason::TtlExpired);
        }
        if let Some(mtu) = icmp::next_hop_mtu(packet.ip.payload()) {
            self.inspected.path_carries(slot, entry.generation, mtu);
        }
        let copy = self.copy(&packet);
        icmp::translate(copy, End::Source, entry.guest.local, entry.guest.local_port);
        ipv4::decrement_ttl(copy);
        let charged = single(self.scratch.len());
        if let Err(reason) = self.may_carry(&vm.net, Direction::Rx, charged, now_ns) {
            return Finish::Drop(reason);
        }
        let sent = self.out.to_guest(
            &vm.net,
            ETHERTYPE_IPV4,
            VirtioNetHdr::default(),
            &self.scratch,
        );
        sent_or_busy(sent)
    }

    /// From a guest, about what was delivered to it.
    pub(crate) fn icmp_from_guest(
        &mut self,
        vm: &VmState,
        vnet: VirtioNetHdr,
        packet: Packet<'_>,
        now_ns: u64,
    ) -> Finish {
        let quoted = match Quoted::parse(&packet.ip, !vnet.needs_csum()) {
            Ok(quoted) => quoted,
            Err(error) => return Finish::Drop(reason(error)),
        };
        // It goes to whom it is about, and nowhere else (RFC 5508 REQ-5).
        if packet.ip.destination != quoted.source {
            return Finish::Drop(DropReason::NoFlow);
        }
        let Some(slot) = self.flows.by_guest(&quoted.tuple_as_received(vm.net.id)) else {
            return Finish::Drop(DropReason::NoFlow);
        };
        let Some(entry) = self.flows.entry(slot).copied() else {
            return Finish::Drop(DropReason::NoFlow);
        };
        // An error carries what its sender likes, past whatever looks at the flow's own packets.
        if self.flows.is_cut(slot) {
            return Finish::Drop(DropReason::Denied);
        }
        let is_held = entry.is_held();
        if is_held && !self.inspected.is_let_in(slot, entry.generation) {
            return Finish::Drop(DropReason::Refused);
        }
        if packet.ip.ttl <= 1 {
            return Finish::Drop(DropReason::TtlExpired);
        }
        let exit = self.exit_of(slot);
        self.copy(&packet);
        let most = if is_held {
            icmp::Quote::Least
        } else {
            icmp::Quote::Most
        };
        icmp::shorten(&mut self.scratch, most);
        let copy = &mut self.scratch;
        icmp::translate(copy, End::Destination, entry.nat, entry.nat_port);
        ipv4::decrement_ttl(copy);
        let charged = single(self.scratch.len());
        if let Err(reason) = self.may_carry(&vm.net, Direction::Tx, charged, now_ns) {
            return Finish::Drop(reason);
        }
        let sent = self
            .out
            .emit(&vm.net, exit, VirtioNetHdr::default(), &self.scratch);
        sent_or_busy(sent)
    }

    /// Tells a peer about its packet to a flow of this VM.
    pub(crate) fn tell_world(
        &mut self,
        vm: &mut VmState,
        packet: &Packet<'_>,
        error: IcmpError,
        now_ns: u64,
    ) {
        let tuple = packet.tuple(Tuple::WORLD, Direction::Rx);
        let Some(slot) = tuple.and_then(|t| self.flows.by_world(&t)) else {
            return;
        };
        let exit = self.exit_of(slot);
        let out = &mut self.out;
        vm.answers
            .icmp_to_world(&vm.net, packet, error, exit, out, now_ns);
    }

    /// Where a flow leaves; a next hop is asked for anew when there was none to be had at its
    /// admission.
    pub(crate) fn exit_of(&mut self, slot: u32) -> Exit {
        use std::sync::atomic::Ordering::Relaxed;
        let live = self.datapath.slot(slot);
        let next_hop = live.next_hop().load(Relaxed);
        if next_hop != 0 {
            return Exit::NextHop(next_hop);
        }
        let mut uplink = live.uplink_ifindex();
        if let Some((hop, _)) = self.routes.lookup(live.remote().into()).hop() {
            let index = self.next_hop(hop, live.remote());
            if index != 0 {
                return Exit::NextHop(index);
            }
            uplink = hop.ifindex;
        }
        Exit::Uplink(uplink)
    }

    /// Copies a packet to the scratch buffer, to be changed there.
    pub(crate) fn copy(&mut self, packet: &Packet<'_>) -> &mut [u8] {
        self.scratch.clear();
        self.scratch.extend_from_slice(packet.ip.bytes);
        &mut self.scratch
    }
}

pub(crate) fn sent_or_busy(sent: Result<(), crate::port::OutboxFull>) -> Finish {
    match sent {
        Ok(()) => Finish::Dispose(Disposition::Consumed),
        Err(_) => Finish::Drop(DropReason::EngineBusy),
    }
}

fn reason(error: Untranslatable) -> DropReason {
    match error {
        Untranslatable::Malformed => DropReason::Malformed,
        Untranslatable::Type => DropReason::IcmpType,
        Untranslatable::Quote => DropReason::NoFlow,
    }
}
