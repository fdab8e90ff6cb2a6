//! The guest's link, as the user-mode engine has it: the queue of a TAP, a stream socket to which a VMM
//! connects, a socket of packets whose other end slipgate's own VMM has ([`packets`]), or the rings of a
//! VMM's network card ([`vhost_user`]).
//!
//! A TAP takes frames with offload headers and bounds its queue itself. A stream socket takes plain
//! Ethernet frames: [`stream`] is its life, [`framing`] the frames on it and the bounded queue of those
//! for the guest, [`segmentation`] and [`joining`] what devices do otherwise for a host.
mod accepting;
pub mod framing;
pub mod joining;
mod packets;
pub mod segmentation;
mod stream;
pub mod vhost_user;

use std::os::fd::OwnedFd;

use nix::unistd::write;
use slipgate_abi::DropReason;

use self::stream::ENOUGH_QUEUED;
pub use self::{
    accepting::Accepted,
    packets::{Packet, PacketLink},
    stream::{Input, StreamLink},
    vhost_user::RingLink,
};
use crate::port::VirtioNetHdr;

/// Link to the guest of a user-mode engine.
#[derive(Debug)]
pub enum GuestLink {
    /// The queue of a TAP, non-blocking, whose frames begin with the legacy `virtio_net_hdr`.
    Tap(OwnedFd),
    /// A socket with the framing of QEMU's `-netdev stream`.
    Stream(Box<StreamLink>),
    /// A socket of packets, each a frame behind a `virtio_net_hdr`.
    Packets(Box<PacketLink>),
    /// The rings of a VMM that speaks vhost-user.
    Rings(Box<RingLink>),
}

impl GuestLink {
    /// Bytes of more data for the guest that should be made now, so that its queue stays short: for the
    /// guest's flows up to 256 KiB, and for relayed connections (`relayed`) up to half as much
    /// again, or one flow that is busy would leave them none. `None` while there is no guest.
    ///
    /// Rings are a queue themselves, and a frame for which they have no buffers is copied once more. So
    /// nothing is made behind one, but up to 128 KiB of relayed connections.
    pub fn room(&mut self, relayed: bool) -> Option<usize> {
        let queued = match self {
            Self::Tap(_) => return Some(usize::MAX),
            Self::Stream(link) => link.queued(),
            Self::Packets(link) => link.queued(),
            Self::Rings(link) => link.queued(),
        };
        let more = match relayed {
            true => ENOUGH_QUEUED / 2,
            false => 0,
        };
        let enough = match self {
            Self::Rings(_) if queued.is_some_and(|queued| queued > 0) => more,
            _ => ENOUGH_QUEUED + more,
        };
        queued.map(|queued| enough.saturating_sub(queued))
    }

    /// Time at which a turn is due without an event, because the host was short of something, ns.
    pub fn due_ns(&self) -> Option<u64> {
        match self {
            Self::Tap(_) => None,
            Self::Stream(link) => link.due_ns(),
            Self::Packets(link) => link.due_ns(),
            Self::Rings(link) => link.due_ns(),
        }
    }

    /// Makes room for a frame, `len` bytes from the Ethernet header on. Returns the reason if there is
    /// none.
    pub fn refusal(&mut self, vnet: VirtioNetHdr, len: usize) -> Option<DropReason> {
        match self {
            Self::Tap(_) => None,
            Self::Stream(link) => link.refusal(vnet, len),
            Self::Packets(link) => link.refusal(vnet, len),
            Self::Rings(link) => link.refusal(vnet, len),
        }
    }

    /// Sends a frame, with its `virtio_net_hdr`. Returns the reason if it was dropped and is to be
    /// counted.
    pub fn send(&mut self, frame: &[u8]) -> Option<DropReason> {
        match self {
            Self::Tap(queue) => {
                // A device that is gone or full loses frames and counts them, as any does.
                let _ = write(queue, frame);
                None
            }
            Self::Stream(link) => link.send(frame),
            Self::Packets(link) => link.send(frame),
            Self::Rings(link) => link.send(frame),
        }
    }
}
