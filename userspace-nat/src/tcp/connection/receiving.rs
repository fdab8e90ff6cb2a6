//! What a segment of the guest means (RFC 9293 section 3.10.7.4, RFC 5961).
use slipgate_abi::tcp::Flags;

use super::{Connection, DUPLICATES, Host, Received, State, TIME_WAIT_NS};
use crate::{
    clock::SECOND_NS,
    tcp::{before, later, reset_for, wire::Segment},
};

impl Connection {
    /// Takes a segment of the guest.
    pub fn receive(&mut self, segment: &Segment, now_ns: u64) -> Received {
        let mut received = Received::default();
        let silent_ns = now_ns.saturating_sub(std::mem::replace(&mut self.now_ns, now_ns));
        if self.state == State::Closed {
            received.reply = reset_for(segment);
            return received;
        }
        if self.state == State::SynSent {
            return self.receive_answer(segment);
        }
        if segment.has(Flags::RST) {
            return self.receive_reset(segment);
        }
        if segment.has(Flags::SYN) {
            let is_first = segment.sequence.wrapping_add(1) == self.next_from_guest;
            received.reply = match self.state {
                State::Connecting => None,
                State::SynReceived if is_first && !segment.has(Flags::ACK) => Some(self.syn()),
                // A challenge (RFC 5961 section 4).
                _ => Some(self.acknowledgement()),
            };
            return received;
        }
        if self.state == State::Connecting || !segment.has(Flags::ACK) {
            return received;
        }
        self.unheard = 0;
        if self.is_outdated(segment) {
            self.owes_ack = true;
            return received;
        }
        if self.state == State::SynReceived {
            if segment.acknowledgement != self.sent {
                received.reply = reset_for(segment);
                return received;
            }
            self.state = State::Established;
            self.unacknowledged = self.sent;
            self.resent = self.sent;
            self.measure_round_trip(segment, self.sent);
            self.waits = 0;
            self.rest();
        } else if before(self.sent, segment.acknowledgement) {
            // Of what was never sent (RFC 9293 section 3.10.7.4).
            self.owes_ack = true;
            return received;
        }
        self.note_times(segment);
        self.receive_acknowledgement(segment, &mut received, now_ns);
        received.keepalive_ns = self.is_keepalive(segment, silent_ns).then_some(silent_ns);
        self.receive_payload(segment, &mut received);
        received
    }

    /// Whether a segment is a keep-alive: of one byte at most, right before what is next, after a silence
    /// of `silent_ns`. A probe of our window is of the same form, but the window is closed then; so are an
    /// acknowledgement that another segment overtook, which comes at once, and the last byte that is sent
    /// again, for as long as a retransmission timer may have grown.
    fn is_keepalive(&self, segment: &Segment, silent_ns: u64) -> bool {
        const LEAST_SILENCE_NS: u64 = SECOND_NS / 2;
        const LONGEST_RETRANSMISSION_NS: u64 = 10 * SECOND_NS;
        let least_ns = match segment.payload_len {
            0 => LEAST_SILENCE_NS,
            _ => LONGEST_RETRANSMISSION_NS,
        };
        silent_ns >= least_ns
            && segment.sequence.wrapping_add(1) == self.next_from_guest
            && segment.payload_len <= 1
            && !segment.has(Flags::FIN)
            && self.window_left() > 0
            && matches!(self.state, State::Established | State::FinWait2)
    }

    fn receive_reset(&mut self, segment: &Segment) -> Received {
        let mut received = Received::default();
        let behind = segment.sequence.wrapping_sub(self.next_from_guest);
        let window = self.edge.wrapping_sub(self.next_from_guest);
        if behind == 0 {
            // A guest that forgot the connection before its last acknowledgement arrived has had all of
            // it (RFC 9293 section 3.10.7.4); what it sent is still on its way from the host's socket.
            let is_over = match self.state {
                State::TimeWait => true,
                State::LastAck | State::Closing => self.fin == Some(self.unacknowledged),
                _ => false,
            };
            received.host = if is_over { Host::Closes } else { Host::Reset };
            self.close();
        } else if behind < window {
            // RFC 5961 section 3: one that was guessed, or the guest sends the right one now.
            received.reply = Some(self.acknowledgement());
        }
        received
    }

