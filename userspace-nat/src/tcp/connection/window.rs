//! Acknowledgements, and the window that they announce: the room of the socket's send queue.
use super::{Connection, DUPLICATES, State};
use crate::tcp::{before, earlier, later, wire::Header};

impl Connection {
    /// Whether an acknowledgement is owed, for which [`Connection::acknowledge`] is to be called.
    pub fn owes_acknowledgement(&self) -> bool {
        self.owes_ack
    }

    /// Whether the window is smaller than a frame, so that the guest may be waiting for room.
    pub fn is_short_of_room(&self) -> bool {
        let window = self.edge.wrapping_sub(self.next_from_guest);
        self.is_receiving() && (self.turned_away || window < self.most_payload)
    }

    /// Whether bytes were turned away that the guest has not been asked for again.
    pub fn has_turned_away(&self) -> bool {
        self.turned_away
    }

    /// Returns an acknowledgement, with a window for `room` bytes.
    pub fn acknowledge(&mut self, room: u32) -> Header {
        self.open_window(if self.turned_away { 0 } else { room });
        self.owes_ack = false;
        self.acknowledgement()
    }

    /// The socket has room again, bytes. Returns an acknowledgement that says so, and how many times
    /// to send it: so often that a guest whose bytes were turned away sends them again at once, if it sends
    /// no selective acknowledgements. One that does counts no duplicates (RFC 6675 section 2), and waits
    /// for its timer.
    pub fn reopen(&mut self, room: u32) -> (Header, u8) {
        let times = if self.turned_away { 1 + DUPLICATES } else { 1 };
        self.turned_away = false;
        (self.acknowledge(room), times)
    }

    /// Tells the guest from now on that a segment behind a gap is kept: in the first of the blocks, with
    /// what it touches (RFC 2018 section 4).
    pub(in crate::tcp) fn hold(&mut self, first: u32, end: u32) {
        if !self.sack_permitted {
            return;
        }
        let mut block = (first, end);
        for (start, last) in self.held.iter() {
            if !before(block.1, start) && !before(last, block.0) {
                block = (earlier(block.0, start), later(block.1, last));
            }
        }
        let (first, end) = block;
        self.held
            .retain(|(start, last)| before(end, start) || before(last, first));
        self.held.push_front(block);
    }

    pub(super) fn open_window(&mut self, room: u32) {
        let most = u32::from(u16::MAX) << self.scales.map_or(0, |(ours, _)| ours);
        let edge = self.next_from_guest.wrapping_add(room.min(most));
        let edge = self.allowed.map_or(edge, |allowed| earlier(edge, allowed));
        if before(self.edge, edge) && self.is_receiving_or_before() {
            self.edge = edge;
        }
    }

    /// Has the window open to `bytes` at most from now on, or as far as it is open already, until more is
    /// allowed.
    pub(crate) fn hold_window(&mut self, bytes: u32) {
        let to = self.next_from_guest.wrapping_add(bytes);
        self.allowed = Some(later(self.edge, to));
    }

    /// Has the window open as far as there is room from now on.
    pub(crate) fn release_window(&mut self) {
        self.allowed = None;
    }

    /// Whether the window opens only as far as is allowed.
    pub(crate) fn is_window_held(&self) -> bool {
        self.allowed.is_some()
    }

    /// Bytes that the guest may be allowed to send until there are `most` that it may: 0 once it has
    /// ended, or where nothing holds it.
    pub(crate) fn lacks(&self, most: u32) -> u32 {
        let next = self.next_from_guest;
        match self.allowed {
            Some(allowed) if self.is_receiving() && before(next, allowed) => {
                most.saturating_sub(allowed.wrapping_sub(next))
            }
            Some(_) if self.is_receiving() => most,
            _ => 0,
        }
    }

    /// Bytes that the guest was allowed to send and has not sent, if its window is held.
    pub(crate) fn allowed_left(&self) -> u32 {
        let next = self.next_from_guest;
        self.allowed
            .map_or(0, |allowed| later(allowed, next).wrapping_sub(next))
    }

    /// Lets the guest send so many bytes more, if its window is held.
    pub(crate) fn allow(&mut self, bytes: u32) {
        let next = self.next_from_guest;
        self.allowed = self
            .allowed
            .map(|allowed| later(allowed, next).wrapping_add(bytes));
    }

    /// Has the window open for `room` bytes, as far as the guest may send them. An acknowledgement is owed
    /// if it does: one that says the same again would be a duplicate.
    pub(crate) fn widen_window(&mut self, room: u32) {
        let edge = self.edge;
        self.open_window(if self.turned_away { 0 } else { room });
        self.owes_ack |= self.edge != edge;
    }

    fn is_receiving_or_before(&self) -> bool {
        self.is_receiving()
            || matches!(
                self.state,
                State::Connecting | State::SynSent | State::SynReceived
            )
    }
}
