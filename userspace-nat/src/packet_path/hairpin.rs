//! Packets of guests to translated addresses of this host (RFC 4787 REQ-9), led back in.
//!
//! # Theory of operation
//! A hairpin is two flows, as it would be through a router outside: the sender's, by which the
//! packet gets its external source, and the receiver's, by which it gets its internal destination
//! (RFC 4787 REQ-9a). Either end may have opened its flow itself, as two guests do that punch a hole
//! to each other; a guest that sends to the very port it sends from has one flow, which is both.
//!
//! The programs hand over every packet of such a flow. The engine does the sender's half in place:
//! source, checksum as complete or partial as it was, charge, counts. Then the frame becomes one that
//! came from an uplink, with [`PortFlags::HAIRPIN`], and is handled as such for the receiver: its
//! admission, filtering, sleep, size and cuts are those of any packet from the world, and the
//! program at the port does its half and counts it. So frames stay whole, and each VM's books have
//! the packet once. The TTL is decremented once, by the receiver's half.
//!
//! What the engine itself sends to a peer (errors of a guest's, which are translated, its own, and
//! resets) is led back in likewise ([`Exit::BackIn`](crate::port::Exit::BackIn)). An error is
//! translated by both flows (RFC 5508 REQ-7).
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{
    Direction, DropReason, Handover, PortHeader, SlotIndex, VmId, VmRow, portframe::PortFlags,
    vm::VmFlags,
};
use slipgate_model::FlowTuple;

use super::{Disposition, Finish, Job, put_header};
use crate::{
    admission::hairpin::{leads_in, leads_to_own},
    datapath::Datapath,
    flow::mappings::Inside,
    icmp::Quoted,
    mss,
    packet::{
        Ip, Packet, Transport, Version, icmp::Unreachable, ip::End, translation::Readdressed,
    },
    poll::Poller,
    port::{Exit, Frame, L3_AT, PORT_HEADER_AT, Side, VirtioNetHdr, ethertype_of, single},
    services::Services,
    state::{Core, VmState, charge},
};

/// A frame that is to be led back in, and what changes in it.
pub(crate) struct BackIn {
    to: Receiver,
    source: Readdressed,
    /// Length of the TCP header of a SYN and the MSS to which it is clamped, bytes.
    mss: Option<(usize, u16)>,
}

/// The guest that a packet leads to by its destination.
#[derive(Clone, Copy)]
struct Receiver {
    row: VmRow,
    id: VmId,
    /// Reason for which a program would have handed the packet over.
    why: Handover,
}

impl BackIn {
    /// Makes a guest's frame one that came from an uplink.
    pub(super) fn apply(self, frame: &mut [u8]) {
        self.source.apply(&mut frame[L3_AT..]);
        if let Some((len, most)) = self.mss {
            let tcp = L3_AT + self.source.header_len();
            mss::clamp(&mut frame[tcp..tcp + len], most, self.source.is_partial());
        }
        put_header(frame, self.to.header());
    }
}

impl Receiver {
    fn header(self) -> PortHeader {
        PortHeader {
            code: self.why as u8,
            flags: PortFlags::FROM_UPLINK | PortFlags::HAIRPIN,
            vm_row: self.row.get(),
            id: self.id.get(),
        }
    }
}

impl<D: Datapath> Core<D> {
    /// Does the sender's half for a guest's packet of a hairpin flow.
    pub(super) fn guest_sent_back_in(
        &mut self,
        vm: &mut VmState,
        job: &Job<'_>,
        slot: SlotIndex,
    ) -> Finish {
        let (packet, now_ns) = (&job.packet, job.now_ns);
        let Some(entry) = self.nat.flows.entry(slot).copied() else {
            return Finish::Drop(DropReason::NoFlow);
        };
        let external = (entry.nat, entry.nat_port);
        // The guest chooses where a partial checksum is completed.
        let source = Readdressed::of(packet, job.frame.vnet, End::Source, external);
        let Some(source) = source else {
            return Finish::Drop(DropReason::Malformed);
        };
        let Some(to) = self.receiver_of(&turned(&entry.world())) else {
            let (code, out) = (Unreachable::Port, &mut self.out.queue);
            vm.answers.refuse(&vm.net, packet, code, out, now_ns);
            return Finish::Drop(DropReason::NoFlow);
        };
        let segments = packet.segments(job.frame.vnet);
        let side = Side::World(Exit::BackIn);
        if let Err(reason) = charge(&self.nat.datapath, &vm.net, side, segments, now_ns) {
            return Finish::Drop(reason);
        }
        let live = self.nat.datapath.slot(slot);
        live.tx_packets().fetch_add(segments.packets, Relaxed);
        live.tx_bytes().fetch_add(segments.bytes, Relaxed);
        live.tx_last_ns().fetch_max(now_ns, Relaxed);
        self.nat.note_segment(slot, Direction::Tx, job);
        let mss = match packet.transport {
            Transport::Tcp(tcp) if tcp.is_opening_syn() => {
                let most = mss::for_mtu(packet.ip.version(), vm.net.mtu.into());
                Some((tcp.header_len, most))
            }
            _ => None,
        };
        Finish::BackIn(BackIn { to, source, mss })
    }

