//! Packets to the guest's own network: the gateway's echo, relays, refusals.
use std::net::SocketAddrV4;

use slipgate_abi::{Direction, DropReason, segment::Segments};

use crate::{
    context::Context,
    datagram::Datagram,
    datapath::Datapath,
    packet::{
        Transport,
        icmp::{ECHO_REQUEST, Unreachable},
        transport::UDP_HEADER_LEN,
    },
    packet_path::{Disposition, Finish, Job},
    port::{VirtioNetHdr, single},
    relay::{Opening, Taken},
    reply::IcmpError,
    services::Services,
    state::{Core, VmState},
    stats::Tally,
    vm::VmNet,
};

/// What records call a connection to the relay that is one too many.
const RELAY_LIMIT: &str = "relay_limit";

impl<D: Datapath> Core<D> {
    /// For an address of the guest's own network.
    pub(crate) fn local(
        &mut self,
        vm: &mut VmState,
        job: Job<'_>,
        services: &mut impl Services,
        now_ns: u64,
    ) -> Finish {
        let packet = job.packet;
        let to = packet.ip.destination.into();
        let ours = vm.net.is_ours(to);
        let relayed = ours || self.leads_to_loopback(&vm.net, to);
        let out = &mut self.out;
        match packet.transport {
            Transport::Icmp(icmp) if ours && icmp.kind == ECHO_REQUEST => {
                if !vm.answers.echo(&vm.net, &packet, out, now_ns) {
                    return Finish::Drop(DropReason::OverRate);
                }
                vm.net.stats.tally(Tally::EchoAnswer, 1);
                Finish::Dispose(Disposition::Consumed)
            }
            Transport::Tcp(_) | Transport::Udp(_) if relayed => {
                self.relay(vm, job, services, now_ns)
            }
            Transport::Tcp(_) => {
                vm.answers.reset(&vm.net, &packet, out, now_ns);
                Finish::Drop(DropReason::ServiceReject)
            }
            _ => {
                let error = IcmpError::Unreachable(Unreachable::Host);
                vm.answers
                    .icmp_to_guest(&vm.net, &packet, error, out, now_ns);
                Finish::Drop(DropReason::ServiceReject)
            }
        }
    }

    /// A packet that a relay may be waiting for, or that may open a relayed connection.
    pub(crate) fn relay(
        &mut self,
        vm: &mut VmState,
        job: Job<'_>,
        services: &mut impl Services,
        now_ns: u64,
    ) -> Finish {
        let packet = job.packet;
        let mut taken = self.offer(vm, job, services, None, now_ns);
        if taken == Taken::No
            && let Some(admitted) = self.admit_to_loopback(vm, &packet, now_ns)
        {
            taken = match admitted {
                Ok(opening) => self.offer(vm, job, services, Some(&opening), now_ns),
                Err(refusal) => return self.refused(vm, &packet, refusal, now_ns),
            };
        }
        let (reason, code) = match taken {
            Taken::Yes => return Finish::Dispose(Disposition::Consumed),
            Taken::No => (DropReason::NoFlow, Unreachable::Port),
            Taken::Refused => (DropReason::ServiceReject, Unreachable::Port),
            Taken::OverLimit => (DropReason::OverRate, Unreachable::Prohibited),
        };
        if reason == DropReason::OverRate
            && let Some(tuple) = packet.tuple(vm.net.id, Direction::Tx)
        {
            self.refusals
                .note(vm.net.id, RELAY_LIMIT, None, &tuple, now_ns);
        }
        let out = &mut self.out;
        match packet.transport {
            Transport::Tcp(_) => vm.answers.reset(&vm.net, &packet, out, now_ns),
            _ => {
                let error = IcmpError::Unreachable(code);
                vm.answers
                    .icmp_to_guest(&vm.net, &packet, error, out, now_ns)
            }
        };
        Finish::Drop(reason)
    }

    /// Gives a relay a packet; with an opening, one that may open a connection. A frame of several
    /// datagrams is each of them.
    fn offer(
        &mut self,
        vm: &VmState,
        job: Job<'_>,
        services: &mut impl Services,
        opening: Option<&Opening>,
        now_ns: u64,
    ) -> Taken {
        let cx = &mut Context {
            now_ns,
            out: &mut self.out,
            poller: job.poller,
        };
        let Job { frame, packet, .. } = job;
        let segments = packet.segments(frame.vnet);
        let offer = |services: &mut _, packet: &[u8], segments, opening, cx: &mut Context<'_>| {
            offer_one(services, &vm.net, packet, segments, opening, cx)
        };
        let Some(datagrams) = datagrams(&job) else {
            return offer(services, packet.ip.bytes, segments, opening, cx);
        };
        let (mut first, mut opening) = (true, opening);
        for datagram in datagrams {
            let bytes = datagram.emit();
            let taken = offer(services, &bytes, single(bytes.len()), opening, cx);
            if taken != Taken::Yes {
                // One behind others is lost, as any datagram may be.
                return if first { taken } else { Taken::Yes };
            }
            // The first one has opened what the others are for.
            (first, opening) = (false, None);
        }
        Taken::Yes
    }
}

fn offer_one(
    services: &mut impl Services,
    vm: &VmNet,
    packet: &[u8],
    segments: Segments,
    opening: Option<&Opening>,
    cx: &mut Context<'_>,
) -> Taken {
    match opening {
        None => services.relay(vm, packet, segments, cx),
        Some(opening) => services.open_loopback(vm, packet, segments, opening, cx),
    }
}

/// What a frame of several datagrams holds; `None`: it is no such frame.
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
    let from = SocketAddrV4::new(ip.source.into(), udp.source);
    let to = SocketAddrV4::new(ip.destination.into(), udp.destination);
    let chunks = payload.chunks(usize::from(vnet.gso_size));
    Some(chunks.map(move |payload| Datagram { from, to, payload }))
}
