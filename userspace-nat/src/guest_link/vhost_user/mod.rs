//! The rings of a VMM's network card as the guest's link: a backend of the vhost-user protocol.
//!
//! # Theory of operation
//! A VMM connects to a Unix socket and describes its guest's memory and rings by [`message`]s; from then
//! on frames pass between the guest's buffers and the engine, and the VMM has no part in them. A frame
//! is copied once, out of the guest's memory ([`ring`]) or into it, behind its `virtio_net_hdr`, so that
//! GSO frames pass whole both ways.
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
//! The queue for the guest is bounded as that of a stream: what its ring has no buffers for waits here;
//! from [`ENOUGH_QUEUED`] bytes on no data is taken from the world's sockets, and from [`MOST_QUEUED`] on
//! a frame is dropped.
//!
//! Kicks are watched for edges: what tells them is never read, since the VMM's end decides whether a read
//! would wait. While there are frames the driver is asked for no kicks.
#[cfg(any(test, feature = "fake"))]
pub mod fake;
mod memory;
mod message;
mod ring;

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsRawFd as _, OwnedFd},
};

use nix::sys::{
    epoll::{Epoll, EpollEvent, EpollFlags},
    socket::{Shutdown, SockFlag, accept4, shutdown},
};
use slipgate_abi::DropReason;

pub use self::message::Wrong;
use self::{
    memory::Memory,
    message::{Connection, End, Message, request},
    ring::{Broken, Format, Put, Ring, Taken},
};
use super::{
    framing::{FrameQueue, MOST_QUEUED},
    packets::{CSUM, Packet, TSO4, USO4, sound, takes},
    segmentation,
    stream::{ENOUGH_QUEUED, owned},
};
use crate::port::{VNET_LEN, VirtioNetHdr};

/// Messages that one turn handles.
const MESSAGES_AT_ONCE: usize = 64;
/// Ring of frames for the guest, and ring of its own.
const RX: usize = 0;
const TX: usize = 1;

/// Features (virtio 1.2, sections 5.1.3 and 6; vhost-user), by bit.
mod feature {
    pub(super) const CSUM: u64 = 1 << 0;
    pub(super) const GUEST_CSUM: u64 = 1 << 1;
    pub(super) const GUEST_TSO4: u64 = 1 << 7;
    pub(super) const HOST_TSO4: u64 = 1 << 11;
    pub(super) const MRG_RXBUF: u64 = 1 << 15;
    pub(super) const INDIRECT_DESC: u64 = 1 << 28;
    pub(super) const EVENT_IDX: u64 = 1 << 29;
    pub(super) const PROTOCOL_FEATURES: u64 = 1 << 30;
    pub(super) const VERSION_1: u64 = 1 << 32;
    pub(super) const GUEST_USO4: u64 = 1 << 54;
    pub(super) const HOST_USO: u64 = 1 << 56;
    /// All that are offered.
    pub(super) const ALL: u64 = CSUM
        | GUEST_CSUM
        | GUEST_TSO4
        | HOST_TSO4
        | MRG_RXBUF
        | INDIRECT_DESC
        | EVENT_IDX
        | PROTOCOL_FEATURES
        | VERSION_1
        | GUEST_USO4
        | HOST_USO;
    /// Protocol feature: a request may ask for an answer.
    pub(super) const REPLY_ACK: u64 = 1 << 3;
}

/// A listening socket, and the VMM that is connected to it.
#[derive(Debug)]
pub struct RingLink {
    listener: OwnedFd,
    is_for_one: bool,
    is_over: bool,
    vmm: Option<Vmm>,
    /// Frames for which the ring had no room, with their headers, and their bytes together.
    queue: VecDeque<Vec<u8>>,
    queued: usize,
    /// Segments of a frame, before they are sent.
    segments: FrameQueue,
    /// Lengths of frames that were dropped after they had been queued.
    lost: Vec<usize>,
}

/// A connected VMM, and what it has told of its guest.
#[derive(Debug)]
struct Vmm {
    connection: Connection,
    /// Features that the driver has accepted, and those of the protocol.
    features: u64,
    protocol: u64,
    memory: Option<Memory>,
    rings: [Ring; 2],
    /// Whether the guest's ring may have frames of which no kick tells.
    has_input: bool,
}

impl RingLink {
    /// A link by a listening socket, non-blocking. `is_for_one`: whether it is over when the first guest
    /// has gone.
    pub fn new(listener: OwnedFd, is_for_one: bool) -> Self {
        Self {
            listener,
            is_for_one,
            is_over: false,
            vmm: None,
            queue: VecDeque::new(),
            queued: 0,
            segments: FrameQueue::default(),
            lost: Vec::new(),
        }
    }

