//! Definitions of a daemon's VMs, kept for its successor: a file for each VM beside the control
//! socket, where only root has access.
//!
//! A successor after a crash, a restart or an upgrade serves the same VMs. A daemon that ends its
//! VMs (`--on-exit detach`) leaves none.
use std::{
    fs,
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use slipgate_control::paths::VMS_DIR;
use slipgate_ipc::client::VmDefinition;

fn path_of(run_dir: &Path, name: &str) -> PathBuf {
    run_dir.join(VMS_DIR).join(format!("{name}.json"))
}

/// Keeps a definition, in place of an earlier one of this name. Its name has been checked.
///
/// # Errors
/// The file can't be written.
pub(crate) fn keep(run_dir: &Path, definition: &VmDefinition) -> anyhow::Result<()> {
    let path = path_of(run_dir, &definition.name);
    let write = || -> io::Result<()> {
        fs::create_dir_all(run_dir.join(VMS_DIR))?;
        // Whole, or as it was.
        let new = path.with_extension("new");
        let mut options = fs::OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        options
            .open(&new)?
            .write_all(&serde_json::to_vec(definition)?)?;
        fs::rename(&new, &path)
    };
    write().with_context(|| format!("writing {}", path.display()))
}

/// Removes the definition of a VM that is not to be served any more.
///
/// # Errors
/// The file can't be removed.
pub(crate) fn forget(run_dir: &Path, name: &str) -> anyhow::Result<()> {
    let path = path_of(run_dir, name);
    match fs::remove_file(&path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(e).with_context(|| format!("removing {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Removes all definitions.
///
/// # Errors
/// The directory can't be removed.
pub(crate) fn forget_all(run_dir: &Path) -> anyhow::Result<()> {
    let dir = run_dir.join(VMS_DIR);
    match fs::remove_dir_all(&dir) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(e).with_context(|| format!("removing {}", dir.display()))
        }
        _ => Ok(()),
    }
}

/// Reads the definitions that a predecessor kept, by name.
///
/// # Errors
/// A file can't be read, or another version wrote it in a form that this one can't read.
pub(crate) fn read(run_dir: &Path) -> anyhow::Result<Vec<VmDefinition>> {
    let dir = run_dir.join(VMS_DIR);
    let entries = match fs::read_dir(&dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.with_context(|| format!("reading {}", dir.display()))?,
    };
    let mut all = Vec::new();
    for entry in entries {
        let path = entry
            .with_context(|| format!("reading {}", dir.display()))?
            .path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let what = || {
            format!(
                "reading the VM that was kept in {} (remove the file to go on without that VM)",
                path.display()
            )
        };
        let bytes = fs::read(&path).with_context(what)?;
        all.push(serde_json::from_slice::<VmDefinition>(&bytes).with_context(what)?);
    }
    all.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(all)
}

#[cfg(test)]
#[path = "persisted_vms_test.rs"]
mod tests;
