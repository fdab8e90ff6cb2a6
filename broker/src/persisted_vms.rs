//! VM definitions and policies that clients gave to a daemon, stored for its successor: a file for
//! each VM and for each policy beside the control socket, where only root has access.
//!
//! A successor after a crash, a restart or an upgrade serves the same VMs by the same policies. A
//! daemon that ends its VMs (`--on-exit detach`) leaves none of this.
use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use slipgate_control::paths::{POLICIES_DIR, VMS_DIR};
use slipgate_ipc::client::VmDefinition;

use crate::persisted_policy;

fn path_of(run_dir: &Path, name: &str) -> PathBuf {
    run_dir.join(VMS_DIR).join(format!("{name}.json"))
}

fn path_of_policy(run_dir: &Path, name: &str) -> PathBuf {
    run_dir.join(POLICIES_DIR).join(format!("{name}.toml"))
}

/// Keeps a definition, in place of an earlier one of this name. Its name has been checked.
///
/// # Errors
/// The file can't be written.
pub(crate) fn keep(run_dir: &Path, definition: &VmDefinition) -> anyhow::Result<()> {
    let bytes = serde_json::to_vec(definition)?;
    write_in_dir(&path_of(run_dir, &definition.name), &bytes)
}

/// Keeps the text of a policy, in place of an earlier one of this name. Its name has been checked.
///
/// # Errors
/// The file can't be written.
pub(crate) fn keep_policy(run_dir: &Path, name: &str, text: &str) -> anyhow::Result<()> {
    write_in_dir(&path_of_policy(run_dir, name), text.as_bytes())
}

/// Removes a policy that is not to be in force any more.
///
/// # Errors
/// The file can't be removed.
pub(crate) fn forget_policy(run_dir: &Path, name: &str) -> anyhow::Result<()> {
    persisted_policy::forget(&path_of_policy(run_dir, name))
}

/// Reads the policies that a predecessor kept, by name.
///
/// # Errors
/// A file can't be read.
pub(crate) fn read_policies(run_dir: &Path) -> anyhow::Result<BTreeMap<String, String>> {
    let files = files_in(&run_dir.join(POLICIES_DIR), "toml")?;
    let text = |path: PathBuf| {
        let text = fs::read_to_string(&path);
        let text = text.with_context(|| format!("reading {}", path.display()))?;
        let name = path.file_stem().unwrap_or_default();
        Ok((name.to_string_lossy().into_owned(), text))
    };
    files.into_iter().map(text).collect()
}

fn write_in_dir(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
    }
    let write = persisted_policy::write_whole(path, bytes);
    write.with_context(|| format!("writing {}", path.display()))
}

/// Removes the definition of a VM that is not to be served any more.
///
/// # Errors
/// The file can't be removed.
pub(crate) fn forget(run_dir: &Path, name: &str) -> anyhow::Result<()> {
    persisted_policy::forget(&path_of(run_dir, name))
}

/// Removes everything that was kept.
///
/// # Errors
/// A directory can't be removed.
pub(crate) fn forget_all(run_dir: &Path) -> anyhow::Result<()> {
    for dir in [VMS_DIR, POLICIES_DIR] {
        let dir = run_dir.join(dir);
        match fs::remove_dir_all(&dir) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                return Err(e).with_context(|| format!("removing {}", dir.display()));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Reads the definitions that a predecessor kept, by name.
///
/// # Errors
/// A file can't be read, or another version wrote it in a form that this one can't read.
pub(crate) fn read(run_dir: &Path) -> anyhow::Result<Vec<VmDefinition>> {
    let mut all = Vec::new();
    for path in files_in(&run_dir.join(VMS_DIR), "json")? {
        let what = || {
            format!(
                "reading the VM that was kept in {} (remove the file to go on without that VM)",
                path.display()
            )
        };
        let bytes = fs::read(&path).with_context(what)?;
        all.push(serde_json::from_slice::<VmDefinition>(&bytes).with_context(what)?);
    }
    Ok(all)
}

/// Returns the files of a directory with this extension, sorted by name; none if the directory does
/// not exist.
fn files_in(dir: &Path, extension: &str) -> anyhow::Result<Vec<PathBuf>> {
    let what = || format!("reading {}", dir.display());
    let entries = match fs::read_dir(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.with_context(what)?,
    };
    let paths = entries.map(|entry| entry.map(|entry| entry.path()));
    let mut paths: Vec<PathBuf> = paths.collect::<Result<_, _>>().with_context(what)?;
    paths.retain(|path| path.extension().is_some_and(|it| it == extension));
    paths.sort();
    Ok(paths)
}

#[cfg(test)]
#[path = "persisted_vms_test.rs"]
mod tests;
