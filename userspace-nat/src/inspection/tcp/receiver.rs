//! The session as the receiver of the guest's data.
use slipgate_abi::tcp::Flags;

use crate::inspection::tcp::{
    Fate, MAX_LEN, Phase, Received, SMALL_MSS, Segment, Session, Wire, advance, is_after,
};

/// Most acknowledgements that a guest may accumulate.
const MAX_OWED: u32 = 64;
/// Smallest window offered before a name is admitted, bytes, as far as there is room.
const MIN_OFFER: u32 = 4_096;

impl Session {
    /// Sequence number of the guest's next byte.
    pub(super) fn next_expected(&self) -> u32 {
        let len = self.stream.whole().len() + usize::from(self.stream.is_ended());
        self.stream.begin().wrapping_add(len as u32)
    }

    /// Records a segment's acknowledgement and window. Returns whether either is new.
    pub(super) fn note_guest(&mut self, segment: &Received<'_>) -> bool {
        if let Some((value, _)) = segment.options.time {
            advance(&mut self.guest_time, value);
        }
        let ahead = segment.acknowledgement.wrapping_sub(self.guest_ack) as i32;
        // What the server has not sent is nobody's to acknowledge.
        let past = is_after(segment.acknowledgement, self.server.next);
        if ahead < 0 || past || (ahead == 0 && segment.window == self.guest_window) {
            return false;
        }
        self.guest_ack = segment.acknowledgement;
        self.guest_window = segment.window;
        let window = u32::from(segment.window) << self.guest_window_scale();
        advance(
            &mut self.guest_window_end,
            self.guest_ack.wrapping_add(window),
        );
        true
    }

    /// Shift count of the guest's windows: 0 unless both sides offered scaling (RFC 7323 section
    /// 2.2).
    pub(super) fn guest_window_scale(&self) -> u8 {
        let guests = self.opening.options.window_scale;
        guests.filter(|_| self.server.scales).unwrap_or(0)
    }

    /// Whether a part of a server's segment, or its sequence number, is in the guest's window.
    pub(super) fn is_in_guests_window(&self, segment: &Received<'_>) -> bool {
        let end = segment.sequence.wrapping_add(segment.sequence_len());
        let before_end = segment.sequence.wrapping_sub(self.guest_window_end) as i32 <= 0;
        before_end && end.wrapping_sub(self.guest_ack) as i32 >= 0
    }

    /// Acknowledgement number, window and timestamp of segments before a name is admitted. They
    /// follow from the SYN and the server's own segments.
    pub(super) fn as_in_syn(&self) -> (u32, u16, u32) {
        // None is too small to be one.
        let window = (self.opening.window >> self.guest_window_scale()).max(1);
        let time = self.opening.options.time.map_or(0, |(value, _)| value);
        (self.server.next, window, time)
    }

    /// Adds the acknowledgements that a server's segment allows. Until a name is admitted the guest
    /// sends no more: their number would be a message to the server.
    pub(super) fn owe_for(&mut self, segment: &Received<'_>) {
        let segments = 1 + segment.payload.len() / SMALL_MSS;
        self.owed = (self.owed + segments as u32).min(MAX_OWED);
    }

    pub(super) fn acknowledge_server(&mut self, wire: &mut dyn Wire) {
        // Before, all of it or nothing is acknowledged: which part would be a word too.
        let may = self.guest_ack == self.server.next && self.owed > 0;
        if self.is_admitted || may {
            self.owed = self.owed.saturating_sub(1);
            self.send(wire, self.sent, 0, 0);
        }
    }

    /// Sends an acknowledgement of the received bytes to the guest.
    pub(super) fn acknowledge(&mut self, wire: &mut dyn Wire) {
        let window = self.window(false);
        wire.to_guest(&Segment {
            sequence: self.server.next,
            acknowledgement: self.next_expected(),
            flags: Flags::ACK,
            window,
            time: self
                .server
                .has_time
                .then_some((self.server.time, self.guest_time)),
            payload: &[],
        });
    }

    /// A segment of the server's goes on with this acknowledgement, and the session's window.
    pub(super) fn pass_as(&mut self, acknowledgement: u32, is_syn: bool) -> Fate {
        Fate::PassAs {
            acknowledgement,
            window: self.window(is_syn),
        }
    }

    /// Window to offer to the guest, in the server's scale except in a SYN. Its end never moves
    /// back.
    pub(super) fn window(&mut self, is_syn: bool) -> u16 {
        let own = self.stream.begin().wrapping_add(MAX_LEN as u32);
        let servers = self.server.window_end;
        let nearer = own.wrapping_sub(servers) as i32 <= 0 && self.phase != Phase::Passing;
        let end = if nearer { own } else { servers };
        // A hello longer than the server's first window could not be whole before it is sent on.
        let least = MIN_OFFER.max(1 << self.server.window_scale);
        let needed = self.next_expected().wrapping_add(least);
        let is_short = !self.is_admitted && is_after(needed, end);
        let end = match is_short {
            true if is_after(own, needed) => needed,
            true => own,
            false => end,
        };
        advance(&mut self.told_window_end, end);
        let left = self.told_window_end.wrapping_sub(self.next_expected());
        let left = if left as i32 > 0 { left } else { 0 };
        let scale = if is_syn { 0 } else { self.server.window_scale };
        u16::try_from(left >> scale).unwrap_or(u16::MAX)
    }
}
