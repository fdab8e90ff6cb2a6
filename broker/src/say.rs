//! What people read: lines on stderr that are no messages of a level, and counts.
use std::io::{self, Write as _};

use slipgate_policy::plain;

/// Says something on stderr, whatever the level of messages: a line, without its end.
pub fn say(text: std::fmt::Arguments<'_>) {
    // In one write: another process's message does not come between.
    let text = format!("slipgate: {text}\n");
    let _ = io::stderr().write_all(plain(&text).as_bytes());
}

/// "1 flow", "2 flows".
pub fn counted(n: u64, of: &str) -> String {
    let s = if n == 1 { "" } else { "s" };
    format!("{n} {of}{s}")
}
