//! The handshake: the only packets that reach a server before a name is known.
//!
//! A SYN carries what a connection needs, and possibly a message of a hostile guest. So the session
//! sends its own copy of the first SYN, and again for each retransmission, then without ECN (RFC
//! 3168 section 6.1.1.1, for paths that reject it). Its options are rewritten: each once, in a
//! fixed order. So a retransmission carries no information, and a SYN with other options is
//! dropped.
use slipgate_abi::tcp::Flags;

use crate::{
    inspection::tcp::{
        Deadline, Fate, INITIAL_SEGMENTS, MIN_RTO_NS, Options, Outcome, Phase, Received, Refused,
        Segment, Session, URGENT, Wire, options::rebuild_syn, server::Server,
    },
    mss,
};

/// ECN-Echo and Congestion Window Reduced (RFC 3168 section 6.1).
const ECN: u8 = 0xc0;

/// The SYN that opened a connection.
#[derive(Clone, Debug, Default)]
pub(super) struct Opening {
    /// Header that is sent to the server, also for retransmissions.
    header: Box<[u8]>,
    pub(super) window: u16,
    pub(super) options: Options,
    /// Number that the server last acknowledged wrongly: the guest may answer that with a reset.
    stray: Option<u32>,
}

impl Opening {
    /// Creates the state from a SYN's TCP header. The MSS is clamped to `most`, the largest for
    /// which the path to the guest has room.
    pub(super) fn new(tcp_header: &[u8], most: u16) -> Self {
        let mut header = rebuild_syn(tcp_header).unwrap_or_default();
        mss::clamp(&mut header, most, true);
        if let Some(flags) = header.get_mut(13) {
            *flags &= Flags::SYN | ECN;
        }
        Self {
            window: window(&header),
            options: Options::parse(tcp_header),
            header,
            stray: None,
        }
    }

    /// Whether a SYN offers the same. Its time may be another's.
    fn is_repeated_by(&self, segment: &Received<'_>) -> bool {
        let timeless = |options: Options| Options {
            time: options.time.map(|_| (0, 0)),
            ..options
        };
        self.window == segment.window && timeless(self.options) == timeless(segment.options)
    }
}

fn window(header: &[u8]) -> u16 {
    let field = header.get(14..16);
    field.map_or(0, |w| u16::from_be_bytes([w[0], w[1]]))
}

impl Session {
    /// The guest's SYN, first or again; its sequence number is the first's.
    pub fn guest_opens(&mut self, segment: &Received<'_>, wire: &mut dyn Wire) -> Fate {
        if segment.has(URGENT) || !segment.payload.is_empty() {
            // RFC 7413's data would be there before anybody has looked at it.
            return Fate::Held;
        }
        if !self.opening.is_repeated_by(segment) {
            return Fate::Dropped;
        }
        wire.syn_to_server(&self.opening.header);
        if let Some(flags) = self.opening.header.get_mut(13) {
            *flags &= !ECN;
        }
        Fate::Held
    }

    /// The guest's segment before the server has answered. All that it can have to say then is that
    /// an answer is none to its SYN.
    pub(super) fn guest_sent_early(
        &mut self,
        segment: &Received<'_>,
        wire: &mut dyn Wire,
    ) -> (Fate, Outcome) {
        let is_reset = segment.has(Flags::RST) && segment.payload.is_empty();
        if !is_reset
            || self
                .opening
                .stray
                .take_if(|at| *at == segment.sequence)
                .is_none()
        {
            return (Fate::Dropped, Outcome::Goes);
        }
        wire.to_server(&Segment::reset(segment.sequence, 0, Flags::RST));
        (Fate::Held, Outcome::Goes)
    }

    /// The server's answer to the SYN.
    pub(super) fn server_opens(&mut self, segment: &Received<'_>, now_ns: u64) -> (Fate, Outcome) {
        let both = Flags::SYN | Flags::ACK;
        let is_ours = segment.acknowledgement == self.stream.begin();
        match segment.flags & (both | Flags::RST) {
            flags if flags == both && is_ours => {}
            flags if flags == Flags::RST | Flags::ACK && is_ours => {
                return (Fate::Pass, Outcome::Reset);
            }
            flags => {
                // RFC 9293 section 3.5.2: the guest resets what is of another connection.
                let is_stray = flags & (Flags::ACK | Flags::RST) == Flags::ACK && !is_ours;
                self.opening.stray = is_stray.then_some(segment.acknowledgement);
                return (Fate::Pass, Outcome::Goes);
            }
        }
        self.server = Server::opens(segment, &self.opening.options);
        self.owe_for(segment);
        self.guest_ack = segment.sequence.wrapping_add(1);
        // A SYN's is not scaled.
        self.guest_window_end = self.guest_ack.wrapping_add(self.opening.window.into());
        self.phase = Phase::Open;
        let round_trip_ns = now_ns.saturating_sub(self.opened_ns);
        self.first_rto_ns =
            (3 * round_trip_ns).clamp(MIN_RTO_NS, crate::inspection::tcp::FIRST_RTO_NS);
        self.rto_ns = self.first_rto_ns;
        self.congestion_window = INITIAL_SEGMENTS * self.mss();
        self.deadline = Some(Deadline::after(now_ns, Refused::Silent));
        (self.pass_as(segment.acknowledgement, true), Outcome::Goes)
    }
}
