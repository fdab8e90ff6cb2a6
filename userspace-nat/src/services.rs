//! The services beside the translation: ARP, DHCP, DNS, relays.
use std::net::SocketAddr;

use slipgate_abi::{DropReason, segment::Segments};

use crate::{
    arp,
    context::Context,
    datapath::Datapath,
    dhcp,
    dns::{self, Origin},
    poll::{Readiness, Subsystem},
    port::{ETHERTYPE_ARP, ETHERTYPE_IPV4, VirtioNetHdr, single},
    record::{Event, FlowLog, Question, RelayedEnd, RelayedFlow},
    relay::{self, Judges, Opening, Rejudged, Relay, Taken},
    state::Core,
    vm::VmNet,
};

/// What the engine asks of the services. An error is the reason to count the packet as dropped
/// for; `Ok` means that it was taken, and answered now, later or not at all.
pub trait Services {
    /// An ARP packet, without Ethernet header.
    fn arp(
        &mut self,
        vm: &mut VmNet,
        packet: &[u8],
        cx: &mut Context<'_>,
    ) -> Result<(), DropReason>;

    /// An IPv4 packet to UDP port 67.
    fn dhcp(
        &mut self,
        vm: &mut VmNet,
        packet: &[u8],
        cx: &mut Context<'_>,
    ) -> Result<(), DropReason>;

