//! State that the engine has and the kernel's tables lack: names, refusals, relayed flows. It is
//! sent to the broker in pages, each well below the largest message of the channel (64 KiB): first
//! VMs by row, then flows by slot, then relayed flows by number.
use slipgate_abi::{SlotIndex, VmRow};
use slipgate_model::{
    EngineInventory, GuestTcpCounts, LiveRelayed, MappingCounts, NameCounts, RefusedQuestions,
    RefusedSample, RelayedCounts,
};

use crate::{
    clock::Clock, datapath::Datapath, event_loop::Engine, port::FrameIo, record::RelayedFlow, relay,
};

/// Size of a page, bytes, roughly: JSON adds to each name.
const PAGE_BYTES: usize = 24 * 1_024;
/// Size of an entry without its texts, bytes.
const ENTRY_BYTES: usize = 60;
/// Most kinds of refusals shown of a VM, the most frequent.
const SHOWN_REFUSALS: usize = 12;
/// Longest text of a rule, with its comment, that is shown, bytes: so an entry fits any page.
const SHOWN_RULE: usize = 200;
/// Most links that are named: a third of a page.
const SHOWN_LINKS: usize = 128;
/// Position at which slots begin in the sequence of pages.
const SLOTS: u64 = 1 << 32;
/// Position at which relayed flows begin.
const RELAYED: u64 = 1 << 33;

/// A page that is being filled.
#[derive(Debug)]
struct Draft {
    page: EngineInventory,
    room: usize,
}

impl Draft {
    /// Whether there is room for `bytes` more; if not, the next page begins at `place`.
    fn has_room(&mut self, bytes: usize, place: u64) -> bool {
        match self.room.checked_sub(bytes) {
            Some(left) => self.room = left,
            None => self.page.next = Some(place),
        }
        self.page.next.is_none()
    }
}

impl<D: Datapath, P: FrameIo, C: Clock> Engine<D, P, C> {
    /// Returns a page of the inventory. `from`: 0, or [`EngineInventory::next`] of the page before.
    pub fn inventory(&self, from: u64) -> EngineInventory {
        let now_ns = self.clock.now_ns();
        let mut draft = Draft {
            page: EngineInventory::default(),
            room: PAGE_BYTES,
        };
        if from == 0 {
            self.links(&mut draft);
        }
        // Each returns false when the page is full.
        let _ = self.vms(&mut draft, from, now_ns)
            && self.flow_names(&mut draft, from)
            && self.relayed(&mut draft, from, now_ns);
        draft.page
    }

    /// Adds the links' names, which take a part of the first page at most.
    fn links(&self, draft: &mut Draft) {
        let links = self.core.nat.network.links().take(SHOWN_LINKS);
        for link in links {
            draft.room -= ENTRY_BYTES + link.name.len();
            draft.page.links.push((link.ifindex, link.name.clone()));
        }
    }

    fn vms(&self, draft: &mut Draft, from: u64, now_ns: u64) -> bool {
        let core = &self.core;
        let judge = core.rules.judge.borrow();
        for row in VmRow::of(core.nat.datapath.vms()).filter(|row| u64::from(row.word()) >= from) {
            let Some(vm) = core.vms.get(row) else {
                continue;
            };
            let counts = NameCounts {
                inspected: core.inspected.counts(vm.net.id),
                ..judge.counts(vm.net.id)
            };
            let text_of = |rule| core.rules.texts.known(rule);
            let (id, name) = (vm.net.id, &vm.net.name);
            let relayed = counts_of(self.services.relay.counts(id));
            let mut tcp = self.services.relay.tcp_counts(id);
            tcp += self.port.tcp_counts();
            let has_tcp = tcp != GuestTcpCounts::default();
            let mut refused = core.journal.refusals.samples(id, name, text_of, now_ns);
            refused.truncate(SHOWN_REFUSALS);
            let mut counts = counts;
            let of_samples = refused.iter_mut().filter_map(|sample| sample.rule.as_mut());
            let of_counts = counts.refused_by.iter_mut().map(|by| &mut by.rule);
            for rule in of_samples.chain(of_counts) {
                shorten(rule);
            }
            let names = (counts != NameCounts::default()) || !refused.is_empty();
            let labels = &vm.net.labels;
            let mappings = core.nat.flows.mappings.counts(id);
            let is_mapped = mappings != MappingCounts::default();
            let has_counts = names || is_mapped || has_tcp;
            if !has_counts && relayed == RelayedCounts::default() && labels.is_empty() {
                continue;
            }
            let takes = size(&counts)
                + refused.iter().map(size_of_sample).sum::<usize>()
                + 4 * ENTRY_BYTES
                + labels.iter().map(size_of_label).sum::<usize>()
                + 8 * name.len();
            if !draft.has_room(takes, row.word().into()) {
                return false;
            }
            let page = &mut draft.page;
            if relayed != RelayedCounts::default() {
                page.relayed.push((name.clone(), relayed));
            }
            if has_tcp {
                page.tcp.push((name.clone(), tcp));
            }
            if is_mapped {
                page.mappings.push((name.clone(), mappings));
            }
            if !labels.is_empty() {
                page.labels.push((name.clone(), labels.clone()));
            }
            if names {
                page.vms.push((name.clone(), counts));
                page.refused.extend(refused);
            }
        }
        true
    }

