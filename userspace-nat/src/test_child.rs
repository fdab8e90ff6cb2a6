//! Tests that change what is the whole process's, such as a limit, in a process of their own.
use std::{env, process::Command};

/// Runs an ignored test of this crate, by its path, in a child process. Fails unless it ran and passed.
pub(crate) fn passes(test: &str) {
    let ran = Command::new(env::current_exe().unwrap())
        .args([test, "--exact", "--ignored", "--test-threads=1"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success() && said.contains("1 passed"), "{ran:?}");
}
