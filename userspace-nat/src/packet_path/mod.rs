//! The path of each frame that is read from the port.
//!
//! Every frame ends in exactly one [`Disposition`], and is counted there: sent back to the kernel
//! (which counts it in its flow), dropped for a reason, or consumed by a service.
use std::{net::IpAddr, sync::atomic::Ordering::Relaxed};

use slipgate_abi::{
    Command, Direction, DropReason, Handover, PortHeader, Refusal, SlotIndex, VmId,
    portframe::PortFlags, segment::Segments, tcp::Flags,
};

use crate::{
    admission::{Admission, admit_outbound, inbound::admit_inbound},
    datapath::Datapath,
    mss,
    packet::{Ip, Packet, Transport, Version, icmp::Unreachable},
    packet_path::{
        change::{Change, Changed},
        job::{Unread, read},
    },
    poll::{Context, Poller},
    port::{ETHERTYPE_IPV6, Frame, L3_AT, PORT_HEADER_AT, Side, command, single},
    reply::IcmpError,
    services::{self, Services},
    state::{Core, Nat, VmState},
    stats::{Tally, Traffic},
};
use slipgate_policy::DNS_PORT;

pub use job::Disposition;
pub(crate) use job::{Finish, Job};
pub(crate) use sleeping::sent_to_guest;

mod adopt;
mod challenged;
mod change;
mod cut;
mod errors;
mod fragments;
pub(crate) mod hairpin;
mod inspected;
mod job;
mod local;
mod oversize;
mod slaac;
mod sleeping;

/// UDP port of a DHCP server.
const DHCP_PORT: u16 = 67;

impl<D: Datapath> Core<D> {
    /// Handles one frame from the port. Returns what was done with it.
    pub(crate) fn handle(
        &mut self,
        bytes: &mut [u8],
        services: &mut Services,
        poller: &Poller,
        now_ns: u64,
    ) -> Disposition {
        let Some(frame) = Frame::parse(bytes) else {
            let len = bytes.len().saturating_sub(L3_AT);
            self.nat
                .datapath
                .nobody()
                .dropped(DropReason::BadCommand, single(len));
            return Disposition::Dropped(DropReason::BadCommand);
        };
        let (row, id) = (frame.header.row(), VmId::new(frame.header.id));
        if self.nat.flows.are_left() {
            self.adopt_for(&frame, now_ns);
        }
        if frame.is_from_world() && self.sleeping.has(row, id) && !self.is_of_cut_flow(frame) {
            return self.hold(bytes, now_ns);
        }
        match Self::is_fragment(&frame) {
            true => self.take_fragment(bytes, services, poller, now_ns),
            false => self.handle_whole(bytes, None, services, poller, now_ns),
        }
    }

    /// Handles a frame that was taken in before, such as one that was held for a VM that slept.
    pub(crate) fn handle_taken(
        &mut self,
        bytes: &mut [u8],
        services: &mut Services,
        poller: &Poller,
        now_ns: u64,
    ) -> Disposition {
        match Frame::parse(bytes) {
            Some(frame) if Self::is_fragment(&frame) => {
                self.take_fragment(bytes, services, poller, now_ns)
            }
            _ => self.handle_whole(bytes, None, services, poller, now_ns),
        }
    }

    /// Handles a frame whose packet is whole. `fragment_size`: the largest fragment in which it
    /// came, L3 bytes.
    fn handle_whole(
        &mut self,
        bytes: &mut [u8],
        fragment_size: Option<u32>,
        services: &mut Services,
        poller: &Poller,
        now_ns: u64,
    ) -> Disposition {
        let Some(frame) = Frame::parse(bytes) else {
            return Disposition::Dropped(DropReason::BadCommand);
        };
        let (row, id) = (frame.header.row(), VmId::new(frame.header.id));
        let Some(mut vm) = self.vms.take(row, id) else {
            self.nat
                .datapath
                .nobody()
                .dropped(DropReason::StaleVm, single(frame.l3.len()));
            return Disposition::Dropped(DropReason::StaleVm);
        };
        let (finish, segments) =
            self.handle_for(&mut vm, frame, fragment_size, services, poller, now_ns);
        if let Finish::BackIn(back_in) = finish {
            back_in.apply(bytes);
            self.vms.put(vm);
            return self.lead_back_in(bytes, fragment_size, services, poller, now_ns);
        }
        let disposition = self.dispose(&vm, bytes, finish, segments);
        self.vms.put(vm);
        disposition
    }

