//! Both handshakes: the answer to the guest's SYN once the host's connection stands, and connections
//! that the host opens (RFC 9293 section 3.10.7.3), a SYN to the guest, and its answer.
use slipgate_abi::tcp::Flags;

use super::{Connection, Host, OUR_SCALE, Received, Segment, State};
use crate::{
    packet::Version,
    tcp::{reset_for, wire::Header},
};

impl Connection {
    /// The host's connection stands: returns our SYN. `room`: of the socket's send queue, bytes.
    pub fn connected(&mut self, room: u32, now_ns: u64) -> Header {
        self.state = State::SynReceived;
        self.now_ns = now_ns;
        self.begin_clock();
        self.open_window(room.min(u16::MAX.into()));
        self.next = self.unacknowledged.wrapping_add(1);
        self.sent = self.next;
        self.wait_again(now_ns);
        self.syn()
    }

    pub(super) fn syn(&mut self) -> Header {
        let window = self.edge.wrapping_sub(self.next_from_guest);
        Header {
            sequence: self.unacknowledged,
            window: window.min(u16::MAX.into()) as u16,
            window_scale: Some(self.scales.map(|(ours, _)| ours)),
            sack_permitted: self.sack_permitted,
            ..self.header(Flags::SYN | Flags::ACK)
        }
    }

    /// A connection that opens to the guest. Its SYN is due at once ([`Connection::on_time`]), and
    /// again until the guest answers. `initial`: our initial sequence number; `room`: of the socket's
    /// send queue, bytes.
    pub fn open(version: Version, initial: u32, room: u32, now_ns: u64) -> Self {
        Self {
            // Where its bytes begin, its answer says.
            edge: room.min(u16::MAX.into()),
            due_ns: Some(now_ns),
            now_ns,
            ..Self::at(State::SynSent, version, initial)
        }
    }

    /// Returns our SYN, for the first time.
    pub(super) fn first_syn(&mut self, now_ns: u64) -> Header {
        self.next = self.unacknowledged.wrapping_add(1);
        self.sent = self.next;
        self.wait_again(now_ns);
        self.opening_syn()
    }

    pub(super) fn opening_syn(&mut self) -> Header {
        Header {
            sequence: self.unacknowledged,
            acknowledgement: 0,
            window_scale: Some(Some(OUR_SCALE)),
            sack_permitted: true,
            timestamps: Some(self.offered_timestamps()),
            ..self.header(Flags::SYN)
        }
    }

    /// Takes the guest's answer to our SYN.
    pub(super) fn receive_answer(&mut self, segment: &Segment) -> Received {
        let mut received = Received::default();
        let acknowledges = segment.has(Flags::ACK);
        if acknowledges && segment.acknowledgement != self.sent {
            // Of an older connection of these ports: the guest ends it, and our next SYN is heard.
            received.reply = reset_for(segment);
            return received;
        }
        if segment.has(Flags::RST) {
            if acknowledges {
                received.host = Host::Reset;
                self.close();
            }
            return received;
        }
        if !segment.has(Flags::SYN) {
            return received;
        }
        self.unheard = 0;
        self.take_syn(segment);
        if !acknowledges {
            // A simultaneous open: what the guest began itself, it may go on with. Our SYN may not
            // have been sent yet.
            self.state = State::SynReceived;
            self.next = self.unacknowledged.wrapping_add(1);
            self.sent = self.next;
            received.reply = Some(self.syn());
            return received;
        }
        self.state = State::Established;
        self.unacknowledged = self.sent;
        self.resent = self.sent;
        self.measure_round_trip(segment, self.sent);
        self.waits = 0;
        self.rest();
        self.owes_ack = true;
        received
    }

    fn take_syn(&mut self, segment: &Segment) {
        let window = self.window_left();
        self.next_from_guest = segment.sequence.wrapping_add(1);
        self.edge = self.next_from_guest.wrapping_add(window);
        let options = segment.options;
        self.sack_permitted = options.sack_permitted;
        self.take_times_of_syn(segment, self.now_ns);
        self.scales = options.window_scale.map(|theirs| (OUR_SCALE, theirs));
        let announced = options.mss.filter(|mss| *mss > 0);
        self.mss = announced.unwrap_or(self.mss).min(self.most_mss);
        // That of a SYN is never scaled.
        self.window = segment.window.into();
        self.window_by = (segment.sequence, segment.acknowledgement);
    }
}
