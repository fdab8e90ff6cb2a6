//! Judgement of DNS answers: the names that they lead through, and the addresses that they open.
use std::{collections::BTreeMap, net::IpAddr, rc::Rc};

use slipgate_abi::VmId;

use super::Judge;
use crate::{
    clock::SECOND_NS,
    dns::{ExtendedError, answer::Answer, chain::Chain},
    name_gate::learnt::{Alike, Full, LearntName, MAX_PER_VM},
};
use slipgate_policy::{Name, PatternRef};

impl Judge {
    /// Returns an error about the first address that a name of the world may not have, if there is
    /// one.
    fn shut(&self, vm: VmId, mut addresses: impl Iterator<Item = IpAddr>) -> Option<ExtendedError> {
        let policy = self.policy(vm);
        addresses.find_map(|addr| {
            let what = policy.shut_space(addr)?.describe();
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
        let Some(chain) = Chain::of(answer, name) else {
            self.count(vm).refused_chains += 1;
            let text = "refused: the answer leads in a circle, or through too many names";
            return Err(ExtendedError::blocked(text.into()));
        };
        let dns = &self.policy(vm).settings().dns;
        let (floor_s, ceiling_s) = (dns.ttl_floor_s, dns.ttl_ceiling_s);
        let mut until = BTreeMap::new();
        for &(address, ttl_s) in &chain.addresses {
            // Where the ceiling is below the floor, the floor applies.
            let lasts_s = ttl_s.saturating_sub(age_s).min(ceiling_s).max(floor_s);
            let until_ns = now_ns + u64::from(lasts_s) * SECOND_NS;
            let longest = until.entry(address).or_insert(until_ns);
            *longest = until_ns.max(*longest);
        }
        let addresses = until.keys().copied();
        match self.learn(vm, name, &chain.steps, addresses)? {
            Some(learnt) => self.open(vm, (&learnt, 0), &until, now_ns),
            None => Ok(()),
        }
    }

    /// Returns what a name and those that its answer leads through are to open addresses by, or `None`
    /// if no decision needs it.
    ///
    /// # Errors
    /// The refusal that the guest receives: the present policy denies a name that the answer leads
    /// through or an address.
    pub(super) fn learn(
        &mut self,
        vm: VmId,
        name: Name<'_>,
        steps: &[Box<[u8]>],
        addresses: impl Iterator<Item = IpAddr>,
    ) -> Result<Option<Rc<LearntName>>, ExtendedError> {
        let mut rules = self.policy(vm).about(name);
        let by_rule = !rules.is_empty();
        let mut names = name.0.to_vec();
        for step in steps {
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
        if by_rule && let Some(error) = self.shut(vm, addresses) {
            self.count(vm).rebinding += 1;
            return Err(error);
        }
        // A connection's server name is compared with the names asked for, whether or not rules
        // name them.
        let (_, by_address) = self.policy(vm).inspections();
        if rules.is_empty() && !by_address {
            return Ok(None);
        }
        rules.sort_unstable();
        rules.dedup();
        Ok(Some(Rc::new(LearntName {
            name: name.without_dot().into(),
            rules: rules.into(),
            chain: names.into(),
        })))
    }

    /// Opens addresses by a name: see [`Learnt::open`](super::Learnt).
    ///
    /// # Errors
    /// The refusal that the guest receives: there is no room.
    pub(super) fn open(
        &mut self,
        vm: VmId,
        name: (&Rc<LearntName>, u64),
        until: &BTreeMap<IpAddr, u64>,
        now_ns: u64,
    ) -> Result<(), ExtendedError> {
        let policy = self.policies.of(self.of_vm.get(&vm).copied());
        let same = |a: &[PatternRef], b: &[PatternRef]| policy.same_effect(a, b);
        let alike = match policy.inspections().0 {
            true => Alike::Itself,
            false => Alike::Rules(&same),
        };
        self.learnt
            .open(vm, name, until, alike, now_ns)
            .map_err(|Full| {
                self.count(vm).full += 1;
                let text =
                    format!("refused: no room, {MAX_PER_VM} addresses are open by name at most");
                ExtendedError::prohibited(text)
            })
    }
}
