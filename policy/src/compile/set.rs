//! The policies of a process: VMs of one process may have different ones.
//!
//! Their rules' numbers stand one behind the other, so a number that a flow's slot or a counter
//! shows tells the policy too, and all of them take one run of `RULES`.
use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use super::{identity::Described, policy::Policy};
use crate::{Action, Decision, LocalAddresses, Rule, RuleId};

/// Of the bytes that compiled policies are sent as.
const FORMAT: u16 = 1;

/// Bytes that are no compiled policies.
#[derive(thiserror::Error, Debug)]
pub enum CompiledError {
    /// Cut short, or something else.
    #[error("not compiled policies: {0}")]
    Malformed(#[from] postcard::Error),
    /// Another version's.
    #[error("compiled policies of format {0}, not {FORMAT}; restart slipgate")]
    Format(u16),
}

/// Policies, numbered.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct PolicySet {
    policies: Vec<Policy>,
    /// For who has none of them: it refuses everything.
    shut: Policy,
}

impl PolicySet {
    /// Numbers `policies`; the first one's rules come first.
    pub fn new(mut policies: Vec<Policy>) -> Self {
        let mut next = 0;
        for policy in &mut policies {
            next = policy.number_from(next);
        }
        let mut shut = Policy::new(Action::Deny, Vec::<Rule>::new());
        // Nobody's numbers.
        shut.number_from(next);
        Self { policies, shut }
    }

    /// The policy of a VM that was given the one at `index`. With several, nobody has one by
    /// accident: without an index, or with one that is none's, everything is refused.
    pub fn of(&self, index: Option<u32>) -> &Policy {
        let given = match (index, &self.policies[..]) {
            (None, [only]) => Some(only),
            (None, _) => None,
            (Some(index), policies) => policies.get(index as usize),
        };
        given.unwrap_or(&self.shut)
    }

    /// The policy of that name, and its index.
    pub fn by_name(&self, name: &str) -> Option<(u32, &Policy)> {
        let named = |policy: &&Policy| policy.settings().name.as_deref() == Some(name);
        (0..).zip(&self.policies).find(|(_, policy)| named(policy))
    }

    /// All of them.
    pub fn iter(&self) -> std::slice::Iter<'_, Policy> {
        self.policies.iter()
    }

    /// The policy that a rule's number is of.
    pub fn with(&self, rule: RuleId) -> Option<&Policy> {
        self.policies.iter().find(|policy| policy.has(rule))
    }

    /// Every rule, in the order of [`RuleId`].
    pub fn described(&self) -> impl Iterator<Item = Described> {
        self.policies.iter().flat_map(Policy::described)
    }

    /// Every rule's text, in the order of [`RuleId`].
    pub fn texts(&self) -> impl Iterator<Item = String> {
        self.policies.iter().flat_map(Policy::texts)
    }

    /// A rule's text; with the file's line, where it was one.
    pub fn text(&self, decision: Decision) -> String {
        let policy = self.with(decision.rule).unwrap_or(&self.shut);
        policy.text(decision)
    }

    /// Says which addresses are the host's and the guests', now.
    pub fn set_local(&mut self, local: &LocalAddresses) {
        for policy in &mut self.policies {
            policy.set_local(local);
        }
    }

    /// In bytes, as the process that compiled it hands it to the one that decides by it.
    pub fn to_bytes(&self) -> Vec<u8> {
        // Nothing in it has a length that is not known, and a vector has room.
        postcard::to_stdvec(&(FORMAT, self)).unwrap_or_default()
    }

    /// What [`PolicySet::to_bytes`] made. Which addresses are local must be said anew
    /// ([`PolicySet::set_local`]).
    ///
    /// # Errors
    /// The bytes are cut short, or another version made them.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, CompiledError> {
        let (format, rest): (u16, _) = postcard::take_from_bytes(bytes)?;
        match format {
            FORMAT => Ok(postcard::from_bytes(rest)?),
            other => Err(CompiledError::Format(other)),
        }
    }

    /// Names that two policies share.
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
