//! Judgement of DNS answers: the names that they lead through, and the addresses that they open.
use std::rc::Rc;

use slipgate_abi::VmId;

use super::Judge;
use crate::{
    dns::{ExtendedError, answer::Answer, chain::Chain},
    name_gate::learnt::{Full, Lasting, LearntName, MAX_PER_VM},
};
use slipgate_policy::Name;

impl Judge {
    /// Returns an error about the first address that a name of the world may not have, if there is
    /// one.
    fn shut(&self, vm: VmId, chain: &Chain) -> Option<ExtendedError> {
        let policy = self.policy(vm);
        chain.addresses.iter().find_map(|(addr, _)| {
            let what = policy.shut_space(*addr)?.describe();
            let text = format!("refused by the safe defaults: the answer has {addr}, {what}");
            Some(ExtendedError::blocked(text))
        })
    }

    pub(super) fn judge_answer(
        &mut self,
        vm: VmId,
        name: Name<'_>,
        answer: &Answer,
        age_s: u32,
        now_ns: u64,
    ) -> Result<(), ExtendedError> {
        // A question that was under way when the policy changed is judged by the new one.
        let policy = self.policy(vm);
        let decision = self.asks(vm, name, &policy.about(name));
        if !decision.is_allowed() {
            let error = self.refusal(vm, decision, name);
            let text = policy.text(decision);
            self.count_refused(vm, text, name.without_dot());
            return Err(error);
        }
        let Some(mut chain) = Chain::of(answer, name) else {
            self.count(vm).refused_chains += 1;
            let text = "refused: the answer leads in a circle, or through too many names";
            return Err(ExtendedError::blocked(text.into()));
        };
        for (_, ttl_s) in &mut chain.addresses {
            *ttl_s = ttl_s.saturating_sub(age_s);
        }
        let dns = &self.policy(vm).settings().dns;
        let lasting = Lasting {
            floor_s: dns.ttl_floor_s,
            ceiling_s: dns.ttl_ceiling_s,
        };
        self.open(vm, name, &chain, lasting, now_ns)
    }

    /// Opens the addresses of an answer, unless the present policy denies a name that it leads
    /// through or an address.
    ///
    /// # Errors
    /// The refusal that the guest receives.
    pub(super) fn open(
        &mut self,
        vm: VmId,
        name: Name<'_>,
        chain: &Chain,
        lasting: Lasting,
        now_ns: u64,
    ) -> Result<(), ExtendedError> {
        let mut rules = self.policy(vm).about(name);
        let by_rule = !rules.is_empty();
        let mut names = name.0.to_vec();
        for step in &chain.steps {
            names.extend_from_slice(step);
            let about = self.policy(vm).about(Name(step));
            let decision = self.asks(vm, Name(step), &about);
            if !decision.is_allowed() {
                self.count(vm).refused_chains += 1;
                return Err(self.refusal(vm, decision, Name(step)));
            }
            // A destination that is denied of an alias must not be reachable by another name for
            // it.
            let policy = self.policy(vm);
            rules.extend(
                about
                    .into_iter()
                    .filter(|place| policy.is_deny(place.order)),
            );
        }
        if by_rule && let Some(error) = self.shut(vm, chain) {
            self.count(vm).rebinding += 1;
            return Err(error);
        }
        // A connection's server name is compared with the names asked for, whether or not rules
        // name them.
        let (inspects, by_address) = self.policy(vm).inspections();
        if rules.is_empty() && !by_address {
            return Ok(());
        }
        rules.sort_unstable();
        rules.dedup();
        let learnt = Rc::new(LearntName {
            name: name.without_dot().into(),
            rules: rules.into(),
            chain: names.into(),
        });
        let policy = self.policies.of(self.of_vm.get(&vm).copied());
        let same = |a: &LearntName, b: &LearntName| match inspects {
            true => a.name == b.name && a.rules == b.rules,
            false => policy.same_effect(&a.rules, &b.rules),
        };
        self.learnt
            .open(vm, &learnt, &chain.addresses, same, lasting, now_ns)
            .map_err(|Full| {
                self.count(vm).full += 1;
                let text =
                    format!("refused: no room, {MAX_PER_VM} addresses are open by name at most");
                ExtendedError::prohibited(text)
            })
    }
}
