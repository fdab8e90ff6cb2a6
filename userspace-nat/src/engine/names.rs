//! What is known by name, for those who read the kernel's tables. It goes to the broker in pages,
//! each well below what a message of the channel may have (64 KiB): first VMs by row, then flows
//! by slot.
use slipgate_abi::maps::MAX_VMS;

use super::{control::NamesPage, core::Core};
use crate::{datapath::Datapath, record::RefusedSample, rules::NameCounts};

/// Bytes of a page, roughly: JSON adds to each name.
const PAGE_BYTES: usize = 24 * 1_024;
/// What an entry takes beside its texts.
const ENTRY_BYTES: usize = 60;
/// As many kinds of refusals are shown of a VM, the most frequent.
const SHOWN_REFUSALS: usize = 12;
/// Of a rule's text, which has its comment, that much is shown, bytes: an entry fits any page.
const SHOWN_RULE: usize = 200;
/// Where slots begin in a page's place.
const SLOTS: u64 = 1 << 32;

impl<D: Datapath> Core<D> {
    /// The page that begins at a row, or at [`SLOTS`] and a slot.
    pub(super) fn names_page(&self, from: u64, now_ns: u64) -> NamesPage {
        let mut page = NamesPage::default();
        let mut room = PAGE_BYTES;
        let judge = self.judge.borrow();
        for row in from..u64::from(MAX_VMS) {
            let Some(vm) = self.vm(row as u16) else {
                continue;
            };
            let counts = NameCounts {
                inspected: self.inspected.counts(vm.net.id),
                ..judge.counts(vm.net.id)
            };
            let text_of = |rule| self.rule_texts.known(rule);
            let (id, name) = (vm.net.id, &vm.net.name);
            let mut refused = self.refusals.samples(id, name, text_of, now_ns);
            refused.truncate(SHOWN_REFUSALS);
            let mut counts = counts;
            let of_samples = refused.iter_mut().filter_map(|sample| sample.rule.as_mut());
            let of_counts = counts.refused_by.iter_mut().map(|by| &mut by.rule);
            for rule in of_samples.chain(of_counts) {
                rule.truncate(rule.floor_char_boundary(SHOWN_RULE));
            }
            if counts == NameCounts::default() && refused.is_empty() {
                continue;
            }
            let takes = size(&counts) + refused.iter().map(size_of_sample).sum::<usize>();
            let Some(left) = room.checked_sub(takes) else {
                page.next = Some(row);
                return page;
            };
            room = left;
            page.vms.push((vm.net.name.clone(), counts));
            page.refused.extend(refused);
        }
        let mut slots: Vec<u32> = self.opened_by.keys().copied().collect();
        slots.retain(|slot| SLOTS + u64::from(*slot) >= from);
        slots.sort_unstable();
        for slot in slots {
            let (generation, name) = &self.opened_by[&slot];
            let Some(left) = room.checked_sub(2 * name.name.len() + ENTRY_BYTES) else {
                page.next = Some(SLOTS + u64::from(slot));
                return page;
            };
            room = left;
            page.flows.push((slot, *generation, name.name.to_string()));
        }
        page
    }
}

fn size_of_sample(sample: &RefusedSample) -> usize {
    let rule = sample.rule.as_ref().map_or(0, |rule| 2 * rule.len());
    2 * sample.vm.len() + rule + 4 * ENTRY_BYTES
}

/// The backslashes of unusual names are doubled in JSON.
fn size(counts: &NameCounts) -> usize {
    let of =
        |by: &crate::rules::RefusedQuestions| 2 * (by.rule.len() + by.last.len()) + ENTRY_BYTES;
    22 * ENTRY_BYTES + counts.refused_by.iter().map(of).sum::<usize>()
}
