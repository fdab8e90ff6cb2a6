//! The rings of a VMM's network card as the guest's link: a backend of the vhost-user protocol.
//!
//! # Theory of operation
//! A VMM connects to a Unix socket and describes its guest's memory and rings by [`message`]s; from then
//! on frames pass between the guest's buffers and the engine, and the VMM has no part in them. A frame
//! is copied once, out of the guest's memory ([`ring`]) or into it, behind its `virtio_net_hdr`, so that
//! GSO frames pass whole both ways. Of a long segment of the guest's only the headers are copied; its
//! payload a socket takes straight out of the guest's buffers ([`Rest`]), if it goes to one. That of a long
//! segment for the guest is received straight into its buffers ([`Space`]).
//!
//! | state | entered by | frames for the guest |
//! | --- | --- | --- |
//! | waiting | the start; the connection has ended | dropped as `stale_vm` |
//! | connected | a connection was accepted | dropped as `stale_vm` while the ring does not run |
//! | over | the only guest's connection has ended | dropped as `stale_vm` |
//!
//! One guest at a time, as with a stream ([`super::stream`]); flows stay when a connection ends. A VMM
//! that breaks the protocol ([`Wrong`]) loses its connection. A driver that breaks a ring loses the ring,
//! until the VMM sets it up again; a chain that is no frame is counted and given back.
//!
//! A VMM may give several pairs of rings, so that each of its guest's CPUs sends by a ring of its own; these
//! are read in turns. Frames for the guest go by the first pair alone: they are the work of one thread here,
//! and none overtakes another.
//!
//! The queue for the guest is bounded: what its ring has no buffers for waits here; while something
//! waits, no data is taken from the world's sockets ([`super::GuestLink::room`]), and from [`MOST_QUEUED`]
//! bytes on a frame is dropped.
//!
//! The VMM of `slipgate run` ([`RingLink::of_own_vmm`]) is connected from the start, and nobody else can
//! be. It stops the rings while its guest is paused: frames wait in the queue then, and a reset of its
//! card ([`message::request::RESET_OWNER`]) empties it. It may ask for counts in memory of its own
//! ([`tally`]), since it sees no frame itself.
//!
//! Kicks are watched for edges: what tells them is never read, since the VMM's end decides whether a read
//! would wait. While there are frames the driver is asked for no kicks.
#[cfg(any(test, feature = "fake"))]
pub mod fake;
mod memory;
mod message;
mod ring;
mod session;
mod tally;

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsRawFd as _, OwnedFd},
};

use nix::sys::{
    epoll::{Epoll, EpollEvent, EpollFlags},
    socket::{Shutdown, shutdown},
};
use slipgate_abi::DropReason;

pub use self::message::Wrong;
use self::{
    message::End,
    ring::{Broken, Put, Taken},
    session::{RX, Vmm, feature},
};
use super::{
    accepting::{self, Accepted, Warned},
    framing::{FrameQueue, MOST_QUEUED},
    packets::{CSUM, Packet, TSO4, TSO6, USO4, USO6, sound, takes},
    segmentation,
    stream::SHORTAGE_NS,
};
use crate::{
    packet::Version,
    payload::Rest,
    port::{VNET_LEN, VirtioNetHdr},
    space::Space,
};

/// Messages that one turn handles.
const MESSAGES_AT_ONCE: usize = 64;

/// A frame for the guest that was dropped after the link had taken it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lost {
    /// Reason of the drop.
    pub reason: DropReason,
    /// Offload header of the frame.
    pub vnet: VirtioNetHdr,
    /// Its length with that header, bytes.
    pub len: usize,
}

impl Lost {
    fn of(reason: DropReason, header: &[u8; VNET_LEN], len: usize) -> Self {
        Self {
            reason,
            vnet: VirtioNetHdr::decode(header),
            len,
        }
    }
}

/// A listening socket, and the VMM that is connected to it.
#[derive(Debug)]
pub struct RingLink {
    /// Where a VMM connects; `None`: the only one is connected.
    listener: Option<OwnedFd>,
    is_for_one: bool,
    is_over: bool,
    vmm: Option<Vmm>,
    /// Frames for which the ring had no room, with their headers, and their bytes together.
    queue: VecDeque<Vec<u8>>,
    queued: usize,
    /// Whether some have waited since [`RingLink::has_drained`] said that none do.
    has_waited: bool,
    /// Segments of a frame, before they are sent.
    segments: FrameQueue,
    /// Frames that were dropped after they had been queued, or in the ring.
    lost: Vec<Lost>,
    /// Time at which to accept again, because the host was short of something, ns.
    again_ns: Option<u64>,
    warned: Warned,
}