    /// Handles a frame that was led back in for its receiver.
    pub(super) fn lead_back_in(
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
        if self.sleeping.has(row, id) {
            return self.hold(bytes, now_ns);
        }
        // As the programs do: a frozen VM gets no flow.
        let live = self.nat.datapath.vm(row);
        if live.is_some_and(|live| live.flags().load(Relaxed) & VmFlags::FROZEN != 0) {
            self.drop_held(row, bytes, DropReason::Frozen);
            return Disposition::Dropped(DropReason::Frozen);
        }
        self.handle_whole(bytes, fragment_size, services, poller, now_ns)
    }

    /// Leads a packet of the engine's own back in, which was queued for that. `frame` is the frame
    /// that it becomes.
    pub(crate) fn lead_own_back_in(
        &mut self,
        l3: &[u8],
        frame: &mut Vec<u8>,
        services: &mut Services,
        poller: &Poller,
        now_ns: u64,
    ) -> Disposition {
        let packet = Ip::parse(l3).and_then(Packet::parse);
        let to = packet.ok().and_then(|packet| self.receiver_by(&packet));
        let Some(to) = to else {
            let nobody = self.nat.datapath.nobody();
            nobody.dropped(DropReason::NoFlow, single(l3.len()));
            return Disposition::Dropped(DropReason::NoFlow);
        };
        frame.clear();
        frame.extend_from_slice(&VirtioNetHdr::default().encode());
        debug_assert_eq!(frame.len(), PORT_HEADER_AT);
        frame.extend_from_slice(&to.header().encode());
        frame.extend_from_slice(&ethertype_of(l3).to_be_bytes());
        frame.extend_from_slice(l3);
        self.lead_back_in(frame, None, services, poller, now_ns)
    }

    /// Returns the guest that a packet leads to.
    fn receiver_by(&self, packet: &Packet<'_>) -> Option<Receiver> {
        if let Ok(quoted) = Quoted::parse(&packet.ip, false) {
            let receiver = self.by_flow(&quoted.tuple_as_sent(FlowTuple::WORLD))?;
            return Some(Receiver {
                why: Handover::Icmp,
                ..receiver
            });
        }
        self.receiver_of(&packet.tuple(FlowTuple::WORLD, Direction::Rx)?)
    }

    /// Returns the guest to which a packet with this tuple on the world's side leads: by a flow, else
    /// by a mapping or forward.
    fn receiver_of(&self, world: &FlowTuple) -> Option<Receiver> {
        if let Some(receiver) = self.by_flow(world) {
            return Some(receiver);
        }
        let network = &self.nat.network;
        let to_own = || {
            let leads = leads_to_own(&self.forwards, world);
            leads.filter(|leads| !network.are_own_ports_shut(leads.vm))
        };
        let leads = leads_in(&self.nat, &self.rules, &self.forwards, world);
        let leads = leads.or_else(to_own)?;
        Some(Receiver {
            row: leads.row,
            id: leads.vm,
            why: Handover::Forward,
        })
    }

    fn by_flow(&self, world: &FlowTuple) -> Option<Receiver> {
        let slot = self.nat.flows.by_world(world)?;
        let entry = self.nat.flows.entry(slot).filter(|it| it.is_hairpin())?;
        Some(Receiver {
            row: entry.vm_row,
            id: entry.vm(),
            why: Handover::Verdict,
        })
    }

    /// Adopts what the receiver of a guest's packet has of a predecessor: its mapping and its flow.
    pub(super) fn adopt_receiver(&mut self, guest: &FlowTuple, now_ns: u64) {
        let to = FlowTuple {
            scope: FlowTuple::WORLD,
            ..turned(guest)
        };
        let is_own = leads_to_own(&self.forwards, &to).is_some();
        if !is_own && !self.nat.network.routes.is_delivered(guest.remote) {
            return;
        }
        let inside = Inside::of(guest, Version::of(guest.local).unspecified());
        let external = inside.and_then(|inside| {
            let source = self
                .nat
                .hairpin_source(inside.vm, Some(&inside), guest.remote);
            let nat = source.ok()?;
            let mapping = self.nat.flows.mappings.get(&Inside { nat, ..inside })?;
            Some((nat, mapping.port))
        });
        let (remote, remote_port) = external.unwrap_or((guest.local, guest.local_port));
        let world = FlowTuple {
            scope: FlowTuple::WORLD,
            local: guest.remote,
            local_port: guest.remote_port,
            remote,
            remote_port,
            protocol: guest.protocol,
        };
        self.adopt_by(&world, now_ns);
        self.adopt_mapping_of(&world, now_ns);
    }
}

/// Returns the tuple on the world's side as the other end has it.
fn turned(world: &FlowTuple) -> FlowTuple {
    FlowTuple {
        local: world.remote,
        local_port: world.remote_port,
        remote: world.local,
        remote_port: world.local_port,
        ..*world
    }
}