    /// Counts a packet that is dropped, or makes its frame the command that it became.
    fn dispose(
        &mut self,
        vm: &VmState,
        bytes: &mut [u8],
        finish: Finish,
        segments: Segments,
    ) -> Disposition {
        let (code, change) = match finish {
            Finish::Dispose(disposition) => return disposition,
            Finish::Drop(reason) => {
                vm.net.stats.dropped(reason, segments);
                return Disposition::Dropped(reason);
            }
            Finish::Command { code, change } => (code, change),
            // Only of a whole packet that was not handled before.
            Finish::BackIn(_) => {
                vm.net.stats.dropped(DropReason::NoFlow, segments);
                return Disposition::Dropped(DropReason::NoFlow);
            }
        };
        if let Some(change) = change {
            change.apply(bytes);
        }
        let (flows, row) = (&mut self.nat.flows, vm.net.row);
        match flows.take_ordered(&self.nat.datapath) {
            Some((slot, order)) => {
                if flows.ports.is_last_early() && opens_connection(bytes) {
                    let generation = self.nat.datapath.slot(slot).generation().load(Relaxed);
                    self.kept_syns.keep(row, slot, generation, bytes);
                }
                put_header(bytes, command(Command::Open, row, order.encode()));
                Disposition::Open(slot)
            }
            None => {
                // Observers tell by the flag what was led back in; the programs ignore it.
                let flags = Frame::parse(bytes).map_or(0, |frame| frame.header.flags);
                let header = command(code, row, vm.net.id.get());
                let flags = flags & PortFlags::HAIRPIN;
                put_header(bytes, PortHeader { flags, ..header });
                Disposition::Send
            }
        }
    }

    /// Finds out whether a flow is open, after the frame was written that ordered it, and the port
    /// accepted it or not. If not, the packet is handled again, and its flow opened by system
    /// calls. Returns what is to be done with the frame.
    pub(crate) fn written(
        &mut self,
        slot: SlotIndex,
        is_accepted: bool,
        bytes: &mut [u8],
        poller: &Poller,
        now_ns: u64,
    ) -> Disposition {
        let Nat {
            flows, datapath, ..
        } = &mut self.nat;
        let row = datapath.slot(slot).row();
        if flows.settle_order(datapath, slot, is_accepted, now_ns) {
            if let Some(vm) = self.vms.get(row) {
                vm.net.stats.tally(Tally::Admitted, 1);
            }
            self.journal.flow_started(slot);
            return Disposition::Sent;
        }
        let id = datapath.slot(slot).id();
        let (Some(frame), Some(mut vm)) = (Frame::parse(bytes), self.vms.take(row, id)) else {
            return Disposition::Dropped(DropReason::StaleVm);
        };
        let segments = segments_of(&frame).unwrap_or(single(frame.l3.len()));
        let finish = match read(frame) {
            Ok(packet) => {
                let job = Job {
                    frame,
                    packet,
                    fragment_size: None,
                    poller,
                    now_ns,
                };
                self.outbound_by_engine(&mut vm, job)
            }
            Err(unread) => Finish::Drop(unread.reason()),
        };
        let disposition = self.dispose(&vm, bytes, finish, segments);
        self.vms.put(vm);
        disposition
    }

