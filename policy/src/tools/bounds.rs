//! What a policy bounds beside its rules, held against a record: new flows and questions per second,
//! flows at once, labels, new names.
//!
//! A VM of the record meets what one of the policy has from its first record on, in the order and at
//! the times recorded. Bytes and packets per second are left out: a record says how many there were,
//! not when.
use std::collections::{HashMap, HashSet};

use crate::{Name, Policy, RecordedAsker, TokenBucket, document::Limits};

/// What is over a bound: what it is about, and which.
pub(super) type Over = (&'static str, String);

/// The VMs of a record, by name, under one policy file.
#[derive(Debug, Default)]
pub(super) struct Bounds {
    vms: HashMap<String, Vm>,
}

#[derive(Debug)]
struct Vm {
    limits: Limits,
    flows: TokenBucket,
    questions: Option<TokenBucket>,
    asker: Option<RecordedAsker>,
    /// Ids of flows that were let in and live.
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

    /// A flow that the rules let in. One that is over already is none of those at once: when it
    /// ended is known to the log only.
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

    /// The end of a flow.
    pub(super) fn end(&mut self, vm: &str, id: &str) {
        if let Some(vm) = self.vms.get_mut(vm) {
            vm.live.remove(id);
        }
    }

    /// Any question, whatever the rules say of it.
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

    /// A question that the rules let be asked for, and that no cached answer met.
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
        (!asker.asks(policy, name, kind, now_ns)).then(|| {
            let by = format!("new_name_octets_per_minute {octets}");
            ("new names beneath wildcards", by)
        })
    }
}

impl Vm {
    /// Records are in the order in which things were over: time does not run backward.
    fn at(&mut self, at_ns: Option<u64>) -> Option<u64> {
        self.last_ns = self.last_ns.max(at_ns?);
        Some(self.last_ns)
    }
}

fn bucket(per_second: u32) -> TokenBucket {
    TokenBucket::new(per_second, per_second)
}
