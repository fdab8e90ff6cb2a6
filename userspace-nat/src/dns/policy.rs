//! Where rules by domain name attach.
use super::{
    answer::{Answer, MAX_TTL_S},
    message::Rcode,
    name::Name,
    query::Key,
    resolvers::Resolvers,
};

/// Why a question gets no answer, for the guest to read (RFC 8914).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExtendedError {
    /// The INFO-CODE.
    pub code: u16,
    /// The EXTRA-TEXT.
    pub text: String,
    /// What the answer says: REFUSED, or that there is no such name.
    pub rcode: Rcode,
}

impl ExtendedError {
    /// The operator's policy has a rule against it (RFC 8914 section 4.16).
    pub const BLOCKED: u16 = 15;
    /// The client may not ask for that (RFC 8914 section 4.19).
    pub const PROHIBITED: u16 = 18;

    /// A rule is against it.
    pub fn blocked(text: String) -> Self {
        Self {
            code: Self::BLOCKED,
            text,
            rcode: Rcode::Refused,
        }
    }

    /// A rule is against it, and the guest is to believe that there is no such name.
    pub fn no_such_name(text: String) -> Self {
        Self {
            rcode: Rcode::NxDomain,
            ..Self::blocked(text)
        }
    }

    /// Nothing is for it.
    pub fn prohibited(text: String) -> Self {
        Self {
            code: Self::PROHIBITED,
            ..Self::blocked(text)
        }
    }

    /// More is asked than may be.
    pub(crate) fn over_rate(per_second: u32) -> Self {
        Self::prohibited(format!(
            "refused: more than {per_second} questions a second"
        ))
    }
}

/// What to do with a question, or with its answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum NameVerdict {
    /// Ask; hand it on.
    Allow,
    /// Answer that it is refused.
    Refuse(ExtendedError),
}

impl From<Result<(), ExtendedError>> for NameVerdict {
    fn from(judged: Result<(), ExtendedError>) -> Self {
        match judged {
            Ok(()) => Self::Allow,
            Err(error) => Self::Refuse(error),
        }
    }
}

/// How a VM's names are told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Telling {
    /// VMs of one view share answers that are kept; those of different ones do not.
    pub view: u32,
    /// Whether `ech` is left out of SVCB and HTTPS records.
    pub strips_ech: bool,
    /// The longest TTL that is told, seconds.
    pub ttl_ceiling_s: u32,
}

impl Default for Telling {
    fn default() -> Self {
        Self {
            view: 0,
            strips_ech: false,
            ttl_ceiling_s: MAX_TTL_S,
        }
    }
}

/// Decides about names. Called for every question and every answer of every guest, from the cache
/// or not, so that what one guest was told is known for that guest.
pub trait NamePolicy {
    /// Before a question is looked up. `name` is in lower case.
    fn question(&mut self, vm: u32, name: Name<'_>, qtype: u16) -> NameVerdict;

    /// How names are told to a VM.
    fn telling(&self, _vm: u32) -> Telling {
        Telling::default()
    }

    /// Whom a VM's questions go to.
    fn resolvers(&self, _vm: u32) -> Resolvers {
        Resolvers::Host
    }

    /// Before a question goes to a resolver: it was not refused, and no answer is kept.
    fn lookup(&mut self, _vm: u32, _key: Key<'_>, _now_ns: u64) -> NameVerdict {
        NameVerdict::Allow
    }

    /// A VM asks more often than it may; why its question gets no answer.
    fn over_rate(&mut self, _vm: u32, per_second: u32) -> ExtendedError {
        ExtendedError::over_rate(per_second)
    }

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
