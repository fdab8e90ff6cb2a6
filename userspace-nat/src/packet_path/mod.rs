//! What becomes of each frame that comes over the port.
//!
//! Every frame ends in exactly one of [`Disposition`]'s ways, and is counted there: sent back to
//! the kernel (which counts it in its flow), dropped for a reason, or consumed by a service.
use slipgate_abi::{
    Command, Direction, DropReason, Handover, PortHeader, Refusal,
    portframe::PortFlags,
    segment::{self, Segments},
};

use crate::{
    admission::Admission,
    context::Context,
    datapath::Datapath,
    mss,
    packet::{Ipv4, Packet, Transport, icmp::Unreachable},
    packet_path::{
        change::{Change, Changed},
        unread::{Unread, read},
    },
    poll::Poller,
    port::{Frame, L3_AT, PORT_HEADER_AT, VirtioNetHdr, single},
    reply::IcmpError,
    services::Services,
    state::{Core, VmState},
    stats::{Tally, Traffic},
};
use slipgate_policy::DNS_PORT;

mod change;
mod cut;
mod errors;
mod find_guests;
mod inspected;
mod local;
mod oversize;
mod rates;
mod segments;
mod unread;

/// What became of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Disposition {
    /// Its header was rewritten: write it to the port.
    Send,
    /// Dropped and counted.
    Dropped(DropReason),
    /// A service took it.
    Consumed,
}

/// DHCP server.
const DHCP_PORT: u16 = 67;

/// A packet in hand, with what it counts as.
#[derive(Clone, Copy)]
pub(crate) struct Job<'a> {
    pub(crate) frame: Frame<'a>,
    pub(crate) packet: Packet<'a>,
    pub(crate) poller: &'a Poller,
}

impl Job<'_> {
    /// The largest packet that the frame becomes, bytes.
    fn largest(&self) -> u32 {
        let vnet = self.frame.vnet;
        let gso_size = if vnet.gso_type == VirtioNetHdr::GSO_NONE {
            0
        } else {
            vnet.gso_size
        };
        segment::largest_packet(
            self.packet.ip.bytes.len() as u32,
            self.packet.headers_len() as u32,
            u32::from(gso_size),
        )
    }
}

/// How to finish with the frame's bytes once the packet's views are dropped.
pub(crate) enum Finish {
    Dispose(Disposition),
    Drop(DropReason),
    Command {
        code: Command,
        change: Option<Change>,
    },
}

impl<D: Datapath> Core<D> {
    /// Handles one frame.
    pub(crate) fn handle(
        &mut self,
        bytes: &mut [u8],
        services: &mut impl Services,
        poller: &Poller,
        now_ns: u64,
    ) -> Disposition {
        let Some(frame) = Frame::parse(bytes) else {
            let len = bytes.len().saturating_sub(L3_AT);
            self.nobody().dropped(DropReason::BadCommand, single(len));
            return Disposition::Dropped(DropReason::BadCommand);
        };
        let PortHeader { vm_row, id, .. } = frame.header;
        self.take_in(&frame);
        let Some(mut vm) = self.take_vm(vm_row, id) else {
            self.nobody()
                .dropped(DropReason::StaleVm, single(frame.l3.len()));
            return Disposition::Dropped(DropReason::StaleVm);
        };
        let (finish, segments) = self.handle_for(&mut vm, frame, services, poller, now_ns);
        let disposition = match finish {
            Finish::Dispose(disposition) => disposition,
            Finish::Drop(reason) => {
                vm.net.stats.dropped(reason, segments);
                Disposition::Dropped(reason)
            }
            Finish::Command { code, change } => {
                let header = PortHeader {
                    code: code as u8,
                    flags: 0,
                    vm_row,
                    id,
                };
                bytes[PORT_HEADER_AT..PORT_HEADER_AT + PortHeader::LEN]
                    .copy_from_slice(&header.encode());
                if let Some(change) = change {
                    change.apply(bytes);
                }
                Disposition::Send
            }
        };
        self.put_vm(vm);
        disposition
    }

    /// Counts a frame that the port did not take.
    pub(crate) fn count_unsent(&self, bytes: &[u8]) {
        let Some(frame) = Frame::parse(bytes) else {
            return;
        };
        let segments: Segments = segments_of(&frame).unwrap_or(single(frame.l3.len()));
        let row = frame.header.vm_row;
        let stats = self
            .vm(row)
            .map_or_else(|| self.nobody(), |vm| vm.net.stats);
        stats.dropped(DropReason::PortWrite, segments);
    }

