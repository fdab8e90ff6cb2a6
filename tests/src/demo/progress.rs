//! Progress messages of the demonstration, and the results of its checks.

use std::{
    io::{IsTerminal, Write},
    time::Instant,
};

const BOLD: &str = "\x1b[1m";
const DIM: &str = "\x1b[2m";
const GREEN: &str = "\x1b[32m";
const RED: &str = "\x1b[31m";
const PLAIN: &str = "\x1b[0m";

/// Writes lines with the time since the start; escape codes only to a terminal.
pub(crate) struct Progress {
    started: Instant,
    colour: bool,
    failed: usize,
}

impl Progress {
    pub(crate) fn start() -> Self {
        Progress {
            started: Instant::now(),
            colour: std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none(),
            failed: 0,
        }
    }

    pub(crate) fn title(&self, text: &str) {
        self.line(&format!("{}\n", self.paint(BOLD, text)));
    }

    /// Prints one completed step.
    pub(crate) fn step(&self, what: &str, outcome: &str) {
        let at = format!("{:6.2} s", self.started.elapsed().as_secs_f64());
        self.line(&format!("{}  {what:<12} {outcome}", self.paint(DIM, &at)));
    }

    pub(crate) fn heading(&self, text: &str) {
        self.line(&format!("\n{}", self.paint(BOLD, text)));
    }

    pub(crate) fn line(&self, text: &str) {
        // A reader that went away (`| head`) does not stop the checks.
        let _ = writeln!(std::io::stdout().lock(), "{text}");
    }

    /// A check that decides over the exit status.
    pub(crate) fn check(&mut self, holds: bool, what: &str) {
        let mark = match holds {
            true => self.paint(GREEN, "ok  "),
            false => self.paint(RED, "FAIL"),
        };
        self.failed += usize::from(!holds);
        self.line(&format!("  {mark} {what}"));
    }

    /// Says how long it took; the number of checks that failed.
    pub(crate) fn finish(&self) -> usize {
        let seconds = self.started.elapsed().as_secs_f64();
        let verdict = match self.failed {
            0 => self.paint(GREEN, "All checks hold."),
            failed => self.paint(RED, &format!("{failed} checks FAILED.")),
        };
        self.line(&format!("\n{verdict} {seconds:.1} s."));
        self.failed
    }

    fn paint(&self, code: &str, text: &str) -> String {
        match self.colour {
            true => format!("{code}{text}{PLAIN}"),
            false => text.to_owned(),
        }
    }
}

/// Formats `1234567` as `1,234,567`.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let first = digits.len() % 3;
    let mut out = digits[..first].to_owned();
    for at in (first..digits.len()).step_by(3) {
        if !out.is_empty() {
            out.push(',');
        }
        out.push_str(&digits[at..at + 3]);
    }
    out
}

/// Bytes with a binary unit.
pub(crate) fn bytes(number: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB"];
    let mut value = number as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{number} B"),
        _ => format!("{value:.1} {}", units[unit]),
    }
}
