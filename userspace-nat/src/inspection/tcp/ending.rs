//! Ends of a session: refusals, resets, and the hand-over of the connection to the kernel.
use slipgate_abi::{Sequences, sequence::SendSpace, tcp::Flags};

use crate::inspection::tcp::{
    DOUBT_NS, Fate, Outcome, Phase, Received, Refused, Segment, Session, Wire, advance,
};

impl Session {
    /// Ends the connection on both sides.
    pub(super) fn refuse(&mut self, why: Refused, wire: &mut dyn Wire) -> Outcome {
        self.send(wire, self.sent_ever, 0, Flags::RST);
        let flags = Flags::RST | Flags::ACK;
        wire.to_guest(&Segment::reset(self.guest_ack, self.next_expected(), flags));
        Outcome::Refused(why)
    }

    /// The guest's reset of a connection that is open.
    pub(super) fn guest_resets(
        &mut self,
        segment: &Received<'_>,
        wire: &mut dyn Wire,
    ) -> (Fate, Outcome) {
        if self.phase == Phase::Passing && self.sendable() == 0 && segment.payload.is_empty() {
            return (Fate::Pass, Outcome::Released);
        }
        // With the number that the server expects: it does not have all that the guest sent.
        self.send(wire, self.sent_ever, 0, Flags::RST);
        (Fate::Held, Outcome::Reset)
    }

    /// The server's reset of a connection that is open.
    pub(super) fn server_resets(&mut self, segment: &Received<'_>, now_ns: u64) -> Outcome {
        let behind_guest = segment.sequence.wrapping_sub(self.guest_ack);
        if behind_guest == 0 {
            return Outcome::Reset;
        }
        // Behind what the guest has not acknowledged yet. RFC 5961 section 3.2: if it is not exactly
        // where the guest is, the guest says so.
        if behind_guest <= self.server.next.wrapping_sub(self.guest_ack) {
            self.reset_at_ns.get_or_insert(now_ns + DOUBT_NS);
        }
        Outcome::Goes
    }

    /// Where the connection stands. Means something once it was
    /// [`crate::inspection::tcp::Outcome::Released`].
    pub fn sequences(&self, now_ns: u64) -> Sequences {
        let inspected_end = self.next_expected();
        let mut sent_end = inspected_end;
        advance(&mut sent_end, self.passed_end.unwrap_or(inspected_end));
        let sent = SendSpace {
            acknowledged: inspected_end,
            end: sent_end,
            window: distance(inspected_end, self.server.window_end),
            window_scale: self.server.window_scale.into(),
            ..SendSpace::default()
        };
        let received = SendSpace {
            acknowledged: self.guest_ack,
            end: self.server.next,
            window: distance(self.guest_ack, self.guest_window_end),
            window_scale: self.guest_window_scale().into(),
            ..SendSpace::default()
        };
        Sequences::released(sent, received, self.server.first, now_ns)
    }
}

/// Returns the distance from one sequence number to a later one, or 0 if the other is earlier.
fn distance(from: u32, to: u32) -> u32 {
    u32::try_from(to.wrapping_sub(from) as i32).unwrap_or(0)
}
