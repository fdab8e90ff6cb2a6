//! Warning that guests' DNS questions will find no answer.
use slipgate_policy::Resolvers;

use super::{Attached, ServedVm};
use crate::host::{RESOLV_CONF, resolver_problem};

impl Attached {
    /// Logs a warning if no resolver is likely to answer guests' questions.
    pub(crate) fn warn_of_resolvers(&self) {
        let of = |vm: &ServedVm| self.policies.set().of(Some(self.policy_index(vm)));
        let mut vms = self.vms.iter();
        if !vms.any(|vm| of(vm).settings().dns.resolvers == Resolvers::Host) {
            return;
        }
        let hosts = self.resolvers.now();
        if hosts.is_empty() {
            tracing::warn!(
                "the host has no resolver that can be asked ({RESOLV_CONF}; those of a link, fe80::/10, can't): \
                 guests' questions will fail; give --dns"
            );
        }
        let problems: Vec<_> = hosts.iter().map(|r| resolver_problem(*r)).collect();
        if let Some(Some(problem)) = problems.first()
            && problems.iter().all(Option::is_some)
        {
            tracing::warn!(
                "guests' questions will fail: {problem} ({RESOLV_CONF}); give --dns a resolver that can \
                 be reached from here"
            );
        }
    }
}