    /// Counts a frame that the port did not accept.
    pub(crate) fn count_unsent(&self, bytes: &[u8]) {
        let Some(frame) = Frame::parse(bytes) else {
            return;
        };
        let segments: Segments = segments_of(&frame).unwrap_or(single(frame.l3.len()));
        let row = frame.header.row();
        let stats = self
            .vms
            .get(row)
            .map_or_else(|| self.nat.datapath.nobody(), |vm| vm.net.stats);
        stats.dropped(DropReason::PortWrite, segments);
    }

    fn handle_for(
        &mut self,
        vm: &mut VmState,
        frame: Frame<'_>,
        fragment_size: Option<u32>,
        services: &mut Services,
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
        let handover = Handover::from_u8(frame.header.code);
        // Listener reports have an extension header, which other packets must not have.
        if handover == Some(Handover::Ndp) && frame.ethertype == ETHERTYPE_IPV6 && !from_world {
            vm.net.stats.traffic(traffic, 1, whole.bytes);
            return (self.neighbour_discovery(vm, frame.l3, now_ns), whole);
        }
        let packet = match read(frame) {
            Ok(packet) => packet,
            Err(Unread::Arp) if !from_world => {
                vm.net.stats.traffic(traffic, 1, whole.bytes);
                let cx = &mut Context::new(now_ns, &mut self.out.queue, poller);
                return (done(services::arp(&mut vm.net, frame.l3, cx)), whole);
            }
            Err(Unread::Options(packet)) if !from_world => {
                vm.net.stats.traffic(traffic, 1, whole.bytes);
                return (self.refuse_options(vm, &packet, now_ns), whole);
            }
            Err(unread) => {
                vm.net.stats.traffic(traffic, 1, whole.bytes);
                return (Finish::Drop(unread.reason()), whole);
            }
        };
        let segments = packet.segments(frame.vnet);
        // Its fragments were counted as they came: of one that was led back in, for its sender.
        if fragment_size.is_none() || frame.header.flags & PortFlags::HAIRPIN != 0 {
            vm.net
                .stats
                .traffic(traffic, segments.packets, segments.bytes);
        }
        vm.loopback_flows = services.relay.loopback_flows(vm.net.id);
        let job = Job {
            frame,
            packet,
            fragment_size,
            poller,
            now_ns,
        };
        let finish = if from_world {
            self.world_sent(vm, job)
        } else {
            self.guest_sent(vm, job, services)
        };
        (finish, segments)
    }

