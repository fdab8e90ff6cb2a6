//! Cache of answers until their TTL expires.
//!
//! # Theory of operation
//! The cache is bounded in entries and bytes. Uses are numbered, and each entry is listed by the
//! number of its last use: among all, and among those that the same VM's queries inserted. When the
//! cache is full, a VM that inserts loses its own oldest entry if it holds more than its share;
//! otherwise the oldest of all is evicted. So a guest that asks for a million names evicts only its
//! own. There is no sweep: an expired entry is removed when it is found or when it is the oldest.
//!
//! The hash is keyed (SipHash), because guests choose the names.
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    rc::Rc,
};

use slipgate_abi::VmId;

use super::answer::Answer;
use crate::clock::SECOND_NS;

/// Memory of an entry in addition to its key and message, bytes.
const ENTRY_OVERHEAD: usize = 160;

/// Cache of DNS answers, shared by VMs.
#[derive(Debug)]
pub struct Cache {
    max_entries: usize,
    max_bytes: usize,
    bytes: usize,
    entries: HashMap<Rc<[u8]>, Entry>,
    /// Keys of the entries by the number of their last use.
    by_use: BTreeMap<u64, Rc<[u8]>>,
    owners: HashMap<VmId, Owned>,
    last_use: u64,
}

#[derive(Debug)]
struct Entry {
    answer: Answer,
    stored_ns: u64,
    vm: VmId,
    bytes: usize,
    last_use: u64,
}

/// Entries that a VM's queries inserted.
#[derive(Debug, Default)]
struct Owned {
    uses: BTreeSet<u64>,
    bytes: usize,
}

impl Cache {
    /// An empty cache that holds at most this many entries and bytes.
    pub fn new(max_entries: usize, max_bytes: usize) -> Self {
        Self {
            max_entries,
            max_bytes,
            bytes: 0,
            entries: HashMap::new(),
            by_use: BTreeMap::new(),
            owners: HashMap::new(),
            last_use: 0,
        }
    }

    /// Number of entries, including expired ones that were not found yet.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether the cache has no entry.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Memory of the entries, bytes, as counted for the limit.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The answer for a key and its age in seconds; `None` if none is cached.
    pub fn get(&mut self, key: &[u8], now_ns: u64) -> Option<(&Answer, u32)> {
        let entry = self.entries.get(key)?;
        let age_s = now_ns.saturating_sub(entry.stored_ns) / SECOND_NS;
        let lifetime_s = entry.answer.lifetime_s.unwrap_or(0);
        let (key, entry) = self.take(entry.last_use)?;
        if age_s >= u64::from(lifetime_s) {
            return None;
        }
        Some((&self.put(key, entry).answer, age_s as u32))
    }

    /// Inserts an answer, if it has a lifetime. `vm` is the VM whose query it answered.
    pub fn insert(&mut self, vm: VmId, key: &[u8], answer: Answer, now_ns: u64) {
        if answer.lifetime_s.is_none() || self.max_entries == 0 {
            return;
        }
        if let Some(known) = self.entries.get(key) {
            self.take(known.last_use);
        }
        let bytes = ENTRY_OVERHEAD + key.len() + answer.message.len() + 2 * answer.ttls.len();
        if bytes > self.max_bytes / 4 {
            return;
        }
        let entry = Entry {
            answer,
            stored_ns: now_ns,
            vm,
            bytes,
            last_use: 0,
        };
        self.put(key.into(), entry);
        while self.len() > self.max_entries || self.bytes > self.max_bytes {
            self.take(self.victim(vm));
        }
    }

    /// Last use of the entry to evict when `vm` inserts one.
    fn victim(&self, vm: VmId) -> u64 {
        let vms = self.owners.len().max(1);
        let own = self.owners.get(&vm).filter(|own| {
            own.uses.len() > self.max_entries / vms || own.bytes > self.max_bytes / vms
        });
        let oldest = match own {
            Some(own) => own.uses.first(),
            None => self.by_use.keys().next(),
        };
        oldest.copied().unwrap_or(0)
    }

    /// Adds an entry as the one that was used last.
    fn put(&mut self, key: Rc<[u8]>, mut entry: Entry) -> &Entry {
        self.last_use += 1;
        entry.last_use = self.last_use;
        self.bytes += entry.bytes;
        let own = self.owners.entry(entry.vm).or_default();
        own.uses.insert(entry.last_use);
        own.bytes += entry.bytes;
        self.by_use.insert(entry.last_use, key.clone());
        self.entries.entry(key).insert_entry(entry).into_mut()
    }

    /// Removes the entry with this last use.
    fn take(&mut self, last_use: u64) -> Option<(Rc<[u8]>, Entry)> {
        let key = self.by_use.remove(&last_use)?;
        let entry = self.entries.remove(&key)?;
        self.bytes -= entry.bytes;
        if let Some(own) = self.owners.get_mut(&entry.vm) {
            own.uses.remove(&last_use);
            own.bytes -= entry.bytes;
            if own.uses.is_empty() {
                self.owners.remove(&entry.vm);
            }
        }
        Some((key, entry))
    }
}

#[cfg(test)]
#[path = "cache_test.rs"]
mod tests;
