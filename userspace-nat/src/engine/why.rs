//! What would become of a flow: the answer to `slipgate why`, from what admission decides by.
use super::{control::Why, core::Core};
use crate::{datapath::Datapath, route::Route, rules::Destination};

/// DNS.
const DNS_PORT: u16 = 53;

impl<D: Datapath> Core<D> {
    /// Judges a destination as admission would now, without charging a quota.
    pub(super) fn why(&self, row: u16, to: Destination) -> Why {
        let decision = self.policy.decide(to);
        let rule = self.policy.text(decision);
        let answer = |admitted, refusal: Option<&str>, outcome: String, via| Why {
            admitted,
            rule: rule.clone(),
            refusal: refusal.map(str::to_owned),
            outcome,
            via,
        };
        let Some(vm) = self.vm(row) else {
            return answer(false, None, format!("no VM is served in row {row}"), None);
        };
        if to.port == DNS_PORT {
            let outcome = "answered by slipgate's resolver, whatever address is asked";
            return answer(true, None, outcome.to_owned(), None);
        }
        if vm.net.is_on_link(to.addr) {
            let outcome = "stays on the guest's own network: never translated";
            return answer(false, None, outcome.to_owned(), None);
        }
        if let Some(refusal) = decision.refusal {
            return answer(
                false,
                Some(refusal.name()),
                "refused by the rules".to_owned(),
                None,
            );
        }
        match self.routes.lookup(to.addr) {
            Route::Via {
                ifindex,
                next_hop,
                source,
            } => {
                let cap = vm.net.max_flows as usize;
                let via = Some(format!("{source} by {next_hop} on ifindex {ifindex}"));
                if self.flows.count(row) >= cap {
                    let outcome = format!("refused: the VM has its {cap} flows already");
                    return answer(false, Some("flow_cap"), outcome, via);
                }
                answer(
                    true,
                    None,
                    "admitted, then translated in the kernel".to_owned(),
                    via,
                )
            }
            Route::HostLocal => {
                let outcome = "an address of the host itself: it has no link to leave by";
                answer(false, Some("protected"), outcome.to_owned(), None)
            }
            Route::OtherUplink { ifindex } => {
                let outcome = format!("the route leads by ifindex {ifindex}, which is no uplink");
                answer(false, Some("no_route"), outcome, None)
            }
            Route::Refused(kind) => {
                let outcome = format!("the host's route refuses it ({kind:?})");
                answer(false, Some("no_route"), outcome, None)
            }
            Route::Unreachable => answer(
                false,
                Some("no_route"),
                "no route leads there".to_owned(),
                None,
            ),
        }
    }
}
