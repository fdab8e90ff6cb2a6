//! Policies that clients give a daemon: by name, and in VMs' definitions.
use std::{collections::BTreeMap, path::Path};

use slipgate_ipc::client::{ClientAnswer, ClientId, PolicyStatus, Replaces, Version};
use slipgate_policy::document::{
    Limits, LoadedPolicies, LoadedPolicy, PolicyFile, PutPolicy, check_named, is_inline,
    quotas_named,
};

use super::{Change, PolicyChanges, Prepared};
use crate::{
    config::{Config, VmConfig},
    counted,
    kernel_state::{Attached, ResourceTaken},
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
    /// Condition: which policy it may replace or remove.
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
        let prepared = with_change(&parts.attached, &change);
        let done = match prepared.and_then(|prepared| self.take_in(parts, prepared)) {
            Ok(done) => done,
            Err(e) => {
                let answer = match e.is::<ResourceTaken>() {
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
            done,
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
        let attached = &parts.attached;
        let config = &attached.config;
        let mut prepared = Prepared::default();
        for (name, text) in texts {
            prepared.add(attached, name, text)?;
        }
        let inline = config.named_policies.keys().filter(|name| is_inline(name));
        for name in inline.filter(|name| !texts.contains_key(*name)) {
            let key = Some(name.clone());
            if attached.vms.with_policy(&key).next().is_none() {
                prepared.named.push((name.clone(), None));
                prepared.gone.push(key);
            }
        }
        let done = self.take_in(parts, prepared)?;
        let change = Change {
            client: None,
            what: format!("{} of VMs in force", counted(texts.len() as u64, "policy")),
            done,
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
            .map(|(name, policy)| PolicyStatus {
                name: name.clone(),
                generation: self.generation(attached, name),
                text: policy.text().to_owned(),
            })
            .collect()
    }
}

/// The answer to a change whose condition does not hold, or that removes what is not there.
fn refusal_of(attached: &Attached, change: &NamedChange) -> Option<ClientAnswer> {
    let NamedChange { name, replaces, .. } = change;
    let named = &attached.config.named_policies;
    let in_force = named.get(name).filter(|_| !is_inline(name));
    if !replaces.permits(in_force.map(|policy| Version::of(policy.text().as_bytes()))) {
        let what = format!("the policy {name}");
        return Some(ClientAnswer::replaced(&what, in_force.is_some()));
    }
    if change.text.is_none() && in_force.is_none() {
        let why = format!("no policy {name:?} was put: GET /v1/policies lists those that were");
        return Some(ClientAnswer::unknown(why));
    }
    None
}

impl Prepared {
    /// Adds a named policy to those that come. Files are not read again.
    fn add(&mut self, attached: &Attached, name: &str, text: &str) -> anyhow::Result<()> {
        let config = &attached.config;
        let policy = PutPolicy::parse(name, text, config.base_file.as_ref())?;
        config.check_loopback_in(policy.file())?;
        let read = |path: &Path| attached.policies.read_again(path);
        self.put.push(policy.load(&config.flags, &read)?);
        self.settle_vms(attached, name, |vm| config.limits_by(policy.quotas(), vm));
        self.named.push((name.to_owned(), Some(policy)));
        Ok(())
    }

    /// Derives the quotas of the VMs with a policy again.
    fn settle_vms(
        &mut self,
        attached: &Attached,
        name: &str,
        limits: impl Fn(&VmConfig) -> Limits,
    ) {
        for at in attached.vms.with_policy(&Some(name.to_owned())) {
            let present = &attached.vms[at].config;
            let new = VmConfig {
                limits: limits(present),
                ..present.clone()
            };
            if new != *present {
                self.vms.push((at, new));
            }
        }
    }
}

/// Reads a change of one policy.
fn with_change(attached: &Attached, change: &NamedChange) -> anyhow::Result<Prepared> {
    let NamedChange { name, text, .. } = change;
    let mut prepared = Prepared::default();
    if let Some(text) = text {
        check_named(name, text)?;
        prepared.add(attached, name, text)?;
        return Ok(prepared);
    }
    let config = &attached.config;
    let key = Some(name.clone());
    let users = attached.vms.with_policy(&key);
    let users = users.map(|at| attached.vms[at].config.name.as_str());
    check_unused(config, name, users)?;
    prepared.named.push((name.clone(), None));
    let of_file = config.base_file.as_ref().filter(|file| has(file, name));
    let Some(file) = of_file else {
        prepared.gone.push(Some(name.clone()));
        return Ok(prepared);
    };
    // The file's own takes its place.
    let read = |path: &Path| attached.policies.read_again(path);
    let loaded = LoadedPolicies::of(&config.flags, Some(file), &read)?;
    let loaded = loaded.with_host_loopback(&config.flags.host_loopback)?;
    let is_it = |policy: &LoadedPolicy| policy.settings.name.as_ref() == Some(name);
    prepared
        .put
        .extend(loaded.policies.into_iter().filter(is_it));
    let quotas = quotas_named(&file.document, Some(name));
    prepared.settle_vms(attached, name, |vm| config.limits_by(Some(quotas), vm));
    Ok(prepared)
}

fn has(file: &PolicyFile, name: &str) -> bool {
    let mut own = file.document.policy.keys();
    own.any(|own| own.get_ref() == name)
}

/// Checks that nobody names a policy, unless the policy file has one of this name, too.
///
/// # Errors
/// [`ResourceTaken`]: somebody does.
pub(crate) fn check_unused<'v>(
    config: &Config,
    name: &str,
    users: impl Iterator<Item = &'v str>,
) -> Result<(), ResourceTaken> {
    if config.base_file.iter().any(|file| has(file, name)) {
        return Ok(());
    }
    let used =
        |who: &str, remedy: &str| ResourceTaken(format!("the policy {name} is {who}: {remedy}"));
    if config.flags.policy_name.as_deref() == Some(name) {
        let who = "that of all VMs that name none, by --policy-name";
        return Err(used(who, "start slipgate without that flag first"));
    }
    let mut in_file = config
        .base_file
        .iter()
        .flat_map(|file| file.document.vms.values());
    if let Some(vm) = in_file.find(|policy| policy.get_ref() == name) {
        let file = config.policy_name();
        let who = format!("named in [vms] of {file}, as {:?}", vm.get_ref());
        return Err(used(&who, "change that file first, and apply it"));
    }
    let mut users: Vec<&str> = users.collect();
    users.sort_unstable();
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