impl RingLink {
    /// A link by a listening socket, non-blocking. `is_for_one`: whether it is over when the first guest
    /// has gone.
    pub fn new(listener: OwnedFd, is_for_one: bool) -> Self {
        Self::of(Some(listener), is_for_one, None)
    }

    /// The link of slipgate's own VMM, by a connected stream socket.
    pub fn of_own_vmm(socket: OwnedFd) -> Self {
        Self::of(None, true, Some(Vmm::own(socket)))
    }

    fn of(listener: Option<OwnedFd>, is_for_one: bool, vmm: Option<Vmm>) -> Self {
        Self {
            listener,
            is_for_one,
            is_over: false,
            vmm,
            queue: VecDeque::new(),
            queued: 0,
            has_waited: false,
            segments: FrameQueue::default(),
            lost: Vec::new(),
            again_ns: None,
            warned: Warned::default(),
        }
    }

    /// Adds the listening socket to a set, or that of the VMM that is connected.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn watch(&self, epoll: &Epoll, listener_key: u64, key: u64) -> io::Result<()> {
        if let Some(listener) = &self.listener {
            // Edge-triggered: it is accepted from when there is no guest, whatever the event.
            let events = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
            epoll.add(listener, EpollEvent::new(events, listener_key))?;
        }
        if let Some(vmm) = &self.vmm {
            epoll.add(vmm.socket(), EpollEvent::new(EpollFlags::EPOLLIN, key))?;
        }
        Ok(())
    }

    /// Accepts the VMM that waits, if none is connected. To be called at the end of every turn: who has
    /// waited causes no event.
    pub fn accept(&mut self, epoll: &Epoll, key: u64, now_ns: u64) -> Accepted {
        let is_too_early = self.again_ns.is_some_and(|again_ns| now_ns < again_ns);
        if self.is_over || self.vmm.is_some() || is_too_early {
            return Accepted::No;
        }
        let Some(listener) = &self.listener else {
            return Accepted::No;
        };
        self.again_ns = None;
        match accepting::accept(listener, epoll, key, &mut self.warned) {
            Ok(Some(socket)) => self.vmm = Some(Vmm::new(socket)),
            Ok(None) => return Accepted::No,
            Err(short) => {
                self.again_ns = Some(now_ns + SHORTAGE_NS);
                return short.accepted();
            }
        }
        tracing::debug!("a VMM has connected");
        Accepted::Yes
    }

    /// Time at which a turn is due without an event, ns.
    pub fn due_ns(&self) -> Option<u64> {
        self.again_ns
    }

    /// Handles messages of the VMM that have come. `kick_key`: for kicks in the set. Returns why its
    /// connection was closed, if it was for a reason.
    pub fn hear(&mut self, epoll: &Epoll, kick_key: u64) -> Option<Wrong> {
        for _ in 0..MESSAGES_AT_ONCE {
            let vmm = self.vmm.as_mut()?;
            match vmm.hear(epoll, kick_key) {
                Ok(true) => self.apply_changes(),
                Ok(false) => return None,
                Err(End::Gone) => {
                    self.end(epoll);
                    return None;
                }
                Err(End::Wrong(wrong)) => {
                    self.end(epoll);
                    return Some(wrong);
                }
            }
        }
        None
    }

    /// For tests: what the host says when a doorbell of the VMM is to be watched.
    #[cfg(test)]
    pub(crate) fn refuse_kicks(&mut self, error: nix::errno::Errno) {
        if let Some(vmm) = &mut self.vmm {
            vmm.refuses_kicks = Some(error);
        }
    }

    /// Does to the queue what a message was about.
    fn apply_changes(&mut self) {
        let Some(vmm) = &mut self.vmm else { return };
        let was_reset = std::mem::take(&mut vmm.was_reset);
        let has_other_features = std::mem::take(&mut vmm.has_other_features);
        if was_reset {
            self.lose_queue();
        }
        if !has_other_features {
            return;
        }
        // What waits may have offloads that the driver does not accept any more.
        self.queued = 0;
        for frame in std::mem::take(&mut self.queue) {
            if let Some(reason) = self.send(&frame) {
                self.lose(reason, &frame);
            }
        }
    }

    /// Drops what waits: its guest, or that guest's driver, has gone.
    fn lose_queue(&mut self) {
        for frame in std::mem::take(&mut self.queue) {
            self.lose(DropReason::StaleVm, &frame);
        }
        self.queued = 0;
    }

    fn lose(&mut self, reason: DropReason, frame: &[u8]) {
        if let Some(header) = frame.first_chunk() {
            self.lost.push(Lost::of(reason, header, frame.len()));
        }
    }

    /// A kick has come: the guest may have sent, or added buffers.
    pub fn kicked(&mut self) {
        if let Some(vmm) = &mut self.vmm {
            vmm.has_input = true;
            vmm.kicks += 1;
        }
    }

    /// Whether the guest may have frames that [`RingLink::next`] has not returned.
    pub fn has_input(&self) -> bool {
        self.vmm.as_ref().is_some_and(|vmm| vmm.has_input)
    }

    /// Copies the guest's next frame to the beginning of `into`, with its `virtio_net_hdr`; `into` has
    /// room for the longest. If there is a rest, it is of a long frame of TCP, and its last bytes, which were
    /// not copied; the caller returns it by [`RingLink::finish`] before anything else.
    pub fn next(&mut self, into: &mut [u8]) -> (Packet, Option<Rest>) {
        let Some(vmm) = self.vmm.as_mut().filter(|vmm| vmm.has_input) else {
            return (Packet::Nothing, None);
        };
        let format = vmm.format();
        let mut without = 0;
        while let Some(memory) = &vmm.memory
            && without < vmm.pairs()
        {
            let nth = vmm.ring_in_turn();
            let ring = &mut vmm.rings[nth];
            // What sets it up has it looked at again.
            let taken = match ring.is_running() {
                true => ring.take(format, &memory.guest, into),
                false => Ok(Taken::Nothing),
            };
            let packet = match taken {
                Ok(Taken::Frame(len, rest)) => {
                    // All headers are here. Behind them `into` still has bytes of an earlier frame, of which
                    // only the number counts here.
                    let (header, frame) = into[..len].split_at_mut(VNET_LEN);
                    let vnet = header.first_chunk().map(VirtioNetHdr::decode);
                    if let Some(vnet) = vnet.and_then(|vnet| sound(vnet, frame)) {
                        header.copy_from_slice(&vnet.encode());
                        ring.counts.frame(frame.len());
                        vmm.open = nth;
                        vmm.pass_turn(false);
                        return (Packet::Frame(len), rest);
                    }
                    // What breaks the ring here is counted with the frame.
                    let _ = rest.map(|rest| ring.finish(&memory.guest, rest));
                    Packet::Malformed(len)
                }
                Ok(Taken::Malformed(len)) => Packet::Malformed(len),
                Ok(Taken::Nothing) if ring.is_running() && ring.listen(&memory.guest) => continue,
                Ok(Taken::Nothing) => {
                    without += 1;
                    vmm.pass_turn(true);
                    continue;
                }
                Err(Broken) => {
                    tracing::debug!("the guest's driver has broken its ring");
                    Packet::Malformed(0)
                }
            };
            vmm.pass_turn(false);
            return (packet, None);
        }
        vmm.has_input = false;
        (Packet::Nothing, None)
    }

    /// Is done with the frame that [`RingLink::next`] returned with this rest: the guest has its buffers
    /// back. Returns what is to be counted: nothing, unless its driver has broken the ring.
    pub fn finish(&mut self, rest: Rest) -> Packet {
        let Some(vmm) = &mut self.vmm else {
            return Packet::Nothing;
        };
        let Some(memory) = &vmm.memory else {
            return Packet::Nothing;
        };
        match vmm.rings[vmm.open].finish(&memory.guest, rest) {
            Ok(()) => Packet::Nothing,
            Err(Broken) => {
                tracing::debug!("the guest's driver has broken its ring");
                Packet::Malformed(0)
            }
        }
    }

    /// Bytes that wait for the guest; `None` while its driver takes none. While the VM is paused it takes
    /// no more.
    pub fn queued(&mut self) -> Option<usize> {
        self.flush();
        if self.takes_frames() {
            return Some(self.queued);
        }
        let is_paused = self.vmm.as_ref().is_some_and(Vmm::is_paused);
        is_paused.then_some(usize::MAX)
    }

    fn takes_frames(&self) -> bool {
        let vmm = self.vmm.as_ref();
        vmm.is_some_and(|vmm| vmm.memory.is_some() && vmm.rings[RX].is_running())
    }

    /// Makes room for a frame, `len` bytes from the Ethernet header on. Returns the reason if there is
    /// none.
    pub fn refusal(&mut self, vnet: VirtioNetHdr, len: usize) -> Option<DropReason> {
        let waits = self.vmm.as_ref().is_some_and(Vmm::is_paused);
        if !waits && !self.takes_frames() {
            return Some(DropReason::StaleVm);
        }
        let is_possible =
            takes(self.offloads(), vnet) || segmentation::has_room(&self.segments, vnet, len);
        if self.queued + len > MOST_QUEUED {
            self.flush();
        }
        let has_room = is_possible && self.queued + len <= MOST_QUEUED;
        (!has_room).then_some(DropReason::EngineBusy)
    }

    /// Puts a frame into the ring, or queues it, with its `virtio_net_hdr`. Returns the reason if it was
    /// dropped.
    pub fn send(&mut self, frame: &[u8]) -> Option<DropReason> {
        let (header, frame) = frame.split_first_chunk::<VNET_LEN>()?;
        let vnet = VirtioNetHdr::decode(header);
        let refusal = self.refusal(vnet, frame.len());
        if refusal.is_some() {
            return refusal;
        }
        if takes(self.offloads(), vnet) {
            self.put(header, frame);
            return None;
        }
        let mut segments = std::mem::take(&mut self.segments);
        let pushed = segmentation::push(&mut segments, vnet, frame);
        for segment in segments.frames() {
            self.put(&[0; VNET_LEN], segment);
        }
        segments.clear();
        self.segments = segments;
        (!pushed).then_some(DropReason::EngineBusy)
    }

    /// Room in the guest's buffers for a TCP frame of this version, of which `at` bytes from the Ethernet
    /// header on are headers, and `most` at most are payload. There is none while frames wait, where the
    /// guest takes no GSO frames, or where too many buffers would be filled. The caller returns it by
    /// [`RingLink::put_space`] or [`RingLink::forget`] before anything else.
    pub fn space(&mut self, version: Version, at: usize, most: usize) -> Option<Space> {
        let needed = match version {
            Version::V4 => CSUM | TSO4,
            Version::V6 => CSUM | TSO6,
        };
        if !self.queue.is_empty() || self.offloads() & needed != needed || !self.takes_frames() {
            return None;
        }
        let vmm = self.vmm.as_mut()?;
        let format = vmm.format();
        vmm.rings[RX].space(format, &vmm.memory.as_ref()?.guest, (at, most))
    }

    /// Is done with a space of which nothing came.
    pub fn forget(&mut self, space: Space) {
        if let Some(vmm) = &mut self.vmm {
            vmm.rings[RX].forget(space);
        }
    }

    /// Puts the frame into the ring whose payload, `len` bytes, is in a space: `headers`, with its
    /// `virtio_net_hdr`. Returns the reason if it was dropped.
    pub fn put_space(&mut self, headers: &[u8], space: Space, len: usize) -> Option<DropReason> {
        let (header, beginning) = headers.split_first_chunk::<VNET_LEN>()?;
        let Some(vmm) = &mut self.vmm else {
            return Some(DropReason::StaleVm);
        };
        let format = vmm.format();
        let (Some(memory), ring) = (&vmm.memory, &mut vmm.rings[RX]) else {
            return Some(DropReason::StaleVm);
        };
        match ring.put_space(format, &memory.guest, [header, beginning], (space, len)) {
            Ok(_) => {
                ring.counts.frame(beginning.len() + len);
                None
            }
            Err(Broken) => Some(DropReason::StaleVm),
        }
    }

    /// Offloads that the guest accepts, `TUN_F_*`.
    fn offloads(&self) -> u32 {
        let features = self.vmm.as_ref().map_or(0, |vmm| vmm.features);
        let has = |feature, offload| if features & feature != 0 { offload } else { 0 };
        has(feature::GUEST_CSUM, CSUM)
            | has(feature::GUEST_TSO4, TSO4)
            | has(feature::GUEST_TSO6, TSO6)
            | has(feature::GUEST_USO4, USO4)
            | has(feature::GUEST_USO6, USO6)
    }

    /// Puts a frame into the ring, or queues it behind others.
    fn put(&mut self, header: &[u8; VNET_LEN], frame: &[u8]) {
        if self.queue.is_empty() && self.write(header, frame) {
            return;
        }
        let queued = [&header[..], frame].concat();
        self.queued += queued.len();
        self.has_waited = true;
        self.queue.push_back(queued);
    }

    /// Returns whether a frame is done with: in the ring, or lost.
    fn write(&mut self, header: &[u8; VNET_LEN], frame: &[u8]) -> bool {
        let len = VNET_LEN + frame.len();
        let Some(vmm) = &mut self.vmm else {
            let lost = Lost::of(DropReason::StaleVm, header, len);
            self.lost.push(lost);
            return true;
        };
        let format = vmm.format();
        let (Some(memory), ring) = (&vmm.memory, &mut vmm.rings[RX]) else {
            // It waits until there is one.
            return false;
        };
        match ring.put(format, &memory.guest, [&header[..], frame]) {
            Ok(Put::Yes) => {
                ring.counts.frame(frame.len());
                true
            }
            Ok(Put::Later) => false,
            Ok(Put::TooLong) => {
                self.lost.push(Lost::of(DropReason::TooBig, header, len));
                true
            }
            Err(Broken) => {
                self.lost.push(Lost::of(DropReason::StaleVm, header, len));
                true
            }
        }
    }

    /// Puts as much of the queue into the ring as it takes.
    fn flush(&mut self) {
        while let Some(frame) = self.queue.pop_front() {
            let is_done = frame
                .split_first_chunk()
                .is_none_or(|(header, rest)| self.write(header, rest));
            if !is_done {
                self.queue.push_front(frame);
                return;
            }
            self.queued -= frame.len();
        }
    }

    /// At the end of a turn: puts what is queued into the ring, has kicks tell of buffers where they
    /// lack, and tells the driver what it wants to know. Returns the frames that were dropped meanwhile,
    /// for whatever reason, though they had been taken.
    pub fn settle(&mut self) -> Vec<Lost> {
        loop {
            self.flush();
            let is_left = !self.queue.is_empty();
            let Some(Vmm { memory, rings, .. }) = &mut self.vmm else {
                break;
            };
            let Some(memory) = memory else { break };
            if is_left && rings[RX].listen(&memory.guest) {
                continue;
            }
            if !is_left {
                rings[RX].be_quiet(&memory.guest);
            }
            rings.iter_mut().for_each(|ring| ring.call(&memory.guest));
            break;
        }
        if let Some(vmm) = &mut self.vmm {
            vmm.settle();
        }
        std::mem::take(&mut self.lost)
    }

    /// Whether frames have waited, and none does any more: who stopped because of them may go on. No kick
    /// tells that, if the driver added its buffers before one was asked for. To be called at the end of
    /// every turn.
    pub fn has_drained(&mut self) -> bool {
        self.queue.is_empty() && std::mem::take(&mut self.has_waited)
    }

    /// Ends the VMM's connection, and forgets what was under way to its guest.
    fn end(&mut self, epoll: &Epoll) {
        if let Some(vmm) = self.vmm.take() {
            vmm.end(epoll);
        }
        self.lose_queue();
        if self.is_for_one {
            self.is_over = true;
            // Nobody connects any more, and whoever else has the socket sees it hang up.
            if let Some(listener) = &self.listener {
                let _ = shutdown(listener.as_raw_fd(), Shutdown::Both);
            }
        }
        tracing::debug!("the VMM's connection has ended");
    }
}

#[cfg(test)]
#[path = "hostile_test.rs"]
mod hostile_tests;
#[cfg(test)]
#[path = "own_vmm_test.rs"]
mod own_vmm_tests;
#[cfg(test)]
#[path = "vhost_user_test.rs"]
mod tests;
