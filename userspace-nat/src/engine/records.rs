//! Writing down what happened ([`crate::record`]): with the names that only the engine knows.
use std::sync::atomic::Ordering::Relaxed;

use super::{Control, Engine, Services, services::ServiceRecord};
use crate::{
    clock::{Clock, SECOND_NS},
    datapath::Datapath,
    flow::Ended,
    port::FrameIo,
    record::{Event, Names},
    stats::Tally,
};

/// Between two reports of what was refused, ns.
const REFUSALS_INTERVAL_NS: u64 = 10 * SECOND_NS;

impl<D: Datapath, P: FrameIo, C: Clock, K: Control, S: Services> Engine<D, P, C, K, S> {
    /// Records the flows admitted since the last call.
    pub(super) fn record_starts(&mut self) {
        if self.core.started.is_empty() {
            return;
        }
        let (now_ns, wall) = (self.clock.now_ns(), self.clock.wall());
        let mut started = std::mem::take(&mut self.core.started);
        for slot in started.drain(..) {
            let live = self.core.datapath.slot(slot);
            let generation = live.generation().load(Relaxed);
            let dns = self.core.opened_by.get(&slot);
            let dns = dns.filter(|(of, _)| *of == generation);
            let names = Names {
                vm: self.core.name_of(live.vm()),
                rule: self.core.rule_texts.known(live.rule()),
                dns: dns.map(|(_, name)| &*name.name),
            };
            self.log.flow_start(slot, live, names, now_ns, wall);
        }
        self.core.started = started;
    }

    /// Records flows that have ended.
    pub(super) fn record(&mut self, ended: &[Ended]) {
        let wall = self.clock.wall();
        for ended in ended {
            let content = &ended.content;
            self.core
                .inspected
                .flow_ended(ended.slot, content.generation);
            let dns = self.core.opened_by.get(&ended.slot);
            let dns = dns.filter(|(generation, _)| *generation == content.generation);
            let dns = dns.map(|(_, name)| &*name.name);
            let rule = self.core.rule_texts.text(content.rule, &self.core.datapath);
            let names = Names {
                vm: self.core.name_of(content.vm),
                rule: rule.as_deref(),
                dns,
            };
            self.log.flow_end(ended, names, wall);
            if dns.is_some() {
                self.core.opened_by.remove(&ended.slot);
            }
        }
    }

    /// Records what the services did: relayed flows, and DNS questions.
    pub(super) fn record_services(&mut self) {
        let (now_ns, wall) = (self.clock.now_ns(), self.clock.wall());
        while let Some(record) = self.services.next_record() {
            match record {
                ServiceRecord::Relayed(flow, end) => {
                    let rule = flow.rule;
                    let texts = &self.core.rule_texts;
                    let names = Names {
                        vm: self.core.name_of(flow.vm),
                        rule: rule.and_then(|rule| texts.known(rule)),
                        dns: None,
                    };
                    self.log.relayed(&flow, end, names, now_ns, wall);
                }
                ServiceRecord::Question(question) => {
                    let vm = self.core.name_of(question.vm);
                    self.log.dns(&question, vm, now_ns, wall);
                }
            }
        }
    }

    /// Records what was refused since the last call.
    pub(super) fn record_refusals(&mut self) {
        let (now_ns, wall) = (self.clock.now_ns(), self.clock.wall());
        self.next_refusals_ns = now_ns + REFUSALS_INTERVAL_NS;
        if !self.log.wants(Event::Refused) {
            return;
        }
        let mut refusals = std::mem::take(&mut self.core.refusals);
        let core = &self.core;
        let names = |vm, rule: Option<u32>| {
            let rule = rule.and_then(|rule| core.rule_texts.known(rule));
            (core.name_of(vm), rule)
        };
        refusals.report(&mut self.log, names, now_ns, wall);
        self.core.refusals = refusals;
    }

    /// Records what is left to be, at the end.
    pub(super) fn end_records(&mut self) {
        self.services.end_records(self.clock.now_ns());
        self.record_services();
        self.record_refusals();
        self.flush_log();
    }

    /// Writes what is buffered, and counts what could not be.
    pub(super) fn flush_log(&mut self) {
        self.log.flush();
        let lost = self.log.take_failed();
        if lost > 0 {
            self.core.nobody().tally(Tally::RecordLost, lost);
        }
    }
}