    fn guest_sent(&mut self, vm: &mut VmState, job: Job<'_>, services: &mut Services) -> Finish {
        let Job {
            frame,
            packet,
            now_ns,
            ..
        } = job;
        if packet.contradicts_itself() {
            return Finish::Drop(DropReason::BadTcpFlags);
        }
        let handover = Handover::from_u8(frame.header.code);
        let group = frame.header.flags & PortFlags::GROUP != 0;
        let to = packet.ip.destination;
        if handover == Some(Handover::Dhcp) && packet.ip.version() == Version::V6 {
            return self.dhcpv6(vm, &packet, now_ns);
        }
        if handover == Some(Handover::Dhcp) || is_dhcp(&packet) && (group || vm.net.is_ours(to)) {
            let cx = &mut Context::new(now_ns, &mut self.out.queue, job.poller);
            return done(services::dhcp(&mut vm.net, packet.ip.bytes, cx));
        }
        if handover == Some(Handover::Address)
            && let Err(reason) = self.bind_source(vm, packet.ip.source, now_ns)
        {
            return Finish::Drop(reason);
        }
        // From now on it is a packet like any other.
        let handover = match (handover, packet.transport) {
            (Some(Handover::Address), Transport::Icmp(icmp)) if !icmp.is_echo() => {
                Some(Handover::Icmp)
            }
            (Some(Handover::Address), _) => Some(Handover::Miss),
            (handover, _) => handover,
        };
        // The programs check this; a packet that they missed must not become a flow.
        if let Err(reason) = self.check_source(vm, &job) {
            return Finish::Drop(reason);
        }
        // Neighbour discovery comes whole (RFC 6980), and so does every error.
        if let (true, Transport::Icmp(icmp)) = (job.fragment_size.is_some(), packet.transport)
            && packet.ip.version() == Version::V6
            && !icmp.is_echo_request()
        {
            return Finish::Drop(DropReason::Fragment);
        }
        // Whichever resolver the guest asks: names are looked up by the engine only.
        match packet.transport {
            Transport::Udp(udp) if udp.destination == DNS_PORT => {
                let guest = self.nat.network.guest(&vm.net);
                let (dns, bytes) = (&mut services.dns, packet.ip.bytes);
                let answered = dns.query_packet(guest, bytes, job.poller, now_ns);
                let unheard = match answered {
                    Err(DropReason::OverRate) => Some("dns_rate"),
                    Err(DropReason::EngineBusy) => Some("dns_busy"),
                    _ => None,
                };
                if let Some(reason) = unheard
                    && let Some(tuple) = packet.tuple(vm.net.id.get(), Direction::Tx)
                {
                    let refusals = &mut self.journal.refusals;
                    refusals.note(vm.net.id, reason, None, &tuple, now_ns);
                }
                match answered {
                    Ok(()) => vm.net.stats.saw(Direction::Tx, now_ns),
                    Err(_) => self.saw_refused(vm, now_ns),
                }
                return done(answered);
            }
            Transport::Tcp(tcp) if tcp.destination == DNS_PORT => {
                return self.relay(vm, job, services);
            }
            _ => {}
        }
        match handover {
            Some(Handover::Icmp) => {
                let (nat, out) = (&mut self.nat, &mut self.out);
                done(nat.icmp_from_guest(&self.inspected, vm, &job, out))
            }
            Some(Handover::TtlExpired) => self.ttl_expired(vm, job),
            Some(_) if group => Finish::Drop(DropReason::Group),
            Some(Handover::Local) => self.local(vm, job, services),
            Some(
                Handover::Miss
                | Handover::Syn
                | Handover::Verdict
                | Handover::TooBig
                | Handover::Fragment,
            ) => match vm.net.is_on_link(to) {
                // An answer as large would not fit the guest's link.
                true if job.fragment_size.is_some() && is_echo(&job.packet) => {
                    Finish::Drop(DropReason::TooBig)
                }
                true => self.local(vm, job, services),
                false => self.outbound(vm, job),
            },
            Some(
                Handover::Arp
                | Handover::Forward
                | Handover::Uncommon
                | Handover::Dhcp
                | Handover::Asleep
                | Handover::Ndp
                | Handover::Address
                | Handover::Challenge,
            )
            | None => Finish::Drop(DropReason::BadCommand),
        }
    }

    /// Checks the source of a guest's packet. An IPv6 address that made room for another is bound
    /// again by a packet of its flows, which go on also where there is no room. One that is not bound
    /// yet is bound by a datagram that came in fragments.
    ///
    /// # Errors
    /// The reason for which the packet is counted as dropped.
    fn check_source(&mut self, vm: &VmState, job: &Job<'_>) -> Result<(), DropReason> {
        let (packet, now_ns) = (&job.packet, job.now_ns);
        let source = packet.ip.source;
        if source.is_ipv6()
            && let Some(tuple) = packet.tuple(vm.net.id.get(), Direction::Tx)
            && self.nat.flows.by_guest(&tuple).is_some()
        {
            return match self.bind_source(vm, source, now_ns) {
                Err(DropReason::AddressBound) => Ok(()),
                checked => checked,
            };
        }
        match self.is_own_source(vm, source) {
            true => Ok(()),
            false if source.is_ipv6() && job.fragment_size.is_some() => {
                self.bind_source(vm, source, now_ns)
            }
            false => Err(DropReason::Spoofed),
        }
    }

