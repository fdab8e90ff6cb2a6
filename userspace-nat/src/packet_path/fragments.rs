//! Fragments, which are reassembled before anything is decided about their datagram.
use slipgate_abi::{DropReason, Handover, VmId, VmRow, portframe::PortFlags};

use super::{Disposition, Services, single};
use crate::{
    datapath::Datapath,
    flow::is_paused,
    packet::{Fragment, Packet, Version},
    poll::Poller,
    port::{Frame, Side, VirtioNetHdr},
    reply::IcmpError,
    state::{
        Core,
        early::{self, Early},
        reassembly::{Origin, Sender, Unfit, Whole},
    },
    stats::Traffic,
};

/// Offset of the payload length in an IPv6 header, bytes.
const PAYLOAD_LENGTH_AT: u8 = 4;
/// Offset of the fragment offset in an IPv6 packet with a fragment header, bytes.
const OFFSET_AT: u8 = 42;

impl<D: Datapath> Core<D> {
    /// Takes the fragments that came before this one, if it is the first one of a datagram of the world
    /// and the programs kept copies of them. They are to be handled before it, as frames that took no
    /// credits. `None` if none were looked for.
    pub(crate) fn take_early(&self, bytes: &[u8], now_ns: u64) -> Option<Early> {
        let frame = Frame::parse(bytes).filter(|frame| {
            // First what almost no frame is: each frame that is handled comes here.
            let is_its = || {
                let (row, id) = (frame.header.row(), VmId::new(frame.header.id));
                self.vms.get(row).is_some_and(|vm| vm.net.id == id)
            };
            frame.is_from_world() && Self::is_fragment(frame) && is_its()
        });
        let frame = frame?;
        let first = Fragment::parse(frame.l3).ok();
        let first = first.filter(|first| first.begin == 0 && first.has_more)?;
        let first = (&first, frame.link);
        Some(early::take(&self.nat.datapath, bytes, first, now_ns))
    }

    /// Handles a fragment, and its datagram if that is whole now.
    pub(super) fn take_fragment(
        &mut self,
        bytes: &[u8],
        services: &mut Services,
        poller: &Poller,
        now_ns: u64,
    ) -> Disposition {
        let Some(frame) = Frame::parse(bytes) else {
            return Disposition::Dropped(DropReason::BadCommand);
        };
        let (row, id) = (frame.header.row(), VmId::new(frame.header.id));
        let size = single(frame.l3.len());
        let Some(vm) = self.vms.get(row).filter(|vm| vm.net.id == id) else {
            let nobody = self.nat.datapath.nobody();
            nobody.dropped(DropReason::StaleVm, size);
            return Disposition::Dropped(DropReason::StaleVm);
        };
        let from_world = frame.is_from_world();
        let traffic = match from_world {
            true => Traffic::RxFromWorld,
            false => Traffic::RxFromGuest,
        };
        vm.net.stats.traffic(traffic, 1, size.bytes);
        let is_plain = !frame.vnet.needs_csum() && frame.vnet.gso_type == VirtioNetHdr::GSO_NONE;
        let Some(fragment) = Fragment::parse(frame.l3).ok().filter(|_| is_plain) else {
            vm.net.stats.dropped(DropReason::Malformed, size);
            return Disposition::Dropped(DropReason::Malformed);
        };
        let origin = match (from_world, frame.header.flags & PortFlags::STRANGER) {
            (false, _) => Origin::Guest,
            (true, 0) => Origin::Peer,
            (true, _) => Origin::Stranger,
        };
        let sender = Sender {
            row,
            origin,
            is_ipv6: fragment.version() == Version::V6,
        };
        let added = match fragment.is_atomic() {
            true => Whole::of_atomic(bytes, &fragment).map(Some),
            false => self.reassembly.add(sender, bytes, &fragment, now_ns),
        };
        let whole = match added {
            Ok(whole) => whole,
            Err(unfit) => return self.refuse_fragment(sender, &fragment, unfit, now_ns),
        };
        self.count_lost_fragments();
        let Some(mut whole) = whole else {
            return Disposition::Consumed;
        };
        if self.nat.flows.are_left()
            && let Some(frame) = Frame::parse(&whole.frame)
        {
            self.adopt_for(&frame, now_ns);
        }
        // It leaves in other frames than this one, so none of them can open its flow.
        let takes_orders = std::mem::replace(&mut self.nat.flows.takes_orders, false);
        let (frame, size) = (&mut whole.frame, Some(whole.largest));
        let disposition = self.handle_whole(frame, size, services, poller, now_ns);
        self.nat.flows.takes_orders = takes_orders;
        if disposition == Disposition::Send
            && let Some(frame) = Frame::parse(&whole.frame)
        {
            let mut header = frame.header;
            if self.nat.world_is_sockets {
                header.flags |= PortFlags::REASSEMBLED;
            }
            let queue = &mut self.out.queue;
            let queued = queue.push(header, frame.ethertype, frame.vnet, frame.l3);
            if queued.is_err() {
                let stats = self.nat.datapath.stats(row);
                stats.dropped(DropReason::EngineBusy, single(frame.l3.len()));
                return Disposition::Dropped(DropReason::EngineBusy);
            }
            return Disposition::Consumed;
        }
        disposition
    }

