//! A socket of packets as the guest's link, whose other end is the network card of slipgate's own VMM
//! (`vmm/src/virtio/net/tap.rs`).
//!
//! # Theory of operation
//! Each message is a frame behind the 12-byte `virtio_net_hdr_v1`, as a TAP's queue has it, so that GSO
//! frames pass whole both ways, with one copy into the kernel and one out of it. A message of
//! [`OFFLOADS_LEN`] bytes has the offloads that the guest accepts from then on, as TUNSETOFFLOAD would
//! tell a TAP (`TUN_F_*`); before the first one it accepts none. A frame with others is segmented here,
//! and its checksum completed.
//!
//! A TAP's kernel looks at a frame's header before anybody else does; here [`sound`] does it. The VMM
//! has checked it too, but it may have been taken over by its guest.
//!
//! The queue for the guest is bounded as that of a stream socket ([`super::stream`]): what the socket
//! does not take waits here; from [`ENOUGH_QUEUED`] bytes on no data is taken from the world's sockets,
//! and from [`MOST_QUEUED`] on a frame is dropped. When the VMM has closed its end the link is over.
use std::{
    collections::VecDeque,
    io::{self, IoSlice, IoSliceMut},
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
};

use nix::{
    errno::Errno,
    sys::{
        epoll::{Epoll, EpollEvent, EpollFlags},
        socket::{MsgFlags, recvmsg, sendmsg},
    },
};
use slipgate_abi::DropReason;

use super::{
    framing::{FrameQueue, MOST_QUEUED},
    segmentation::{self, Headers},
    stream::{ENOUGH_QUEUED, SHORTAGE_NS},
};
use crate::{
    packet::ipv6,
    port::{ETHERNET_LEN, VNET_LEN, VirtioNetHdr},
};

/// Length of `virtio_net_hdr_v1`, bytes: after the fields of [`VirtioNetHdr`], a number of buffers that
/// has no meaning here.
const HEADER_LEN: usize = VNET_LEN + 2;
/// Most datagrams of one frame: what Linux takes of a TAP since 6.9 (`UDP_MAX_SEGMENTS`), and as many as
/// its guests make. Each may cost a system call.
const MOST_DATAGRAMS: usize = 128;
/// Length of a message with offloads, bytes.
const OFFLOADS_LEN: usize = 4;
/// `TUN_F_CSUM` and others, <linux/if_tun.h>.
pub(super) const CSUM: u32 = 0x01;
pub(super) const TSO4: u32 = 0x02;
pub(super) const TSO6: u32 = 0x04;
pub(super) const USO4: u32 = 0x20;
pub(super) const USO6: u32 = 0x40;

/// Result of a read from the VMM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Packet {
    /// A frame of this length, with its `virtio_net_hdr`.
    Frame(usize),
    /// A message of so many bytes that is no frame: to be counted.
    Malformed(usize),
    /// Nothing for now, or never again.
    Nothing,
}

/// The socket of a VMM.
#[derive(Debug)]
pub struct PacketLink {
    socket: OwnedFd,
    /// Offloads that the guest accepts.
    offloads: u32,
    /// Messages that the socket did not take, and their bytes together.
    queue: VecDeque<Vec<u8>>,
    queued: usize,
    /// Segments of a frame, before they are sent.
    segments: FrameQueue,
    /// Whether an event tells when the socket takes more.
    waits_for_room: bool,
    /// Whether the host had no memory for the last message, and the time to try again, ns.
    lacks_memory: bool,
    again_ns: Option<u64>,
    is_over: bool,
}

