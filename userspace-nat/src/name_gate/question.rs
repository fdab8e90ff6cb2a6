//! Judgement of DNS questions: whether a name may be asked for, and whether it may be sent to a
//! resolver.
use super::Judge;
use crate::dns::{ExtendedError, message::Type, query::Key};
use slipgate_abi::VmId;
use slipgate_policy::{Action, Asker, Decision, Exceeded, Name, PatternRef, is_canary};

impl Judge {
    /// Returns the reason why a name may not be asked for, in words.
    pub(super) fn refusal(&self, vm: VmId, decision: Decision, name: Name<'_>) -> ExtendedError {
        let policy = self.policy(vm);
        match decision.rule {
            rule if rule == policy.default_id() => ExtendedError::prohibited(format!(
                "no rule allows {}, and the default is deny",
                name.without_dot()
            )),
            rule if rule == policy.dns_bypass_id() => ExtendedError::blocked(format!(
                "{0} is refused by the safe defaults: DNS elsewhere; --allow {0} would open it",
                name.without_dot()
            )),
            rule => ExtendedError::blocked(format!(
                "{} is refused by {}, {}",
                name.without_dot(),
                policy.call(rule),
                policy.text(decision)
            )),
        }
    }

    /// Whether a name may be asked for.
    pub(super) fn asks(&self, vm: VmId, name: Name<'_>, rules: &[PatternRef]) -> Decision {
        self.policy(vm).asks(name, rules)
    }

    pub(super) fn judge_question(
        &mut self,
        vm: VmId,
        name: Name<'_>,
        qtype: u16,
    ) -> Result<(), ExtendedError> {
        let policy = self.policy(vm);
        if let Some(text) = policy.without_dns() {
            let error = ExtendedError::prohibited(format!("refused by {text}"));
            self.count_refused(vm, text, name.without_dot());
            return Err(error);
        }
        if !policy.judges_names() {
            return Ok(());
        }
        let about = policy.about(name);
        if is_canary(name) && !policy.names_exactly(&about) {
            let text = "refused by the safe defaults: DNS elsewhere";
            self.count(vm).elsewhere += 1;
            return Err(ExtendedError::no_such_name(text.into()));
        }
        let decision = self.asks(vm, name, &about);
        if !decision.is_allowed() {
            let error = self.refusal(vm, decision, name);
            let text = policy.text(decision);
            let elsewhere = decision.rule == policy.dns_bypass_id();
            self.count(vm).elsewhere += u64::from(elsewhere);
            self.count_refused(vm, text, name.without_dot());
            return Err(error);
        }
        let dns = &policy.settings().dns;
        if let Some(text) = dns.too_much(name) {
            self.count(vm).refused_names += 1;
            return Err(ExtendedError::prohibited(format!("refused: {text}")));
        }
        let shut = policy.default_action() == Action::Deny && !is_common(qtype);
        if shut && !dns.types.contains(&qtype) {
            self.count(vm).refused_types += 1;
            let text = match qtype {
                Type::TXT | Type::NULL | Type::ANY => {
                    "TXT, NULL and ANY are refused, for the default is deny".to_owned()
                }
                _ => format!("type {qtype} is refused, for the default is deny"),
            };
            return Err(ExtendedError::prohibited(text));
        }
        Ok(())
    }

    /// Checks a question that would be sent to a resolver: whether it says more than the VM may by
    /// new names beneath wildcards, or by its choice among questions asked before.
    ///
    /// # Errors
    /// The refusal that the guest receives.
    pub(super) fn judge_lookup(
        &mut self,
        vm: VmId,
        key: Key<'_>,
        now_ns: u64,
    ) -> Result<(), ExtendedError> {
        let Some(chosen) = self.policy(vm).chosen(key.name()) else {
            return Ok(());
        };
        let may = self.policy(vm).settings().dns.new_names;
        let asker = self.askers.entry(vm);
        let asker = asker.or_insert_with(|| Asker::new(may, now_ns));
        asker.set(may);
        let Err(exceeded) = asker.asks(&self.hasher, key.question(), chosen, now_ns) else {
            return Ok(());
        };
        let counts = self.count(vm);
        match exceeded {
            Exceeded::NewNames => counts.new_names += 1,
            Exceeded::Repeated => counts.asked_again += 1,
        }
        let text = format!(
            "refused: more than {} octets a minute by {}",
            exceeded.octets_per_minute(may),
            exceeded.describe()
        );
        Err(ExtendedError::prohibited(text))
    }
}

/// Whether clients ask for this type in the course of a connection. Other types can carry arbitrary
/// data of their owner, and no connection needs them.
fn is_common(qtype: u16) -> bool {
    const COMMON: [u16; 18] = [
        Type::A,
        2, // NS
        Type::CNAME,
        Type::SOA,
        Type::PTR,
        Type::MX,
        Type::AAAA,
        Type::SRV,
        Type::NAPTR,
        Type::DNAME,
        43, // DS
        44, // SSHFP
        48, // DNSKEY
        52, // TLSA
        Type::NSEC,
        Type::SVCB,
        Type::HTTPS,
        257, // CAA
    ];
    COMMON.contains(&qtype)
}
