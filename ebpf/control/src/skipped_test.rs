//! Report of tests that cannot run here. Also part of `tests/programs`.

use std::io::Write as _;

/// Reports that a test is skipped. With `SLIPGATE_NO_SKIP` set, this fails the test.
pub(crate) fn skipped(test: &str, why: &str) {
    let line = format!("skipped: {test}: {why}");
    assert!(std::env::var_os("SLIPGATE_NO_SKIP").is_none(), "{line}");
    // Not `println!`: libtest shows its output for failed tests only.
    writeln!(std::io::stderr(), "{line}").ok();
}