    fn handle_for(
        &mut self,
        vm: &mut VmState,
        frame: Frame<'_>,
        services: &mut impl Services,
        poller: &Poller,
        now_ns: u64,
    ) -> (Finish, Segments) {
        let from_world = frame.is_from_world();
        let traffic = if from_world {
            Traffic::RxFromWorld
        } else {
            Traffic::RxFromGuest
        };
        let whole = single(frame.l3.len());
        let packet = match read(frame) {
            Ok(packet) => packet,
            Err(Unread::Arp) if !from_world => {
                vm.net.stats.traffic(traffic, 1, whole.bytes);
                let cx = &mut Context {
                    now_ns,
                    out: &mut self.out,
                    poller,
                };
                return (done(services.arp(&mut vm.net, frame.l3, cx)), whole);
            }
            Err(unread) => {
                vm.net.stats.traffic(traffic, 1, whole.bytes);
                return (Finish::Drop(unread.reason()), whole);
            }
        };
        let segments = packet.segments(frame.vnet);
        vm.net
            .stats
            .traffic(traffic, segments.packets, segments.bytes);
        vm.loopback_flows = services.loopback_flows(vm.net.id);
        let job = Job {
            frame,
            packet,
            poller,
        };
        let finish = if from_world {
            self.world_sent(vm, job, now_ns)
        } else {
            self.guest_sent(vm, job, services, now_ns)
        };
        (finish, segments)
    }

    fn guest_sent(
        &mut self,
        vm: &mut VmState,
        job: Job<'_>,
        services: &mut impl Services,
        now_ns: u64,
    ) -> Finish {
        let Job { frame, packet, .. } = job;
        if packet.contradicts_itself() {
            return Finish::Drop(DropReason::BadTcpFlags);
        }
        let handover = Handover::from_u8(frame.header.code);
        let group = frame.header.flags & PortFlags::GROUP != 0;
        let to = packet.ip.destination.into();
        if handover == Some(Handover::Dhcp) || is_dhcp(&packet) && (group || vm.net.is_ours(to)) {
            let cx = &mut Context {
                now_ns,
                out: &mut self.out,
                poller: job.poller,
            };
            return done(services.dhcp(&mut vm.net, packet.ip.bytes, cx));
        }
        // The programs see to it; whatever they missed must not become a flow.
        if packet.ip.source != vm.net.guest.into() {
            return Finish::Drop(DropReason::Spoofed);
        }
        // Whatever resolver it asks: a name is looked up here or nowhere.
        match packet.transport {
            Transport::Udp(udp) if udp.destination == DNS_PORT => {
                let cx = &mut Context {
                    now_ns,
                    out: &mut self.out,
                    poller: job.poller,
                };
                let answered = services.dns(&vm.net, packet.ip.bytes, cx);
                let unheard = match answered {
                    Err(DropReason::OverRate) => Some("dns_rate"),
                    Err(DropReason::EngineBusy) => Some("dns_busy"),
                    _ => None,
                };
                if let Some(reason) = unheard
                    && let Some(tuple) = packet.tuple(vm.net.id, Direction::Tx)
                {
                    self.refusals.note(vm.net.id, reason, None, &tuple, now_ns);
                }
                return done(answered);
            }
            Transport::Tcp(tcp) if tcp.destination == DNS_PORT => {
                return self.relay(vm, job, services, now_ns);
            }
            _ => {}
        }
        match handover {
            Some(Handover::Icmp) => self.icmp_from_guest(vm, frame.vnet, packet, now_ns),
            Some(Handover::TtlExpired) => self.ttl_expired(vm, job, now_ns),
            Some(_) if group => Finish::Drop(DropReason::Group),
            Some(Handover::Local) => self.local(vm, job, services, now_ns),
            Some(Handover::Miss | Handover::Syn | Handover::Verdict | Handover::TooBig)
                if vm.net.is_on_link(to) =>
            {
                self.local(vm, job, services, now_ns)
            }
            Some(Handover::Miss | Handover::Syn | Handover::Verdict | Handover::TooBig) => {
                self.outbound(vm, job, now_ns)
            }
            Some(Handover::Arp | Handover::Forward | Handover::Uncommon | Handover::Dhcp)
            | None => Finish::Drop(DropReason::BadCommand),
        }
    }

    /// It ends here, whether or not it had or would have opened a flow.
    fn ttl_expired(&mut self, vm: &mut VmState, job: Job<'_>, now_ns: u64) -> Finish {
        let (error, out) = (IcmpError::TtlExceeded, &mut self.out);
        vm.answers
            .icmp_to_guest(&vm.net, &job.packet, error, out, now_ns);
        Finish::Drop(DropReason::TtlExpired)
    }

    fn outbound(&mut self, vm: &mut VmState, job: Job<'_>, now_ns: u64) -> Finish {
        if job.packet.ip.ttl <= 1 {
            return self.ttl_expired(vm, job, now_ns);
        }
        match self.admit_outbound(vm, &job.packet, now_ns) {
            Admission::Flow { slot } => self.guest_sent_to_flow(vm, job, slot, now_ns),
            Admission::Cut { slot } => self.guest_sent_to_cut(vm, &job.packet, slot, now_ns),
            Admission::NoFlow => {
                vm.answers
                    .reset(&vm.net, &job.packet, &mut self.out, now_ns);
                Finish::Drop(DropReason::NoFlow)
            }
            Admission::Refused(refusal) => self.refused(vm, &job.packet, refusal, now_ns),
        }
    }

