//! Identity of a rule, across policies and processes.
//!
//! When another policy or another process takes over, it must find which of the rules that admitted
//! flows still exist. Neither number nor text tells. A number is a position; a text is for people,
//! is truncated in the kernel's maps, and may be made to look like another's. So two digests
//! (SHA-256, truncated to 128 bits) stand beside a rule's text: one of its meaning, and one of its
//! meaning and text together. Processes of two versions must agree on what the digests cover: a
//! change of it requires another `ABI_VERSION`.
use sha2::{Digest as _, Sha256};
use slipgate_abi::maps::{RuleElement, RuleFlags};

use crate::{Action, Http, Rule};

/// Digest of what a rule means.
pub type Meaning = [u8; 16];

/// Identity of a rule: the digests by which policies and processes recognize it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Identity {
    /// Digest of the meaning, regardless of the policy and of whether the rule was a flag or in a
    /// file.
    meaning: Meaning,
    /// Digest of the meaning, the text and `is_learning`.
    whole: [u8; 16],
    /// Whether the rule's policy opens a VM so that the VM's own policy can be learnt.
    is_learning: bool,
}

/// Text and identity of a rule, as in the map `RULES`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Described {
    /// Text shown to people.
    pub text: String,
    /// Identity, by which rules are compared.
    pub identity: Identity,
}

impl Identity {
    /// Whether the rule has this meaning.
    pub fn means(&self, meaning: &Meaning) -> bool {
        self.meaning == *meaning
    }

    /// Returns the digest of meaning and text. It is never zero.
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

    /// Describes a forward by its text.
    pub fn forward(text: String) -> Self {
        Self::new(digest(&[b"forward", text.as_bytes()]), false, text)
    }

    /// Restores a rule from an element of `RULES` and its text; `None` if the element is free.
    pub fn of_element(element: &RuleElement, text: String) -> Option<Self> {
        let identity = Identity {
            meaning: element.meaning,
            whole: element.whole,
            is_learning: element.flags & RuleFlags::LEARNING != 0,
        };
        (element.whole != RuleElement::FREE.whole).then_some(Self { text, identity })
    }

    /// Returns the element of `RULES` without the text.
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

/// Returns the digest of a rule's meaning. That of a deny file covers its name only, not its lines.
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

/// Returns the digest of a default or a safe default, which every policy has.
pub(super) fn meaning_of_default(what: &str, action: Action) -> Meaning {
    digest(&[b"default", what.as_bytes(), action.name().as_bytes()])
}

/// Returns the digest of a list of parts. Each part is preceded by its length, so that different
/// lists never hash the same bytes.
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
