//! Policies that clients give a daemon: by name, and in VMs' definitions.
use std::collections::{BTreeMap, BTreeSet};

use slipgate_ipc::client::{ClientAnswer, ClientId, PolicyStatus, Replaces, Version};
use slipgate_policy::document::{ConfigError, check_named, is_inline};

use super::{Change, LearningVms, PolicyChanges, Read};
use crate::{
    config::{Config, from_disk},
    counted,
    kernel_state::{Attached, Taken},
    parts::Parts,
    persisted_vms,
};

/// Number of VMs that a refusal names.
const MOST_NAMED: usize = 8;

/// A change of a named policy, which a client requests.
#[derive(Debug)]
pub(crate) struct NamedChange {
    pub(crate) client: ClientId,
    pub(crate) name: String,
    /// Text of the policy; `None`: it is to be removed.
    pub(crate) text: Option<String>,
    /// What it may replace or remove.
    pub(crate) replaces: Replaces,
}

impl PolicyChanges {
    /// Whether the last change was a named policy's.
    pub(crate) fn last_was_put(&self) -> bool {
        self.last_was_put
    }

    /// Makes the next of the changes of named policies that wait, unless a change is under way.
    pub(crate) fn see_to_puts(&mut self, parts: &mut Parts) -> anyhow::Result<()> {
        while !self.is_applying()
            && let Some(change) = self.to_put.pop_front()
        {
            self.change_named(parts, change)?;
        }
        Ok(())
    }

    /// Puts a named policy in force, in place of the policy of this name, or removes it, after the
    /// change that is under way.
    pub(crate) fn change_named(
        &mut self,
        parts: &mut Parts,
        change: NamedChange,
    ) -> anyhow::Result<()> {
        if self.is_applying() {
            self.to_put.push_back(change);
            return Ok(());
        }
        let client = change.client;
        if let Some(answer) = refusal_of(&parts.attached, &change) {
            parts.control.answer(client, &answer);
            return Ok(());
        }
        let now = self.generation(&parts.attached, &change.name);
        let learning = LearningVms::of(&self.learning);
        let changed = with_change(&parts.attached, &change, &learning);
        let before = match changed.and_then(|read| parts.attached.take_in(read)) {
            Ok(before) => before,
            Err(e) => {
                let answer = match e.is::<Taken>() {
                    true => ClientAnswer::taken(format!("{e:#}")),
                    false => ClientAnswer::error(format!("{e:#}")),
                };
                parts.control.answer(client, &answer);
                return Ok(());
            }
        };
        let NamedChange { name, text, .. } = change;
        let run_dir = &parts.attached.datapath.paths().run_dir;
        let (kept, what) = match &text {
            Some(text) => {
                self.generations.insert(name.clone(), now + 1);
                let kept = persisted_vms::keep_policy(run_dir, &name, text);
                (kept, format!("the policy {name} is in force"))
            }
            None => {
                self.generations.remove(&name);
                let forgotten = persisted_vms::forget_policy(run_dir, &name);
                (forgotten, format!("the policy {name} is removed"))
            }
        };
        if let Err(e) = kept {
            tracing::warn!("a successor would have the policy {name} as it was: {e:#}");
        }
        let change = Change {
            client: Some(client),
            what,
            before,
            named: Some(name),
            ..Change::default()
        };
        self.send_policies(parts, change)
    }

    /// Puts policies in force that VMs' definitions contain, by name, in place of those that no VM
    /// has any more.
    ///
    /// # Errors
    /// A policy can't be used with the others; nothing has changed then.
    pub(crate) fn put_inline(
        &mut self,
        parts: &mut Parts,
        texts: &BTreeMap<String, String>,
    ) -> anyhow::Result<()> {
        let learning = LearningVms::of(&self.learning);
        let attached = &mut parts.attached;
        let mut config = attached.config.clone();
        let in_use = config.vms.iter().filter_map(|vm| vm.flags.policy_name());
        let in_use: BTreeSet<String> = in_use.collect();
        let named = &mut config.named_policies;
        named.retain(|name, _| !is_inline(name) || in_use.contains(name));
        named.extend(texts.clone());
        let read = reread(attached, config, &learning)?;
        let before = attached.take_in(read)?;
        let change = Change {
            client: None,
            what: format!("{} of VMs in force", counted(texts.len() as u64, "policy")),
            before,
            ..Change::default()
        };
        self.send_policies(parts, change)
    }

