//! Packets to the guest's own network: the gateway's echo, relays, refusals.
use std::net::SocketAddr;

use slipgate_abi::{Direction, DropReason, VmId};

use crate::{
    admission::admit_to_loopback,
    datagram::Datagram,
    datapath::Datapath,
    packet::{Transport, icmp::Unreachable, transport::UDP_HEADER_LEN},
    packet_path::{Disposition, Finish, Job},
    poll::Context,
    port::{VirtioNetHdr, single},
    relay::{Opening, Relay, Taken},
    services::Services,
    state::{Core, VmState},
    stats::Tally,
};

/// Reason in records for a relayed connection beyond the limit.
const RELAY_LIMIT: &str = "relay_limit";

impl<D: Datapath> Core<D> {
    /// Handles a packet to an address of the guest's own network.
    pub(crate) fn local(
        &mut self,
        vm: &mut VmState,
        job: Job<'_>,
        services: &mut Services,
    ) -> Finish {
        let (packet, now_ns) = (job.packet, job.now_ns);
        let to = packet.ip.destination;
        let ours = vm.net.is_ours(to);
        let relayed = ours || self.rules.leads_to_loopback(&vm.net, to);
        let out = &mut self.out.queue;
        match packet.transport {
            Transport::Icmp(icmp) if ours && icmp.is_echo_request() => {
                if !vm.answers.echo(&vm.net, &packet, out, now_ns) {
                    return Finish::Drop(DropReason::OverRate);
                }
                vm.net.stats.tally(Tally::EchoAnswer, 1);
                vm.net.stats.saw(Direction::Tx, now_ns);
                vm.net.stats.saw(Direction::Rx, now_ns);
                Finish::Dispose(Disposition::Consumed)
            }
            Transport::Tcp(_) | Transport::Udp(_) if relayed => self.relay(vm, job, services),
            _ => {
                self.saw_refused(vm, now_ns);
                let out = &mut self.out.queue;
                let code = Unreachable::Host;
                vm.answers.refuse(&vm.net, &packet, code, out, now_ns);
                Finish::Drop(DropReason::ServiceReject)
            }
        }
    }

    /// Handles a packet that a relayed connection may expect, or that may open one.
    pub(crate) fn relay(
        &mut self,
        vm: &mut VmState,
        job: Job<'_>,
        services: &mut Services,
    ) -> Finish {
        let (packet, now_ns) = (job.packet, job.now_ns);
        let relay = &mut services.relay;
        let cx = &mut Context::new(now_ns, &mut self.out.queue, job.poller);
        let mut taken = offer(relay, vm.net.id, &job, None, cx);
        if taken == Taken::No
            && let Some(admitted) = admit_to_loopback(
                &mut self.nat,
                (&self.rules, &self.forwards),
                &mut self.inspected,
                &mut self.journal,
                vm,
                &packet,
                now_ns,
            )
        {
            taken = match admitted {
                Ok(opening) => offer(relay, vm.net.id, &job, Some(&opening), cx),
                Err(refusal) => return self.refused(vm, &job, refusal),
            };
        }
        let (reason, code) = match taken {
            Taken::Yes => {
                if self.has_content(vm, &packet) {
                    vm.net.stats.saw(Direction::Tx, now_ns);
                }
                return Finish::Dispose(Disposition::Consumed);
            }
            Taken::No => (DropReason::NoFlow, Unreachable::Port),
            Taken::Refused => (DropReason::ServiceReject, Unreachable::Port),
            Taken::OverLimit => (DropReason::OverRate, Unreachable::Prohibited),
        };
        if reason == DropReason::OverRate
            && let Some(tuple) = packet.tuple(vm.net.id.get(), Direction::Tx)
        {
            let refusals = &mut self.journal.refusals;
            refusals.note(vm.net.id, RELAY_LIMIT, None, &tuple, now_ns);
        }
        if self.has_content(vm, &packet) {
            self.saw_refused(vm, now_ns);
        }
        let out = &mut self.out.queue;
        vm.answers.refuse(&vm.net, &packet, code, out, now_ns);
        Finish::Drop(reason)
    }
}

/// Offers a packet of a VM to the relay; with an opening, a packet that may open a connection. Of a
/// frame with several datagrams each is offered.
fn offer(
    relay: &mut Relay,
    vm: VmId,
    job: &Job<'_>,
    mut opening: Option<&Opening>,
    cx: &mut Context<'_>,
) -> Taken {
    let mut offer_one = |packet: &[u8], segments, opening| match opening {
        None => relay.packet(vm, packet, segments, cx),
        Some(opening) => relay.open_loopback(vm, packet, segments, opening, cx),
    };
    let Job { frame, packet, .. } = job;
    let Some(datagrams) = datagrams(job) else {
        return offer_one(packet.ip.bytes, packet.segments(frame.vnet), opening);
    };
    let mut first = true;
    for datagram in datagrams {
        let bytes = datagram.emit();
        let taken = offer_one(&bytes, single(bytes.len()), opening);
        if taken != Taken::Yes {
            // A later datagram is lost, as any datagram may be.
            return if first { taken } else { Taken::Yes };
        }
        // The first one has opened the connection for the others.
        (first, opening) = (false, None);
    }
    Taken::Yes
}

/// Returns the datagrams of a GSO frame; `None` for other frames.
fn datagrams<'f>(job: &Job<'f>) -> Option<impl Iterator<Item = Datagram<'f>>> {
    let Transport::Udp(udp) = job.packet.transport else {
        return None;
    };
    let vnet = job.frame.vnet;
    if vnet.gso_type == VirtioNetHdr::GSO_NONE || vnet.gso_size == 0 {
        return None;
    }
    let ip = job.packet.ip;
    let payload: &'f [u8] = ip.payload().get(UDP_HEADER_LEN..)?;
    let from = SocketAddr::new(ip.source, udp.source);
    let to = SocketAddr::new(ip.destination, udp.destination);
    let chunks = payload.chunks(usize::from(vnet.gso_size));
    Some(chunks.map(move |payload| Datagram { from, to, payload }))
}
