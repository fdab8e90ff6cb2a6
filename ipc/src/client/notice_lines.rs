//! Splits a socket's bytes into a machine's notices. The bytes come in pieces, and from whoever has
//! the other end.
use super::{MAX_NOTICE, MachineNotice};

/// Reads notices, one a line. What is none is passed over; after a line that is longer than any notice
/// nothing is read any more.
#[derive(Debug, Default)]
pub struct NoticeLines {
    /// The beginning of a line.
    beginning: Vec<u8>,
    /// Whether a line was too long.
    is_over: bool,
}

impl NoticeLines {
    /// Takes bytes in the order in which they came. Returns the notices whose lines end in them.
    pub fn take(&mut self, bytes: &[u8]) -> Vec<MachineNotice> {
        let mut notices = Vec::new();
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            if self.is_over {
                break;
            }
            if self.beginning.len() + piece.len() > MAX_NOTICE {
                self.is_over = true;
                self.beginning = Vec::new();
                break;
            }
            self.beginning.extend_from_slice(piece);
            if piece.ends_with(b"\n") {
                notices.extend(serde_json::from_slice::<MachineNotice>(&self.beginning));
                self.beginning.clear();
            }
        }
        notices
    }

    /// Whether a line was too long, so that nothing is read any more.
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    /// Bytes of memory that are kept.
    pub fn kept_bytes(&self) -> usize {
        self.beginning.capacity()
    }
}

#[cfg(test)]
#[path = "notice_lines_test.rs"]
mod tests;
