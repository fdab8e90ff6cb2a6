//! The policy of `policy apply FILE`, kept for a successor.
//!
//! A successor that is started with the same command line (after a crash, an upgrade, or with
//! `--on-exit keep`) continues with the policy that was in force, not with the one that the command
//! line names. So that policy is kept, with the texts of all files as they were read, beside the
//! control socket, where only root has access. A successor with other policy settings uses those
//! and logs it; the kept policy is removed when it serves. A successor that can't read the settings
//! of a predecessor of another version continues with the applied policy. The command line's own
//! policy file is not kept: it is read again.
use std::{
    collections::BTreeMap,
    fs,
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use slipgate_policy::{
    PolicySet,
    document::{LoadedPolicies, PolicyFile},
};

use crate::config::{Config, PolicyFlags};

/// Format version: changes when an older [`PolicyFlags`] can no longer be compared.
const VERSION: u32 = 1;

/// The file's contents: an applied policy.
#[derive(Debug, Serialize, Deserialize)]
struct PersistedPolicy {
    /// Format version of `command_line`; another version is not read.
    #[serde(default)]
    version: u32,
    /// Policy settings of the command line: a [`PolicyFlags`].
    command_line: serde_json::Value,
    /// Path of the policy file.
    file: PathBuf,
    text: String,
    /// Texts of the deny files, by the paths under which they were read.
    lists: BTreeMap<String, String>,
}

impl PersistedPolicy {
    /// Returns the command line's policy flags; `None` if another version wrote them in a form that
    /// this one can't read.
    fn command_line_flags(&self) -> Option<PolicyFlags> {
        let known = self.version == VERSION;
        let flags = || serde_json::from_value(self.command_line.clone()).ok();
        known.then(flags).flatten()
    }
}

/// Path of the file that keeps an owner's applied policy.
pub(crate) fn path(run_dir: &Path, owner_row: u32) -> PathBuf {
    run_dir.join(format!("{owner_row}.policy"))
}

/// Writes the applied policy, or removes the file when the command line says the same.
pub(crate) fn keep(
    path: &Path,
    command_line: &PolicyFlags,
    now: &Config,
    deny_files: impl FnOnce() -> BTreeMap<String, String>,
) -> anyhow::Result<()> {
    let said = now.policy_flags();
    let Some(file) = now
        .base_file
        .as_ref()
        .filter(|_| !said.agrees(command_line))
    else {
        return forget(path);
    };
    let kept = PersistedPolicy {
        version: VERSION,
        command_line: serde_json::to_value(command_line)?,
        file: file.path().to_owned(),
        text: file.text().to_owned(),
        lists: deny_files(),
    };
    let what = || format!("keeping the policy for a successor in {}", path.display());
    write_whole(path, &serde_json::to_vec(&kept)?).with_context(what)
}

/// Writes a file for root alone that replaces an earlier one. It is written completely or left
/// unchanged.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut name = path.as_os_str().to_owned();
    name.push("-new");
    let new = PathBuf::from(name);
    let mut options = fs::OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    options.open(&new)?.write_all(bytes)?;
    fs::rename(&new, path)
}

/// Removes a file that was kept, so that a successor takes nothing over.
pub(crate) fn forget(path: &Path) -> anyhow::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(e).with_context(|| format!("removing {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Returns the policy that a predecessor applied beyond its command line, if this command line says
/// the same. The file stays: a process that takes nothing over removes it when it serves its VMs,
/// and not when it fails to start.
pub(crate) fn take_over(
    path: &Path,
    config: &Config,
) -> anyhow::Result<Option<(Config, LoadedPolicies, PolicySet)>> {
    let what = || {
        format!(
            "taking over the policy that was in force, {}",
            path.display()
        )
    };
    let bytes = match fs::read(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other.with_context(what)?,
    };
    let kept: PersistedPolicy = serde_json::from_slice(&bytes).with_context(what)?;
    match kept.command_line_flags() {
        Some(said) if !said.agrees(&config.policy_flags()) => {
            tracing::warn!(
                "{} was in force by `slipgate policy apply`; the command line has other \
                 policy flags now, which replace it",
                kept.file.display()
            );
            return Ok(None);
        }
        Some(_) => {}
        // To take back what an owner shut by hand would be worse than to keep it.
        None => tracing::warn!(
            "{} was put in force by `slipgate policy apply` under another version of slipgate, and \
             stays in force, whatever the command line says of policies: `slipgate policy apply \
             FILE` puts another in force",
            kept.file.display()
        ),
    }
    let file = PolicyFile::parse(&kept.file, kept.text).with_context(what)?;
    let config = config.with_policy(file).with_context(what)?;
    let loaded = config.load_policies_by(&|path| {
        let text = kept.lists.get(&path.display().to_string());
        text.cloned().ok_or_else(|| io::ErrorKind::NotFound.into())
    });
    let loaded = loaded.with_context(what)?;
    let policies = loaded.compile().with_context(what)?;
    tracing::info!("{} is in force, as it was applied", kept.file.display());
    Ok(Some((config, loaded, policies)))
}

#[cfg(test)]
#[path = "persisted_policy_test.rs"]
mod tests;
