//! The judge as the policy of the DNS proxy.
use super::SharedJudge;
use crate::dns::{
    AnswerPolicy, ExtendedError, NamePolicy, NameVerdict, answer::Answer, query::Key,
};
use slipgate_abi::VmId;
use slipgate_policy::{Name, Resolvers};

/// The DNS proxy's handle of a shared judge.
#[derive(Clone, Debug)]
pub struct ByRules(pub SharedJudge);

impl NamePolicy for ByRules {
    fn rule(&self, vm: VmId, name: Name<'_>) -> Option<String> {
        let judge = self.0.borrow();
        let policy = judge.policy(vm);
        if let Some(text) = policy.without_dns() {
            return Some(text);
        }
        let judges = policy.judges_names();
        judges.then(|| policy.text(judge.asks(vm, name, &policy.about(name))))
    }

    fn answer_policy(&self, vm: VmId) -> AnswerPolicy {
        let judge = self.0.borrow();
        let policy = judge.policy(vm);
        let index = judge.policy_of(vm).unwrap_or(0) & 0xffff;
        AnswerPolicy {
            view: u32::from(judge.generation_of(index)) << 16 | index,
            strips_ech: policy.inspections().0,
            ttl_ceiling_s: policy.settings().dns.ttl_ceiling_s,
        }
    }

    fn resolvers(&self, vm: VmId) -> Resolvers {
        self.0.borrow().policy(vm).settings().dns.resolvers.clone()
    }

    fn question(&mut self, vm: VmId, name: Name<'_>, qtype: u16) -> NameVerdict {
        self.0.borrow_mut().judge_question(vm, name, qtype)
    }

    fn lookup(&mut self, vm: VmId, key: Key<'_>, now_ns: u64) -> NameVerdict {
        self.0.borrow_mut().judge_lookup(vm, key, now_ns)
    }

    fn over_rate(&mut self, vm: VmId, per_second: u32) -> ExtendedError {
        self.0.borrow_mut().count(vm).over_rate += 1;
        ExtendedError::over_rate(per_second)
    }

    fn answer(
        &mut self,
        vm: VmId,
        name: Name<'_>,
        answer: &Answer,
        age_s: u32,
        now_ns: u64,
    ) -> NameVerdict {
        let mut judge = self.0.borrow_mut();
        if !judge.policy(vm).judges_names() {
            return Ok(());
        }
        judge.judge_answer(vm, name, answer, age_s, now_ns)
    }
}
