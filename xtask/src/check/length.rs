//! Reports long files. The report never fails: it is for readers.

use std::fs;

use anyhow::Result;

use crate::workspace::{Workspace, capture, say};

/// Length, in lines, from which on a file is reported.
const LONG_LINES: usize = 400;

/// Prints the Rust files under version control that are longer than that, the longest first.
pub(super) fn report(workspace: &Workspace) -> Result<()> {
    let mut git = std::process::Command::new("git");
    git.arg("-C")
        .arg(&workspace.root)
        .args(["ls-files", "--", "*.rs"]);
    // A source archive has no git: then there is nobody to tell.
    let Ok(files) = capture(&mut git) else {
        return Ok(());
    };
    let mut long: Vec<(usize, &str)> = files
        .lines()
        .filter_map(|file| Some((fs::read_to_string(workspace.root.join(file)).ok()?, file)))
        .map(|(text, file)| (text.lines().count(), file))
        .filter(|(lines, _)| *lines > LONG_LINES)
        .collect();
    long.sort_by_key(|(lines, _)| std::cmp::Reverse(*lines));
    for (lines, file) in long {
        say(format!("{file} has {lines} lines"));
    }
    Ok(())
}
