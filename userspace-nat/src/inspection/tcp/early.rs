//! Early answers: an HTTP server answers before it has received the whole request.
//!
//! # Theory of operation
//! A server that answers before it has a request's content may never read it as content. The rest
//! of the content is then its next request, which was not judged. So where the rules judge each
//! request, no further data of the guest is sent to such a server. The guest receives the answer
//! and may end the connection; if it sends more data, both sides are reset.
//!
//! Data that a server sends while content is in flight is taken as its answer, except for interim
//! answers (RFC 9110 section 15.2): a client without pipelining has received the answers to earlier
//! requests by then. Content that was in flight already when the answer came cannot be recalled.
use crate::inspection::tcp::{Received, Refused, Session, is_after};

/// State of the server's answer to a request whose content is not completely sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum EarlyAnswer {
    /// No content remains to be sent.
    #[default]
    NotAwaited,
    /// Only interim answers came so far.
    None(Interim),
    /// The final answer has begun.
    Begun,
}

/// Position in a server's interim answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Interim {
    /// Sequence number of the next octet.
    next: u32,
    /// Number of octets of the status line so far.
    at: u8,
    /// After the status line: octets of an empty line so far, with the line end before it.
    of_empty_line: u8,
}

/// Pattern of an interim answer's status line; `0` stands for any digit.
const STATUS_LINE: &[u8] = b"HTTP/1.0 100";

impl Interim {
    fn from(next: u32) -> Self {
        Self {
            next,
            at: 0,
            of_empty_line: 0,
        }
    }

    /// Processes a segment. Returns whether an answer other than an interim one has begun.
    fn is_over_with(&mut self, segment: &Received<'_>) -> bool {
        let behind = self.next.wrapping_sub(segment.sequence) as i32;
        let Ok(behind) = usize::try_from(behind) else {
            // Whatever is missing before it, an interim answer is followed by nothing.
            return !segment.payload.is_empty();
        };
        let new = segment.payload.get(behind..).unwrap_or_default();
        self.next = self.next.wrapping_add(new.len() as u32);
        new.iter().any(|octet| !self.octet(*octet))
    }

    /// Whether an octet may follow in an interim answer.
    fn octet(&mut self, octet: u8) -> bool {
        if let Some(expected) = STATUS_LINE.get(usize::from(self.at)) {
            self.at += 1;
            return match expected {
                b'0' => octet.is_ascii_digit(),
                expected => octet == *expected,
            };
        }
        self.of_empty_line = match (self.of_empty_line, octet) {
            (0, b'\n') => 1,
            (1, b'\r') => 2,
            (1 | 2, b'\n') => {
                *self = Self::from(self.next);
                0
            }
            _ => 0,
        };
        true
    }
}

impl Session {
    /// Records that content of the guest was allowed.
    pub(super) fn content_allowed(&mut self) {
        let end = self.stream.begin().wrapping_add(self.allowed as u32);
        self.content_end = Some(end);
    }

    /// Whether content of a request remains to be sent to the server.
    fn has_content_to_send(&self) -> bool {
        let sent = self.stream.begin().wrapping_add(self.sent_ever as u32);
        let unsent = self.content_end.is_some_and(|end| is_after(end, sent));
        unsent || self.sniffer.has_content_to_come()
    }

    /// Updates whether an early answer is awaited. Called after the guest's data was processed.
    pub(super) fn await_early_answer(&mut self) {
        let content = self.has_content_to_send();
        // Its number would be ahead again in a while.
        self.content_end = self.content_end.filter(|_| content);
        self.early_answer = match self.early_answer {
            EarlyAnswer::Begun => EarlyAnswer::Begun,
            _ if !content => EarlyAnswer::NotAwaited,
            EarlyAnswer::NotAwaited => EarlyAnswer::None(Interim::from(self.server.next)),
            awaited => awaited,
        };
    }

    /// A segment of the server's, in the guest's window, before anything else is done about it.
    pub(super) fn note_early_answer(&mut self, segment: &Received<'_>) {
        let content = self.has_content_to_send();
        let EarlyAnswer::None(interim) = &mut self.early_answer else {
            return;
        };
        if !content {
            self.early_answer = EarlyAnswer::NotAwaited;
        } else if interim.is_over_with(segment) {
            self.early_answer = EarlyAnswer::Begun;
            // What has not left is kept back.
            self.allowed = self.allowed.min(self.sent_ever);
        }
    }

    /// Whether the guest has said more, to a server that had answered before.
    pub(super) fn goes_on_after_early_answer(&self) -> Option<Refused> {
        let said_more = self.stream.whole().len() > self.allowed;
        (self.early_answer == EarlyAnswer::Begun && said_more).then_some(Refused::Early)
    }
}
