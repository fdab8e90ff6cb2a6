//! What `policy apply FILE` put in force, for a successor.
//!
//! A successor that is started by the same command line (after a crash, an upgrade, or with
//! `--on-exit keep`) goes on with the policy that was in force, and not with the one that the command
//! line names. So it is kept, with the texts of all files as they were read, beside the control
//! socket, where only root comes. One that is told something else about policies is given that, and
//! says so, and what was kept is forgotten when it serves. One that does not understand what a
//! predecessor of another version was told goes on with what was applied. What the command line itself names is not kept: it is read again.
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
    document::{LoadedPolicies, PolicyFile, RuleText},
};

use crate::config::{Config, PolicyFlags};

/// To be another when a [`PolicyFlags`] can't be compared with those of before.
const VERSION: u32 = 1;

/// As it is kept.
#[derive(Debug, Serialize, Deserialize)]
struct PersistedPolicy {
    /// Of what `command_line` is: one that says another is not understood.
    #[serde(default)]
    version: u32,
    /// What the command line said of policies: a [`PolicyFlags`].
    command_line: serde_json::Value,
    /// The policy file.
    file: PathBuf,
    text: String,
    /// The deny files, by the names they were read by.
    lists: BTreeMap<String, String>,
}

impl PersistedPolicy {
    /// What the command line said; `None`: another version's, not understood.
    fn said(&self) -> Option<PolicyFlags> {
        let known = self.version == VERSION;
        let said = || serde_json::from_value(self.command_line.clone()).ok();
        known.then(said).flatten()
    }
}

/// Where what an owner applied is kept.
pub(crate) fn path(run_dir: &Path, owner_row: u32) -> PathBuf {
    run_dir.join(format!("{owner_row}.policy"))
}

/// Keeps what was applied, or forgets what was kept when the command line says the same.
pub(crate) fn keep(
    path: &Path,
    command_line: &PolicyFlags,
    now: &Config,
    loaded: &LoadedPolicies,
) -> anyhow::Result<()> {
    let said = now.policy_flags();
    let Some(file) = now
        .policy_file
        .as_ref()
        .filter(|_| !said.agrees(command_line))
    else {
        return forget(path);
    };
    let rules = loaded.policies.iter().flat_map(|policy| &policy.rules);
    let lists = rules.filter_map(|rule| match &rule.rule {
        RuleText::DenyFile { name, text } => Some((name.clone(), text.clone())),
        RuleText::Match(..) => None,
    });
    let kept = PersistedPolicy {
        version: VERSION,
        command_line: serde_json::to_value(command_line)?,
        file: file.path().to_owned(),
        text: file.text().to_owned(),
        lists: lists.collect(),
    };
    let what = || format!("keeping the policy for a successor in {}", path.display());
    // Whole, or as it was.
    let new = path.with_extension("policy-new");
    let mut options = fs::OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    options
        .open(&new)
        .and_then(|mut file| file.write_all(&serde_json::to_vec(&kept)?))
        .and_then(|()| fs::rename(&new, path))
        .with_context(what)
}

/// Nothing is to be taken over.
pub(crate) fn forget(path: &Path) -> anyhow::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(e).with_context(|| format!("removing {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// What a predecessor had in force beside what its command line said, if this one says the same.
/// What is kept stays: who takes nothing over forgets it when it serves its VMs, and not when it
/// fails to start.
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
    match kept.said() {
        Some(said) if !said.agrees(&config.policy_flags()) => {
            tracing::warn!(
                "{} was in force by `slipgate policy apply`; now the command line says something \
                 else about policies, and that holds",
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
