//! What would become of a flow: the answer to `slipgate why`, from what admission decides by.
use std::{net::Ipv4Addr, sync::atomic::Ordering::Relaxed};

use slipgate_abi::{Refusal, vm::VmFlags};

use super::{
    control::Why,
    core::{Core, VmState},
};
use crate::{datapath::Datapath, route::Route};
use slipgate_policy::{DNS_PORT, Decision, Destination, Lead, Name, wire};

/// Addresses of a name that are shown: who owns the name says how many there are.
const SHOWN_ADDRESSES: usize = 8;

/// The first of these, and how many there are besides.
fn some_of(addresses: &[Ipv4Addr]) -> String {
    let (shown, more) = addresses.split_at(addresses.len().min(SHOWN_ADDRESSES));
    let shown: Vec<String> = shown.iter().map(Ipv4Addr::to_string).collect();
    let shown = shown.join(", ");
    match more.len() {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

impl<D: Datapath> Core<D> {
    /// Judges a destination as admission would now, without charging a quota. With a name: as the
    /// guest would come there, by asking for it first.
    pub(super) fn why(
        &self,
        row: u16,
        mut to: Destination,
        name: Option<&str>,
        now_ns: u64,
    ) -> Why {
        let mut found = None;
        // Port 53 is answered here, whatever address a name has.
        if let Some(name) = name.filter(|_| to.port != DNS_PORT) {
            match self.by_name(row, to, name, now_ns) {
                Ok((addr, sentence)) => {
                    to.addr = addr;
                    found = Some(sentence);
                }
                Err(mut answer) => {
                    self.note_frozen(row, &mut answer);
                    return *answer;
                }
            }
        }
        let mut answer = self.by_address(row, to, now_ns);
        self.note_frozen(row, &mut answer);
        if let Some(sentence) = found {
            answer.explanation = format!("{sentence}\n{}", answer.explanation);
        }
        answer
    }

    /// Whatever is admitted, nothing passes of a VM that is frozen.
    fn note_frozen(&self, row: u16, answer: &mut Why) {
        let vm = self.datapath.vm(row);
        if vm.is_some_and(|vm| vm.flags().load(Relaxed) & VmFlags::FROZEN != 0) {
            answer.admitted = false;
            answer.outcome = format!("the VM is frozen: nothing passes; else {}", answer.outcome);
        }
    }

    /// The address that a name stands for, and how it is known; or the answer, when there is none
    /// to judge.
    fn by_name(
        &self,
        row: u16,
        to: Destination,
        name: &str,
        now_ns: u64,
    ) -> Result<(Ipv4Addr, String), Box<Why>> {
        let judge = self.judge.borrow();
        let answer = |decision: Decision, refusal: Option<&str>, outcome: String| {
            Box::new(Why {
                admitted: decision.is_allowed(),
                rule: judge.policies().text(decision),
                refusal: refusal.map(str::to_owned),
                outcome,
                explanation: String::new(),
                via: None,
                lacks_address: false,
            })
        };
        let vm = self.vm(row).map_or(0, |vm| vm.net.id);
        let nothing = |outcome| {
            Box::new(Why {
                admitted: false,
                rule: String::new(),
                refusal: None,
                outcome,
                explanation: String::new(),
                via: None,
                lacks_address: false,
            })
        };
        let wire = wire(name).map_err(|error| nothing(error.to_string()))?;
        if let Some(text) = judge.policy(vm).without_dns() {
            let outcome = format!("{name} is not resolved: every question is answered REFUSED");
            return Err(Box::new(Why {
                rule: text,
                ..*nothing(outcome)
            }));
        }
        let (question, connection, open) = judge.name(vm, Name(&wire), to, now_ns);
        if let Some(refusal) = question.refusal {
            let outcome =
                format!("{name} is not resolved: the guest's question is answered REFUSED");
            return Err(answer(question, Some(refusal.name()), outcome));
        }
        if let Some(addr) = open.first() {
            let sentence = format!("{name} is open to this VM at {}.", some_of(&open));
            return Ok((*addr, sentence));
        }
        match connection {
            Some(decision) if decision.is_allowed() => {
                let outcome = format!(
                    "opened by the answer when the guest asks for {name}, if that leads by names that \
                     are allowed to addresses that are; nothing is open by that name now"
                );
                Err(answer(decision, None, outcome))
            }
            Some(decision) => {
                let outcome = format!("{name} is resolved, but this port is refused by the rules");
                Err(answer(
                    decision,
                    decision.refusal.map(|r| r.name()),
                    outcome,
                ))
            }
            None if to.addr.is_unspecified() => Err(Box::new(Why {
                lacks_address: true,
                ..*nothing(format!(
                    "no rule names {name}, and this host finds no address for it: ask for an \
                     address"
                ))
            })),
            None => {
                let sentence = format!(
                    "{name} is resolved, and no rule by name speaks of this port; this host finds \
                     it at {}.",
                    to.addr
                );
                Ok((to.addr, sentence))
            }
        }
    }

    /// Of a destination that is listed as a port of the host's loopback.
    fn by_loopback(&self, vm: &VmState, to: Destination, lead: &Lead, now_ns: u64) -> Why {
        let judge = self.judge.borrow();
        let policy = judge.policy(vm.net.id);
        let cap = vm.net.max_flows as usize;
        let row = vm.net.row;
        let is_full = self.flows.count(row) + vm.loopback_flows as usize >= cap
            && !self.flows.could_make_room(&self.datapath, row, now_ns);
        let (refusal, outcome) = match lead.decision.refusal {
            Some(refusal) => (Some(refusal), "refused by the rules".to_owned()),
            None if is_full => (
                Some(Refusal::FlowCap),
                format!("refused: the VM has its {cap} flows already"),
            ),
            None => (
                None,
                format!(
                    "admitted, and relayed to the host's 127.0.0.1:{}, if somebody listens there",
                    lead.host_port
                ),
            ),
        };
        Why {
            admitted: refusal.is_none(),
            rule: match lead.decision.refusal {
                Some(_) => judge.policies().text(lead.decision),
                None => lead.text.clone(),
            },
            refusal: refusal.map(|refusal| refusal.name().to_owned()),
            outcome,
            explanation: policy.explain_loopback(to, lead),
            via: None,
            lacks_address: false,
        }
    }

    fn by_address(&self, row: u16, to: Destination, now_ns: u64) -> Why {
        let judge = self.judge.borrow();
        let id = self.vm(row).map_or(0, |vm| vm.net.id);
        let decision = judge.decide(id, to, now_ns).decision;
        let rule = judge.policies().text(decision);
        let explanation = judge.explain(id, to, now_ns);
        let answer = |admitted, refusal: Option<&str>, outcome: String, via| Why {
            admitted,
            rule: rule.clone(),
            refusal: refusal.map(str::to_owned),
            outcome,
            explanation: explanation.clone(),
            via,
            lacks_address: false,
        };
        let Some(vm) = self.vm(row) else {
            return answer(false, None, format!("no VM is served in row {row}"), None);
        };
        if to.port == DNS_PORT
            && let Some((rule, why)) = judge.policy(id).resolves_nothing()
        {
            let outcome = "answered REFUSED, whatever is asked".to_owned();
            return Why {
                rule,
                explanation: why.to_owned(),
                ..answer(false, None, outcome, None)
            };
        }
        if to.port == DNS_PORT {
            let outcome = "answered by slipgate's resolver, whatever address is asked; no rule by \
                           address is tried";
            return Why {
                rule: String::new(),
                explanation: String::new(),
                ..answer(true, None, outcome.to_owned(), None)
            };
        }
        if let Some(lead) = self.lead(&vm.net, to) {
            return self.by_loopback(vm, to, &lead, now_ns);
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
                ..
            } => {
                let cap = vm.net.max_flows as usize;
                let via = Some(format!("{source} by {next_hop} on ifindex {ifindex}"));
                let is_full = self.flows.count(row) >= cap
                    && !self.flows.could_make_room(&self.datapath, row, now_ns);
                if is_full {
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
