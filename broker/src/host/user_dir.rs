//! Directories of what runs without privileges.
use std::path::{Path, PathBuf};

use nix::unistd::geteuid;

/// Directory of root's files of memory.
pub(crate) const MEMORY_OF_ROOT: &str = "/run/slipgate/userspace";

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
