//! The session as a sender, toward the server (RFC 5681, RFC 6298).
use slipgate_abi::tcp::Flags;

use crate::inspection::tcp::{MAX_LEN, Phase, Received, Segment, Session, Wire};

/// PSH flag (RFC 9293 section 3.1).
const PUSH: u8 = 0x08;

impl Session {
    /// Number of bytes that may be sent, the end of the stream included.
    pub(super) fn sendable(&self) -> usize {
        let whole = self.allowed == self.stream.whole().len();
        let end = whole && self.stream.is_ended() && !self.end_acknowledged;
        self.allowed + usize::from(end)
    }

    pub(super) fn mss(&self) -> usize {
        let mss = usize::from(self.server.mss).min(self.path_mss);
        let options = if self.server.has_time { 12 } else { 0 };
        mss.saturating_sub(options).max(1)
    }

    /// Sends data that is allowed and fits the windows.
    pub(super) fn transmit(&mut self, wire: &mut dyn Wire, now_ns: u64) {
        let begin = self.stream.begin();
        let window = self.server.window_end.wrapping_sub(begin);
        let window = if window as i32 > 0 {
            window as usize
        } else {
            0
        };
        let most = window.min(self.congestion_window);
        while self.sent < self.sendable() {
            let mut len = (self.allowed.saturating_sub(self.sent)).min(self.mss());
            len = len.min(most.saturating_sub(self.sent));
            let end = self.sent + len == self.allowed && self.sendable() > self.allowed;
            if len == 0 && !(end && self.sent <= most) {
                break;
            }
            let push = if self.sent + len == self.allowed {
                PUSH
            } else {
                0
            };
            let fin = if end { Flags::FIN } else { 0 };
            self.send(wire, self.sent, len, push | fin);
            self.sent += len + usize::from(end);
            self.sent_ever = self.sent_ever.max(self.sent);
        }
        if self.sendable() == 0 {
            self.resend_at_ns = None;
        } else {
            self.resend_at_ns.get_or_insert(now_ns + self.rto_ns);
        }
    }

    /// Retransmits one segment from the first unacknowledged byte on; one byte if the window is
    /// closed.
    pub(super) fn resend_from_begin(&mut self, wire: &mut dyn Wire, now_ns: u64) {
        self.sent = 0;
        self.duplicates = 0;
        self.congestion_window = self.mss();
        self.resend_at_ns = None;
        self.transmit(wire, now_ns);
        if self.sent == 0 && self.allowed > 0 {
            self.send(wire, 0, 1, 0);
            self.sent_ever = self.sent_ever.max(1);
        }
    }

    /// Sends `len` bytes of the stream, from offset `from` on, in one segment with these flags.
    pub(super) fn send(&self, wire: &mut dyn Wire, from: usize, len: usize, flags: u8) {
        let (acknowledgement, window, time) = match self.is_admitted {
            true => (self.guest_ack, self.guest_window, self.guest_time),
            false => self.as_in_syn(),
        };
        wire.to_server(&Segment {
            sequence: self.stream.begin().wrapping_add(from as u32),
            acknowledgement,
            flags: flags | Flags::ACK,
            window,
            time: self.server.has_time.then_some((time, self.server.time)),
            payload: &self.stream.whole()[from.min(self.stream.whole().len())..][..len],
        });
    }

    /// Whether an acknowledgement number lies in the data that was sent lately.
    pub(super) fn is_in_sent_data(&self, acknowledgement: u32) -> bool {
        let begin = self.stream.begin();
        let sent = self.sent_ever + usize::from(self.end_acknowledged);
        let passed = self
            .passed_end
            .map_or(0, |end| end.wrapping_sub(begin) as i32);
        let ahead = acknowledgement.wrapping_sub(begin) as i32;
        (-(2 * MAX_LEN as i32)..=passed.max(sent as i32)).contains(&ahead)
    }

    /// Processes an acknowledgement. Returns whether a retransmission is due.
    pub(super) fn acknowledged(&mut self, segment: &Received<'_>, now_ns: u64) -> bool {
        let bytes = segment.acknowledgement.wrapping_sub(self.stream.begin()) as i32;
        let Ok(bytes) = usize::try_from(bytes) else {
            return false;
        };
        let most = self.sent_ever;
        let bytes = match self.phase {
            // The rest is what went on as it was.
            Phase::Passing => bytes.min(most),
            _ if bytes > most => return false,
            _ => bytes,
        };
        self.server.note_window(segment);
        self.retries = 0;
        if bytes == 0 {
            let asks = segment.payload.is_empty() && self.sent > 0;
            self.duplicates = if asks { self.duplicates + 1 } else { 0 };
            return self.duplicates == 3;
        }
        self.duplicates = 0;
        self.rto_ns = self.first_rto_ns;
        let whole = bytes.min(self.stream.whole().len());
        self.end_acknowledged |= bytes > whole;
        self.stream.release(whole);
        self.allowed -= whole.min(self.allowed);
        self.sent = self.sent.saturating_sub(bytes);
        self.sent_ever -= bytes;
        self.congestion_window = (self.congestion_window + bytes).min(MAX_LEN);
        self.resend_at_ns = (self.sent > 0).then_some(now_ns + self.rto_ns);
        false
    }
}
