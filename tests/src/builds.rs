//! The builds of slipgate that tests start, and by which statuses they tell.

use std::{env, fs, path::PathBuf};

use crate::error::{Error, Result, Tried};

/// The exit status of `slipgate why` for no.
const WHY_REFUSED: i32 = 3;

/// Returns the path of the built binary: `$SLIPGATE_BIN`, or `target/release/slipgate` of the
/// workspace.
///
/// # Errors
/// The file does not exist.
pub fn binary() -> Result<PathBuf> {
    let built = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/release/slipgate");
    let path = env::var_os("SLIPGATE_BIN").map_or_else(|| PathBuf::from(built), PathBuf::from);
    match path.is_file() {
        true => Ok(path),
        false => Err(Error::Missing(format!(
            "there is no slipgate binary at {}: run `cargo xtask build`, or set SLIPGATE_BIN",
            path.display()
        ))),
    }
}

/// Returns the path of another build of the same source: `$SLIPGATE_OTHER_BIN`, which `cargo xtask
/// test` builds without optimisation where the binary under test is optimised.
///
/// # Errors
/// The variable is not set, a file cannot be read, or both builds are the same.
pub fn another_build() -> Result<PathBuf> {
    let missing = |why: &str| Error::Missing(format!("another build of slipgate: {why}"));
    let path = env::var_os("SLIPGATE_OTHER_BIN").map(PathBuf::from);
    let path = path.ok_or_else(|| missing("SLIPGATE_OTHER_BIN is not set"))?;
    let read = |path: &PathBuf| fs::read(path).tried(format!("read {}", path.display()));
    match read(&path)? == read(&binary()?)? {
        false => Ok(path),
        true => Err(missing("SLIPGATE_OTHER_BIN is the one under test")),
    }
}

/// Statuses other than 0 by which a command tells, and does not fail.
pub(crate) fn refusals_of(args: &[&str]) -> &'static [i32] {
    match args {
        ["why", ..] => &[WHY_REFUSED],
        _ => &[],
    }
}
