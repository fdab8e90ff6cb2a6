//! An HTTP server's answer before it has all of a request.
//!
//! # Theory of operation
//! A server that answers before a request's content is there may never read that as content: what is
//! still to come is then its next request, and nobody has judged it. So where each request is held to
//! its name, nothing more of the guest's goes to such a server. The answer goes to the guest, who
//! may read it, and end the connection; if it says anything more, both sides are reset.
//!
//! What a server says while content is on its way is its answer, but for interim ones (RFC 9110 section
//! 15.2): a client that does not send requests ahead of the answers to others has had those. Content
//! that was on its way already when the answer came can't be called back.
use crate::inspection::tcp::{Received, Refused, Session};

/// What is known of a server's answer to a request whose content is not all sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum EarlyAnswer {
    /// No content is to be sent.
    #[default]
    NotAwaited,
    /// Nothing but interim answers up to here.
    None(Interim),
    /// It has begun.
    Begun,
}

/// Where a server is in its interim answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Interim {
    /// The sequence number of the next octet.
    next: u32,
    /// So many octets into a status line.
    at: u8,
    /// Behind that: so many octets of an empty line, and the line end before it.
    of_empty_line: u8,
}

/// A status line of an interim answer, `0` for any digit.
const STATUS_LINE: &[u8] = b"HTTP/1.0 100";

impl Interim {
    fn from(next: u32) -> Self {
        Self {
            next,
            at: 0,
            of_empty_line: 0,
        }
    }

    /// Takes a segment in. Returns whether an answer that is none of these has begun.
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

    /// Whether an octet may stand there in an interim answer.
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
    /// Content of the guest's was let by.
    pub(super) fn content_allowed(&mut self) {
        let end = self.stream.begin().wrapping_add(self.allowed as u32);
        self.content_end = Some(end);
    }

    /// Whether content of a request is still to be sent to the server.
    fn has_content_to_send(&self) -> bool {
        let sent = self.stream.begin().wrapping_add(self.sent_ever as u32);
        let unsent = self
            .content_end
            .is_some_and(|end| end.wrapping_sub(sent) as i32 > 0);
        unsent || self.spoken.has_content_to_come()
    }

    /// Behind what the guest said.
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
