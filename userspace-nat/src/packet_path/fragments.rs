//! Fragments, which are reassembled before anything is decided about their datagram.
use slipgate_abi::{DropReason, Handover, VmId};

use super::{Disposition, Services, single};
use crate::{
    datapath::Datapath,
    packet::Ipv4,
    poll::Poller,
    port::{Frame, VirtioNetHdr},
    state::Core,
    stats::Traffic,
};

impl<D: Datapath> Core<D> {
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
        let ip = Ipv4::parse(frame.l3).ok();
        let ip = ip.filter(|ip| is_plain && ip.is_fragment() && !ip.has_options());
        let sender = (row, from_world);
        let added = ip.map(|ip| self.reassembly.add(sender, bytes, &ip, now_ns));
        let Some(Ok(whole)) = added else {
            vm.net.stats.dropped(DropReason::Malformed, size);
            return Disposition::Dropped(DropReason::Malformed);
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
            let queue = &mut self.out.queue;
            let queued = queue.push(frame.header, frame.ethertype, frame.vnet, frame.l3);
            if queued.is_err() {
                let stats = self.nat.datapath.stats(row);
                stats.dropped(DropReason::EngineBusy, single(frame.l3.len()));
                return Disposition::Dropped(DropReason::EngineBusy);
            }
            return Disposition::Consumed;
        }
        disposition
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
