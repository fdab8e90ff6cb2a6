//! A Debian's programs, for the root of the rig's Linux guests: `target/kernels/userland`, as their packages have
//! them. They are unpacked, not installed: none of their scripts runs, so it takes no root but to refresh
//! old package lists.

use std::fs;

use anyhow::{Context, Result};

use super::packages::{Lists, fetch_unpacked, scratch_in};
use crate::workspace::Workspace;

/// The init, shell and tools that the root's script calls; the libraries come with them.
const PACKAGES: [&str; 6] = [
    "base-files",
    "coreutils",
    "dash",
    "grep",
    "mount",
    "sysvinit-core",
];
/// What none of them reads, below `/usr/share`.
const UNREAD: [&str; 4] = ["doc", "info", "locale", "man"];

pub(super) fn find_or_fetch(workspace: &Workspace) -> Result<()> {
    let target = workspace.kernels().join("userland");
    if target.is_dir() {
        return Ok(());
    }
    let scratch = scratch_in(&workspace.kernels())?;
    let tree = fetch_unpacked(scratch.path(), with_libraries)
        .context("could not fetch Debian's programs for the root of a guest")?;
    for folder in UNREAD {
        // It may not be there.
        fs::remove_dir_all(tree.join("usr/share").join(folder)).ok();
    }
    fs::rename(&tree, &target)
        .with_context(|| format!("could not put Debian's programs into {}", target.display()))
}

/// The packages, and those of all libraries that their programs are linked with.
fn with_libraries(lists: &Lists) -> Result<Vec<String>> {
    let mut all: Vec<String> = PACKAGES.map(str::to_owned).to_vec();
    let mut at = 0;
    while let Some(package) = all.get(at).cloned() {
        for name in lists.depends_of(&package)? {
            if name.starts_with("lib") && !all.contains(&name) {
                all.push(name);
            }
        }
        at += 1;
    }
    Ok(all)
}
