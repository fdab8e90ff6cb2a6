//! What a rule is told by.
//!
//! Another policy comes, or another process: which of the rules that flows were let in by are still
//! there? Neither number nor text says so. A number is a place, and a text, which is for people, is cut
//! short in the kernel's maps, and may be made to look like another's. So beside a rule's text stand
//! digests (SHA-256, cut to 128 bits) of what it means, and of all that is known of it. What goes into
//! them is part of what processes of two versions must agree on: another way to make them is another
//! `ABI_VERSION`.
use sha2::{Digest as _, Sha256};
use slipgate_abi::maps::{RuleElement, RuleFlags};

use crate::{Action, Http, Rule};

/// Digest of what a rule means.
pub type Meaning = [u8; 16];

/// What a rule is told by.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Identity {
    /// Of what it means, whichever policy it is of, and whether it was typed or stood in a file.
    meaning: Meaning,
    /// Of all of it.
    whole: [u8; 16],
    /// It is of a policy by which a VM is open to learn its own.
    is_learning: bool,
}

/// A rule with its text, as `RULES` has it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Described {
    /// For people.
    pub text: String,
    /// For everything else.
    pub identity: Identity,
}

impl Identity {
    /// Whether it is a rule of this meaning.
    pub fn means(&self, meaning: &Meaning) -> bool {
        self.meaning == *meaning
    }

    /// Digest of all that is known of it: never zero.
    pub fn whole(&self) -> [u8; 16] {
        self.whole
    }
}

impl Described {
    pub(super) fn new(meaning: Meaning, is_learning: bool, text: String) -> Self {
        let whole = digest(&[
            b"whole",
            &meaning,
            &[u8::from(is_learning)],
            text.as_bytes(),
        ]);
        let identity = Identity {
            meaning,
            whole,
            is_learning,
        };
        Self { text, identity }
    }

    /// A forward's, by its text.
    pub fn forward(text: String) -> Self {
        Self::new(digest(&[b"forward", text.as_bytes()]), false, text)
    }

    /// As the kernel's map has it, with the text to be put in; `None`: the element is free.
    pub fn of_element(element: &RuleElement, text: String) -> Option<Self> {
        let identity = Identity {
            meaning: element.meaning,
            whole: element.whole,
            is_learning: element.flags & RuleFlags::LEARNING != 0,
        };
        (element.whole != RuleElement::FREE.whole).then_some(Self { text, identity })
    }

    /// For the kernel's map, without the text.
    pub fn element(&self) -> RuleElement {
        let Identity {
            meaning,
            whole,
            is_learning,
        } = self.identity;
        RuleElement {
            meaning,
            whole,
            flags: if is_learning { RuleFlags::LEARNING } else { 0 },
            ..RuleElement::FREE
        }
    }
}

/// Of a rule. A deny file's is its name: which lines it has is not asked.
pub(super) fn meaning_of(rule: &Rule, http: Http) -> Meaning {
    let followed = |action| match (action, http) {
        (Action::Inspect, Http::Each) => &b"each"[..],
        (Action::Inspect, Http::First) => b"first",
        _ => b"",
    };
    let of = |kind: &[u8], action: Action, pattern: String| {
        let name = action.name().as_bytes();
        digest(&[kind, name, pattern.as_bytes(), followed(action)])
    };
    match rule {
        Rule::Match(action, pattern) => of(b"address", *action, pattern.to_string()),
        Rule::Name(action, pattern) => of(b"name", *action, pattern.to_string()),
        Rule::DenyFile(file) => digest(&[b"deny file", file.name().as_bytes()]),
    }
}

/// Of what every policy has beside its rules.
pub(super) fn meaning_of_default(what: &str, action: Action) -> Meaning {
    digest(&[b"default", what.as_bytes(), action.name().as_bytes()])
}

/// Of parts, which are told apart whatever is in them.
fn digest(parts: &[&[u8]]) -> [u8; 16] {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    let hash = hash.finalize();
    std::array::from_fn(|at| hash[at])
}

#[cfg(test)]
#[path = "identity_test.rs"]
mod tests;
