//! ICMP and ICMPv6 errors: those that are translated, and the engine's own about packets that can't pass.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{Direction, DropReason, Protocol, tcp::TcpBits};
use slipgate_model::FlowTuple;

use crate::{
    datapath::Datapath,
    icmp::{self, Quoted, Untranslatable},
    inspection::sessions::Inspected,
    packet::ip::{self, End},
    packet_path::Job,
    port::{Exit, Outbox, Side},
    reply::IcmpError,
    state::{Nat, Outgoing, VmState},
};

impl<D: Datapath> Nat<D> {
    /// Translates an error from the world about a packet of a guest.
    ///
    /// # Errors
    /// Returns the reason for which the error is dropped.
    pub(super) fn icmp_from_world(
        &self,
        inspected: &mut Inspected,
        vm: &VmState,
        job: &Job<'_>,
        out: &mut Outgoing,
    ) -> Result<(), DropReason> {
        let (vnet, packet) = (job.frame.vnet, job.packet);
        let quoted = Quoted::parse(&packet.ip, !vnet.needs_csum()).map_err(reason)?;
        let slot = self.flows.by_world(&quoted.tuple_as_sent(FlowTuple::WORLD));
        let slot = slot.ok_or(DropReason::NoFlow)?;
        let entry = self.flows.entry(slot).ok_or(DropReason::NoFlow)?;
        if entry.guest.scope != vm.net.id.get() || packet.ip.destination != entry.nat {
            return Err(DropReason::NoFlow);
        }
        if self.flows.is_cut(slot) {
            return Err(DropReason::Denied);
        }
        if packet.ip.ttl <= 1 {
            return Err(DropReason::TtlExpired);
        }
        let version = packet.ip.version();
        if let Some(mtu) = icmp::next_hop_mtu(version, packet.ip.payload()) {
            inspected.path_carries(slot, entry.generation, (version, mtu));
        }
        let copy = out.copy(&packet);
        icmp::translate(copy, End::Source, entry.guest.local, entry.guest.local_port);
        ip::decrement_ttl(copy);
        out.send(&self.datapath, &vm.net, Side::Guest, job.now_ns)
    }

    /// Translates a guest's error about a packet that was delivered to it.
    ///
    /// # Errors
    /// Returns the reason for which the error is dropped.
    pub(super) fn icmp_from_guest(
        &mut self,
        inspected: &Inspected,
        vm: &VmState,
        job: &Job<'_>,
        out: &mut Outgoing,
    ) -> Result<(), DropReason> {
        let (vnet, packet) = (job.frame.vnet, job.packet);
        let quoted = Quoted::parse(&packet.ip, !vnet.needs_csum()).map_err(reason)?;
        // The error goes to the sender of the packet it is about, and nowhere else (RFC 5508
        // REQ-5).
        if packet.ip.destination != quoted.source {
            return Err(DropReason::NoFlow);
        }
        let slot = self
            .flows
            .by_guest(&quoted.tuple_as_received(vm.net.id.get()));
        let slot = slot.ok_or(DropReason::NoFlow)?;
        let entry = *self.flows.entry(slot).ok_or(DropReason::NoFlow)?;
        // An error can carry arbitrary data, past the inspection of the flow's own packets.
        if self.flows.is_cut(slot) {
            return Err(DropReason::Denied);
        }
        if icmp::is_unreachable(packet.ip.version(), packet.ip.payload())
            && entry.protocol() != Protocol::Tcp
        {
            let live = self.datapath.slot(slot);
            live.tcp().fetch_or(TcpBits::REFUSED, Relaxed);
        }
        let is_held = entry.is_held();
        if is_held && !inspected.is_admitted(slot, entry.generation) {
            return Err(DropReason::Refused);
        }
        if packet.ip.ttl <= 1 {
            return Err(DropReason::TtlExpired);
        }
        let exit = self.exit_of(slot);
        let copy = out.copy(&packet);
        let most = if is_held {
            icmp::Quote::Least
        } else {
            icmp::Quote::Most
        };
        icmp::shorten(copy, most);
        icmp::translate(copy, End::Destination, entry.nat, entry.nat_port);
        // A hairpin's is decremented on its way in.
        if exit != Exit::BackIn {
            ip::decrement_ttl(copy);
        }
        out.send(&self.datapath, &vm.net, Side::World(exit), job.now_ns)
    }

    /// Sends a peer an error about its packet to a flow of this VM.
    pub(super) fn icmp_to_world(
        &mut self,
        vm: &mut VmState,
        job: &Job<'_>,
        error: IcmpError,
        out: &mut Outbox,
    ) {
        let tuple = job.packet.tuple(FlowTuple::WORLD, Direction::Rx);
        let Some(slot) = tuple.and_then(|t| self.flows.by_world(&t)) else {
            return;
        };
        let to = Side::World(self.exit_of(slot));
        let (packet, now_ns) = (&job.packet, job.now_ns);
        vm.answers.icmp(&vm.net, to, packet, error, out, now_ns);
    }
}

fn reason(error: Untranslatable) -> DropReason {
    match error {
        Untranslatable::Malformed => DropReason::Malformed,
        Untranslatable::Type => DropReason::IcmpType,
        Untranslatable::Quote => DropReason::NoFlow,
    }
}
