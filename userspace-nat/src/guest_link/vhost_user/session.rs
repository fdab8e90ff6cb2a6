//! A connected VMM: what it has told of its guest, and how its requests are carried out.
use std::os::fd::OwnedFd;

use nix::{
    errno::Errno,
    sys::epoll::{Epoll, EpollEvent, EpollFlags},
};

use super::{
    memory::Memory,
    message::{Connection, End, Message, Wrong, request},
    ring::{Format, Ring},
    tally::Tally,
};
use crate::port::VNET_LEN;

/// Ring of frames for the guest, and ring of its own: the first pair. The others are behind it in the same
/// order.
pub(super) const RX: usize = 0;
pub(super) const TX: usize = 1;
/// Pairs of rings that a VMM may give.
pub(super) const MOST_PAIRS: usize = 16;
/// Frames that are read of a ring before the next pair's has its turn.
const IN_A_ROW: usize = 16;

/// Features (virtio 1.2, sections 5.1.3 and 6; vhost-user), by bit.
pub(super) mod feature {
    pub(in super::super) const CSUM: u64 = 1 << 0;
    pub(in super::super) const GUEST_CSUM: u64 = 1 << 1;
    pub(in super::super) const GUEST_TSO4: u64 = 1 << 7;
    pub(in super::super) const GUEST_TSO6: u64 = 1 << 8;
    pub(in super::super) const HOST_TSO4: u64 = 1 << 11;
    pub(in super::super) const HOST_TSO6: u64 = 1 << 12;
    pub(in super::super) const MRG_RXBUF: u64 = 1 << 15;
    /// The VMM's own affair, which serves the control queue: some offer their guest both only if the engine
    /// does.
    pub(in super::super) const CTRL_VQ: u64 = 1 << 17;
    pub(in super::super) const MQ: u64 = 1 << 22;
    pub(in super::super) const INDIRECT_DESC: u64 = 1 << 28;
    pub(in super::super) const EVENT_IDX: u64 = 1 << 29;
    pub(in super::super) const PROTOCOL_FEATURES: u64 = 1 << 30;
    pub(in super::super) const VERSION_1: u64 = 1 << 32;
    pub(in super::super) const GUEST_USO4: u64 = 1 << 54;
    pub(in super::super) const GUEST_USO6: u64 = 1 << 55;
    pub(in super::super) const HOST_USO: u64 = 1 << 56;
    /// All that are offered.
    pub(in super::super) const ALL: u64 = CSUM
        | GUEST_CSUM
        | GUEST_TSO4
        | GUEST_TSO6
        | HOST_TSO4
        | HOST_TSO6
        | MRG_RXBUF
        | CTRL_VQ
        | MQ
        | INDIRECT_DESC
        | EVENT_IDX
        | PROTOCOL_FEATURES
        | VERSION_1
        | GUEST_USO4
        | GUEST_USO6
        | HOST_USO;
    /// Protocol features: the VMM may ask how many pairs there may be, and a request for an answer.
    pub(in super::super) const PROTOCOL_MQ: u64 = 1 << 0;
    pub(in super::super) const REPLY_ACK: u64 = 1 << 3;
    /// All of the protocol that are offered.
    pub(in super::super) const PROTOCOL: u64 = PROTOCOL_MQ | REPLY_ACK;
}

/// A connected VMM, and what it has told of its guest.
#[derive(Debug)]
pub(super) struct Vmm {
    pub(super) connection: Connection,
    /// Features that the driver has accepted, and those of the protocol.
    pub(super) features: u64,
    protocol: u64,
    pub(super) memory: Option<Memory>,
    /// The first pair, and those of which the VMM has told.
    pub(super) rings: Vec<Ring>,
    /// Pair whose turn it is that its frames are read, and how many were in a row.
    turn: usize,
    in_a_row: usize,
    /// Ring of the frame whose rest was not copied.
    pub(super) open: usize,
    /// Whether the guest's rings may have frames of which no kick tells.
    pub(super) has_input: bool,
    /// Kicks that have come.
    pub(super) kicks: u64,
    /// Whether it is slipgate's own, and where that one reads counts.
    is_own: bool,
    tally: Option<Tally>,
    /// Whether a driver has accepted features, and was not reset since.
    has_driver: bool,
    /// Changes that the queue has yet to follow: other features of the driver, and its reset.
    pub(super) has_other_features: bool,
    pub(super) was_reset: bool,
    /// For tests: what the host says when a doorbell is to be watched.
    #[cfg(test)]
    pub(super) refuses_kicks: Option<Errno>,
}

