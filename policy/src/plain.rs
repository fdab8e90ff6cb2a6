//! Text of others' making (the engine, a guest's questions, a flow log, a policy file), as a terminal
//! may be given it: a control character would move the cursor, change the title, or worse.

/// In place of a control character.
const INSTEAD: char = '\u{fffd}';

/// Text of many lines, without control characters but ends of lines and tabs.
pub fn plain(text: &str) -> String {
    let ok = |c: char| !c.is_control() || matches!(c, '\n' | '\t');
    text.chars()
        .map(|c| if ok(c) { c } else { INSTEAD })
        .collect()
}

/// What belongs on one line: an end of line in it would begin one that looks like ours.
pub fn one_line(text: &str) -> String {
    let ok = |c: char| !c.is_control();
    text.chars()
        .map(|c| if ok(c) { c } else { INSTEAD })
        .collect()
}

#[cfg(test)]
#[path = "plain_test.rs"]
mod tests;
