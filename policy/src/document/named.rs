//! Named policies that come one by one, beside those of a policy file; and policies of single VMs,
//! which have a name made of their text, so that VMs with the same text share one.
use std::{collections::BTreeMap, path::Path};

use sha2::{Digest as _, Sha256};
use toml::Table;

use super::{
    error::ConfigError, file::PolicyFile, meaning::check_name, place::FilePlace,
    schema::NamedPolicy,
};

/// Path that messages show for policies that are in no file.
const NO_FILE: &str = "(policies of the API)";
/// Base of policies that are in no file: what holds for VMs without a policy where there is no file.
const NO_POLICY: &str = "default = \"allow\"\n";

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
    check_text("(policy of the VM)", text)
}

fn check_text(name: &str, text: &str) -> Result<(), ConfigError> {
    let path = Path::new(name);
    let policy: NamedPolicy = toml::from_str(text).map_err(|e| {
        let place = FilePlace::new(path, text, &e.span().unwrap_or(0..0));
        let remedy = "see `slipgate policy schema` for what there is";
        ConfigError::in_file(place, e.message().replace('\n', ", "), remedy)
    })?;
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

/// A policy file with named policies added, each of them in place of the file's of this name.
///
/// # Errors
/// The texts together are no policy file.
pub fn with_named(
    file: Option<PolicyFile>,
    named: &BTreeMap<String, String>,
) -> Result<Option<PolicyFile>, ConfigError> {
    if named.is_empty() {
        return Ok(file);
    }
    let (path, text) = match &file {
        Some(file) => (file.path().to_owned(), file.text()),
        None => (NO_FILE.into(), NO_POLICY),
    };
    let merged = merged(text, named).map_err(|e| {
        let place = FilePlace::new(&path, text, &(0..0));
        let remedy = "correct the policy that was put last";
        ConfigError::in_file(place, e, remedy)
    })?;
    PolicyFile::parse(&path, merged).map(Some)
}

fn merged(text: &str, named: &BTreeMap<String, String>) -> Result<String, String> {
    let mut document: Table = text.parse().map_err(|e: toml::de::Error| e.to_string())?;
    let policies = document
        .entry("policy")
        .or_insert_with(|| Table::new().into())
        .as_table_mut()
        .ok_or("policy is no table")?;
    for (name, text) in named {
        let policy: Table = text.parse().map_err(|e: toml::de::Error| e.to_string())?;
        policies.insert(name.clone(), policy.into());
    }
    toml::to_string(&document).map_err(|e| e.to_string())
}

#[cfg(test)]
#[path = "named_test.rs"]
mod tests;