    fn receive_acknowledgement(&mut self, segment: &Segment, received: &mut Received, now_ns: u64) {
        let to = segment.acknowledgement;
        let window = u32::from(segment.window) << self.scales.map_or(0, |(_, theirs)| theirs);
        let (sequence, acknowledgement) = self.window_by;
        // An old acknowledgement's window began elsewhere (RFC 9293 section 3.10.7.4). One of something
        // new is the newest whatever its sequence number, as of a segment that is sent again; the window
        // before it would end further on from there than any that the guest has announced.
        let is_newer = before(self.unacknowledged, to)
            || to == self.unacknowledged
                && (before(sequence, segment.sequence)
                    || sequence == segment.sequence && !before(to, acknowledgement));
        let is_update = is_newer && window != self.window;
        if is_newer {
            self.window = window;
            self.window_by = (segment.sequence, to);
        }
        if before(self.unacknowledged, to) {
            let mut bytes = to.wrapping_sub(self.unacknowledged);
            let fin_acknowledged = self.fin.is_some_and(|fin| before(fin, to));
            bytes -= u32::from(fin_acknowledged);
            received.acknowledged = bytes;
            self.measure_round_trip(segment, to);
            self.unacknowledged = to;
            self.scoreboard.acknowledged(to);
            self.resent = later(self.resent, to);
            if before(self.next, to) {
                self.next = to;
            }
            self.duplicates = 0;
            self.repairing = self.repairing.filter(|until| before(to, *until));
            self.waits = 0;
            self.rest();
            if self.unacknowledged != self.sent {
                self.wait_again(now_ns);
            }
            if fin_acknowledged {
                self.fin_is_acknowledged(received, now_ns);
            }
        } else if to == self.unacknowledged
            && segment.payload_len == 0
            && !segment.has(Flags::FIN)
            && !is_update
            && self.unacknowledged != self.sent
        {
            self.duplicates = self.duplicates.saturating_add(1);
            let is_told =
                self.sack_permitted && !(self.scoreboard.is_empty() && segment.sack.is_empty());
            if self.duplicates == DUPLICATES && self.repairing.is_none() && !is_told {
                self.repairing = Some(self.sent);
                self.next = self.unacknowledged;
                received.resend = true;
            }
        }
        if self.sack_permitted {
            self.receive_sack(segment, received);
        }
        if self.window > 0 && self.unacknowledged == self.sent {
            // No probe is due any more, and the waits for the next frame are none of the probes'.
            self.rest();
            self.waits = 0;
            if self.state == State::TimeWait {
                self.due_ns = Some(now_ns + TIME_WAIT_NS);
            }
        }
    }

    /// Takes what the guest has received behind a gap (RFC 6675).
    fn receive_sack(&mut self, segment: &Segment, received: &mut Received) {
        self.scoreboard
            .note(&segment.sack, self.unacknowledged, self.sent);
        // What was sent well behind that has arrived, so it was lost again: a link to a guest keeps the
        // order but for a few segments.
        let reordered = u32::from(self.mss()) * u32::from(DUPLICATES);
        let is_past = |highest| before(self.sent_by_resent.wrapping_add(reordered), highest);
        if before(self.unacknowledged, self.resent)
            && self.scoreboard.highest().is_some_and(is_past)
        {
            self.resent = self.unacknowledged;
        }
        if self.has_hole() {
            self.repairing.get_or_insert(self.sent);
            received.resend = true;
        }
    }

    fn fin_is_acknowledged(&mut self, received: &mut Received, now_ns: u64) {
        match self.state {
            State::FinWait1 => self.state = State::FinWait2,
            State::Closing => self.wait_for_the_end(received, now_ns),
            State::LastAck => {
                received.host = Host::Closes;
                self.close();
            }
            _ => {}
        }
    }

    fn wait_for_the_end(&mut self, received: &mut Received, now_ns: u64) {
        self.state = State::TimeWait;
        self.due_ns = Some(now_ns + TIME_WAIT_NS);
        received.host = Host::Closes;
    }

    /// Takes a segment that came early, whose turn it is: its acknowledgement was taken when it came.
    pub(in crate::tcp) fn receive_early(&mut self, segment: &Segment) -> Received {
        let mut received = Received::default();
        self.receive_payload(segment, &mut received);
        received
    }

    fn receive_payload(&mut self, segment: &Segment, received: &mut Received) {
        let fin = segment.has(Flags::FIN);
        let len = segment.payload_len;
        let old = self.next_from_guest.wrapping_sub(segment.sequence);
        if len == 0 && !fin {
            // Behind or before what is next it asks what that is: a keep-alive, a window probe.
            self.owes_ack |= old != 0;
            return;
        }
        self.owes_ack = true;
        if !self.is_receiving() || before(self.next_from_guest, segment.sequence) || old > len {
            return;
        }
        let room = self.edge.wrapping_sub(self.next_from_guest);
        let end = len.min(old.saturating_add(room));
        received.deliver = old..end;
        received.fin = fin && end == len;
    }

    /// The socket took so many bytes of what was received. Returns whether the guest has sent its
    /// last byte: no more is to be written to the socket.
    pub fn taken(&mut self, received: &Received, bytes: u32, now_ns: u64) -> bool {
        self.next_from_guest = self.next_from_guest.wrapping_add(bytes);
        let next = self.next_from_guest;
        self.held.retain(|(first, _)| before(next, first));
        if bytes < received.deliver.len() as u32 {
            self.turned_away = true;
            return false;
        }
        if !received.fin {
            return false;
        }
        self.next_from_guest = self.next_from_guest.wrapping_add(1);
        self.edge = match before(self.edge, self.next_from_guest) {
            true => self.next_from_guest,
            false => self.edge,
        };
        match self.state {
            State::Established => self.state = State::CloseWait,
            State::FinWait1 => self.state = State::Closing,
            State::FinWait2 => {
                self.state = State::TimeWait;
                self.due_ns = Some(now_ns + TIME_WAIT_NS);
            }
            _ => {}
        }
        true
    }
}
