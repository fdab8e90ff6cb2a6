//! Where rules by domain name attach.
use super::{answer::Answer, name::Name};

/// Why a question gets no answer, for the guest to read (RFC 8914).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExtendedError {
    /// The INFO-CODE.
    pub code: u16,
    /// The EXTRA-TEXT.
    pub text: String,
}

impl ExtendedError {
    /// The operator's policy has a rule against it (RFC 8914 section 4.16).
    pub const BLOCKED: u16 = 15;
    /// The client may not ask for that (RFC 8914 section 4.19).
    pub const PROHIBITED: u16 = 18;

    /// A rule is against it.
    pub fn blocked(text: String) -> Self {
        let code = Self::BLOCKED;
        Self { code, text }
    }

    /// Nothing is for it.
    pub fn prohibited(text: String) -> Self {
        let code = Self::PROHIBITED;
        Self { code, text }
    }
}

/// What to do with a question, or with its answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum NameVerdict {
    /// Ask; hand it on.
    Allow,
    /// Answer REFUSED.
    Refuse(ExtendedError),
}

/// Decides about names. Called for every question and every answer of every guest, from the cache
/// or not, so that what one guest was told is known for that guest.
pub trait NamePolicy {
    /// Before a question is looked up. `name` is in lower case.
    fn question(&mut self, vm: u32, name: Name<'_>, qtype: u16) -> NameVerdict;

    /// Before an answer, `age_s` old, goes to the guest.
    fn answer(
        &mut self,
        vm: u32,
        name: Name<'_>,
        answer: &Answer,
        age_s: u32,
        now_ns: u64,
    ) -> NameVerdict;

    /// The rule that decides whether a name may be asked for, as typed, for the records.
    fn rule(&self, _vm: u32, _name: Name<'_>) -> Option<String> {
        None
    }
}

/// No rule by name.
#[derive(Clone, Copy, Debug, Default)]
pub struct AllowAll;

impl NamePolicy for AllowAll {
    fn question(&mut self, _: u32, _: Name<'_>, _: u16) -> NameVerdict {
        NameVerdict::Allow
    }

    fn answer(&mut self, _: u32, _: Name<'_>, _: &Answer, _: u32, _: u64) -> NameVerdict {
        NameVerdict::Allow
    }
}

/// No DNS: what a guest has to say to the owner of a name stays unsaid.
#[derive(Clone, Copy, Debug, Default)]
pub struct RefuseAll;

impl RefuseAll {
    fn verdict() -> NameVerdict {
        NameVerdict::Refuse(ExtendedError::prohibited("refused by --dns none".into()))
    }
}

impl NamePolicy for RefuseAll {
    fn rule(&self, _: u32, _: Name<'_>) -> Option<String> {
        Some("--dns none".into())
    }

    fn question(&mut self, _: u32, _: Name<'_>, _: u16) -> NameVerdict {
        Self::verdict()
    }

    fn answer(&mut self, _: u32, _: Name<'_>, _: &Answer, _: u32, _: u64) -> NameVerdict {
        Self::verdict()
    }
}
