//! The live flows as the text of a JSON array that is written part by part, for the API.
//!
//! First come the flows that pages of the engines name or have alone, page by page; then all other
//! flows of the tables, in the order of their slots. Held meanwhile are one page, labels of VMs, and a
//! bit for each slot whose flow came with a page: what a million flows take is not held.
use std::{collections::VecDeque, rc::Rc};

use slipgate_abi::SlotIndex;
use slipgate_api::flows::{FlowList, PART_BYTES, Written};
use slipgate_control::maps::ReadOnlyMaps;
use slipgate_ipc::engine::{EngineInventory, LiveRelayed};

use super::{Flow, Sources, Texts};
use crate::show::{names::Known, now_ns};

/// Slots that are looked at in one go, whatever is in them.
const SLOTS_AT_ONCE: u32 = 16 << 10;
/// Most text of labels that is taken from engines, bytes: a kilobyte for each of 65,535 VMs. What is beyond
/// it is not shown.
const MOST_LABELS_BYTES: usize = 64 << 20;
/// Most links whose names are taken from engines; one tells of far fewer.
const MOST_LINKS: usize = 4_096;

/// A list that is being written.
pub(crate) struct InParts {
    maps: Rc<ReadOnlyMaps>,
    /// The VM whose flows are listed; `None`: all.
    vm: Option<String>,
    /// Links and labels.
    known: Known,
    room_for_labels_bytes: usize,
    texts: Texts,
    /// Of the last page, what is not written yet.
    named: VecDeque<(SlotIndex, u32, String)>,
    relayed: VecDeque<LiveRelayed>,
    /// Slots of which the flow has been written with its name.
    written: Slots,
    /// Slot from which on the others are written; `None`: there may be a further page.
    at: Option<u32>,
    is_begun: bool,
}

impl InParts {
    /// Begins the list of a VM's flows, or of all.
    pub(crate) fn new(maps: Rc<ReadOnlyMaps>, vm: Option<String>) -> Self {
        let texts = Texts::new(&maps, now_ns());
        Self {
            maps,
            vm,
            known: Known::default(),
            room_for_labels_bytes: MOST_LABELS_BYTES,
            texts,
            named: VecDeque::new(),
            relayed: VecDeque::new(),
            written: Slots::default(),
            at: None,
            is_begun: false,
        }
    }

    /// Writes one of the last page's flows; `false` if none is left.
    fn write_of_page(&mut self, text: &mut Vec<u8>) -> bool {
        let maps = &self.maps;
        let from = Sources {
            maps,
            names: &self.known,
        };
        let flow = if let Some((index, generation, name)) = self.named.pop_front() {
            // It may have ended since.
            let Some(slot) = maps.flow(index).filter(|it| it.generation == generation) else {
                return true;
            };
            self.written.add(index);
            from.translated(&mut self.texts, (index, &slot), Some(name), now_ns())
        } else if let Some(flow) = self.relayed.pop_front() {
            from.relayed(&mut self.texts, &flow, now_ns())
        } else {
            return false;
        };
        self.put(&flow, text);
        true
    }

    /// Writes flows of the slots from `at` on. Returns where the rest begins.
    fn write_of_slots(&mut self, at: u32, text: &mut Vec<u8>) -> u32 {
        let maps = self.maps.clone();
        let end = maps.slots().min(at.saturating_add(SLOTS_AT_ONCE));
        for (index, slot) in maps.flows_in(at..end) {
            if self.written.has(index) {
                continue;
            }
            let from = Sources {
                maps: &maps,
                names: &self.known,
            };
            let flow = from.translated(&mut self.texts, (index, &slot), None, now_ns());
            self.put(&flow, text);
            if text.len() >= PART_BYTES {
                return index.get() + 1;
            }
        }
        end
    }

    fn put(&mut self, flow: &Flow, text: &mut Vec<u8>) {
        if self.vm.as_ref().is_some_and(|vm| **vm != *flow.vm) {
            return;
        }
        text.push(if self.is_begun { b',' } else { b'[' });
        self.is_begun = true;
        // Its keys are texts, and memory takes what is written.
        let written = serde_json::to_writer(text, flow);
        debug_assert!(written.is_ok(), "{written:?}");
    }
}

impl FlowList for InParts {
    fn write(&mut self, text: &mut Vec<u8>) -> Written {
        while text.len() < PART_BYTES && self.write_of_page(text) {}
        if text.len() >= PART_BYTES {
            return Written::InPart;
        }
        let Some(at) = self.at else {
            return Written::ToPage;
        };
        let next = self.write_of_slots(at, text);
        self.at = Some(next);
        if next < self.maps.slots() {
            return Written::InPart;
        }
        text.extend_from_slice(if self.is_begun { b"]" } else { b"[]" });
        Written::Whole
    }

    fn add(&mut self, page: Option<EngineInventory>) {
        let Some(page) = page else {
            self.at = Some(0);
            // Of some VMs the labels may have come after a text was made.
            self.texts = Texts::new(&self.maps, now_ns());
            return;
        };
        let EngineInventory {
            links,
            mut labels,
            flows,
            relayed_flows,
            ..
        } = page;
        labels.retain(|(vm, labels)| {
            let texts = labels.iter().map(|(key, value)| key.len() + value.len());
            let room = self.room_for_labels_bytes;
            let left = room.checked_sub(vm.len() + texts.sum::<usize>());
            self.room_for_labels_bytes = left.unwrap_or(room);
            left.is_some()
        });
        // All engines tell of the same ones.
        let room = MOST_LINKS.saturating_sub(self.known.links.len());
        self.known.add(EngineInventory {
            links: links.into_iter().take(room).collect(),
            labels,
            ..EngineInventory::default()
        });
        self.named.extend(flows);
        self.relayed.extend(relayed_flows);
    }
}

/// A set of slots, a bit each.
#[derive(Debug, Default)]
struct Slots(Vec<u64>);

impl Slots {
    fn add(&mut self, index: SlotIndex) {
        let (word, bit) = Self::place(index);
        if word >= self.0.len() {
            self.0.resize(word + 1, 0);
        }
        self.0[word] |= bit;
    }

    fn has(&self, index: SlotIndex) -> bool {
        let (word, bit) = Self::place(index);
        self.0.get(word).is_some_and(|word| word & bit != 0)
    }

    fn place(index: SlotIndex) -> (usize, u64) {
        (index.get() as usize / 64, 1 << (index.get() % 64))
    }
}

#[cfg(test)]
#[path = "in_parts_test.rs"]
mod tests;
