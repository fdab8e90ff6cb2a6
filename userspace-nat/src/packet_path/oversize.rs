//! Packets larger than the link they would leave by (RFC 4787 REQ-13), and those that came in
//! fragments (REQ-14).
//!
//! The sender of a packet with DF, of an IPv6 packet, or of a GSO frame, is sent the MTU. Other
//! packets are fragmented, and IPv6 packets that came in fragments which the link takes (RFC 8200
//! section 4.5: who forwards does not make smaller ones). In user mode the NAT makes the packets from the
//! world, of what a socket received whole, so it fragments them as their sender. The kernel's translation can't do that, so
//! the engine translates here: it rewrites the packet, completes the checksum, charges the VM's rates
//! for the fragments, counts the packet in its flow as one packet, and sends the fragments unchanged:
//! all, or none. What an inspected connection does not need is removed from its headers here too.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{Direction, DropReason, SlotIndex, connection, handshake, tcp::TcpBits};

use crate::{
    datapath::Datapath,
    inspection::tcp::keep_known,
    packet::{Transport, Version, ip::End, translation::translate},
    packet_path::Job,
    port::{Side, VirtioNetHdr},
    reply::IcmpError,
    state::{Nat, Outgoing, VmState},
};

impl<D: Datapath> Nat<D> {
    /// Handles a guest's packet of a flow that is larger than the uplink's MTU.
    ///
    /// # Errors
    /// Returns the reason for which the packet is dropped.
    pub(super) fn too_big_from_guest(
        &mut self,
        vm: &mut VmState,
        job: Job<'_>,
        slot: SlotIndex,
        out: &mut Outgoing,
    ) -> Result<(), DropReason> {
        let (vnet, packet, now_ns) = (job.frame.vnet, &job.packet, job.now_ns);
        let link_mtu = self.uplink_mtu(slot);
        let mtu = at_most(link_mtu, &job);
        if !may_be_in_fragments(&job, link_mtu) {
            let error = IcmpError::TooBig(link_mtu);
            vm.answers
                .icmp(&vm.net, Side::Guest, packet, error, &mut out.queue, now_ns);
            return Err(DropReason::TooBig);
        }
        let entry = *self.flows.entry(slot).ok_or(DropReason::NoFlow)?;
        if self.is_strange(slot, &job) {
            return Err(DropReason::OutOfWindow);
        }
        let to = Side::World(self.exit_of(slot));
        let copy = out.copy(packet);
        if entry.is_held()
            && let Transport::Tcp(tcp) = packet.transport
        {
            let at = packet.ip.header_len;
            keep_known(&mut copy[at..at + tcp.header_len], vnet.needs_csum());
        }
        translate(copy, packet, vnet, End::Source, (entry.nat, entry.nat_port));
        out.set_identification();
        out.send_fragments(&self.datapath, &vm.net, to, mtu, now_ns)?;
        let live = self.datapath.slot(slot);
        live.tx_packets().fetch_add(1, Relaxed);
        live.tx_bytes()
            .fetch_add(packet.ip.bytes.len() as u64, Relaxed);
        live.tx_last_ns().fetch_max(now_ns, Relaxed);
        self.note_segment(slot, Direction::Tx, &job);
        Ok(())
    }

    /// Handles a packet from the world of a flow that is larger than the MTU of the guest's link.
    ///
    /// # Errors
    /// Returns the reason for which the packet is dropped.
    pub(super) fn too_big_from_world(
        &mut self,
        vm: &mut VmState,
        job: Job<'_>,
        slot: SlotIndex,
        out: &mut Outgoing,
    ) -> Result<(), DropReason> {
        let (vnet, packet, now_ns) = (job.frame.vnet, &job.packet, job.now_ns);
        let link_mtu = u32::from(vm.net.mtu);
        let mtu = at_most(link_mtu, &job);
        let is_ours = self.world_is_sockets
            && vnet.gso_type == VirtioNetHdr::GSO_NONE
            && !matches!(packet.transport, Transport::Tcp(_));
        if !is_ours && !may_be_in_fragments(&job, link_mtu) {
            let error = IcmpError::TooBig(link_mtu);
            self.icmp_to_world(vm, &job, error, &mut out.queue);
            return Err(DropReason::TooBig);
        }
        let guest = self.flows.entry(slot).map(|entry| entry.guest);
        let guest = guest.filter(|guest| guest.scope == vm.net.id.get());
        let guest = guest.ok_or(DropReason::NoFlow)?;
        let to = (guest.local, guest.local_port);
        translate(out.copy(packet), packet, vnet, End::Destination, to);
        out.send_fragments(&self.datapath, &vm.net, Side::Guest, mtu, now_ns)?;
        let live = self.datapath.slot(slot);
        live.rx_packets().fetch_add(1, Relaxed);
        live.rx_bytes()
            .fetch_add(packet.ip.bytes.len() as u64, Relaxed);
        live.rx_last_ns().fetch_max(now_ns, Relaxed);
        self.note_segment(slot, Direction::Rx, &job);
        Ok(())
    }

    /// Whether a guest's segment does not belong to the connection that was inspected in this flow.
    fn is_strange(&self, slot: SlotIndex, job: &Job<'_>) -> bool {
        let Transport::Tcp(tcp) = job.packet.transport else {
            return false;
        };
        let live = self.datapath.slot(slot);
        let is_held = live.tcp().load(Relaxed) & TcpBits::HELD != 0;
        let sequences = self.datapath.sequences(slot);
        is_held && !sequences.is_guests(live, &tcp.segment(), || job.now_ns)
    }

    /// Updates the connection's state from a segment that was translated here.
    pub(super) fn note_segment(&self, slot: SlotIndex, direction: Direction, job: &Job<'_>) {
        let Transport::Tcp(tcp) = job.packet.transport else {
            return;
        };
        let live = self.datapath.slot(slot);
        if TcpBits(live.tcp().load(Relaxed)).is_concerned_by(tcp.flags) {
            let sequences = self.datapath.sequences(slot);
            connection::note(live, sequences, direction, &tcp.segment(), || job.now_ns);
        }
        if handshake::is_pending(live) {
            handshake::note(live, direction, &tcp.segment());
        }
    }
}

/// Whether a packet may leave in fragments by a link of this MTU.
fn may_be_in_fragments(job: &Job<'_>, link_mtu: u32) -> bool {
    if job.frame.vnet.gso_type != VirtioNetHdr::GSO_NONE {
        return false;
    }
    match (job.packet.ip.version(), job.fragment_size) {
        (Version::V4, _) => !job.packet.ip.dont_fragment,
        (Version::V6, size) => size.is_some_and(|size| size <= link_mtu),
    }
}

/// Size of the fragments that a packet leaves in: those that it came in, if the link takes them.
/// Tiny ones, which serve to hide ports and flags from filters (RFC 1858 section 3), are joined to
/// such as every link of the family carries, or every host takes.
fn at_most(mtu: u32, job: &Job<'_>) -> u32 {
    let least = job.packet.ip.version().least_mtu();
    job.fragment_size
        .map_or(mtu, |size| mtu.min(size.max(least)))
}
