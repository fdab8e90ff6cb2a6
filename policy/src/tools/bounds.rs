//! Limits of a policy beside its rules, applied to a record: new flows and questions per second,
//! concurrent flows, labels, data by questions.
//!
//! A VM of the record gets the limits of a VM under the policy from its first record on, in the
//! order and at the times recorded. Bytes and packets per second are left out: a record has their
//! totals only, without times.
use std::collections::{HashMap, HashSet};

use crate::{Name, Policy, RecordedAsker, TokenBucket, document::Limits};

/// A limit that was exceeded: the resource, and the setting with its value.
pub(super) type Over = (&'static str, String);

/// State of the VMs of a record, by name, under one policy file.
#[derive(Debug, Default)]
pub(super) struct Bounds {
    vms: HashMap<String, Vm>,
}

/// State of one VM.
#[derive(Debug)]
struct Vm {
    limits: Limits,
    flows: TokenBucket,
    questions: Option<TokenBucket>,
    asker: Option<RecordedAsker>,
    /// Ids of admitted flows that have not ended.
    live: HashSet<String>,
    last_ns: u64,
}

impl Bounds {
    fn vm(&mut self, name: &str, limits: Limits) -> &mut Vm {
        self.vms.entry(name.to_owned()).or_insert_with(|| Vm {
            flows: bucket(limits.new_flows_per_second),
            questions: (limits.dns_per_second > 0).then(|| bucket(limits.dns_per_second)),
            asker: None,
            live: HashSet::new(),
            last_ns: 0,
            limits,
        })
    }

    /// Applies the limits to a flow that the rules admit. Returns the limit that it exceeds. A flow
    /// whose record is its end does not count as concurrent: only the log knows when it ended.
    pub(super) fn flow(
        &mut self,
        vm: &str,
        limits: Limits,
        id: Option<&str>,
        at_ns: Option<u64>,
        is_over: bool,
    ) -> Option<Over> {
        let vm = self.vm(vm, limits);
        let most = vm.limits.max_flows;
        if !is_over && vm.live.len() >= most as usize {
            return Some(("flows at once", format!("max_flows {most}")));
        }
        if let Some(now_ns) = vm.at(at_ns)
            && !vm.flows.take(now_ns)
        {
            let per_second = vm.limits.new_flows_per_second;
            return Some(("new flows", format!("new_flows_per_second {per_second}")));
        }
        if let Some(id) = id.filter(|_| !is_over) {
            vm.live.insert(id.to_owned());
        }
        None
    }

    /// Removes a flow that ended.
    pub(super) fn end(&mut self, vm: &str, id: &str) {
        if let Some(vm) = self.vms.get_mut(vm) {
            vm.live.remove(id);
        }
    }

    /// Applies the limit of questions per second to a question, whatever the rules decide about it.
    pub(super) fn question(
        &mut self,
        vm: &str,
        limits: Limits,
        at_ns: Option<u64>,
    ) -> Option<Over> {
        let vm = self.vm(vm, limits);
        let now_ns = vm.at(at_ns)?;
        let over = vm
            .questions
            .as_mut()
            .is_some_and(|bucket| !bucket.take(now_ns));
        let per_second = vm.limits.dns_per_second;
        over.then(|| ("questions", format!("dns_per_second {per_second}")))
    }

    /// Applies the limits of data by questions to one that the rules allow and no cached answer met.
    pub(super) fn lookup(
        &mut self,
        vm: &str,
        limits: Limits,
        policy: &Policy,
        name: Name<'_>,
        kind: &str,
        at_ns: Option<u64>,
    ) -> Option<Over> {
        let vm = self.vm(vm, limits);
        let now_ns = vm.at(at_ns)?;
        let may = policy.settings().dns.new_names;
        let asker = &mut vm.asker;
        let asker = asker.get_or_insert_with(|| RecordedAsker::new(may, now_ns));
        let octets = may.octets_per_minute;
        let exceeded = asker.asks(policy, name, kind, now_ns).err()?;
        let by = format!("new_name_octets_per_minute {octets}");
        Some((exceeded.describe(), by))
    }
}

impl Vm {
    /// Returns the time of a record, never before that of an earlier one: records are in the order
    /// of ends.
    fn at(&mut self, at_ns: Option<u64>) -> Option<u64> {
        self.last_ns = self.last_ns.max(at_ns?);
        Some(self.last_ns)
    }
}

fn bucket(per_second: u32) -> TokenBucket {
    TokenBucket::new(per_second, per_second)
}

#[cfg(test)]
#[path = "bounds_test.rs"]
mod tests;
