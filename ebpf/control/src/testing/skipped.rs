//! Tests that can't run here. Also part of `tests/programs`.

use std::io::Write as _;

/// Says that a test is skipped; where nothing may be (`SLIPGATE_NO_SKIP`), that fails it.
pub(crate) fn skipped(test: &str, why: &str) {
    let line = format!("skipped: {test}: {why}");
    assert!(std::env::var_os("SLIPGATE_NO_SKIP").is_none(), "{line}");
    // Not `println!`: libtest shows what that prints of failed tests only.
    writeln!(std::io::stderr(), "{line}").ok();
}
