//! The services beside the translation: ARP, DHCP, DNS and the relay.
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

/// Interface between the engine and its services. A method that takes a packet returns `Ok` when it
/// has consumed the packet, whether it answers it now, later or not at all.
pub trait Services {
    /// Takes an ARP packet, without Ethernet header.
    ///
    /// # Errors
    /// Returns the reason for which the packet is counted as dropped.
    fn arp(
        &mut self,
        vm: &mut VmNet,
        packet: &[u8],
        cx: &mut Context<'_>,
    ) -> Result<(), DropReason>;

    /// Takes an IPv4 packet to UDP port 67.
    ///
    /// # Errors
    /// Returns the reason for which the packet is counted as dropped.
    fn dhcp(
        &mut self,
        vm: &mut VmNet,
        packet: &[u8],
        cx: &mut Context<'_>,
    ) -> Result<(), DropReason>;

    /// Takes an IPv4 packet to UDP port 53 of any address.
    ///
    /// # Errors
    /// Returns the reason for which the packet is counted as dropped.
    fn dns(&mut self, vm: &VmNet, packet: &[u8], cx: &mut Context<'_>) -> Result<(), DropReason>;

    /// Takes a TCP segment to port 53 of any address, or a TCP or UDP packet to an address of the
    /// engine. `segments`: packets and bytes that it counts as.
    fn relay(
        &mut self,
        vm: &VmNet,
        packet: &[u8],
        segments: Segments,
        cx: &mut Context<'_>,
    ) -> Taken;

    /// Takes an admitted packet that opens a connection to the host's loopback, and that
    /// [`Services::relay`] did not take.
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

    /// Returns the number of connections to, and exchanges with, the host's loopback of a VM. They
    /// count among its flows.
    fn loopback_flows(&self, _vm: u32) -> u32 {
        0
    }

    /// Ends the connections to the host's loopback that the present rules deny, of all VMs.
    fn rejudge_loopback(&mut self, _judges: Judges<'_>, _cx: &mut Context<'_>) -> Rejudged {
        Rejudged::default()
    }

    /// Ends every relayed flow of a VM. Returns how many there were.
    fn cut(&mut self, _vm: u32, _cx: &mut Context<'_>) -> usize {
        0
    }

    /// Ends the relayed flow of this number. Returns whether it was live.
    fn cut_flow(&mut self, _number: u64, _cx: &mut Context<'_>) -> bool {
        false
    }

    /// Returns the live relayed flows, in order of their numbers, from `_from` on, each with its
    /// state.
    fn relayed(&self, _from: u64) -> impl Iterator<Item = (&RelayedFlow, &'static str)> {
        std::iter::empty()
    }

    /// Returns the relayed traffic of a VM so far.
    fn relayed_counts(&self, _vm: u32) -> relay::Counts {
        relay::Counts::default()
    }

    /// Handles a ready descriptor of [`Subsystem::Dns`] or [`Subsystem::Relay`].
    fn on_ready(&mut self, readiness: Readiness, cx: &mut Context<'_>);

    /// Begins a turn of the event loop: each VM may be sent as much as in the previous turn.
    fn begin_turn(&mut self) {}

    /// Returns the time at which [`Services::on_timer`] is due, ns; `None` when no timer runs.
    fn next_deadline_ns(&self) -> Option<u64>;

    /// Handles timers that have expired, as far as the outbox has room. Returns whether all were
    /// handled. `is_frozen` says of a VM's row whether the VM is frozen, so that nothing passes.
    fn on_timer(&mut self, is_frozen: &dyn Fn(u16) -> bool, cx: &mut Context<'_>) -> bool;

    /// Sends what became ready since the last call, as far as the outbox has room. Returns whether
    /// all was sent. VMs are found by id in `vms`.
    fn flush(&mut self, vms: &dyn Vms, cx: &mut Context<'_>) -> bool;

    /// Sets the host's resolvers.
    fn set_resolvers(&mut self, resolvers: &[SocketAddr]);

    /// Adds a bound socket of the host whose connections are relayed to a guest.
    ///
    /// # Errors
    /// When the socket can't be waited on.
    fn add_forward(&mut self, forward: relay::Forward, cx: &mut Context<'_>)
    -> std::io::Result<()>;

    /// Adds a VM, or replaces its description.
    fn vm_added(&mut self, vm: &VmNet);

    /// Removes a VM, by id.
    fn vm_removed(&mut self, id: u32, cx: &mut Context<'_>);

    /// Sets which records are kept: those that `log` wants, and no others.
    fn keep_records(&mut self, _log: &FlowLog) {}

    /// Returns the next record to be written; `None` when there is none.
    fn next_record(&mut self) -> Option<ServiceRecord> {
        None
    }

    /// Ends the live flows of the services and records them: the engine stops.
    fn end_records(&mut self, _now_ns: u64) {}
}

/// Action of a service that is recorded.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ServiceRecord {
    /// A relayed flow has begun, or ended.
    Relayed(RelayedFlow, Option<RelayedEnd>),
    /// A DNS question that was answered or refused.
    Question(Question),
}

/// Look-up of the VMs that the engine serves.
pub trait Vms {
    /// Returns the VM of this id.
    fn by_id(&self, id: u32) -> Option<&VmNet>;
}

impl<D: Datapath> Vms for Core<D> {
    fn by_id(&self, id: u32) -> Option<&VmNet> {
        self.vm_by_id(id).map(|vm| &vm.net)
    }
}

/// The services of a running engine.
#[derive(Debug)]
pub struct HostServices {
    dns: dns::Proxy,
    relay: Relay,
}

impl HostServices {
    /// Creates the services from a DNS proxy and a relay.
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
            // A refused question stays without an answer; the connection's own timer ends it.
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