    /// An IPv4 packet to UDP port 53 of any address.
    fn dns(&mut self, vm: &VmNet, packet: &[u8], cx: &mut Context<'_>) -> Result<(), DropReason>;

    /// A TCP segment to port 53 of any address, or TCP or UDP to an address of ours.
    /// `segments`: what it counts as.
    fn relay(
        &mut self,
        vm: &VmNet,
        packet: &[u8],
        segments: Segments,
        cx: &mut Context<'_>,
    ) -> Taken;

    /// A packet that [`Services::relay`] did not take, which opens a connection to the host's
    /// loopback, and was let in.
    fn open_loopback(
        &mut self,
        _vm: &VmNet,
        _packet: &[u8],
        _segments: Segments,
        _opening: &Opening,
        _cx: &mut Context<'_>,
    ) -> Taken {
        Taken::No
    }

    /// How many connections to the host's loopback, and exchanges with it, a VM has: they count
    /// among its flows.
    fn loopback_flows(&self, _vm: u32) -> u32 {
        0
    }

    /// Ends those of all VMs that may not be any more.
    fn rejudge_loopback(&mut self, _judges: Judges<'_>, _cx: &mut Context<'_>) -> Rejudged {
        Rejudged::default()
    }

    /// Ends what is relayed for a VM; how many flows.
    fn cut(&mut self, _vm: u32, _cx: &mut Context<'_>) -> usize {
        0
    }

    /// Ends the relayed flow of this number; whether it lived.
    fn cut_flow(&mut self, _number: u64, _cx: &mut Context<'_>) -> bool {
        false
    }

    /// The relayed flows that live, by their numbers, from this one on; and how each stands.
    fn relayed(&self, _from: u64) -> impl Iterator<Item = (&RelayedFlow, &'static str)> {
        std::iter::empty()
    }

    /// What was relayed for a VM so far.
    fn relayed_counts(&self, _vm: u32) -> relay::Counts {
        relay::Counts::default()
    }

    /// A descriptor of [`Subsystem::Dns`] or [`Subsystem::Relay`] is ready.
    fn on_ready(&mut self, readiness: Readiness, cx: &mut Context<'_>);

    /// A turn of the engine's begins, in which each VM may be sent as much as in the last.
    fn begin_turn(&mut self) {}

    /// When [`Services::on_timer`] is due, ns.
    fn next_deadline_ns(&self) -> Option<u64>;

    /// Goes on with what has waited long enough, as far as there is room; whether that was all for
    /// this turn. `is_frozen` tells of which VMs, by row, nothing passes.
    fn on_timer(&mut self, is_frozen: &dyn Fn(u16) -> bool, cx: &mut Context<'_>) -> bool;

    /// Hands on what became ready since the last call, as far as there is room; VMs are found by
    /// their id. Whether that was all.
    fn flush(&mut self, vms: &dyn Vms, cx: &mut Context<'_>) -> bool;

    /// The host's resolvers from now on.
    fn set_resolvers(&mut self, resolvers: &[SocketAddr]);

    /// A socket of the host that leads to a guest.
    fn add_forward(&mut self, forward: relay::Forward, cx: &mut Context<'_>)
    -> std::io::Result<()>;

    /// A VM is there, or has changed.
    fn vm_added(&mut self, vm: &VmNet);

    /// A VM is gone.
    fn vm_removed(&mut self, id: u32, cx: &mut Context<'_>);

    /// What `log` wants is kept for it from now on, and nothing else.
    fn keep_records(&mut self, _log: &FlowLog) {}

    /// The next thing to be written down.
    fn next_record(&mut self) -> Option<ServiceRecord> {
        None
    }

    /// The engine ends: what lives by it is to be written down.
    fn end_records(&mut self, _now_ns: u64) {}
}

/// What a service did, for the records.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ServiceRecord {
    /// A relayed flow has begun, or ended.
    Relayed(RelayedFlow, Option<RelayedEnd>),
    /// A DNS question was answered, or refused.
    Question(Question),
}

/// The VMs there are.
pub trait Vms {
    /// By id.
    fn by_id(&self, id: u32) -> Option<&VmNet>;
}

impl<D: Datapath> Vms for Core<D> {
    fn by_id(&self, id: u32) -> Option<&VmNet> {
        self.vm_by_id(id).map(|vm| &vm.net)
    }
}

/// The real ones.
#[derive(Debug)]
pub struct HostServices {
    dns: dns::Proxy,
    relay: Relay,
}

impl HostServices {
    /// Services that ask by `dns` and relay by `relay`.
    pub fn new(dns: dns::Proxy, relay: Relay) -> Self {
        Self { dns, relay }
    }
}

impl Services for HostServices {
    fn arp(
        &mut self,
        vm: &mut VmNet,
        packet: &[u8],
        cx: &mut Context<'_>,
    ) -> Result<(), DropReason> {
        let outcome = arp::handle(vm, packet)?;
        answer(vm, ETHERTYPE_ARP, outcome.reply.as_deref(), cx)
    }

    fn dhcp(
        &mut self,
        vm: &mut VmNet,
        packet: &[u8],
        cx: &mut Context<'_>,
    ) -> Result<(), DropReason> {
        let outcome = dhcp::handle(vm, packet)?;
        answer(vm, ETHERTYPE_IPV4, outcome.reply.as_deref(), cx)
    }

    fn dns(&mut self, vm: &VmNet, packet: &[u8], cx: &mut Context<'_>) -> Result<(), DropReason> {
        self.dns.query_packet(vm, packet, cx.poller, cx.now_ns)
    }

    fn relay(
        &mut self,
        vm: &VmNet,
        packet: &[u8],
        segments: Segments,
        cx: &mut Context<'_>,
    ) -> Taken {
        self.relay.packet(vm.id, packet, segments, cx)
    }

    fn open_loopback(
        &mut self,
        vm: &VmNet,
        packet: &[u8],
        segments: Segments,
        opening: &Opening,
        cx: &mut Context<'_>,
    ) -> Taken {
        self.relay
            .open_loopback(vm.id, packet, segments, opening, cx)
    }

    fn loopback_flows(&self, vm: u32) -> u32 {
        self.relay.loopback_flows(vm)
    }

    fn rejudge_loopback(&mut self, judges: Judges<'_>, cx: &mut Context<'_>) -> Rejudged {
        self.relay.rejudge(judges, cx)
    }

    fn cut(&mut self, vm: u32, cx: &mut Context<'_>) -> usize {
        self.relay.cut(vm, cx)
    }

    fn cut_flow(&mut self, number: u64, cx: &mut Context<'_>) -> bool {
        self.relay.cut_flow(number, cx)
    }

    fn relayed(&self, from: u64) -> impl Iterator<Item = (&RelayedFlow, &'static str)> {
        self.relay.live(from)
    }

    fn relayed_counts(&self, vm: u32) -> relay::Counts {
        self.relay.counts(vm)
    }

    fn keep_records(&mut self, log: &FlowLog) {
        let flows = log.wants(Event::FlowStart) || log.wants(Event::FlowEnd);
        self.dns.keep_records(log.wants(Event::Dns));
        self.relay.keep_records(flows);
    }

    fn next_record(&mut self) -> Option<ServiceRecord> {
        let relayed = self.relay.next_record();
        let relayed = relayed.map(|(flow, end)| ServiceRecord::Relayed(flow, end));
        relayed.or_else(|| self.dns.next_record().map(ServiceRecord::Question))
    }

    fn end_records(&mut self, now_ns: u64) {
        self.relay.end_records(now_ns);
    }

    fn on_ready(&mut self, readiness: Readiness, cx: &mut Context<'_>) {
        match readiness.token.subsystem {
            Subsystem::Dns => self.dns.on_ready(readiness, cx.poller, cx.now_ns),
            Subsystem::Relay => self.relay.on_ready(readiness, cx),
            Subsystem::Port | Subsystem::Control | Subsystem::Capture | Subsystem::Listener => {}
        }
    }

    fn begin_turn(&mut self) {
        self.relay.begin_turn();
    }

    fn next_deadline_ns(&self) -> Option<u64> {
        let deadlines = [self.dns.next_deadline_ns(), self.relay.next_deadline_ns()];
        deadlines.into_iter().flatten().min()
    }

    fn on_timer(&mut self, is_frozen: &dyn Fn(u16) -> bool, cx: &mut Context<'_>) -> bool {
        self.dns.on_timer(cx.poller, cx.now_ns);
        self.relay.on_timer(is_frozen, cx)
    }

    fn flush(&mut self, vms: &dyn Vms, cx: &mut Context<'_>) -> bool {
        while let Some(question) = self.relay.next_question() {
            let Some(vm) = vms.by_id(question.vm) else {
                continue;
            };
            let origin = Origin::Tcp {
                connection: question.connection,
            };
            // What is refused stays without an answer; the connection's own timer ends it.
            let _ = self
                .dns
                .query(vm, origin, &question.message, cx.poller, cx.now_ns);
        }
        while !cx.out.is_half_full() {
            let Some(reply) = self.dns.next_reply() else {
                return true;
            };
            if let Origin::Tcp { connection } = reply.origin {
                self.relay.answer(connection, &reply.message, cx);
                continue;
            }
            let Some(vm) = vms.by_id(reply.vm) else {
                continue;
            };
            if let Some(packet) = reply.to_packet(vm) {
                // A full outbox loses the answer; the guest's resolver asks again.
                if let Err(reason) = answer(vm, ETHERTYPE_IPV4, Some(&packet), cx) {
                    vm.stats.dropped(reason, single(packet.len()));
                }
            }
        }
        false
    }

    fn set_resolvers(&mut self, resolvers: &[SocketAddr]) {
        self.dns.set_resolvers(resolvers);
    }

    fn add_forward(
        &mut self,
        forward: relay::Forward,
        cx: &mut Context<'_>,
    ) -> std::io::Result<()> {
        self.relay.add_forward(forward, cx)
    }

    fn vm_added(&mut self, vm: &VmNet) {
        self.relay.add_vm(vm.clone());
    }

    fn vm_removed(&mut self, id: u32, cx: &mut Context<'_>) {
        self.dns.forget(id);
        self.relay.remove_vm(id, cx);
    }
}

fn answer(
    vm: &VmNet,
    ethertype: u16,
    reply: Option<&[u8]>,
    cx: &mut Context<'_>,
) -> Result<(), DropReason> {
    match reply {
        Some(reply) => cx
            .out
            .to_guest(vm, ethertype, VirtioNetHdr::default(), reply)
            .map_err(|_| DropReason::EngineBusy),
        None => Ok(()),
    }
}
