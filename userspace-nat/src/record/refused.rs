//! Refusals, which are too many to record one by one and so are summed up.
//!
//! Refusals are summed up by VM, reason and rule, with the first and the last time and the tuple of
//! the last one. A sum is written when it has grown ([`Refusals::report`], every ten seconds, every
//! second while a listener wants it, and at the end). Only VMs with new refusals are looked at. A VM has at most [`MOST_KINDS`] sums by rule. When there are more, a sum that has
//! nothing new is removed; if there is none, the refusal is counted without its rule. So a guest
//! can't make memory grow, and no refusal goes uncounted.
use std::time::SystemTime;

use hashbrown::HashMap;
use serde::Serialize;
use slipgate_abi::{Protocol, RuleIndex, VmId};
use slipgate_model::{FlowTuple, Labels, RefusedSample};

use super::{Event, FlowLog, Rfc3339, VmText, flow::Address, wall_at};

/// Most sums with a rule per VM.
const MOST_KINDS: usize = 32;

/// Refusals since the engine started.
#[derive(Debug, Default)]
pub struct Refusals {
    of_vms: HashMap<VmId, OfVm>,
    /// VMs with refusals that were not reported.
    changed: Vec<VmId>,
    /// Whether refusals are not reported, so that they count as reported.
    unwanted: bool,
}

#[derive(Debug, Default)]
struct OfVm {
    /// Sums in no order: there are few.
    sums: Vec<Sum>,
    /// Whether the VM is among the changed ones.
    is_changed: bool,
}

#[derive(Clone, Copy, Debug)]
struct Sum {
    reason: &'static str,
    rule: Option<RuleIndex>,
    count: u64,
    /// Number of refusals in `count` that were reported.
    reported: u64,
    /// Time of the first refusal that was not reported, ns.
    first_ns: u64,
    last_ns: u64,
    /// Tuple of the last refusal.
    tuple: FlowTuple,
}

#[derive(Serialize)]
struct Line<'a> {
    event: Event,
    vm: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    labels: Option<&'a Labels>,
    reason: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    rule: Option<RuleIndex>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rule_text: Option<&'a str>,
    count: u64,
    first: Rfc3339,
    last: Rfc3339,
    proto: &'static str,
    guest: Address,
    remote: Address,
}

impl Refusals {
    /// Sets whether refusals are reported from now on. Earlier ones are not, if they were not.
    pub fn keep(&mut self, keep: bool) {
        self.unwanted = !keep;
    }

    /// Counts a refusal. `tuple`: as on the guest's link; `rule`: the element of `RULES` that
    /// refused it.
    pub fn note(
        &mut self,
        vm: VmId,
        reason: &'static str,
        rule: Option<RuleIndex>,
        tuple: &FlowTuple,
        now_ns: u64,
    ) {
        let of_vm = self.of_vms.entry(vm).or_default();
        let sums = &mut of_vm.sums;
        let of = |sums: &[Sum], rule| {
            let is = |sum: &Sum| sum.rule == rule && sum.reason == reason;
            sums.iter().position(is)
        };
        let known = of(sums, rule);
        let rule = rule.filter(|_| known.is_some() || has_room(sums));
        let at = of(sums, rule).unwrap_or_else(|| {
            sums.push(Sum {
                reason,
                rule,
                count: 0,
                reported: 0,
                first_ns: now_ns,
                last_ns: now_ns,
                tuple: *tuple,
            });
            sums.len() - 1
        });
        let sum = &mut sums[at];
        if sum.count == sum.reported {
            sum.first_ns = now_ns;
        }
        sum.count += 1;
        sum.last_ns = now_ns;
        sum.tuple = *tuple;
        if self.unwanted {
            sum.reported = sum.count;
        } else if !std::mem::replace(&mut of_vm.is_changed, true) {
            self.changed.push(vm);
        }
    }

    /// Writes the refusals since the last report. `names` returns a VM's name and a rule's text.
    pub fn report<'a>(
        &mut self,
        log: &mut FlowLog,
        names: impl Fn(VmId, Option<RuleIndex>) -> (VmText<'a>, Option<&'a str>),
        now_ns: u64,
        now: SystemTime,
    ) {
        for vm in self.changed.drain(..) {
            let Some(of_vm) = self.of_vms.get_mut(&vm) else {
                continue;
            };
            of_vm.is_changed = false;
            for sum in &mut of_vm.sums {
                let count = sum.count - std::mem::replace(&mut sum.reported, sum.count);
                if count == 0 {
                    continue;
                }
                let (text, rule_text) = names(vm, sum.rule);
                let line = Line {
                    event: Event::Refused,
                    vm: text.name,
                    labels: text.labels,
                    reason: sum.reason,
                    rule: sum.rule,
                    rule_text,
                    count,
                    first: Rfc3339(wall_at(sum.first_ns, now_ns, now)),
                    last: Rfc3339(wall_at(sum.last_ns, now_ns, now)),
                    proto: proto(&sum.tuple),
                    guest: Address(sum.tuple.local, sum.tuple.local_port),
                    remote: Address(sum.tuple.remote, sum.tuple.remote_port),
                };
                log.push(Event::Refused, vm, &line);
            }
        }
    }

    /// Returns a VM's sums, the most frequent first. `name`: the VM's name; `text_of` returns a
    /// rule's text.
    pub fn samples<'a>(
        &self,
        vm: VmId,
        name: &str,
        text_of: impl Fn(RuleIndex) -> Option<&'a str>,
        now_ns: u64,
    ) -> Vec<RefusedSample> {
        let sums = self
            .of_vms
            .get(&vm)
            .into_iter()
            .flat_map(|of_vm| &of_vm.sums);
        let mut samples: Vec<_> = sums
            .map(|sum| RefusedSample {
                vm: name.to_owned(),
                reason: sum.reason.to_owned(),
                rule: sum.rule.and_then(&text_of).map(str::to_owned),
                count: sum.count,
                last_ms_ago: now_ns.saturating_sub(sum.last_ns) / 1_000_000,
                proto: proto(&sum.tuple).to_owned(),
                guest: sum.tuple.local_addr(),
                remote: sum.tuple.remote_addr(),
            })
            .collect();
        samples.sort_by(|a, b| (b.count, &a.reason).cmp(&(a.count, &b.reason)));
        samples
    }

    /// Removes the sums of a VM that is gone. They are to be reported before.
    pub fn forget(&mut self, vm: VmId) {
        self.of_vms.remove(&vm);
    }

    /// Removes a VM's sums by rule, whose numbers may come to mean other rules. They are to be
    /// reported before.
    pub fn forget_rules(&mut self, vm: VmId) {
        if let Some(of_vm) = self.of_vms.get_mut(&vm) {
            of_vm.sums.retain(|sum| sum.rule.is_none());
        }
    }
}

/// Whether a VM may have one more sum by rule. Removes a sum that was reported if that makes room.
fn has_room(sums: &mut Vec<Sum>) -> bool {
    let by_rule = sums.iter().filter(|sum| sum.rule.is_some());
    if by_rule.count() < MOST_KINDS {
        return true;
    }
    let is_reported = |sum: &Sum| sum.rule.is_some() && sum.count == sum.reported;
    let places = (0..sums.len()).filter(|at| is_reported(&sums[*at]));
    let oldest = places.min_by_key(|at| sums[*at].last_ns);
    oldest.map(|at| sums.swap_remove(at)).is_some()
}

fn proto(tuple: &FlowTuple) -> &'static str {
    tuple.protocol().map_or("other", Protocol::name)
}
