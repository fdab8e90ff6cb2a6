//! Directories of what runs without privileges.
use std::{
    fs::DirBuilder,
    io,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _},
    path::{Path, PathBuf},
};

use nix::unistd::geteuid;

/// Directory of root's files of memory.
pub(crate) const MEMORY_OF_ROOT: &str = "/run/slipgate/userspace";

/// Bits of a mode: others can write; others can do anything.
const WRITABLE: u32 = 0o022;
const ACCESSIBLE: u32 = 0o077;

/// Checks that a directory is this user's alone, and that nobody else can put another in its place: in
/// /tmp another user may have made one of its name first, and would answer for this user's machines, or
/// write their tables.
///
/// # Errors
/// It, or the directory that it is in, is not this user's, or others can get into it; it is not there.
pub(crate) fn check_private(dir: &Path) -> io::Result<()> {
    let above = dir.parent().map(|above| (above, WRITABLE));
    for (path, forbidden) in above.into_iter().chain([(dir, ACCESSIBLE)]) {
        // Not where a link leads: its owner would choose.
        let found = path.symlink_metadata()?;
        let problem = if !found.is_dir() {
            "is no directory".to_owned()
        } else if found.uid() != geteuid().as_raw() {
            format!("belongs to the user {}", found.uid())
        } else if found.mode() & forbidden != 0 {
            format!("is open to others (mode {:04o})", found.mode() & 0o7777)
        } else {
            continue;
        };
        let path = path.display();
        return Err(io::Error::other(format!(
            "{path} {problem}, and would hold sockets or tables of this user's machines: remove it, or \
             set XDG_RUNTIME_DIR to a directory of your own"
        )));
    }
    Ok(())
}

/// Makes a directory, if it is not there, for this user alone.
///
/// # Errors
/// It can't be made, or as [`check_private`].
pub(crate) fn make_private(dir: &Path) -> io::Result<()> {
    let mut made = DirBuilder::new();
    made.recursive(true).mode(0o700).create(dir)?;
    check_private(dir)
}

/// Directory of this user's files of memory, unless `--pin-dir` names another.
pub fn user_mode_dir() -> PathBuf {
    if geteuid().is_root() {
        return MEMORY_OF_ROOT.into();
    }
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(dir) if Path::new(&dir).is_absolute() => Path::new(&dir).join("slipgate"),
        _ => format!("/tmp/slipgate-{}", geteuid()).into(),
    }
}