    /// Adds the listening socket to a set.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn watch(&self, epoll: &Epoll, listener_key: u64) -> io::Result<()> {
        // Edge-triggered: it is accepted from when there is no guest, whatever the event.
        let events = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
        Ok(epoll.add(&self.listener, EpollEvent::new(events, listener_key))?)
    }

    /// Accepts the VMM that waits, if none is connected; returns whether it did. To be called at the end
    /// of every turn: who has waited causes no event.
    ///
    /// # Errors
    /// The kernel can't watch the connection.
    pub fn accept(&mut self, epoll: &Epoll, key: u64) -> io::Result<bool> {
        if self.is_over || self.vmm.is_some() {
            return Ok(false);
        }
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        // Nobody is there, or no descriptor is to be had: tried again in the next turn.
        let Ok(socket) = accept4(self.listener.as_raw_fd(), flags) else {
            return Ok(false);
        };
        let socket = owned(socket);
        epoll.add(&socket, EpollEvent::new(EpollFlags::EPOLLIN, key))?;
        self.vmm = Some(Vmm {
            connection: Connection::new(socket),
            features: 0,
            protocol: 0,
            memory: None,
            rings: Default::default(),
            has_input: false,
        });
        tracing::debug!("a VMM has connected");
        Ok(true)
    }

    /// Handles messages of the VMM that have come. `kick_key`: for kicks in the set. Returns why its
    /// connection was closed, if it was for a reason.
    pub fn hear(&mut self, epoll: &Epoll, kick_key: u64) -> Option<Wrong> {
        for _ in 0..MESSAGES_AT_ONCE {
            let vmm = self.vmm.as_mut()?;
            let heard = match vmm.connection.receive() {
                Ok(None) => return None,
                Ok(Some(message)) => vmm.handle(message, epoll, kick_key),
                Err(end) => Err(end),
            };
            match heard {
                Ok(()) => {}
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

    /// A kick has come: the guest may have sent, or added buffers.
    pub fn kicked(&mut self) {
        if let Some(vmm) = &mut self.vmm {
            vmm.has_input = true;
        }
    }

    /// Whether the guest may have frames that [`RingLink::next`] has not returned.
    pub fn has_input(&self) -> bool {
        self.vmm.as_ref().is_some_and(|vmm| vmm.has_input)
    }

    /// Copies the guest's next frame to the beginning of `into`, with its `virtio_net_hdr`; `into` has
    /// room for the longest.
    pub fn next(&mut self, into: &mut [u8]) -> Packet {
        let Some(vmm) = self.vmm.as_mut().filter(|vmm| vmm.has_input) else {
            return Packet::Nothing;
        };
        let format = vmm.format();
        let (Some(memory), [_, ring]) = (&vmm.memory, &mut vmm.rings) else {
            return Packet::Nothing;
        };
        if !ring.is_running() {
            vmm.has_input = false;
            return Packet::Nothing;
        }
        loop {
            match ring.take(format, &memory.guest, into) {
                Ok(Taken::Frame(len)) => {
                    let (header, frame) = into[..len].split_at_mut(VNET_LEN);
                    let vnet = header.first_chunk().map(VirtioNetHdr::decode);
                    let Some(vnet) = vnet.and_then(|vnet| sound(vnet, frame)) else {
                        return Packet::Malformed(len);
                    };
                    header.copy_from_slice(&vnet.encode());
                    return Packet::Frame(len);
                }
                Ok(Taken::Malformed(len)) => return Packet::Malformed(len),
                Ok(Taken::Nothing) if ring.listen(&memory.guest) => {}
                Ok(Taken::Nothing) => {
                    vmm.has_input = false;
                    return Packet::Nothing;
                }
                Err(Broken) => {
                    vmm.has_input = false;
                    tracing::debug!("the guest's driver has broken its ring");
                    return Packet::Malformed(0);
                }
            }
        }
    }

    /// Whether more data for the guest should be made now.
    pub fn has_room(&mut self) -> bool {
        if self.queued >= ENOUGH_QUEUED {
            self.flush();
        }
        self.queued < ENOUGH_QUEUED && self.takes_frames()
    }

    fn takes_frames(&self) -> bool {
        let vmm = self.vmm.as_ref();
        vmm.is_some_and(|vmm| vmm.memory.is_some() && vmm.rings[RX].is_running())
    }

    /// Makes room for a frame, `len` bytes from the Ethernet header on. Returns the reason if there is
    /// none.
    pub fn refusal(&mut self, vnet: VirtioNetHdr, len: usize) -> Option<DropReason> {
        if !self.takes_frames() {
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

    /// Offloads that the guest accepts, `TUN_F_*`.
    fn offloads(&self) -> u32 {
        let features = self.vmm.as_ref().map_or(0, |vmm| vmm.features);
        let has = |feature, offload| if features & feature != 0 { offload } else { 0 };
        has(feature::GUEST_CSUM, CSUM)
            | has(feature::GUEST_TSO4, TSO4)
            | has(feature::GUEST_USO4, USO4)
    }

    /// Puts a frame into the ring, or queues it behind others.
    fn put(&mut self, header: &[u8], frame: &[u8]) {
        if self.queue.is_empty() && self.write(header, frame) {
            return;
        }
        let queued = [header, frame].concat();
        self.queued += queued.len();
        self.queue.push_back(queued);
    }

    /// Returns whether a frame is done with: in the ring, or for nobody.
    fn write(&mut self, header: &[u8], frame: &[u8]) -> bool {
        let Some(vmm) = &mut self.vmm else {
            return true;
        };
        let format = vmm.format();
        let (Some(memory), [ring, _]) = (&vmm.memory, &mut vmm.rings) else {
            return true;
        };
        match ring.put(format, &memory.guest, [header, frame]) {
            Ok(Put::Yes) => true,
            Ok(Put::Later) => false,
            Ok(Put::TooLong) | Err(Broken) => {
                self.lost.push(header.len() + frame.len());
                true
            }
        }
    }

    /// Puts as much of the queue into the ring as it takes.
    fn flush(&mut self) {
        while let Some(frame) = self.queue.pop_front() {
            let (header, rest) = frame.split_at(VNET_LEN);
            if !self.write(header, rest) {
                self.queue.push_front(frame);
                return;
            }
            self.queued -= frame.len();
        }
    }

    /// At the end of a turn: puts what is queued into the ring, has kicks tell of buffers where they
    /// lack, and tells the driver what it wants to know. Returns lengths of frames that were dropped,
    /// with their headers.
    pub fn settle(&mut self) -> Vec<usize> {
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
        std::mem::take(&mut self.lost)
    }

    /// Ends the VMM's connection, and forgets what was under way to its guest.
    fn end(&mut self, epoll: &Epoll) {
        if let Some(vmm) = self.vmm.take() {
            for kick in vmm.rings.iter().filter_map(|ring| ring.kick.as_ref()) {
                // Others may have the same: it would stay in the set.
                let _ = epoll.delete(kick);
            }
            let _ = epoll.delete(vmm.connection.socket());
        }
        self.queue.clear();
        self.queued = 0;
        if self.is_for_one {
            self.is_over = true;
            // Nobody connects any more, and whoever else has the socket sees it hang up.
            let _ = shutdown(self.listener.as_raw_fd(), Shutdown::Both);
        }
        tracing::debug!("the VMM's connection has ended");
    }
}

impl Vmm {
    fn format(&self) -> Format {
        let has = |feature| self.features & feature != 0;
        // virtio 1.2, section 5.1.6.1.
        let counts = has(feature::VERSION_1) || has(feature::MRG_RXBUF);
        Format {
            header_len: if counts { VNET_LEN + 2 } else { VNET_LEN },
            merges: has(feature::MRG_RXBUF),
            event_idx: has(feature::EVENT_IDX),
        }
    }

    /// Carries out a request, and answers it.
    fn handle(&mut self, message: Message, epoll: &Epoll, kick_key: u64) -> Result<(), End> {
        let (number, needs_reply) = (message.request, message.needs_reply);
        let answer = self
            .carry_out(message, epoll, kick_key)
            .map_err(End::Wrong)?;
        match answer {
            Some(answer) => self.connection.answer(number, &answer),
            None if needs_reply && self.protocol & feature::REPLY_ACK != 0 => {
                self.connection.answer(number, &0_u64.to_ne_bytes())
            }
            None => Ok(()),
        }
    }

    /// Carries out a request. Returns the body of its answer, if it has one.
    fn carry_out(
        &mut self,
        message: Message,
        epoll: &Epoll,
        kick_key: u64,
    ) -> Result<Option<Vec<u8>>, Wrong> {
        let number = message.request;
        let takes_fds = matches!(
            number,
            request::SET_MEM_TABLE
                | request::SET_VRING_KICK
                | request::SET_VRING_CALL
                | request::SET_VRING_ERR
        );
        if !takes_fds && !message.fds.is_empty() {
            return Err(Wrong::Descriptors(number));
        }
        let long = |value: u64| Ok(Some(value.to_ne_bytes().to_vec()));
        match number {
            request::GET_FEATURES => return long(feature::ALL),
            request::GET_PROTOCOL_FEATURES => return long(feature::REPLY_ACK),
            request::SET_FEATURES => {
                let [features] = message.longs(0)?;
                if features & !feature::ALL != 0 {
                    return Err(Wrong::Body(number));
                }
                self.features = features;
            }
            request::SET_PROTOCOL_FEATURES => {
                let [features] = message.longs(0)?;
                self.protocol = features & feature::REPLY_ACK;
            }
            // There is one owner, and packets tell other hosts where a guest is.
            request::SET_OWNER | request::SEND_RARP => {}
            request::RESET_OWNER => {
                for nth in [RX, TX] {
                    self.stop(nth, epoll);
                }
            }
            request::SET_MEM_TABLE => {
                self.memory = Some(Memory::map(message)?);
                for nth in [RX, TX] {
                    if self.rings[nth].kick.is_some() {
                        self.restart(nth)?;
                    }
                }
            }
            request::SET_VRING_NUM => {
                let [nth, size] = message.words()?;
                self.ring(nth, number)?.set_size(size)?;
            }
            request::SET_VRING_BASE => {
                let [nth, base] = message.words()?;
                self.ring(nth, number)?.set_base(base)?;
            }
            request::GET_VRING_BASE => {
                let [nth, _] = message.words()?;
                self.ring(nth, number)?;
                let base = self.stop(nth as usize, epoll);
                let words = [nth, base.into()];
                return Ok(Some(words.iter().flat_map(|w| w.to_ne_bytes()).collect()));
            }
            request::SET_VRING_ADDR => {
                let nth = message
                    .body
                    .first_chunk()
                    .map(|nth| u32::from_ne_bytes(*nth));
                let [descriptors, used, available, _log] = message.longs(8)?;
                let ring = self.ring(nth.unwrap_or(u32::MAX), number)?;
                ring.set_addresses([descriptors, used, available]);
            }
            request::SET_VRING_ENABLE => {
                let [nth, is_enabled] = message.words()?;
                self.ring(nth, number)?.enable(is_enabled != 0);
                self.has_input = true;
            }
            request::SET_VRING_KICK => {
                let (nth, kick) = self.of_ring(message)?;
                self.stop(nth, epoll);
                // Without one the ring would have to be looked at all the time.
                let kick = kick.ok_or(Wrong::Kick)?;
                let events = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
                let event = EpollEvent::new(events, kick_key);
                epoll.add(&kick, event).map_err(|_| Wrong::Kick)?;
                self.rings[nth].kick = Some(kick);
                self.restart(nth)?;
            }
            request::SET_VRING_CALL => {
                let (nth, call) = self.of_ring(message)?;
                self.rings[nth].set_call(call);
            }
            // Nothing is told there.
            request::SET_VRING_ERR => drop(self.of_ring(message)?),
            _ => return Err(Wrong::Request(number)),
        }
        Ok(None)
    }

    /// The ring of a message about a descriptor of one, and the descriptor.
    fn of_ring(&mut self, message: Message) -> Result<(usize, Option<OwnedFd>), Wrong> {
        let number = message.request;
        let [told] = message.longs(0)?;
        let mut fds = message.fds.into_iter();
        let fd = fds.next();
        // Bit 8: there is none.
        if fd.is_some() == (told & 1 << 8 != 0) || fds.next().is_some() {
            return Err(Wrong::Descriptors(number));
        }
        let nth = (told & 0xff) as u32;
        self.ring(nth, number)?;
        Ok((nth as usize, fd))
    }

    fn ring(&mut self, nth: u32, request: u32) -> Result<&mut Ring, Wrong> {
        let ring = self.rings.get_mut(nth as usize);
        ring.ok_or(Wrong::Body(request))
    }

    /// Starts a ring, or has it go on in other memory.
    fn restart(&mut self, nth: usize) -> Result<(), Wrong> {
        let (format, needs_enabling) = (
            self.format(),
            self.features & feature::PROTOCOL_FEATURES != 0,
        );
        let memory = self.memory.as_ref().ok_or(Wrong::Ring)?;
        let ring = &mut self.rings[nth];
        ring.pause();
        ring.start(format, &memory.guest, |address| memory.of_vmm(address))?;
        if !needs_enabling {
            ring.enable(true);
        }
        self.has_input = true;
        Ok(())
    }

    fn stop(&mut self, nth: usize, epoll: &Epoll) -> u16 {
        if let Some(kick) = &self.rings[nth].kick {
            let _ = epoll.delete(kick);
        }
        self.rings[nth].stop()
    }
}

#[cfg(test)]
#[path = "vhost_user_test.rs"]
mod tests;