    /// Returns the generation of a named policy that clients put; 0 if there is none. A policy that
    /// a predecessor stored begins with 1.
    pub(super) fn generation(&self, attached: &Attached, name: &str) -> u64 {
        let kept = u64::from(attached.config.named_policies.contains_key(name));
        self.generations.get(name).copied().unwrap_or(kept)
    }

    /// Returns the named policies that clients put, by name.
    pub(crate) fn named(&self, attached: &Attached) -> Vec<PolicyStatus> {
        let named = attached.config.named_policies.iter();
        named
            .filter(|(name, _)| !is_inline(name))
            .map(|(name, text)| PolicyStatus {
                name: name.clone(),
                generation: self.generation(attached, name),
                text: text.clone(),
            })
            .collect()
    }
}

/// The answer to a change whose condition does not hold, or that removes what is not there.
fn refusal_of(attached: &Attached, change: &NamedChange) -> Option<ClientAnswer> {
    let NamedChange { name, replaces, .. } = change;
    let named = &attached.config.named_policies;
    let in_force = named.get(name).filter(|_| !is_inline(name));
    if !replaces.permits(in_force.map(|text| Version::of(text.as_bytes()))) {
        let what = format!("the policy {name}");
        return Some(ClientAnswer::replaced(&what, in_force.is_some()));
    }
    if change.text.is_none() && in_force.is_none() {
        let why = format!("no policy {name:?} was put: GET /v1/policies lists those that were");
        return Some(ClientAnswer::unknown(why));
    }
    None
}

/// Reads the policies with a change of one of them.
fn with_change(
    attached: &Attached,
    change: &NamedChange,
    learning: &LearningVms,
) -> anyhow::Result<Read> {
    let NamedChange { name, text, .. } = change;
    let mut config = attached.config.clone();
    let Some(text) = text else {
        config.named_policies.remove(name);
        check_unused(&config, name)?;
        let read = reread(attached, config, learning);
        // The policy file's [vms] may name it.
        return read.map_err(|e| Taken(format!("the policy {name} can't be removed: {e}")).into());
    };
    check_named(name, text)?;
    config.named_policies.insert(name.clone(), text.clone());
    Ok(reread(attached, config, learning)?)
}

/// Reads the policies of another configuration. Files are not read again.
fn reread(
    attached: &Attached,
    config: Config,
    learning: &LearningVms,
) -> Result<Read, ConfigError> {
    let config = config.settled()?;
    let files = attached.loaded.deny_files();
    let loaded = config.load_policies_by(&|path| match files.get(&*path.to_string_lossy()) {
        Some(text) => Ok(text.clone()),
        None => from_disk(path),
    })?;
    Read::of(config, loaded, learning)
}

/// Checks that nobody names a policy, unless the policy file has one of this name, too.
///
/// # Errors
/// [`Taken`]: somebody does.
fn check_unused(config: &Config, name: &str) -> Result<(), Taken> {
    let mut of_file = config
        .base_file
        .iter()
        .flat_map(|file| file.document.policy.keys());
    if of_file.any(|own| own.get_ref() == name) {
        return Ok(());
    }
    let used = |who: &str, remedy: &str| Taken(format!("the policy {name} is {who}: {remedy}"));
    if config.flags.policy_name.as_deref() == Some(name) {
        let who = "that of all VMs that name none, by --policy-name";
        return Err(used(who, "start slipgate without that flag first"));
    }
    let users = config
        .vms
        .iter()
        .filter(|vm| vm.flags.policy.as_deref() == Some(name));
    let users: Vec<&str> = users.map(|vm| &*vm.name).collect();
    if users.is_empty() {
        return Ok(());
    }
    let mut who = users[..users.len().min(MOST_NAMED)].join(", ");
    if users.len() > MOST_NAMED {
        who = format!("{who} and {} more", users.len() - MOST_NAMED);
    }
    Err(used(
        &format!("that of {who}"),
        "give each of them another one first, or remove it",
    ))
}

#[cfg(test)]
#[path = "named_test.rs"]
mod tests;