impl Vmm {
    /// A VMM that has told nothing, by its connection.
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self {
            connection: Connection::new(socket),
            features: 0,
            protocol: 0,
            memory: None,
            rings: vec![Ring::default(), Ring::default()],
            turn: 0,
            in_a_row: 0,
            open: TX,
            has_input: false,
            kicks: 0,
            is_own: false,
            tally: None,
            has_driver: false,
            has_other_features: false,
            was_reset: false,
            #[cfg(test)]
            refuses_kicks: None,
        }
    }

    /// Slipgate's own VMM, as [`Vmm::new`].
    pub(super) fn own(socket: OwnedFd) -> Self {
        Self {
            is_own: true,
            ..Self::new(socket)
        }
    }

    pub(super) fn socket(&self) -> &OwnedFd {
        self.connection.socket()
    }

    /// Whether frames for its guest wait until its ring runs again.
    pub(super) fn is_paused(&self) -> bool {
        // A broken ring runs only after a reset, which empties the queue.
        self.is_own && self.has_driver && !self.rings[RX].is_broken()
    }

    /// At the end of a turn: tells of broken rings, and what was carried.
    pub(super) fn settle(&mut self) {
        self.rings.iter_mut().for_each(Ring::tell_broken);
        if let Some(tally) = &self.tally {
            tally.set(self.kicks, &self.rings);
        }
    }

    /// Handles the next message, if one has come. Returns whether it has.
    pub(super) fn hear(&mut self, epoll: &Epoll, kick_key: u64) -> Result<bool, End> {
        match self.connection.receive()? {
            Some(message) => self.handle(message, epoll, kick_key).map(|()| true),
            None => Ok(false),
        }
    }

    /// Takes its descriptors out of the set.
    pub(super) fn end(self, epoll: &Epoll) {
        for kick in self.rings.iter().filter_map(|ring| ring.kick.as_ref()) {
            // Others may have the same: it would stay in the set.
            let _ = epoll.delete(kick);
        }
        let _ = epoll.delete(self.connection.socket());
    }

    /// Pairs of rings.
    pub(super) fn pairs(&self) -> usize {
        self.rings.len() / 2
    }

    /// The ring of the guest's frames whose turn it is.
    pub(super) fn ring_in_turn(&self) -> usize {
        2 * self.turn + TX
    }

    /// Has the next pair have its turn, at once or when this one has had enough of them.
    pub(super) fn pass_turn(&mut self, at_once: bool) {
        self.in_a_row += 1;
        if at_once || self.in_a_row >= IN_A_ROW {
            self.turn = (self.turn + 1) % self.pairs();
            self.in_a_row = 0;
        }
    }

    pub(super) fn format(&self) -> Format {
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
                | request::SET_TALLY
        );
        if !takes_fds && !message.fds.is_empty() {
            return Err(Wrong::Descriptors(number));
        }
        let long = |value: u64| Ok(Some(value.to_ne_bytes().to_vec()));
        match number {
            request::GET_FEATURES => return long(feature::ALL),
            request::GET_PROTOCOL_FEATURES => return long(feature::PROTOCOL),
            // QEMU takes it for pairs, Cloud Hypervisor for rings.
            request::GET_QUEUE_NUM => return long(MOST_PAIRS as u64),
            request::SET_FEATURES => {
                let [features] = message.longs(0)?;
                if features & !feature::ALL != 0 {
                    return Err(Wrong::Body(number));
                }
                self.features = features;
                self.has_driver = true;
                self.has_other_features = true;
            }
            request::SET_PROTOCOL_FEATURES => {
                let [features] = message.longs(0)?;
                self.protocol = features & feature::PROTOCOL;
            }
            // There is one owner, and packets tell other hosts where a guest is.
            request::SET_OWNER | request::SEND_RARP => {}
            request::RESET_OWNER => {
                for nth in 0..self.rings.len() {
                    self.stop(nth, epoll);
                }
                self.has_driver = false;
                self.was_reset = true;
            }
            request::SET_MEM_TABLE => {
                self.memory = Some(Memory::map(message, self.is_own)?);
                for nth in 0..self.rings.len() {
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
                self.watch(&kick, epoll, kick_key)
                    .map_err(|error| match error {
                        // This user watches too much already, or the host has no memory.
                        Errno::ENOSPC | Errno::ENOMEM => Wrong::NoPlace,
                        _ => Wrong::Kick,
                    })?;
                self.rings[nth].kick = Some(kick);
                self.restart(nth)?;
            }
            request::SET_VRING_CALL => {
                let (nth, call) = self.of_ring(message)?;
                self.rings[nth].set_call(call);
            }
            request::SET_VRING_ERR => {
                let (nth, err) = self.of_ring(message)?;
                self.rings[nth].set_err(err);
            }
            request::SET_TALLY if self.is_own => self.tally = Some(Tally::map(message)?),
            _ => return Err(Wrong::Request(number)),
        }
        Ok(None)
    }

    /// Has a set tell of a doorbell's kicks.
    fn watch(&self, kick: &OwnedFd, epoll: &Epoll, key: u64) -> Result<(), Errno> {
        #[cfg(test)]
        if let Some(error) = self.refuses_kicks {
            return Err(error);
        }
        let events = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
        epoll.add(kick, EpollEvent::new(events, key))
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

    /// The ring of this number, with which its pair begins to be.
    fn ring(&mut self, nth: u32, request: u32) -> Result<&mut Ring, Wrong> {
        let nth = nth as usize;
        let most = if self.is_own { 1 } else { MOST_PAIRS };
        if nth >= 2 * most {
            return Err(Wrong::Body(request));
        }
        let rings = self.rings.len().max(2 * (nth / 2 + 1));
        self.rings.resize_with(rings, Ring::default);
        Ok(&mut self.rings[nth])
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
