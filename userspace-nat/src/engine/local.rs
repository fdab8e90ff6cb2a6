//! Packets to the guest's own network: the gateway's echo, relays, refusals.
use slipgate_abi::{Direction, DropReason};

use super::{
    core::{Core, VmState},
    dispatch::{Disposition, Finish, Job},
    services::{Context, Services},
};
use crate::{
    datapath::Datapath,
    packet::{
        Transport,
        icmp::{ECHO_REQUEST, Unreachable},
    },
    relay::Taken,
    reply::IcmpError,
    stats::Tally,
};

/// What records call a connection to the relay that is one too many.
const RELAY_LIMIT: &str = "relay_limit";

impl<D: Datapath> Core<D> {
    /// For an address of the guest's own network.
    pub(super) fn local(
        &mut self,
        vm: &mut VmState,
        job: Job<'_>,
        services: &mut impl Services,
        now_ns: u64,
    ) -> Finish {
        let packet = job.packet;
        let ours = vm.net.is_ours(packet.ip.destination.into());
        let out = &mut self.out;
        match packet.transport {
            Transport::Icmp(icmp) if ours && icmp.kind == ECHO_REQUEST => {
                if !vm.answers.echo(&vm.net, &packet, out, now_ns) {
                    return Finish::Drop(DropReason::OverRate);
                }
                vm.net.stats.tally(Tally::EchoAnswer, 1);
                Finish::Dispose(Disposition::Consumed)
            }
            Transport::Tcp(_) | Transport::Udp(_) if ours => self.relay(vm, job, services, now_ns),
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

    /// A packet that a relay may be waiting for.
    pub(super) fn relay(
        &mut self,
        vm: &mut VmState,
        job: Job<'_>,
        services: &mut impl Services,
        now_ns: u64,
    ) -> Finish {
        let packet = job.packet;
        let cx = &mut Context {
            now_ns,
            out: &mut self.out,
            poller: job.poller,
        };
        let segments = packet.segments(job.frame.vnet);
        let (reason, code) = match services.relay(&vm.net, packet.ip.bytes, segments, cx) {
            Taken::Yes => return Finish::Dispose(Disposition::Consumed),
            Taken::No => (DropReason::NoFlow, Unreachable::Port),
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
}
