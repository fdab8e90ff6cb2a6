//! Whether the TAP is read once more behind a frame.
//!
//! # Theory of operation
//! That a TAP is empty only a read can say, and the set of descriptors says again in the next turn that it
//! is not. So where frames come one by one, as those of a handshake or of requests do, the read behind each
//! would be in vain: it is left out, unless there were frames in a row the last time, or the turn before
//! had one too. Of frames in a row that nothing announced, the first is read alone; the next turn reads
//! the others to the end. A turn is a call of [`FrameIo::recv`](crate::port::FrameIo::recv).

/// What the last readings have found.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(super) struct InRow {
    /// Whether the last reading that went on behind its first frame found a second.
    were_several: bool,
    /// Whether the turn before this one, and this one, have a reading.
    was_readable: bool,
    is_readable: bool,
}

impl InRow {
    /// Begins a turn. `is_readable`: whether the link is read in it.
    pub(super) fn begin_turn(&mut self, is_readable: bool) {
        self.was_readable = std::mem::replace(&mut self.is_readable, is_readable);
    }

    /// Whether to read once more behind the nth frame of this reading, counted from 1.
    pub(super) fn goes_on_after(&mut self, nth: usize) -> bool {
        let goes_on = nth > 1 || self.were_several || self.was_readable;
        // Until there is a second.
        self.were_several = nth > 1;
        goes_on
    }
}

#[cfg(test)]
#[path = "in_row_test.rs"]
mod tests;
