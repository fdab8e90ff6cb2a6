//! Records of events ([`crate::record`]), with the names that only the engine knows.
use std::{
    sync::atomic::Ordering::Relaxed,
    time::{Duration, SystemTime},
};

use slipgate_abi::{IfIndex, RuleIndex, SlotIndex, VmId, VmRow};

use crate::{
    clock::{Clock, SECOND_NS},
    datapath::Datapath,
    event_loop::Engine,
    flow::{EndReason, Ended},
    port::FrameIo,
    record::{Event, FlowLog, Names},
    state::{Core, Nat},
    stats::Tally,
};

/// Interval between two reports of refusals, ns.
const REFUSALS_INTERVAL_NS: u64 = 10 * SECOND_NS;
/// The same while a listener waits for them, ns.
const HEARD_REFUSALS_INTERVAL_NS: u64 = SECOND_NS;
/// Time that a disk may take for the last lines. The client that stopped the engine waits for it.
const LOG_ENDS_WITHIN: Duration = Duration::from_secs(5);

impl<D: Datapath, P: FrameIo, C: Clock> Engine<D, P, C> {
    /// Makes core and services keep the records that the log or its listeners want.
    pub(crate) fn keep_records(&mut self) {
        self.core.journal.records_starts = self.log.wants(Event::FlowStart);
        self.services.keep_records(&self.log);
        let journal = &mut self.core.journal;
        journal.refusals.keep(self.log.wants(Event::Refused));
        if self.log.is_heard(Event::Refused) {
            let soon_ns = self.clock.now_ns() + HEARD_REFUSALS_INTERVAL_NS;
            self.next_refusals_ns = self.next_refusals_ns.min(soon_ns);
        }
    }

    /// Records the flows admitted since the last call.
    pub(crate) fn record_starts(&mut self) {
        if self.core.journal.started.is_empty() {
            return;
        }
        let (now_ns, wall) = (self.clock.now_ns(), self.clock.wall());
        let mut started = std::mem::take(&mut self.core.journal.started);
        for slot in started.drain(..) {
            record_start(&mut self.log, &self.core, slot, now_ns, wall);
        }
        self.core.journal.started = started;
    }

    /// Sends a new listener a start record of each live flow of a VM.
    pub(crate) fn describe_flows(&mut self, row: VmRow, listener: u32) {
        self.adopt_vm(row);
        let (now_ns, wall) = (self.clock.now_ns(), self.clock.wall());
        let core = &self.core;
        self.log.only_for(listener, |log| {
            for slot in core.nat.flows.slots_of(row) {
                let entry = core.nat.flows.entry(*slot);
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
            self.core.nat.flows.recorded(ended, self.log.batch());
            let content = &ended.content;
            self.core
                .inspected
                .flow_ended(ended.slot, content.generation);
            let opened_by = self.core.rules.forget_name(ended.slot, content.generation);
            let moved = self.core.nat.moved.remove(&ended.slot);
            let has_moved = matches!(ended.reason, EndReason::Uplink | EndReason::Route);
            let moved = moved.filter(|_| has_moved);
            let nat = &self.core.nat;
            let uplink = IfIndex::new(content.uplink_ifindex);
            let rule = self
                .core
                .rules
                .texts
                .text(RuleIndex::new(content.rule), &self.core.nat.datapath);
            let names = Names {
                vm: self.core.vms.text_of(VmId::new(content.vm)),
                rule: rule.as_deref(),
                dns: opened_by.as_deref().map(|name| &*name.name),
                uplink: nat.uplink_of_record(content.flags, uplink, content.next_hop),
                moved_to: moved.map(|hop| nat.way_by(hop)),
            };
            self.log.flow_end(ended, names, wall);
        }
    }

    /// Records the services' actions: relayed flows, and DNS questions.
    pub(crate) fn record_services(&mut self) {
        let (now_ns, wall) = (self.clock.now_ns(), self.clock.wall());
        let Core {
            nat, rules, vms, ..
        } = &self.core;
        while let Some((flow, end)) = self.services.relay.next_record() {
            let rule = flow
                .rule
                .and_then(|rule| rules.texts.text(rule, &nat.datapath));
            let names = Names {
                vm: vms.text_of(flow.vm),
                rule: rule.as_deref(),
                ..Names::default()
            };
            self.log.relayed(&flow, end, names, now_ns, wall);
        }
        while let Some(question) = self.services.dns.next_record() {
            let vm = vms.text_of(question.vm);
            self.log.dns(&question, vm, now_ns, wall);
        }
    }

    /// Records the refusals since the last call.
    pub(crate) fn record_refusals(&mut self) {
        let (now_ns, wall) = (self.clock.now_ns(), self.clock.wall());
        self.next_refusals_ns = now_ns
            + match self.log.is_heard(Event::Refused) {
                true => HEARD_REFUSALS_INTERVAL_NS,
                false => REFUSALS_INTERVAL_NS,
            };
        if !self.log.wants(Event::Refused) {
            return;
        }
        let mut refusals = std::mem::take(&mut self.core.journal.refusals);
        let core = &self.core;
        let names = |vm, rule: Option<RuleIndex>| {
            let rule = rule.and_then(|rule| core.rules.texts.known(rule));
            (core.vms.text_of(vm), rule)
        };
        refusals.report(&mut self.log, names, now_ns, wall);
        self.core.journal.refusals = refusals;
    }

    /// Records the remaining flows and refusals when the engine stops.
    pub(crate) fn end_records(&mut self) {
        self.services.relay.end_records(self.clock.now_ns());
        self.record_services();
        self.record_refusals();
        self.finish_log();
        if let Some(lost) = self.losses.rest() {
            self.report_lost(lost);
        }
    }

    /// Frees the flows that have ended, except for those whose record is on its way to the file.
    pub(crate) fn free_recorded(&mut self, now_ns: u64) {
        let Nat {
            flows, datapath, ..
        } = &mut self.core.nat;
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
            self.core
                .nat
                .datapath
                .nobody()
                .tally(Tally::RecordLost, lost);
            self.losses.add(lost);
        }
        if !self.losses.is_empty()
            && let Some(lost) = self.losses.due(self.clock.now_ns())
        {
            self.report_lost(lost);
        }
    }

    pub(super) fn report_lost(&self, lost: u64) {
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
    slot: SlotIndex,
    now_ns: u64,
    wall: SystemTime,
) {
    let live = core.nat.datapath.slot(slot);
    let generation = live.generation().load(Relaxed);
    let opened_by = core.rules.name_of(slot, generation);
    let texts = &core.rules.texts;
    let rule = texts.text(live.rule_index(), &core.nat.datapath);
    let names = Names {
        vm: core.vms.text_of(live.id()),
        rule: rule.as_deref(),
        dns: opened_by.map(|name| &*name.name),
        uplink: core.nat.uplink_of_record(
            live.flags(),
            live.uplink(),
            live.next_hop().load(Relaxed),
        ),
        moved_to: None,
    };
    let addresses = core.nat.datapath.addresses(slot);
    log.flow_start((slot, live), addresses, names, now_ns, wall);
}
