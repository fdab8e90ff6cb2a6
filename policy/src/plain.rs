//! Untrusted text (from the engine, a guest's questions, a flow log, a policy file), made safe for
//! a terminal: a control character would move the cursor, change the title, or worse.

/// Replacement for a control character: U+FFFD.
const REPLACEMENT: char = '\u{fffd}';

/// Returns the text with its control characters replaced, except line feeds and tabs.
pub fn plain(text: &str) -> String {
    let ok = |c: char| !c.is_control() || matches!(c, '\n' | '\t');
    text.chars()
        .map(|c| if ok(c) { c } else { REPLACEMENT })
        .collect()
}

/// Returns the text with all control characters replaced, line feeds included: text after a line
/// feed could pass for a line of our own output.
pub fn one_line(text: &str) -> String {
    let ok = |c: char| !c.is_control();
    text.chars()
        .map(|c| if ok(c) { c } else { REPLACEMENT })
        .collect()
}

#[cfg(test)]
#[path = "plain_test.rs"]
mod tests;
