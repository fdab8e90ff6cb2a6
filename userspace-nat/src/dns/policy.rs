//! Interface between the proxy and rules by domain name.
use super::{
    answer::{Answer, MAX_TTL_S},
    message::Rcode,
    name::Name,
    query::Key,
    resolvers::Resolvers,
};
use slipgate_abi::VmId;

/// Refusal of a question, with its reason for the guest (Extended DNS Error, RFC 8914).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExtendedError {
    /// INFO-CODE of the error.
    pub code: u16,
    /// EXTRA-TEXT of the error.
    pub text: String,
    /// Response code of the reply: REFUSED, NXDOMAIN or SERVFAIL.
    pub rcode: Rcode,
}

impl ExtendedError {
    /// INFO-CODE of a name that the operator's policy blocks (RFC 8914 section 4.16).
    pub const BLOCKED: u16 = 15;
    /// INFO-CODE of a question that the client may not ask (RFC 8914 section 4.19).
    pub const PROHIBITED: u16 = 18;
    /// INFO-CODE of a question that reached no server (RFC 8914 section 4.24).
    pub const NETWORK: u16 = 23;

    /// Failure of a question to whose resolvers no route of the VM's leads.
    pub fn no_route() -> Self {
        Self {
            code: Self::NETWORK,
            text: "no route of this guest's leads to a resolver".to_owned(),
            rcode: Rcode::ServFail,
        }
    }

    /// Refusal with REFUSED by a rule against the name.
    pub fn blocked(text: String) -> Self {
        Self {
            code: Self::BLOCKED,
            text,
            rcode: Rcode::Refused,
        }
    }

    /// Refusal by a rule against the name, with NXDOMAIN: the guest shall believe that the name
    /// does not exist.
    pub fn no_such_name(text: String) -> Self {
        Self {
            rcode: Rcode::NxDomain,
            ..Self::blocked(text)
        }
    }

    /// Refusal of a name that no rule allows.
    pub fn prohibited(text: String) -> Self {
        Self {
            code: Self::PROHIBITED,
            ..Self::blocked(text)
        }
    }

    /// Refusal of a question above the VM's rate.
    pub(crate) fn over_rate(per_second: u32) -> Self {
        Self::prohibited(format!(
            "refused: more than {per_second} questions a second"
        ))
    }
}

/// Decision about a question or an answer: it goes on, or this refusal is the reply.
pub type NameVerdict = Result<(), ExtendedError>;

/// Settings of a VM's answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AnswerPolicy {
    /// Number of the view. VMs of one view share cached answers; those of different views do not.
    pub view: u32,
    /// Whether `ech` is removed from SVCB and HTTPS records.
    pub strips_ech: bool,
    /// Largest TTL in replies, seconds.
    pub ttl_ceiling_s: u32,
}

impl Default for AnswerPolicy {
    fn default() -> Self {
        Self {
            view: 0,
            strips_ech: false,
            ttl_ceiling_s: MAX_TTL_S,
        }
    }
}

/// Decisions about names. They are requested for every question and answer of every guest, cached
/// or not, so that the answers of each guest are recorded for it.
pub trait NamePolicy {
    /// Decides about a question before it is looked up. `name` is in lower case.
    fn question(&mut self, vm: VmId, name: Name<'_>, qtype: u16) -> NameVerdict;

    /// Settings of a VM's answers.
    fn answer_policy(&self, _vm: VmId) -> AnswerPolicy {
        AnswerPolicy::default()
    }

    /// Resolvers for a VM's questions.
    fn resolvers(&self, _vm: VmId) -> Resolvers {
        Resolvers::Host
    }

    /// Decides about a question that was not refused and has no cached answer, before it goes to a
    /// resolver.
    fn lookup(&mut self, _vm: VmId, _key: Key<'_>, _now_ns: u64) -> NameVerdict {
        Ok(())
    }

    /// Refusal for a question above the VM's rate. `per_second` is that rate.
    fn over_rate(&mut self, _vm: VmId, per_second: u32) -> ExtendedError {
        ExtendedError::over_rate(per_second)
    }

    /// Decides about an answer, `age_s` seconds old, before it goes to the guest.
    fn answer(
        &mut self,
        vm: VmId,
        name: Name<'_>,
        answer: &Answer,
        age_s: u32,
        now_ns: u64,
    ) -> NameVerdict;

    /// Text of the rule that decides about a name, for the records; `None` if there is none.
    fn rule(&self, _vm: VmId, _name: Name<'_>) -> Option<String> {
        None
    }
}

/// Policy that has no rules by name.
#[derive(Clone, Copy, Debug, Default)]
pub struct AllowAll;

impl NamePolicy for AllowAll {
    fn question(&mut self, _: VmId, _: Name<'_>, _: u16) -> NameVerdict {
        Ok(())
    }

    fn answer(&mut self, _: VmId, _: Name<'_>, _: &Answer, _: u32, _: u64) -> NameVerdict {
        Ok(())
    }
}
