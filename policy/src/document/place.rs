//! A place in a file, shown with its line.
use std::{fmt, ops::Range, path::Path};

/// Maximum number of characters of a line that are shown; a longer line is cut around the place.
const SHOWN: usize = 120;

/// Place in a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FilePlace {
    /// Path of the file, as shown.
    pub file: String,
    /// Number of the line, from 1.
    pub line: usize,
    /// Position in the line, characters, from 1.
    pub column: usize,
    /// Text of the line.
    text: String,
    /// Length of the marked part, characters from `column` on.
    length: usize,
}

impl FilePlace {
    /// Creates the place of the bytes `span` of a file's text.
    pub(super) fn new(file: &Path, text: &str, span: &Range<usize>) -> Self {
        let at = text.floor_char_boundary(span.start.min(text.len()));
        let end = text.floor_char_boundary(span.end.clamp(at, text.len()));
        let begin = text[..at].rfind('\n').map_or(0, |newline| newline + 1);
        let line_end = text[at..]
            .find('\n')
            .map_or(text.len(), |length| at + length);
        let shown = text[begin..line_end].trim_end_matches('\r');
        let meant = text[at..end.min(line_end)].chars().count();
        Self {
            file: file.display().to_string(),
            line: text[..at].matches('\n').count() + 1,
            column: text[begin..at].chars().count() + 1,
            text: shown.to_owned(),
            length: meant.max(1),
        }
    }
}

impl fmt::Display for FilePlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.file, self.line, self.column)
    }
}

impl FilePlace {
    /// Returns the line, with carets beneath the marked part.
    pub fn shown(&self) -> String {
        let number = self.line.to_string();
        // A long line is shown around the place.
        let skipped = (self.column - 1).saturating_sub(SHOWN / 2);
        let skipped = if self.text.chars().count() > SHOWN {
            skipped
        } else {
            0
        };
        let text: String = self.text.chars().skip(skipped).take(SHOWN).collect();
        let before: String = text
            .chars()
            .take(self.column - 1 - skipped)
            .map(|c| if c == '\t' { '\t' } else { ' ' })
            .collect();
        let room = text.chars().count().saturating_sub(before.chars().count());
        let carets = "^".repeat(self.length.min(room.max(1)));
        let margin = " ".repeat(number.len());
        format!(" {number} | {text}\n {margin} | {before}{carets}")
    }
}