    fn flow_names(&self, draft: &mut Draft, from: u64) -> bool {
        let Ok(from) = u32::try_from(from.saturating_sub(SLOTS)) else {
            return true;
        };
        for (slot, generation, name) in self.core.rules.names_of_flows(SlotIndex::new(from)) {
            let takes = 2 * name.name.len() + ENTRY_BYTES;
            if !draft.has_room(takes, SLOTS + u64::from(slot.get())) {
                return false;
            }
            let name = name.name.to_string();
            draft.page.flows.push((slot, generation, name));
        }
        true
    }

    fn relayed(&self, draft: &mut Draft, from: u64, now_ns: u64) -> bool {
        let ms_since = |ns: u64| now_ns.saturating_sub(ns) / 1_000_000;
        for (flow, state) in self.services.relay.live(from.saturating_sub(RELAYED)) {
            let vm = self.core.vms.name_of(flow.vm);
            let rule = self.rule_of(flow);
            let takes = 8 * ENTRY_BYTES + 2 * (vm.len() + rule.len());
            if !draft.has_room(takes, RELAYED + flow.number) {
                return false;
            }
            draft.page.relayed_flows.push(LiveRelayed {
                id: self.log.relayed_id(flow),
                vm: vm.to_owned(),
                protocol: flow.protocol as u8,
                guest: flow.guest,
                remote: flow.remote,
                nat: flow.nat,
                host: flow.host,
                inbound: flow.inbound,
                rule,
                state: state.to_owned(),
                tx: flow.tx,
                rx: flow.rx,
                age_ms: ms_since(flow.opened_ns),
                idle_ms: ms_since(flow.last_ns),
            });
        }
        true
    }

    fn rule_of(&self, flow: &RelayedFlow) -> String {
        let texts = &self.core.rules.texts;
        let by_number = flow.rule.and_then(|rule| texts.known(rule));
        let rule = flow.rule_text.as_deref().or(by_number);
        let mut rule = rule.unwrap_or_default().to_owned();
        shorten(&mut rule);
        rule
    }
}

fn counts_of(counts: relay::Counts) -> RelayedCounts {
    RelayedCounts {
        flows: counts.begun - counts.ended,
        begun: counts.begun,
        ended: counts.ended,
        tx_packets: counts.tx.0,
        tx_bytes: counts.tx.1,
        rx_packets: counts.rx.0,
        rx_bytes: counts.rx.1,
    }
}

fn shorten(rule: &mut String) {
    rule.truncate(rule.floor_char_boundary(SHOWN_RULE));
}

fn size_of_sample(sample: &RefusedSample) -> usize {
    let rule = sample.rule.as_ref().map_or(0, |rule| 2 * rule.len());
    2 * sample.vm.len() + rule + 4 * ENTRY_BYTES
}

fn size_of_label((key, value): (&String, &String)) -> usize {
    key.len() + value.len() + ENTRY_BYTES
}

/// Returns the size of a VM's counts, bytes. The backslashes of unusual names are doubled in JSON.
fn size(counts: &NameCounts) -> usize {
    let of = |by: &RefusedQuestions| 2 * (by.rule.len() + by.last.len()) + ENTRY_BYTES;
    23 * ENTRY_BYTES + counts.refused_by.iter().map(of).sum::<usize>()
}