impl PacketLink {
    /// A link by a connected socket of sequenced packets.
    pub fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            offloads: 0,
            queue: VecDeque::new(),
            queued: 0,
            segments: FrameQueue::default(),
            waits_for_room: false,
            lacks_memory: false,
            again_ns: None,
            is_over: false,
        }
    }

    /// Adds the socket to a set.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn watch(&self, epoll: &Epoll, key: u64) -> io::Result<()> {
        Ok(epoll.add(&self.socket, EpollEvent::new(EpollFlags::EPOLLIN, key))?)
    }

    /// Reads the next frame to the beginning of `into`, which has room for the longest, and handles the
    /// messages before it that are none.
    pub fn next(&mut self, into: &mut [u8]) -> Packet {
        loop {
            match self.receive(into) {
                Ok(Some((len, is_whole))) if len >= HEADER_LEN && is_whole => {
                    let len = len - (HEADER_LEN - VNET_LEN);
                    let (header, frame) = into[..len].split_at_mut(VNET_LEN);
                    let vnet = header.first_chunk().map(VirtioNetHdr::decode);
                    let Some(vnet) = vnet.and_then(|vnet| sound(vnet, frame)) else {
                        return Packet::Malformed(len);
                    };
                    header.copy_from_slice(&vnet.encode());
                    return Packet::Frame(len);
                }
                Ok(Some((OFFLOADS_LEN, true))) => {
                    let told = into.first_chunk().copied().unwrap_or_default();
                    self.offloads = u32::from_le_bytes(told);
                }
                Ok(Some((len, _))) => return Packet::Malformed(len),
                Ok(None) | Err(Errno::EAGAIN) => return Packet::Nothing,
                Err(Errno::EINTR) => {}
                Err(_) => {
                    self.is_over = true;
                    return Packet::Nothing;
                }
            }
        }
    }

    /// Reads a message, without the last two bytes of its header. Returns its length and whether that is
    /// all of it; `None`: there is nobody to send any more.
    fn receive(&mut self, into: &mut [u8]) -> nix::Result<Option<(usize, bool)>> {
        if self.is_over {
            return Ok(None);
        }
        let (header, frame) = into.split_at_mut(VNET_LEN);
        let mut buffers = [0; HEADER_LEN - VNET_LEN];
        let mut parts = [header, &mut buffers, frame].map(IoSliceMut::new);
        let flags = MsgFlags::MSG_DONTWAIT;
        let fd = self.socket.as_raw_fd();
        let message = recvmsg::<()>(fd, &mut parts, None, flags)?;
        // The VMM sends no message without bytes.
        self.is_over = message.bytes == 0;
        let is_whole = !message.flags.contains(MsgFlags::MSG_TRUNC);
        Ok((!self.is_over).then_some((message.bytes, is_whole)))
    }

    /// Bytes that wait for the guest; `None` once it has gone.
    pub fn queued(&mut self) -> Option<usize> {
        if self.queued >= ENOUGH_QUEUED {
            self.flush();
        }
        (!self.is_over).then_some(self.queued)
    }

    /// Makes room for a frame, `len` bytes from the Ethernet header on. Returns the reason if there is
    /// none.
    pub fn refusal(&mut self, vnet: VirtioNetHdr, len: usize) -> Option<DropReason> {
        if self.is_over {
            return Some(DropReason::StaleVm);
        }
        let is_possible =
            takes(self.offloads, vnet) || segmentation::has_room(&self.segments, vnet, len);
        if self.queued + len > MOST_QUEUED {
            self.flush();
        }
        let has_room = is_possible && self.queued + len <= MOST_QUEUED;
        (!has_room).then_some(DropReason::EngineBusy)
    }

    /// Sends or queues a frame, with its `virtio_net_hdr`. Returns the reason if it was dropped.
    pub fn send(&mut self, frame: &[u8]) -> Option<DropReason> {
        let (header, frame) = frame.split_first_chunk::<VNET_LEN>()?;
        let vnet = VirtioNetHdr::decode(header);
        let refusal = self.refusal(vnet, frame.len());
        if refusal.is_some() {
            return refusal;
        }
        if takes(self.offloads, vnet) {
            self.put(*header, frame);
            return None;
        }
        let mut segments = std::mem::take(&mut self.segments);
        let pushed = segmentation::push(&mut segments, vnet, frame);
        for segment in segments.frames() {
            self.put([0; VNET_LEN], segment);
        }
        segments.clear();
        self.segments = segments;
        (!pushed).then_some(DropReason::EngineBusy)
    }

    /// Sends a message, or queues it behind others.
    fn put(&mut self, header: [u8; VNET_LEN], frame: &[u8]) {
        if self.queue.is_empty() && self.write([&header, &[0; HEADER_LEN - VNET_LEN], frame]) {
            return;
        }
        let message = [&header, &[0; HEADER_LEN - VNET_LEN][..], frame].concat();
        self.queued += message.len();
        self.queue.push_back(message);
    }

    /// Returns whether a message is done with: sent, or for nobody.
    fn write(&mut self, parts: [&[u8]; 3]) -> bool {
        let parts = parts.map(IoSlice::new);
        let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
        self.lacks_memory = false;
        loop {
            match sendmsg::<()>(self.socket.as_raw_fd(), &parts, &[], flags, None) {
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return false,
                // There is memory for it later, of which no event tells.
                Err(Errno::ENOBUFS | Errno::ENOMEM) => {
                    self.lacks_memory = true;
                    return false;
                }
                Ok(_) => return true,
                Err(_) => {
                    self.is_over = true;
                    return true;
                }
            }
        }
    }

    /// Writes as much of the queue as the socket takes.
    fn flush(&mut self) {
        while let Some(message) = self.queue.pop_front() {
            if !self.write([&message, &[], &[]]) {
                self.queue.push_front(message);
                return;
            }
            self.queued -= message.len();
        }
    }

    /// Time at which a turn is due without an event, ns.
    pub fn due_ns(&self) -> Option<u64> {
        self.again_ns
    }

    /// At the end of a turn: writes what is queued, and has an event tell when more can be written, or
    /// the time ([`PacketLink::due_ns`]).
    ///
    /// # Errors
    /// The kernel can't watch the socket.
    pub fn settle(&mut self, epoll: &Epoll, key: u64, now_ns: u64) -> io::Result<()> {
        self.flush();
        let lacks_memory = self.lacks_memory && !self.queue.is_empty() && !self.is_over;
        self.again_ns = lacks_memory.then_some(now_ns + SHORTAGE_NS);
        if self.is_over {
            // It hangs up for good. An error means that it is out of the set already.
            let _ = epoll.delete(&self.socket);
            return Ok(());
        }
        let is_left = !self.queue.is_empty() && !lacks_memory;
        if is_left != self.waits_for_room {
            let events = match is_left {
                true => EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT,
                false => EpollFlags::EPOLLIN,
            };
            epoll.modify(self.socket.as_fd(), &mut EpollEvent::new(events, key))?;
            self.waits_for_room = is_left;
        }
        Ok(())
    }
}

