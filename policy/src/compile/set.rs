//! The policies of a process: its VMs may have different ones.
//!
//! Each has a range of numbers of its own, so a rule's number in a flow's slot or a counter
//! identifies the policy too. A policy keeps its index and its numbers while others come, change and
//! go.
use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use super::{identity::Described, policy::Policy};
use crate::{Action, Decision, LocalAddresses, Rule, RuleId};

/// Version of the serialized form of compiled policies.
const FORMAT: u16 = 4;

/// Most policies of a process.
pub const MOST_POLICIES: u32 = 32_767;

/// First number of the policy that refuses everything: beyond any element of `RULES`.
const NOBODYS: u32 = u32::MAX - RuleId::FIRST_TYPED.0;

/// Error of bytes that are not compiled policies.
#[derive(thiserror::Error, Debug)]
pub enum CompiledError {
    /// The bytes are truncated or malformed.
    #[error("not compiled policies: {0}")]
    Malformed(#[from] postcard::Error),
    /// Another version of slipgate serialized them.
    #[error("compiled policies of format {0}, not {FORMAT}; restart slipgate")]
    Format(u16),
    /// A policy has an index that none can have.
    #[error("a policy of index {0}, and there are {MOST_POLICIES} at most")]
    Index(u32),
}

/// Policies by their indexes.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct PolicySet {
    /// `None`: the policy was removed.
    policies: Vec<Option<Policy>>,
    /// Policy of VMs that have none of these: it refuses everything.
    deny_all: Policy,
}

impl Default for PolicySet {
    /// No policy: every VM is refused everything.
    fn default() -> Self {
        let mut deny_all = Policy::new(Action::Deny, Vec::<Rule>::new());
        deny_all.number_from(NOBODYS);
        Self {
            policies: Vec::new(),
            deny_all,
        }
    }
}

impl PolicySet {
    /// Numbers the rules of `policies` consecutively from 0.
    pub fn new(policies: Vec<Policy>) -> Self {
        Self::numbered_from(0, policies)
    }

    /// Numbers the rules of `policies` consecutively from `first`.
    pub fn numbered_from(first: u32, mut policies: Vec<Policy>) -> Self {
        let mut next = first;
        for policy in &mut policies {
            next = policy.number_from(next);
        }
        Self {
            policies: policies.into_iter().map(Some).collect(),
            ..Self::default()
        }
    }

    /// Puts a policy in the place of the one at an index, if there is one. `None` removes that.
    /// Other policies keep their numbers. Returns the policy that was there. An index from
    /// [`MOST_POLICIES`] on is not used.
    pub fn put(&mut self, index: u32, policy: Option<Policy>) -> Option<Policy> {
        if index >= MOST_POLICIES {
            return None;
        }
        let at = index as usize;
        if self.policies.len() <= at {
            self.policies.resize(at + 1, None);
        }
        std::mem::replace(&mut self.policies[at], policy)
    }

    /// Returns the policy at `index`. With several policies, a missing index or one out of range
    /// refuses everything; a single policy is also that of VMs without an index.
    pub fn of(&self, index: Option<u32>) -> &Policy {
        let given = match (index, &self.policies[..]) {
            (None, [Some(only)]) => Some(only),
            (None, _) => None,
            (Some(index), policies) => policies.get(index as usize).and_then(Option::as_ref),
        };
        given.unwrap_or(&self.deny_all)
    }

    /// Returns the policy of that name and its index, or `None` if there is none.
    pub fn by_name(&self, name: &str) -> Option<(u32, &Policy)> {
        let named = |policy: &Policy| policy.settings().name.as_deref() == Some(name);
        let mut all = (0..).zip(&self.policies);
        all.find_map(|(index, policy)| Some((index, policy.as_ref().filter(|p| named(p))?)))
    }

    /// Returns the policies, in order.
    pub fn into_policies(self) -> impl Iterator<Item = Policy> {
        self.policies.into_iter().flatten()
    }

    /// Returns all policies, in order.
    pub fn iter(&self) -> impl Iterator<Item = &Policy> {
        self.policies.iter().flatten()
    }

    /// Returns all policies with their indexes, in order.
    pub fn indexed(&self) -> impl Iterator<Item = (u32, &Policy)> {
        let all = (0..).zip(&self.policies);
        all.filter_map(|(index, policy)| Some((index, policy.as_ref()?)))
    }

    /// Returns the policy that a rule's number belongs to, if one does.
    pub fn with(&self, rule: RuleId) -> Option<&Policy> {
        self.iter().find(|policy| policy.has(rule))
    }

    /// Returns every rule's text and identity, in the order of the policies.
    pub fn described(&self) -> impl Iterator<Item = Described> {
        self.iter().flat_map(Policy::described)
    }

    /// Returns every rule's text, in the order of the policies.
    pub fn texts(&self) -> impl Iterator<Item = String> {
        self.iter().flat_map(Policy::texts)
    }

    /// Returns the text of the rule that decided, with the line if it is a deny file.
    pub fn text(&self, decision: Decision) -> String {
        let policy = self.with(decision.rule).unwrap_or(&self.deny_all);
        policy.text(decision)
    }

    /// Sets the current addresses of the host and the guests, in every policy.
    pub fn set_local(&mut self, local: &LocalAddresses) {
        for policy in self.policies.iter_mut().flatten() {
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

    /// Serializes changes of the policies at some indexes, for the process that decides by them.
    /// `None`: the policy is removed.
    pub fn changes_to_bytes(&self, indexes: &[u32]) -> Vec<u8> {
        let at = |index: u32| self.policies.get(index as usize).and_then(Option::as_ref);
        let changes: Vec<(u32, Option<&Policy>)> =
            indexes.iter().map(|index| (*index, at(*index))).collect();
        postcard::to_stdvec(&(FORMAT, changes)).unwrap_or_default()
    }

    /// Deserializes changes from [`PolicySet::changes_to_bytes`]. Local addresses are not included.
    ///
    /// # Errors
    /// The bytes are truncated, malformed, of another version, or about an index that no policy has.
    pub fn changes_from_bytes(bytes: &[u8]) -> Result<Vec<(u32, Option<Policy>)>, CompiledError> {
        let (format, rest): (u16, _) = postcard::take_from_bytes(bytes)?;
        if format != FORMAT {
            return Err(CompiledError::Format(format));
        }
        let changes: Vec<(u32, Option<Policy>)> = postcard::from_bytes(rest)?;
        let wrong = changes.iter().find(|(index, _)| *index >= MOST_POLICIES);
        match wrong {
            Some((index, _)) => Err(CompiledError::Index(*index)),
            None => Ok(changes),
        }
    }

    /// Returns a name that two policies share, if there is one.
    pub fn doubles(&self) -> Option<&str> {
        let mut seen = HashSet::new();
        let names = self.iter().map(|p| p.settings().name.as_deref());
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