    /// Whether a guest may send from this address: its IPv4 address, or an IPv6 address that is
    /// bound to it.
    fn is_own_source(&self, vm: &VmState, source: IpAddr) -> bool {
        match source {
            IpAddr::V4(source) => source == vm.net.guest,
            IpAddr::V6(source) => {
                let row = self.nat.datapath.vm6(vm.net.row);
                let is_bound = row.is_some_and(|row| row.place_of(source.into()).is_some());
                vm.net.ipv6.is_some() && is_bound && !source.is_unspecified()
            }
        }
    }

    /// Drops a guest's packet with IPv4 options, and tells the guest (RFC 792, Parameter Problem).
    fn refuse_options(&mut self, vm: &mut VmState, packet: &Packet<'_>, now_ns: u64) -> Finish {
        if !self.is_own_source(vm, packet.ip.source) {
            return Finish::Drop(DropReason::Spoofed);
        }
        let (error, out) = (IcmpError::FIRST_OPTION, &mut self.out.queue);
        vm.answers
            .icmp(&vm.net, Side::Guest, packet, error, out, now_ns);
        Finish::Drop(DropReason::IpOptions)
    }

    /// Drops a packet whose TTL has expired, whether or not it belongs to a flow or would have
    /// opened one.
    fn ttl_expired(&mut self, vm: &mut VmState, job: Job<'_>) -> Finish {
        vm.net.stats.saw(Direction::Tx, job.now_ns);
        let (error, out) = (IcmpError::TtlExceeded, &mut self.out.queue);
        vm.answers
            .icmp(&vm.net, Side::Guest, &job.packet, error, out, job.now_ns);
        Finish::Drop(DropReason::TtlExpired)
    }

    fn outbound(&mut self, vm: &mut VmState, job: Job<'_>) -> Finish {
        if job.packet.ip.ttl <= 1 {
            return self.ttl_expired(vm, job);
        }
        let admission = admit_outbound(
            &mut self.nat,
            (&mut self.rules, &self.forwards),
            &mut self.inspected,
            &mut self.journal,
            vm,
            &job.packet,
            job.now_ns,
        );
        let out = &mut self.out.queue;
        match admission {
            Admission::Flow { slot } => self.guest_sent_to_flow(vm, job, slot),
            Admission::Cut { slot } => self.nat.guest_sent_to_cut(vm, &job, slot, out),
            Admission::NoFlow => {
                vm.reset_unknown(&job.packet, out, job.now_ns);
                if self.has_content(vm, &job.packet) {
                    self.saw_refused(vm, job.now_ns);
                }
                Finish::Drop(DropReason::NoFlow)
            }
            Admission::Refused(refusal) => self.refused(vm, &job, refusal),
        }
    }

    /// Handles a guest's packet whose flow, if it opens one, is opened by system calls.
    fn outbound_by_engine(&mut self, vm: &mut VmState, job: Job<'_>) -> Finish {
        let takes_orders = std::mem::replace(&mut self.nat.flows.takes_orders, false);
        let finish = self.outbound(vm, job);
        self.nat.flows.takes_orders = takes_orders;
        finish
    }

    /// Counts a flow that is refused, and answers its guest.
    pub(crate) fn refused(&mut self, vm: &mut VmState, job: &Job<'_>, refusal: Refusal) -> Finish {
        vm.net.stats.refused(refusal);
        self.saw_refused(vm, job.now_ns);
        let code = match refusal {
            Refusal::NoRoute => Unreachable::Net,
            _ => Unreachable::Prohibited,
        };
        let out = &mut self.out.queue;
        if vm
            .answers
            .refuse(&vm.net, &job.packet, code, out, job.now_ns)
        {
            vm.net.stats.tally(Tally::RefusalAnswered, 1);
        }
        Finish::Drop(DropReason::Refused)
    }