/// Whether a guest with these offloads accepts such a frame as it is.
pub(super) fn takes(offloads: u32, vnet: VirtioNetHdr) -> bool {
    let needed = match vnet.gso_type {
        VirtioNetHdr::GSO_NONE if vnet.needs_csum() => CSUM,
        VirtioNetHdr::GSO_NONE => 0,
        VirtioNetHdr::GSO_TCPV4 => CSUM | TSO4,
        VirtioNetHdr::GSO_TCPV6 => CSUM | TSO6,
        // Packets for guests have no IP options: where L4 begins tells the version.
        _ if usize::from(vnet.csum_start) == ETHERNET_LEN + ipv6::HEADER_LEN => CSUM | USO6,
        _ => CSUM | USO4,
    };
    offloads & needed == needed
}

/// Returns the header of a frame of the guest as the kernel would make it for one of a TAP: with what has
/// a meaning. `None`: the frame is to be dropped.
pub(super) fn sound(given: VirtioNetHdr, frame: &[u8]) -> Option<VirtioNetHdr> {
    let mut vnet = VirtioNetHdr::default();
    if given.needs_csum() {
        let field = usize::from(given.csum_start) + usize::from(given.csum_offset);
        if usize::from(given.csum_start) < ETHERNET_LEN || field + 2 > frame.len() {
            return None;
        }
        vnet.flags = VirtioNetHdr::NEEDS_CSUM;
        vnet.csum_start = given.csum_start;
        vnet.csum_offset = given.csum_offset;
    }
    if given.gso_type == VirtioNetHdr::GSO_NONE {
        return Some(vnet);
    }
    let headers = Headers::of_whole(given.gso_type, frame)?;
    if !given.needs_csum() || usize::from(given.csum_start) != headers.l4 || given.gso_size == 0 {
        return None;
    }
    let payload_len = frame.len() - headers.len;
    let datagrams = payload_len.div_ceil(given.gso_size.into());
    if given.gso_type == VirtioNetHdr::GSO_UDP_L4 && datagrams > MOST_DATAGRAMS {
        return None;
    }
    if payload_len > usize::from(given.gso_size) {
        vnet.gso_type = given.gso_type;
        vnet.gso_size = given.gso_size;
        vnet.hdr_len = u16::try_from(headers.len).ok()?;
    }
    Some(vnet)
}

#[cfg(test)]
#[path = "packets_test.rs"]
mod tests;
