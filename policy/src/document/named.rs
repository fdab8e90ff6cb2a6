//! Named policies that come one by one, beside those of a policy file; and policies of single VMs,
//! which have a name made of their text, so that VMs with the same text share one.
use std::{collections::BTreeMap, path::Path, sync::Arc};

use sha2::{Digest as _, Sha256};
use toml::Spanned;

use super::{
    error::ConfigError,
    file::PolicyFile,
    load::{LoadedPolicies, LoadedPolicy, Reader},
    meaning::{check_dns, check_name},
    overrides::CliOverrides,
    place::FilePlace,
    schema::{Document, NamedPolicy, Quotas},
};

/// Path that messages show for a policy that a VM's definition contains.
const OF_THE_VM: &str = "(policy of the VM)";

/// First part of the names of single VMs' policies.
const INLINE: &str = "inline-";

/// Name of a policy that a VM's definition contains.
pub fn inline_name(text: &str) -> String {
    let digest = Sha256::digest(text);
    let digits = digest.iter().take(16).map(|byte| format!("{byte:02x}"));
    INLINE.to_owned() + &digits.collect::<String>()
}

/// Whether a policy with this name is one that VMs' definitions contain.
pub fn is_inline(name: &str) -> bool {
    name.starts_with(INLINE)
}

/// Checks the name and the text of a named policy: TOML with the keys of `[policy.NAME]` in a policy
/// file.
///
/// # Errors
/// The name or the text can't be used, or the text names a file, which only root may do.
pub fn check_named(name: &str, text: &str) -> Result<(), ConfigError> {
    check_name("policy", name, name)?;
    if is_inline(name) {
        return Err(ConfigError::new(
            "policy",
            name,
            "names that begin so are those of policies in VMs' definitions",
            "give another name",
        ));
    }
    check_text(name, text)
}

/// Checks the text of a policy that a VM's definition contains.
///
/// # Errors
/// As [`check_named`].
pub fn check_inline(text: &str) -> Result<(), ConfigError> {
    check_text(OF_THE_VM, text)
}

fn check_text(name: &str, text: &str) -> Result<(), ConfigError> {
    let path = Path::new(name);
    let policy = read(path, text)?;
    let names_file =
        |rule: &&toml::Spanned<super::schema::RuleEntry>| rule.get_ref().deny_file.is_some();
    match policy.rules.iter().find(names_file) {
        None => Ok(()),
        Some(rule) => Err(ConfigError::in_file(
            FilePlace::new(path, text, &rule.span()),
            "deny_file names a file of the host",
            "write the rules out, or put them into the policy file of the command line",
        )),
    }
}

fn read(path: &Path, text: &str) -> Result<NamedPolicy, ConfigError> {
    toml::from_str(text).map_err(|e| {
        let place = FilePlace::new(path, text, &e.span().unwrap_or(0..0));
        let remedy = "see `slipgate policy schema` for the keys and their values";
        ConfigError::in_file(place, e.message().replace('\n', ", "), remedy)
    })
}

/// A named policy that came by itself, read once.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PutPolicy {
    /// Its text as a file that has this policy alone, and the DNS settings of the policy file, which
    /// hold for all policies.
    file: Arc<PolicyFile>,
}

impl PutPolicy {
    /// Reads a policy. `base`: the policy file that it stands beside.
    ///
    /// # Errors
    /// The text is no policy, or a DNS setting can't be used.
    pub fn parse(name: &str, text: &str, base: Option<&PolicyFile>) -> Result<Self, ConfigError> {
        let path = Path::new(match is_inline(name) {
            true => OF_THE_VM,
            false => name,
        });
        let policy = read(path, text)?;
        let key = Spanned::new(0..0, name.to_owned());
        let document = Document {
            dns: base
                .map(|file| file.document.dns.clone())
                .unwrap_or_default(),
            policy: BTreeMap::from([(key, policy)]),
            ..Document::default()
        };
        let file = PolicyFile::of(path, text.to_owned(), document);
        check_dns(&file)?;
        Ok(Self {
            file: Arc::new(file),
        })
    }

    /// Returns the policy's text, TOML as it was given.
    pub fn text(&self) -> &str {
        self.file.text()
    }

    /// Returns the text as a file that has this policy alone.
    pub fn file(&self) -> &PolicyFile {
        &self.file
    }

    /// Returns the quotas of its VMs.
    pub fn quotas(&self) -> Option<&Quotas> {
        self.file
            .document
            .policy
            .values()
            .map(|said| &said.quotas)
            .next()
    }

    /// Loads the policy with the rules and values of the flags before its own. `read` reads the deny
    /// files of the flags.
    ///
    /// # Errors
    /// A rule or setting can't be used, or the default is missing.
    pub fn load(
        &self,
        typed: &CliOverrides,
        read: Reader<'_>,
    ) -> Result<LoadedPolicy, ConfigError> {
        let all = LoadedPolicies::of(typed, Some(&self.file), read)?;
        let all = all.with_host_loopback(&typed.host_loopback)?;
        let own = all.policies.into_iter().next_back();
        own.ok_or_else(|| ConfigError::new("policy", self.file.name(), "no policy", "write one"))
    }
}

#[cfg(test)]
#[path = "named_test.rs"]
mod tests;
