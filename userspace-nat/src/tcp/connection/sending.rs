//! Data and FIN to the guest, and what is due at a time.
use slipgate_abi::tcp::Flags;

use super::{Connection, DUPLICATES, Due, GIVE_UP_AFTER, MOST_SEGMENTS, Sendable, State};
use crate::tcp::{
    before, later,
    wire::{Header, PSH},
};

impl Connection {
    /// Returns the place of the next bytes for the guest, if it takes some now: a gap that it has told of,
    /// or what comes next. If there are any bytes, [`Connection::send`] is to be called; at the end of the
    /// server's data, [`Connection::send_fin`].
    pub fn sendable(&self) -> Option<Sendable> {
        if !self.is_sending() {
            return None;
        }
        let (at, end) = self.place();
        if self.fin.is_some_and(|fin| before(fin, at)) {
            return None;
        }
        let offset = at.wrapping_sub(self.unacknowledged);
        let room = self.window.saturating_sub(offset);
        let mss = u32::from(self.mss());
        let least = match end {
            // Small pieces only when nothing is under way (RFC 9293 section 3.8.6.2.1).
            None => mss.min(self.window / 2).max(1),
            Some(_) => 1,
        };
        let most = room
            .min(end.map_or(u32::MAX, |end| end.wrapping_sub(at)))
            .min(self.most_payload - self.options_len() as u32)
            .min(mss * MOST_SEGMENTS);
        (room >= least || room > 0 && offset == 0).then_some(Sendable {
            offset,
            most,
            options_len: self.options_len(),
        })
    }

    /// Whether something is to be sent again that the guest has told of as a gap.
    pub fn has_hole(&self) -> bool {
        self.is_sending() && self.hole().is_some()
    }

    /// Where the next bytes begin, and where they end if the guest has what is behind them.
    fn place(&self) -> (u32, Option<u32>) {
        if let Some((first, end)) = self.hole() {
            return (first, Some(end));
        }
        if !before(self.next, self.sent) {
            return (self.next, None);
        }
        let at = self.scoreboard.skip(self.next);
        (at, self.scoreboard.next_range(at))
    }

    /// Returns the next gap that is lost and was not sent again (NextSeg of RFC 6675 section 4, its first
    /// rule).
    fn hole(&self) -> Option<(u32, u32)> {
        if self.scoreboard.is_empty() {
            return None;
        }
        let first = self.unacknowledged;
        let mss = u32::from(self.mss());
        let mut limit = self.scoreboard.lost_before(mss).unwrap_or(first);
        if self.duplicates >= DUPLICATES
            && limit == first
            && let Some(range) = self.scoreboard.next_range(first)
        {
            let gap = range.wrapping_sub(first);
            limit = first.wrapping_add(gap.min(mss));
        }
        let at = self.scoreboard.skip(self.resent);
        let end = match self.scoreboard.next_range(at) {
            Some(range) if before(range, limit) => range,
            _ => limit,
        };
        let end = match self.fin {
            Some(fin) if before(fin, end) => fin,
            _ => end,
        };
        before(at, end).then_some((at, end))
    }

    /// The next bytes for the guest wait for its window, which is probed from now on: the segment
    /// that opens it may be lost.
    pub fn blocked(&mut self, now_ns: u64) {
        if self.is_sending() && self.unacknowledged == self.sent && self.due_ns.is_none() {
            self.wait_again(now_ns);
        }
    }

    /// Returns the header for the next `bytes` of the socket's data.
    pub fn send(&mut self, bytes: u32, room: Option<u32>, now_ns: u64) -> Header {
        self.now_ns = now_ns;
        if let Some(room) = room {
            self.open_window(if self.turned_away { 0 } else { room });
            // What is held behind a gap is told by a segment without data.
            self.owes_ack &= !self.held.is_empty();
        }
        let (at, _) = self.place();
        let header = Header {
            sequence: at,
            ..self.header(Flags::ACK | PSH)
        };
        self.advance(at, bytes, now_ns);
        header
    }

    /// All of the server's data was sent, and it has ended its side. Returns our FIN.
    pub fn send_fin(&mut self, now_ns: u64) -> Option<Header> {
        let (at, _) = self.place();
        if !self.is_sending() || self.fin.is_some_and(|fin| fin != at) {
            return None;
        }
        self.now_ns = now_ns;
        let header = Header {
            sequence: at,
            ..self.header(Flags::ACK | Flags::FIN)
        };
        self.fin = Some(at);
        self.advance(at, 1, now_ns);
        self.state = match self.state {
            State::Established => State::FinWait1,
            State::CloseWait => State::LastAck,
            other => other,
        };
        Some(header)
    }

    fn advance(&mut self, at: u32, numbers: u32, now_ns: u64) {
        let end = at.wrapping_add(numbers);
        let is_again = before(at, self.sent);
        self.next = later(self.next, end);
        self.sent = later(self.sent, self.next);
        if is_again {
            self.resent = later(self.resent, end);
            self.sent_by_resent = self.sent;
        }
        if self.due_ns.is_none() || is_again && at == self.unacknowledged {
            self.wait_again(now_ns);
        }
    }

    /// Where what is to be sent again was not sent yet since the timer said so: has the timer begin anew,
    /// and counts nothing, for the guest has nothing to answer. Returns whether that is so.
    pub(crate) fn waits_to_resend(&mut self, now_ns: u64) -> bool {
        let is_to_resend = self.due_ns.is_some_and(|due_ns| due_ns <= now_ns)
            && self.is_sending()
            && self.window > 0
            && self.unacknowledged != self.sent
            && self.next == self.unacknowledged;
        if is_to_resend {
            self.wait_again(now_ns);
        }
        is_to_resend
    }

    /// Does what is due.
    pub fn on_time(&mut self, now_ns: u64) -> Due {
        if self.due_ns.is_none_or(|due_ns| due_ns > now_ns) {
            return Due::Nothing;
        }
        self.due_ns = None;
        self.now_ns = now_ns;
        match self.state {
            State::TimeWait | State::Closed => {
                self.close();
                return Due::Forget;
            }
            State::Connecting => return Due::Nothing,
            State::SynSent if self.next == self.unacknowledged => {
                return Due::Send(self.first_syn(now_ns));
            }
            _ => {}
        }
        self.waits += 1;
        self.unheard += 1;
        let is_probe = self.unacknowledged == self.sent;
        // A guest that answers each probe keeps its connection, however long its window is closed.
        if self.unheard > GIVE_UP_AFTER {
            return Due::GiveUp(self.reset());
        }
        self.wait_again(now_ns);
        match self.state {
            State::SynSent => return Due::Send(self.opening_syn()),
            State::SynReceived => return Due::Send(self.syn()),
            _ => {}
        }
        if is_probe {
            return Due::Send(self.probe());
        }
        self.duplicates = 0;
        self.repairing = Some(self.sent);
        self.next = self.unacknowledged;
        // The guest may have forgotten what it had (RFC 2018 section 8).
        self.scoreboard.clear();
        self.resent = self.unacknowledged;
        match self.window {
            // An acknowledgement that came late has closed it over what was sent: that is sent again
            // once the guest has said what its window is.
            0 => Due::Send(self.probe()),
            _ => Due::Resend,
        }
    }

    /// Returns a byte that the guest has: it answers with its window (as Linux probes).
    fn probe(&mut self) -> Header {
        Header {
            sequence: self.unacknowledged.wrapping_sub(1),
            ..self.acknowledgement()
        }
    }
}
