//! The services beside the translation: ARP, DHCP, DNS and the relay.
use slipgate_abi::{Direction, DropReason, VmId, VmRow};

use crate::{
    arp, dhcp,
    dns::{self, Origin},
    poll::{Context, Readiness, Subsystem},
    port::{ETHERTYPE_ARP, ETHERTYPE_IPV4, VirtioNetHdr, ethertype_of, single},
    record::{Event, FlowLog},
    relay::Relay,
    state::{Network, VmTable},
    vm::VmNet,
};

/// The services of an engine.
#[derive(Debug)]
pub struct Services {
    pub(crate) dns: dns::Proxy,
    pub(crate) relay: Relay,
}

impl Services {
    /// Creates the services from a DNS proxy and a relay.
    pub fn new(dns: dns::Proxy, relay: Relay) -> Self {
        Self { dns, relay }
    }

    /// Sets which records are kept: those that `log` wants, and no others.
    pub(crate) fn keep_records(&mut self, log: &FlowLog) {
        let flows = log.wants(Event::FlowStart) || log.wants(Event::FlowEnd);
        self.dns.keep_records(log.wants(Event::Dns));
        self.relay.keep_records(flows);
    }

    /// Handles a ready descriptor of [`Subsystem::Dns`] or [`Subsystem::Relay`].
    pub(crate) fn on_ready(&mut self, readiness: Readiness, cx: &mut Context<'_>) {
        match readiness.token.subsystem {
            Subsystem::Dns => self.dns.on_ready(readiness, cx.poller, cx.now_ns),
            Subsystem::Relay => self.relay.on_ready(readiness, cx),
            Subsystem::Port | Subsystem::Control | Subsystem::Capture | Subsystem::Listener => {}
        }
    }

    /// Returns the time at which [`Services::on_timer`] is due, ns; `None` when no timer runs.
    pub(crate) fn next_deadline_ns(&self, is_port_full: bool) -> Option<u64> {
        let of_relay = self.relay.next_deadline_ns(is_port_full);
        let deadlines = [self.dns.next_deadline_ns(), of_relay];
        deadlines.into_iter().flatten().min()
    }

    /// Handles timers that have expired, as far as the outbox has room. Returns whether all were
    /// handled. `is_paused` says of a VM's row whether the VM is frozen or sleeps, so that nothing passes.
    pub(crate) fn on_timer(
        &mut self,
        is_paused: &dyn Fn(VmRow) -> bool,
        cx: &mut Context<'_>,
    ) -> bool {
        self.dns.on_timer(cx.poller, cx.now_ns);
        self.relay.on_timer(is_paused, cx)
    }

    /// Sends what became ready since the last call, as far as the outbox has room. Returns whether
    /// all was sent.
    pub(crate) fn flush(&mut self, vms: &VmTable, network: &Network, cx: &mut Context<'_>) -> bool {
        let vm_of = |id| vms.by_id(id).map(|vm| &vm.net);
        while let Some(question) = self.relay.next_question() {
            let Some(vm) = vm_of(question.vm) else {
                continue;
            };
            let origin = Origin::Tcp {
                connection: question.connection,
            };
            // A refused question stays without an answer; the connection's own timer ends it.
            let _ = self.dns.query(
                network.guest(vm),
                origin,
                &question.message,
                cx.poller,
                cx.now_ns,
            );
        }
        while !cx.out.is_half_full() {
            let Some(reply) = self.dns.next_reply() else {
                return true;
            };
            if let Origin::Tcp { connection } = reply.origin {
                self.relay.answer(connection, &reply.message, cx);
                continue;
            }
            let Some(vm) = vm_of(reply.vm) else {
                continue;
            };
            if let Some(packet) = reply.to_packet() {
                // A full outbox loses the answer; the guest's resolver asks again.
                match answer(vm, ethertype_of(&packet), Some(&packet), cx) {
                    Ok(()) => vm.stats.saw(Direction::Rx, cx.now_ns),
                    Err(reason) => vm.stats.dropped(reason, single(packet.len())),
                }
            }
        }
        false
    }

    /// Removes a VM, by id.
    pub(crate) fn vm_removed(&mut self, id: VmId, cx: &mut Context<'_>) {
        self.dns.forget(id);
        self.relay.remove_vm(id, cx);
    }
}

/// Answers an ARP packet, without Ethernet header.
///
/// # Errors
/// Returns the reason for which the packet is counted as dropped.
pub(crate) fn arp(vm: &mut VmNet, packet: &[u8], cx: &mut Context<'_>) -> Result<(), DropReason> {
    let outcome = arp::handle(vm, packet)?;
    answer(vm, ETHERTYPE_ARP, outcome.reply.as_deref(), cx)
}

/// Answers an IPv4 packet to UDP port 67.
///
/// # Errors
/// Returns the reason for which the packet is counted as dropped.
pub(crate) fn dhcp(vm: &mut VmNet, packet: &[u8], cx: &mut Context<'_>) -> Result<(), DropReason> {
    let outcome = dhcp::handle(vm, packet)?;
    let first = cx.out.len();
    let answered = answer(vm, ETHERTYPE_IPV4, outcome.reply.as_deref(), cx);
    // What a guest asked for as it went to sleep is no reason to wake it.
    cx.out.are_unprompted_from(first);
    answered
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
