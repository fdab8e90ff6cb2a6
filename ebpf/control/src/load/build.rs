//! Record of the build of the pinned programs.

use std::{fs, path::PathBuf};

use super::{Loaded, twins::Twins};
use crate::{Error, Paths, Result, attach::Program, bpf, fingerprint::fingerprint, object, paths};

/// Returns the path of the file that records the build of the pinned programs, if all are of one.
fn build_path(paths: &Paths) -> PathBuf {
    paths.run_dir.join(paths::BUILD_FILE)
}

fn this_build() -> Result<String> {
    Ok(fingerprint(object::bytes(false)?))
}

/// Whether all programs are pinned and of this build.
pub(super) fn is_this_build(paths: &Paths) -> bool {
    let pinned = |program: Program| paths.pin(program.name()).exists();
    let kept = fs::read_to_string(build_path(paths)).ok();
    kept.is_some_and(|kept| this_build().is_ok_and(|this| kept == this))
        && Program::ALL.into_iter().all(pinned)
        && Twins::are_pinned(paths)
}

/// Records that the pinned programs are of this build.
pub(super) fn record_build(paths: &Paths) -> Result<()> {
    let path = build_path(paths);
    fs::write(&path, this_build()?).map_err(Error::os(format!("write {}", path.display())))
}

/// Removes the record, before the programs change.
pub(super) fn clear_build(paths: &Paths) -> Result<()> {
    paths::remove_if_there(&build_path(paths), |path| fs::remove_file(path)).map(drop)
}

/// Opens the pinned programs.
pub(super) fn open_programs(paths: &Paths) -> Result<Loaded> {
    let open = |program: Program| {
        let pin = paths.pin(program.name());
        let what = format!("open the pinned program {}", pin.display());
        let fd = bpf::obj_get(&pin).map_err(Error::os(what))?;
        Ok((program, fd))
    };
    Program::ALL.into_iter().map(open).collect()
}