    /// Counts a flow that may not be, and tells its guest.
    pub(crate) fn refused(
        &mut self,
        vm: &mut VmState,
        packet: &Packet<'_>,
        refusal: Refusal,
        now_ns: u64,
    ) -> Finish {
        vm.net.stats.refused(refusal);
        let out = &mut self.out;
        let answered = match packet.transport {
            Transport::Tcp(_) => vm.answers.reset(&vm.net, packet, out, now_ns),
            _ => {
                let code = match refusal {
                    Refusal::NoRoute => Unreachable::Net,
                    _ => Unreachable::Prohibited,
                };
                let error = IcmpError::Unreachable(code);
                vm.answers
                    .icmp_to_guest(&vm.net, packet, error, out, now_ns)
            }
        };
        if answered {
            vm.net.stats.tally(Tally::RefusalAnswered, 1);
        }
        Finish::Drop(DropReason::Refused)
    }

    /// A guest's packet of a flow.
    fn guest_sent_to_flow(
        &mut self,
        vm: &mut VmState,
        job: Job<'_>,
        slot: u32,
        now_ns: u64,
    ) -> Finish {
        if let Some(finish) = self.inspect_from_guest(vm, job, slot, now_ns) {
            return finish;
        }
        // The kernel drops what comes back too large: whoever sent it must be told before.
        if job.largest() > self.uplink_mtu(slot) {
            return self.too_big_from_guest(vm, job.frame.vnet, job.packet, slot, now_ns);
        }
        self.command(vm, job, Command::Forward, slot)
    }

    /// The world's packet of a flow.
    fn world_sent_to_flow(
        &mut self,
        vm: &mut VmState,
        job: Job<'_>,
        slot: u32,
        now_ns: u64,
    ) -> Finish {
        if let Some(finish) = self.inspect_from_world(vm, job, slot, now_ns) {
            return finish;
        }
        if job.largest() > u32::from(vm.net.mtu) {
            return self.too_big_from_world(vm, job.frame.vnet, job.packet, slot, now_ns);
        }
        self.command(vm, job, Command::Deliver, slot)
    }

    fn world_sent(&mut self, vm: &mut VmState, job: Job<'_>, now_ns: u64) -> Finish {
        if job.packet.contradicts_itself() {
            return Finish::Drop(DropReason::BadTcpFlags);
        }
        match Handover::from_u8(job.frame.header.code) {
            Some(Handover::Icmp) => self.icmp_from_world(vm, job.frame.vnet, job.packet, now_ns),
            Some(Handover::TtlExpired) => {
                self.tell_world(vm, &job.packet, IcmpError::TtlExceeded, now_ns);
                Finish::Drop(DropReason::TtlExpired)
            }
            Some(
                Handover::Forward
                | Handover::Verdict
                | Handover::Miss
                | Handover::Syn
                | Handover::TooBig,
            ) => {
                match self.admit_inbound(vm, &job.packet, now_ns) {
                    Admission::Flow { slot } => self.world_sent_to_flow(vm, job, slot, now_ns),
                    Admission::Cut { slot } => {
                        self.world_sent_to_cut(vm, &job.packet, slot, now_ns)
                    }
                    // Silence: what the world asked for may not be known to exist.
                    Admission::NoFlow => Finish::Drop(DropReason::NoFlow),
                    Admission::Refused(refusal) => {
                        vm.net.stats.refused(refusal);
                        Finish::Drop(DropReason::Refused)
                    }
                }
            }
            Some(Handover::Arp | Handover::Dhcp | Handover::Local | Handover::Uncommon) | None => {
                Finish::Drop(DropReason::BadCommand)
            }
        }
    }

    /// Back to the kernel with it; a SYN's MSS is clamped on the way, and of what an inspected
    /// connection's guest sends no more goes on than was looked at.
    fn command(&self, vm: &VmState, job: Job<'_>, code: Command, slot: u32) -> Finish {
        let mss = match job.packet.transport {
            Transport::Tcp(tcp) if tcp.is_opening_syn() => {
                Some(mss::for_mtu(self.path_mtu(&vm.net, slot)))
            }
            _ => None,
        };
        let is_held = self.flows.entry(slot).is_some_and(|entry| entry.is_held());
        let change = match mss {
            mss if is_held && code == Command::Forward => Change::new(&job, Changed::Known { mss }),
            Some(most) => Change::new(&job, Changed::Mss(most)),
            None => None,
        };
        Finish::Command { code, change }
    }
}

fn is_dhcp(packet: &Packet<'_>) -> bool {
    matches!(packet.transport, Transport::Udp(udp) if udp.destination == DHCP_PORT)
}

fn done(result: Result<(), DropReason>) -> Finish {
    match result {
        Ok(()) => Finish::Dispose(Disposition::Consumed),
        Err(reason) => Finish::Drop(reason),
    }
}

/// What a frame counts as.
fn segments_of(frame: &Frame<'_>) -> Option<Segments> {
    let ip = Ipv4::parse(frame.l3).ok()?;
    Some(Packet::parse(ip).ok()?.segments(frame.vnet))
}
