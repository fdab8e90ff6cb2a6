//! The policies of a process: its VMs may have different ones.
//!
//! Their rules are numbered consecutively. A number in a flow's slot or a counter thus identifies
//! the policy too, and all policies share one range of `RULES`.
use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use super::{identity::Described, policy::Policy};
use crate::{Action, Decision, LocalAddresses, Rule, RuleId};

/// Version of the serialized form of compiled policies.
const FORMAT: u16 = 3;

/// Error of bytes that are not compiled policies.
#[derive(thiserror::Error, Debug)]
pub enum CompiledError {
    /// The bytes are truncated or malformed.
    #[error("not compiled policies: {0}")]
    Malformed(#[from] postcard::Error),
    /// Another version of slipgate serialized them.
    #[error("compiled policies of format {0}, not {FORMAT}; restart slipgate")]
    Format(u16),
}

/// Policies with consecutive rule numbers.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct PolicySet {
    policies: Vec<Policy>,
    /// Policy of VMs that have none of these: it refuses everything.
    deny_all: Policy,
}

impl PolicySet {
    /// Numbers the rules of `policies`, beginning with the first one's.
    pub fn new(mut policies: Vec<Policy>) -> Self {
        let mut next = 0;
        for policy in &mut policies {
            next = policy.number_from(next);
        }
        let mut deny_all = Policy::new(Action::Deny, Vec::<Rule>::new());
        // Numbers that no rule of the policies has.
        deny_all.number_from(next);
        Self { policies, deny_all }
    }

    /// Returns the policy at `index`. With several policies, a missing index or one out of range
    /// refuses everything; a single policy is also that of VMs without an index.
    pub fn of(&self, index: Option<u32>) -> &Policy {
        let given = match (index, &self.policies[..]) {
            (None, [only]) => Some(only),
            (None, _) => None,
            (Some(index), policies) => policies.get(index as usize),
        };
        given.unwrap_or(&self.deny_all)
    }

    /// Returns the policy of that name and its index, or `None` if there is none.
    pub fn by_name(&self, name: &str) -> Option<(u32, &Policy)> {
        let named = |policy: &&Policy| policy.settings().name.as_deref() == Some(name);
        (0..).zip(&self.policies).find(|(_, policy)| named(policy))
    }

    /// Returns all policies, in order.
    pub fn iter(&self) -> std::slice::Iter<'_, Policy> {
        self.policies.iter()
    }

    /// Returns the policy that a rule's number belongs to, if one does.
    pub fn with(&self, rule: RuleId) -> Option<&Policy> {
        self.policies.iter().find(|policy| policy.has(rule))
    }

    /// Returns every rule's text and identity, in the order of [`RuleId`].
    pub fn described(&self) -> impl Iterator<Item = Described> {
        self.policies.iter().flat_map(Policy::described)
    }

    /// Returns every rule's text, in the order of [`RuleId`].
    pub fn texts(&self) -> impl Iterator<Item = String> {
        self.policies.iter().flat_map(Policy::texts)
    }

    /// Returns the text of the rule that decided, with the line if it is a deny file.
    pub fn text(&self, decision: Decision) -> String {
        let policy = self.with(decision.rule).unwrap_or(&self.deny_all);
        policy.text(decision)
    }

    /// Sets the current addresses of the host and the guests, in every policy.
    pub fn set_local(&mut self, local: &LocalAddresses) {
        for policy in &mut self.policies {
            policy.set_local(local);
        }
    }

    /// Serializes the policies, for the process that decides by them.
    pub fn to_bytes(&self) -> Vec<u8> {
        // All lengths are known, and a vector grows, so serialization cannot fail.
        postcard::to_stdvec(&(FORMAT, self)).unwrap_or_default()
    }

    /// Deserializes policies from [`PolicySet::to_bytes`]. Local addresses are not included and
    /// must be set again ([`PolicySet::set_local`]).
    ///
    /// # Errors
    /// The bytes are truncated, malformed, or of another version.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, CompiledError> {
        let (format, rest): (u16, _) = postcard::take_from_bytes(bytes)?;
        match format {
            FORMAT => Ok(postcard::from_bytes(rest)?),
            other => Err(CompiledError::Format(other)),
        }
    }

    /// Returns a name that two policies share, if there is one.
    pub fn doubles(&self) -> Option<&str> {
        let mut seen = HashSet::new();
        let names = self.policies.iter().map(|p| p.settings().name.as_deref());
        names.flatten().find(|name| !seen.insert(*name))
    }
}

impl From<Policy> for PolicySet {
    fn from(policy: Policy) -> Self {
        Self::new(vec![policy])
    }
}

#[cfg(test)]
#[path = "set_test.rs"]
mod tests;
