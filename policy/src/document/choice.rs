//! The policy that a VM has, by flags, by the policy file and by the policies that stand beside it.
use std::collections::{BTreeMap, BTreeSet};

use super::{
    error::ConfigError,
    file::PolicyFile,
    meaning::{has_top_level, named},
    named::{PutPolicy, is_inline},
    overrides::CliOverrides,
    schema::Document,
};

/// Most policies that an error names.
const MOST_NAMES: usize = 16;

/// A VM and the policy that its own flag names.
#[derive(Clone, Copy, Debug)]
pub struct VmChoice<'v> {
    /// Name of the VM.
    pub name: &'v str,
    /// Value of `policy=` in its `--vm`.
    pub policy: Option<&'v str>,
}

/// Returns the name of a VM's policy; `None`: it is the one without a name. `put`: the policies that
/// stand beside those of the file.
///
/// # Errors
/// The policy that is named does not exist, or the file has named policies only and none is named.
pub fn policy_of(
    vm: VmChoice<'_>,
    typed: &CliOverrides,
    file: Option<&PolicyFile>,
    put: &BTreeMap<String, PutPolicy>,
) -> Result<Option<String>, ConfigError> {
    let by_flag = match (vm.policy, typed.policy_name.as_deref()) {
        (Some(name), _) => Some(("--vm", name)),
        (None, name) => name.map(|name| ("--policy-name", name)),
    };
    let Some(file) = file else {
        return match by_flag {
            None => Ok(None),
            Some((_, name)) if put.contains_key(name) => Ok(Some(name.to_owned())),
            Some((flag, name)) if !put.is_empty() => {
                let problem = "there is no such policy";
                let remedy = format!("there are {}", named_in(None, put));
                Err(ConfigError::new(flag, name, problem, remedy))
            }
            Some((_, name)) => {
                let problem = format!("policy={name}, but there is no --policy");
                let remedy = "give the file that has it by --policy";
                Err(ConfigError::new("--vm", vm.name, problem, remedy))
            }
        };
    };
    let document = &file.document;
    let place = |name: &str| {
        let is_known = put.contains_key(name) || named(document, name).is_some();
        is_known.then(|| Some(name.to_owned()))
    };
    let remedy = || match (document.policy.is_empty(), put.is_empty()) {
        (true, true) => "the file has no [policy.NAME]".to_owned(),
        (_, true) => format!("the file has {}", named_in(Some(document), put)),
        (_, false) => format!("there are {}", named_in(Some(document), put)),
    };
    // A choice for one VM overrides one for all.
    let in_file = document
        .vms
        .iter()
        .find(|(name, _)| name.get_ref() == vm.name);
    if let Some((_, name)) = in_file
        && vm.policy.is_none()
    {
        return place(name.get_ref()).ok_or_else(|| {
            file.error(
                &name.span(),
                format!("no policy {:?}", name.get_ref()),
                remedy(),
            )
        });
    }
    if let Some((flag, name)) = by_flag {
        let problem = format!("{} has no such policy", file.name());
        return place(name).ok_or_else(|| ConfigError::new(flag, name, problem, remedy()));
    }
    if !has_top_level(document) {
        let problem = format!(
            "{} names no policy, and {} has named ones only",
            vm.name,
            file.name()
        );
        let remedy = format!("give policy=NAME in --vm, or --policy-name: {}", remedy());
        return Err(ConfigError::new("--policy", file.name(), problem, remedy));
    }
    Ok(None)
}

/// Returns the names of the policies there are, some of them where there are many. Those of single
/// VMs are nobody else's.
fn named_in(document: Option<&Document>, put: &BTreeMap<String, PutPolicy>) -> String {
    let in_file = document
        .into_iter()
        .flat_map(|document| document.policy.keys());
    let in_file = in_file.map(|name| name.get_ref().as_str());
    let put = put.keys().map(String::as_str);
    let all: BTreeSet<&str> = in_file.chain(put).filter(|name| !is_inline(name)).collect();
    let some: Vec<&str> = all.iter().copied().take(MOST_NAMES).collect();
    match all.len() - some.len() {
        0 => some.join(", "),
        more => format!("{} and {more} more", some.join(", ")),
    }
}