    /// Notes a guest's packet that is refused, if it counts as activity by the VM's policy.
    pub(crate) fn saw_refused(&self, vm: &VmState, now_ns: u64) {
        if !self.rules.judge.borrow().idle(vm.net.id).ignores_refused {
            vm.net.stats.saw(Direction::Tx, now_ns);
        }
    }

    /// Whether a guest's packet that is no live flow's counts as activity: by a policy that ignores
    /// keep-alives, a segment without content does not, and a reset never does.
    pub(crate) fn has_content(&self, vm: &VmState, packet: &Packet<'_>) -> bool {
        let Transport::Tcp(tcp) = packet.transport else {
            return true;
        };
        let is_bare = tcp.payload_len == 0 && tcp.flags & (Flags::SYN | Flags::FIN) == 0;
        let counts_bare = || !self.rules.judge.borrow().idle(vm.net.id).ignores_keepalive;
        tcp.flags & Flags::RST == 0 && (!is_bare || counts_bare())
    }

    /// Handles a guest's packet of a flow.
    fn guest_sent_to_flow(&mut self, vm: &mut VmState, job: Job<'_>, slot: SlotIndex) -> Finish {
        if self.nat.is_hairpin(slot) {
            return self.guest_sent_back_in(vm, &job, slot);
        }
        if let Some(finish) = self.inspect_from_guest(vm, job, slot) {
            return finish;
        }
        // The kernel drops a returned packet that is too large: its sender must be informed before.
        let mtu = self.nat.uplink_mtu(slot);
        // What takes the largest datagram, as a socket does, gets it whole.
        let in_fragments = job.fragment_size.is_some() && mtu < u32::from(u16::MAX);
        if job.largest() > mtu || in_fragments {
            let (nat, out) = (&mut self.nat, &mut self.out);
            // No frame of it as it is goes to the port, which could open the flow.
            if nat.flows.is_ordered(slot) {
                nat.flows.withdraw(&nat.datapath, slot, job.now_ns);
                return self.outbound_by_engine(vm, job);
            }
            return done(nat.too_big_from_guest(vm, job, slot, out));
        }
        return_to_kernel(&self.nat, vm, job, (Command::Forward, Some(mtu)), slot)
    }

    /// Handles a packet of a flow from the world.
    fn world_sent_to_flow(&mut self, vm: &mut VmState, job: Job<'_>, slot: SlotIndex) -> Finish {
        if let Some(finish) = self.inspect_from_world(vm, job, slot) {
            return finish;
        }
        if job.largest() > u32::from(vm.net.mtu) || job.fragment_size.is_some() {
            let (nat, out) = (&mut self.nat, &mut self.out);
            return done(nat.too_big_from_world(vm, job, slot, out));
        }
        return_to_kernel(&self.nat, vm, job, (Command::Deliver, None), slot)
    }

