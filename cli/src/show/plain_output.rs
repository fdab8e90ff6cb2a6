//! Standard output of text that is written while it is made, with its control characters replaced.
use std::io::{self, Write};

/// Bytes that are held until they are written.
const HELD: usize = 64 << 10;

/// A writer that replaces control characters, line feeds and tabs excepted. It writes whole lines.
#[derive(Debug)]
pub(crate) struct PlainOutput<W> {
    out: W,
    /// Control sequences of our own that come first, as long as nothing is written.
    sequences: &'static str,
    held: Vec<u8>,
}

impl<W: Write> PlainOutput<W> {
    /// `sequences`: control sequences of our own, which pass as they are. They are written with the first
    /// text, not before: what fails before it does not clear a screen.
    pub(crate) fn after(out: W, sequences: &'static str) -> Self {
        Self {
            out,
            sequences,
            held: Vec::with_capacity(HELD),
        }
    }

    /// Writes the rest.
    ///
    /// # Errors
    /// The output takes no more.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        self.write_up_to(self.held.len())?;
        self.out.flush()
    }

    fn write_up_to(&mut self, end: usize) -> io::Result<()> {
        let sequences = std::mem::take(&mut self.sequences);
        self.out.write_all(sequences.as_bytes())?;
        let text = &self.held[..end];
        match is_plain(text) {
            true => self.out.write_all(text)?,
            false => {
                let text = slipgate_policy::plain(&String::from_utf8_lossy(text));
                self.out.write_all(text.as_bytes())?;
            }
        }
        self.held.drain(..end);
        Ok(())
    }
}

impl<W: Write> Write for PlainOutput<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.held.extend_from_slice(bytes);
        if self.held.len() >= HELD {
            // At a line's end no character is cut in two.
            let lines = self.held.iter().rposition(|byte| *byte == b'\n');
            self.write_up_to(lines.map_or(0, |at| at + 1))?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Whether a text in UTF-8 has no control character that is replaced.
fn is_plain(text: &[u8]) -> bool {
    let is_ascii = |byte: u8| matches!(byte, b'\n' | b'\t' | b' '..=b'~');
    let mut before = 0;
    text.iter().all(|byte| {
        // U+0080 to U+009F begin with 0xC2.
        let is_c1 = before == 0xc2 && *byte < 0xa0;
        before = *byte;
        is_ascii(*byte) || *byte >= 0x80 && !is_c1
    })
}

#[cfg(test)]
#[path = "plain_output_test.rs"]
mod tests;
