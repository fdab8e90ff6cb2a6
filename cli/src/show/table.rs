//! Tables of text in columns, and numbers in few digits.
use std::{
    fmt::{self, Display, Write as _},
    io::{self, Write},
};

use slipgate_policy::one_line;

/// Most rows that are held back for the widths of columns.
const ROWS_AT_ONCE: usize = 4_096;

/// A table that is written while its rows are made. Each column is as wide as its widest cell so far,
/// that of the next [`ROWS_AT_ONCE`] rows included; a shorter table is as wide as its widest cells.
#[derive(Debug)]
pub(crate) struct Columns<'a, W> {
    out: W,
    /// Width of each column, characters.
    widths: Vec<usize>,
    /// Columns of numbers.
    right: &'a [usize],
    /// Cells that are not written yet, one after the other, and each one's end and width in characters.
    text: String,
    cells: Vec<(usize, usize)>,
    /// Lines that are being made.
    lines: String,
    most_rows: usize,
}

impl<'a, W: Write> Columns<'a, W> {
    /// Begins a table of these titles. `right`: columns of numbers.
    pub(crate) fn new(out: W, head: &[&str], right: &'a [usize]) -> Self {
        let mut this = Self {
            out,
            widths: vec![0; head.len()],
            right,
            text: String::new(),
            cells: Vec::new(),
            lines: String::new(),
            most_rows: ROWS_AT_ONCE,
        };
        head.iter().for_each(|title| this.cell(title));
        this
    }

    /// Adds a cell to the row that is being made. A control character in it is replaced.
    pub(crate) fn cell(&mut self, content: impl Display) {
        let start = self.text.len();
        // A String takes everything.
        let _ = write!(self.text, "{content}");
        let added = &self.text[start..];
        let is_ascii = added.is_ascii();
        let is_plain = match is_ascii {
            true => !added.bytes().any(|byte| byte.is_ascii_control()),
            false => !added.chars().any(char::is_control),
        };
        if !is_plain {
            let plain = one_line(added);
            self.text.replace_range(start.., &plain);
        }
        let added = &self.text[start..];
        let width = match is_ascii && is_plain {
            true => added.len(),
            false => added.chars().count(),
        };
        let column = self.cells.len() % self.widths.len();
        self.widths[column] = self.widths[column].max(width);
        self.cells.push((self.text.len(), width));
    }

    /// Ends a row.
    ///
    /// # Errors
    /// The output takes no more.
    pub(crate) fn end_row(&mut self) -> io::Result<()> {
        match self.cells.len() / self.widths.len() < self.most_rows {
            true => Ok(()),
            false => self.write_rows(),
        }
    }

    /// Writes the rest.
    ///
    /// # Errors
    /// The output takes no more.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        self.write_rows()
    }

    fn write_rows(&mut self) -> io::Result<()> {
        let last = self.widths.len() - 1;
        self.lines.clear();
        let mut start = 0;
        for (at, &(end, width)) in self.cells.iter().enumerate() {
            let column = at % self.widths.len();
            let pad = self.widths[column] - width;
            let cell = &self.text[start..end];
            start = end;
            if self.right.contains(&column) {
                self.lines.extend(std::iter::repeat_n(' ', pad));
                self.lines.push_str(cell);
            } else {
                self.lines.push_str(cell);
                self.lines.extend(std::iter::repeat_n(' ', pad));
            }
            if column < last {
                self.lines.push_str("  ");
            } else {
                let end = self.lines.trim_end_matches(' ').len();
                self.lines.truncate(end);
                self.lines.push('\n');
            }
        }
        self.cells.clear();
        self.text.clear();
        self.out.write_all(self.lines.as_bytes())
    }
}

/// Lines of cells, each column as wide as its widest cell. `right`: columns of numbers.
pub(crate) fn table(head: &[&str], rows: &[Vec<String>], right: &[usize]) -> String {
    let mut text = Vec::new();
    let mut columns = Columns::new(&mut text, head, right);
    columns.most_rows = usize::MAX;
    for row in rows {
        let missing = std::iter::repeat_n("", head.len().saturating_sub(row.len()));
        let cells = row.iter().map(String::as_str).chain(missing);
        cells.take(head.len()).for_each(|cell| columns.cell(cell));
    }
    let written = columns.finish();
    debug_assert!(written.is_ok(), "memory takes everything");
    String::from_utf8(text).unwrap_or_default()
}

/// A number in three digits: 1536 is "1.5K"; decimal steps of 1000.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Amount(pub(crate) u64);

impl Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["K", "M", "G", "T", "P", "E"];
        if self.0 < 1_000 {
            return write!(f, "{}", self.0);
        }
        let n = u128::from(self.0);
        let mut size: u128 = 1_000;
        let mut unit = 0;
        while 2 * n >= 1_999 * size && unit + 1 < UNITS.len() {
            size *= 1_000;
            unit += 1;
        }
        let unit = UNITS[unit];
        if 100 * n >= 9_995 * size {
            return write!(f, "{}{unit}", (n + size / 2) / size);
        }
        let tenths = (10 * n + size / 2) / size;
        write!(f, "{}.{}{unit}", tenths / 10, tenths % 10)
    }
}

/// [`Amount`] as a text.
pub(crate) fn amount(n: u64) -> String {
    Amount(n).to_string()
}

/// "1 flow", "2 flows".
pub(crate) fn counted(n: u64, of: &str) -> String {
    let s = if n == 1 { "" } else { "s" };
    format!("{n} {of}{s}")
}

/// Milliseconds as "250ms", "12s", "3m04s", "2h05m".
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span(pub(crate) u64);

impl Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = self.0 / 1000;
        match s {
            0 => write!(f, "{}ms", self.0),
            1..60 => write!(f, "{s}s"),
            60..3600 => write!(f, "{}m{:02}s", s / 60, s % 60),
            _ => write!(f, "{}h{:02}m", s / 3600, s / 60 % 60),
        }
    }
}

/// [`Span`] as a text.
pub(crate) fn span(ms: u64) -> String {
    Span(ms).to_string()
}

#[cfg(test)]
#[path = "table_test.rs"]
mod tests;
