//! Frames for VMs that sleep.
use slipgate_abi::{Command, Direction, DropReason, VmId, VmRow, tcp::Flags};
use slipgate_model::FlowTuple;

use super::{Disposition, read, segments_of};
use crate::{
    datapath::Datapath,
    packet::Transport,
    port::{Frame, single},
    state::{Core, NotHeld, SegmentId},
};

impl<D: Datapath> Core<D> {
    /// Whether a frame from the world is of a flow that was cut. Its guest gets nothing of that any more,
    /// and its peer may be answering where it stands, so that it can be reset.
    pub(super) fn is_of_cut_flow(&self, frame: Frame<'_>) -> bool {
        let packet = read(frame).ok();
        let tuple = packet.and_then(|packet| packet.tuple(FlowTuple::WORLD, Direction::Rx));
        let flows = &self.nat.flows;
        let slot = tuple.and_then(|tuple| flows.by_world(&tuple));
        slot.is_some_and(|slot| flows.is_cut(slot))
    }

    /// Holds a frame from the world for a VM that sleeps.
    pub(super) fn hold(&mut self, bytes: &[u8], now_ns: u64) -> Disposition {
        let Some(frame) = Frame::parse(bytes) else {
            return Disposition::Dropped(DropReason::BadCommand);
        };
        let row = frame.header.row();
        let packet = match read(frame) {
            Ok(packet) => Some(packet),
            Err(_) if Self::is_fragment(&frame) => None,
            Err(unread) => {
                let reason = unread.reason();
                self.drop_held(row, bytes, reason);
                return Disposition::Dropped(reason);
            }
        };
        let tuple = packet.and_then(|packet| packet.tuple(FlowTuple::WORLD, Direction::Rx));
        let segment = packet.zip(tuple).and_then(|(packet, tuple)| {
            let Transport::Tcp(tcp) = packet.transport else {
                return None;
            };
            Some(SegmentId {
                tuple,
                sequence: tcp.sequence,
                flags: tcp.flags,
                payload_len: packet.ip.payload().len().saturating_sub(tcp.header_len),
            })
        });
        if let Some(tuple) = tuple {
            self.sleeping.knock(row, &tuple, now_ns);
        }
        let bounds = self.rules.judge.borrow().sleep(VmId::new(frame.header.id));
        let reason = match self.sleeping.hold(row, bytes, segment, &bounds, now_ns) {
            Ok(()) => return Disposition::Consumed,
            Err(NotHeld::Repeated) => DropReason::Held,
            Err(NotHeld::Full) => DropReason::EngineBusy,
        };
        self.drop_held(row, bytes, reason);
        Disposition::Dropped(reason)
    }

    /// Counts a frame that came for a VM that slept, and is dropped.
    pub(crate) fn drop_held(&self, row: VmRow, bytes: &[u8], reason: DropReason) {
        let Some(frame) = Frame::parse(bytes) else {
            return;
        };
        let segments = segments_of(&frame).unwrap_or(single(frame.l3.len()));
        let stats = self.nat.datapath.stats(row);
        stats.dropped(reason, segments);
    }
}

/// Returns the VM's row and the tuple of a packet that the engine itself, as a relay, sends to a
/// guest; `None` for any other frame, and for a segment that brings the guest nothing: an
/// acknowledgement, a keep-alive, or a probe.
pub(crate) fn sent_to_guest(bytes: &[u8]) -> Option<(VmRow, FlowTuple)> {
    let frame = Frame::parse(bytes)?;
    if frame.header.code != Command::ToGuest as u8 {
        return None;
    }
    let packet = read(frame).ok()?;
    if let Transport::Tcp(tcp) = packet.transport {
        let is_bare = tcp.flags & (Flags::SYN | Flags::FIN | Flags::RST) == 0
            && packet.ip.payload().len() <= tcp.header_len;
        if is_bare {
            return None;
        }
    }
    let tuple = packet.tuple(FlowTuple::WORLD, Direction::Rx)?;
    Some((frame.header.row(), tuple))
}