    /// Drops a fragment that is none of any possible datagram. Of IPv6, its guest is told why (RFC 8200
    /// section 4.5, RFC 7112 section 5).
    fn refuse_fragment(
        &mut self,
        sender: Sender,
        fragment: &Fragment<'_>,
        unfit: Unfit,
        now_ns: u64,
    ) -> Disposition {
        self.count_lost_fragments();
        let reason = match unfit {
            Unfit::Extension => DropReason::ExtensionHeader,
            _ => DropReason::Malformed,
        };
        let error = match unfit {
            Unfit::Length => Some(IcmpError::ParameterProblem(PAYLOAD_LENGTH_AT)),
            Unfit::End => Some(IcmpError::ParameterProblem(OFFSET_AT)),
            Unfit::Headers => Some(IcmpError::IncompleteHeaders),
            Unfit::Empty | Unfit::Extension => None,
        };
        let stats = self.nat.datapath.stats(sender.row);
        stats.dropped(reason, single(fragment.packet.len()));
        if sender.is_ipv6
            && sender.origin == Origin::Guest
            && let Some(error) = error
            && let Some(packet) = fragment.as_packet()
        {
            self.tell_guest(sender.row, &packet, error, now_ns);
        }
        Disposition::Dropped(reason)
    }

    /// Ends the datagrams that did not become whole in time. A guest is told of those whose first
    /// fragment came.
    pub(crate) fn expire_fragments(&mut self, now_ns: u64) {
        let overdue = self.reassembly.expire(now_ns);
        self.count_lost_fragments();
        for (row, first) in overdue {
            let fragment = Fragment::parse(&first).ok();
            if let Some(packet) = fragment.and_then(|fragment| fragment.as_packet()) {
                self.tell_guest(row, &packet, IcmpError::ReassemblyTime, now_ns);
            }
        }
    }

    /// Sends a guest an ICMP error, unless it is paused.
    fn tell_guest(&mut self, row: VmRow, packet: &Packet<'_>, error: IcmpError, now_ns: u64) {
        let id = self.vms.get(row).map(|vm| vm.net.id);
        let Some(mut vm) = id.and_then(|id| self.vms.take(row, id)) else {
            return;
        };
        if !is_paused(&self.nat.datapath, row) {
            let out = &mut self.out.queue;
            vm.answers
                .icmp(&vm.net, Side::Guest, packet, error, out, now_ns);
        }
        self.vms.put(vm);
    }

    /// Whether a frame is a fragment, to be reassembled.
    pub(super) fn is_fragment(frame: &Frame<'_>) -> bool {
        frame.header.code == Handover::Fragment as u8
    }

    /// Counts the fragments that were dropped.
    pub(crate) fn count_lost_fragments(&mut self) {
        for (row, lost) in self.reassembly.take_lost() {
            if lost.packets > 0 {
                let stats = self.nat.datapath.stats(row);
                stats.dropped(DropReason::Fragment, lost);
            }
        }
    }
}