    fn world_sent(&mut self, vm: &mut VmState, job: Job<'_>) -> Finish {
        if job.packet.contradicts_itself() {
            return Finish::Drop(DropReason::BadTcpFlags);
        }
        match Handover::from_u8(job.frame.header.code) {
            Some(Handover::Icmp) => {
                let (nat, out) = (&self.nat, &mut self.out);
                done(nat.icmp_from_world(&mut self.inspected, vm, &job, out))
            }
            Some(code)
                if code == Handover::TtlExpired
                    || code == Handover::Fragment && job.packet.ip.ttl <= 1 =>
            {
                let (nat, out) = (&mut self.nat, &mut self.out.queue);
                nat.icmp_to_world(vm, &job, IcmpError::TtlExceeded, out);
                Finish::Drop(DropReason::TtlExpired)
            }
            Some(
                code @ (Handover::Forward
                | Handover::Verdict
                | Handover::Miss
                | Handover::Syn
                | Handover::TooBig
                | Handover::Asleep
                | Handover::Fragment
                | Handover::Challenge),
            ) => {
                let admission = admit_inbound(
                    &mut self.nat,
                    &mut self.rules,
                    &self.forwards,
                    &mut self.journal,
                    vm,
                    (&job.packet, job.is_led_back()),
                    job.now_ns,
                );
                match admission {
                    Admission::Flow { slot } if code == Handover::Challenge => {
                        self.challenged(vm, job, slot)
                    }
                    Admission::Flow { slot } => self.world_sent_to_flow(vm, job, slot),
                    Admission::Cut { slot } => {
                        let (nat, out) = (&mut self.nat, &mut self.out.queue);
                        nat.world_sent_to_cut(vm, &job, slot, out)
                    }
                    // No answer: the world may not learn whether this exists.
                    Admission::NoFlow => Finish::Drop(DropReason::NoFlow),
                    Admission::Refused(refusal) => {
                        vm.net.stats.refused(refusal);
                        Finish::Drop(DropReason::Refused)
                    }
                }
            }
            Some(
                Handover::Arp
                | Handover::Dhcp
                | Handover::Local
                | Handover::Uncommon
                | Handover::TtlExpired
                | Handover::Ndp
                | Handover::Address,
            )
            | None => Finish::Drop(DropReason::BadCommand),
        }
    }
}

/// Returns a packet to the kernel. A SYN's MSS is clamped on the way, and from a guest's packet of
/// an inspected connection all is removed that was not inspected. `uplink_mtu`: [`Nat::uplink_mtu`],
/// where it is known already.
fn return_to_kernel<D: Datapath>(
    nat: &Nat<D>,
    vm: &VmState,
    job: Job<'_>,
    (code, uplink_mtu): (Command, Option<u32>),
    slot: SlotIndex,
) -> Finish {
    let path_mtu = || match uplink_mtu {
        Some(uplink_mtu) => uplink_mtu.min(vm.net.mtu.into()),
        None => nat.path_mtu(&vm.net, slot),
    };
    let mss = match job.packet.transport {
        Transport::Tcp(tcp) if tcp.is_opening_syn() => {
            let version = job.packet.ip.version();
            Some(mss::for_mtu(version, path_mtu()))
        }
        _ => None,
    };
    let is_held = nat.flows.entry(slot).is_some_and(|entry| entry.is_held());
    let change = match mss {
        mss if is_held && code == Command::Forward => Change::new(&job, Changed::Known { mss }),
        Some(most) => Change::new(&job, Changed::Mss(most)),
        None => None,
    };
    Finish::Command { code, change }
}

/// Whether a frame has a SYN that opens a connection.
fn opens_connection(bytes: &[u8]) -> bool {
    let packet = Frame::parse(bytes).and_then(|frame| read(frame).ok());
    packet.is_some_and(
        |packet| matches!(packet.transport, Transport::Tcp(tcp) if tcp.is_opening_syn()),
    )
}

fn put_header(bytes: &mut [u8], header: PortHeader) {
    bytes[PORT_HEADER_AT..PORT_HEADER_AT + PortHeader::LEN].copy_from_slice(&header.encode());
}

fn is_echo(packet: &Packet<'_>) -> bool {
    matches!(packet.transport, Transport::Icmp(_))
}

fn is_dhcp(packet: &Packet<'_>) -> bool {
    packet.ip.version() == Version::V4
        && matches!(packet.transport, Transport::Udp(udp) if udp.destination == DHCP_PORT)
}

fn done(result: Result<(), DropReason>) -> Finish {
    match result {
        Ok(()) => Finish::Dispose(Disposition::Consumed),
        Err(reason) => Finish::Drop(reason),
    }
}

/// Returns the packets and bytes that a frame counts as.
fn segments_of(frame: &Frame<'_>) -> Option<Segments> {
    let ip = Ip::parse(frame.l3).ok()?;
    Some(Packet::parse(ip).ok()?.segments(frame.vnet))
}
