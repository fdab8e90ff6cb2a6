//! Records of events ([`crate::record`]), with the names that only the engine knows.
use std::{
    sync::atomic::Ordering::Relaxed,
    time::{Duration, SystemTime},
};

use crate::{
    clock::{Clock, SECOND_NS},
    datapath::Datapath,
    event_loop::Engine,
    flow::Ended,
    port::FrameIo,
    record::{Event, FlowLog, Names},
    services::{ServiceRecord, Services},
    state::Core,
    stats::Tally,
};

/// Interval between two reports of refusals, ns.
const REFUSALS_INTERVAL_NS: u64 = 10 * SECOND_NS;
/// Time that a disk may take for the last lines. The client that stopped the engine waits for it.
const LOG_ENDS_WITHIN: Duration = Duration::from_secs(5);

impl<D: Datapath, P: FrameIo, C: Clock, S: Services> Engine<D, P, C, S> {
    /// Has core and services keep the records that the log or its listeners want.
    pub(crate) fn keep_records(&mut self) {
        self.core.records_starts = self.log.wants(Event::FlowStart);
        self.services.keep_records(&self.log);
    }

    /// Records the flows admitted since the last call.
    pub(crate) fn record_starts(&mut self) {
        if self.core.started.is_empty() {
            return;
        }
        let (now_ns, wall) = (self.clock.now_ns(), self.clock.wall());
        let mut started = std::mem::take(&mut self.core.started);
        for slot in started.drain(..) {
            record_start(&mut self.log, &self.core, slot, now_ns, wall);
        }
        self.core.started = started;
    }

    /// Sends a new listener a start record of each live flow of a VM.
    pub(crate) fn tell_of_flows(&mut self, row: u16, listener: u32) {
        let (now_ns, wall) = (self.clock.now_ns(), self.clock.wall());
        let core = &self.core;
        self.log.tell_only(listener, |log| {
            for slot in core.flows.slots_of(row) {
                let entry = core.flows.entry(*slot);
                if entry.is_some_and(|entry| entry.state.is_linked()) {
                    record_start(log, core, *slot, now_ns, wall);
                }
            }
        });
    }

    /// Records flows that have ended.
    pub(crate) fn record(&mut self, ended: &[Ended]) {
        let wall = self.clock.wall();
        for ended in ended {
            self.core.flows.recorded(ended, self.log.batch());
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

    /// Records the services' actions: relayed flows, and DNS questions.
    pub(crate) fn record_services(&mut self) {
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

    /// Records the refusals since the last call.
    pub(crate) fn record_refusals(&mut self) {
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

    /// Records what is left to be recorded when the engine stops.
    pub(crate) fn end_records(&mut self) {
        self.services.end_records(self.clock.now_ns());
        self.record_services();
        self.record_refusals();
        self.finish_log();
        if let Some(lost) = self.losses.rest() {
            self.say_lost(lost);
        }
    }

    /// Frees the flows that have ended, except for those whose record is on its way to the file.
    pub(crate) fn free_recorded(&mut self, now_ns: u64) {
        let Core {
            flows, datapath, ..
        } = &mut self.core;
        flows.free_finished(datapath, |batch| self.log.is_under_way(batch), now_ns);
    }

    /// Writes the last frames of `--pcap`.
    pub(crate) fn end_dump(&mut self) {
        if let Some(dump) = &mut self.watch.dump {
            dump.finish(LOG_ENDS_WITHIN);
        }
    }

    /// Hands over the buffered lines, and counts those that could not be written.
    pub(crate) fn flush_log(&mut self) {
        self.log.flush();
        self.count_lost();
    }

    /// Waits until all lines are written, at most [`LOG_ENDS_WITHIN`].
    pub(crate) fn finish_log(&mut self) {
        self.log.finish(LOG_ENDS_WITHIN);
        self.count_lost();
    }

    fn count_lost(&mut self) {
        let lost = self.log.take_failed();
        if lost > 0 {
            self.core.nobody().tally(Tally::RecordLost, lost);
            self.losses.add(lost);
        }
        if !self.losses.is_empty()
            && let Some(lost) = self.losses.due(self.clock.now_ns())
        {
            self.say_lost(lost);
        }
    }

    fn say_lost(&self, lost: u64) {
        let why = self.log.last_error();
        let why = why.map_or_else(String::new, |why| format!(": {why}"));
        tracing::warn!(
            "the flow log did not take {lost} of its lines{why}; they are lost, and counted as \
             records_lost in `slipgate stats`"
        );
    }
}

fn record_start<D: Datapath>(
    log: &mut FlowLog,
    core: &Core<D>,
    slot: u32,
    now_ns: u64,
    wall: SystemTime,
) {
    let live = core.datapath.slot(slot);
    let generation = live.generation().load(Relaxed);
    let dns = core.opened_by.get(&slot);
    let dns = dns.filter(|(of, _)| *of == generation);
    let names = Names {
        vm: core.name_of(live.vm()),
        rule: core.rule_texts.known(live.rule()),
        dns: dns.map(|(_, name)| &*name.name),
    };
    log.flow_start(slot, live, names, now_ns, wall);
}
