//! Cache of answers until their TTL expires.
//!
//! # Theory of operation
//! The cache is bounded in entries and bytes. Every entry is in two lists by recency: the common
//! one, and that of the VM whose query inserted it. When the cache is full, a VM that inserts loses
//! its own oldest entry if it holds more than its share; otherwise the oldest of all is evicted. So
//! a guest that asks for a million names evicts only its own. Every operation is O(1). There is no
//! sweep: an expired entry is removed when it is found or when it is the oldest.
//!
//! The hash is keyed (SipHash), because guests choose the names.
use std::hash::{BuildHasher, RandomState};

use slipgate_abi::VmId;

use hashbrown::{HashMap, HashTable, hash_table};

use super::answer::Answer;
use crate::clock::SECOND_NS;

const NIL: u32 = u32::MAX;
/// Index of an entry's links in the common list; `OWN` is that of its VM's list.
const COMMON: usize = 0;
const OWN: usize = 1;
/// Memory of an entry in addition to its key and message, bytes.
const ENTRY_OVERHEAD: usize = 160;

/// Cache of DNS answers, shared by VMs.
#[derive(Debug)]
pub struct Cache {
    max_entries: usize,
    max_bytes: usize,
    table: HashTable<u32>,
    hasher: RandomState,
    entries: Vec<Entry>,
    free: Vec<u32>,
    common: List,
    owners: HashMap<VmId, List>,
}

#[derive(Debug)]
struct Entry {
    key: Box<[u8]>,
    answer: Answer,
    stored_ns: u64,
    vm: VmId,
    links: [ListLinks; 2],
}

#[derive(Clone, Copy, Debug)]
struct ListLinks {
    newer: u32,
    older: u32,
}

#[derive(Clone, Copy, Debug)]
struct List {
    newest: u32,
    oldest: u32,
    len: usize,
    bytes: usize,
}

impl Cache {
    /// An empty cache that holds at most this many entries and bytes.
    pub fn new(max_entries: usize, max_bytes: usize) -> Self {
        Self {
            max_entries: max_entries.min(NIL as usize),
            max_bytes,
            table: HashTable::new(),
            hasher: RandomState::new(),
            entries: Vec::new(),
            free: Vec::new(),
            common: List::EMPTY,
            owners: HashMap::new(),
        }
    }

    /// Number of entries, including expired ones that were not found yet.
    pub fn len(&self) -> usize {
        self.common.len
    }

    /// Whether the cache has no entry.
    pub fn is_empty(&self) -> bool {
        self.common.len == 0
    }

    /// Memory of the entries, bytes, as counted for the limit.
    pub fn bytes(&self) -> usize {
        self.common.bytes
    }

    /// The answer for a key and its age in seconds; `None` if none is cached.
    pub fn get(&mut self, key: &[u8], now_ns: u64) -> Option<(&Answer, u32)> {
        let hash = self.hasher.hash_one(key);
        let index = *self
            .table
            .find(hash, |&i| *self.entries[i as usize].key == *key)?;
        let entry = &self.entries[index as usize];
        let age_s = now_ns.saturating_sub(entry.stored_ns) / SECOND_NS;
        let lifetime_s = entry.answer.lifetime_s.unwrap_or(0);
        if age_s >= u64::from(lifetime_s) {
            self.remove(index);
            return None;
        }
        self.unlink(index);
        self.link(index);
        Some((&self.entries[index as usize].answer, age_s as u32))
    }

    /// Caches an answer to a query of `vm`, unless it may not be cached.
    pub fn insert(&mut self, vm: VmId, key: &[u8], answer: Answer, now_ns: u64) {
        if answer.lifetime_s.is_none() || self.max_entries == 0 {
            return;
        }
        let hash = self.hasher.hash_one(key);
        if let Some(&index) = self
            .table
            .find(hash, |&i| *self.entries[i as usize].key == *key)
        {
            self.remove(index);
        }
        let links = [ListLinks {
            newer: NIL,
            older: NIL,
        }; 2];
        let entry = Entry {
            key: key.into(),
            answer,
            stored_ns: now_ns,
            vm,
            links,
        };
        if entry.cost() > self.max_bytes / 4 {
            return;
        }
        let index = match self.free.pop() {
            Some(index) => {
                self.entries[index as usize] = entry;
                index
            }
            None => {
                self.entries.push(entry);
                (self.entries.len() - 1) as u32
            }
        };
        let (entries, hasher) = (&self.entries, &self.hasher);
        self.table
            .insert_unique(hash, index, |&i| hasher.hash_one(&*entries[i as usize].key));
        self.link(index);
        while self.common.len > self.max_entries || self.common.bytes > self.max_bytes {
            self.remove(self.victim(vm));
        }
    }

    /// Index of the entry to evict when `vm` inserts one.
    fn victim(&self, vm: VmId) -> u32 {
        let vms = self.owners.len().max(1);
        self.owners
            .get(&vm)
            .filter(|own| own.len > self.max_entries / vms || own.bytes > self.max_bytes / vms)
            .map_or(self.common.oldest, |own| own.oldest)
    }

    fn remove(&mut self, index: u32) {
        self.unlink(index);
        let entry = &mut self.entries[index as usize];
        let hash = self.hasher.hash_one(&*entry.key);
        // The memory goes now, the element waits in `free`.
        entry.key = Box::default();
        entry.answer.message = Box::default();
        entry.answer.ttls = Box::default();
        if let Ok(found) = self.table.find_entry(hash, |&i| i == index) {
            hash_table::OccupiedEntry::remove(found);
        }
        self.free.push(index);
    }

    fn link(&mut self, index: u32) {
        let vm = self.entries[index as usize].vm;
        self.common.push(&mut self.entries, index, COMMON);
        self.owners
            .entry(vm)
            .or_insert(List::EMPTY)
            .push(&mut self.entries, index, OWN);
    }

    fn unlink(&mut self, index: u32) {
        let vm = self.entries[index as usize].vm;
        self.common.take(&mut self.entries, index, COMMON);
        if let Some(own) = self.owners.get_mut(&vm) {
            own.take(&mut self.entries, index, OWN);
            if own.len == 0 {
                self.owners.remove(&vm);
            }
        }
    }
}

impl Entry {
    fn cost(&self) -> usize {
        ENTRY_OVERHEAD + self.key.len() + self.answer.message.len() + 2 * self.answer.ttls.len()
    }
}

impl List {
    const EMPTY: Self = Self {
        newest: NIL,
        oldest: NIL,
        len: 0,
        bytes: 0,
    };

    fn push(&mut self, entries: &mut [Entry], index: u32, which: usize) {
        entries[index as usize].links[which] = ListLinks {
            newer: NIL,
            older: self.newest,
        };
        match self.newest {
            NIL => self.oldest = index,
            newest => entries[newest as usize].links[which].newer = index,
        }
        self.newest = index;
        self.len += 1;
        self.bytes += entries[index as usize].cost();
    }

    fn take(&mut self, entries: &mut [Entry], index: u32, which: usize) {
        let ListLinks { newer, older } = entries[index as usize].links[which];
        match newer {
            NIL => self.newest = older,
            newer => entries[newer as usize].links[which].older = older,
        }
        match older {
            NIL => self.oldest = newer,
            older => entries[older as usize].links[which].newer = newer,
        }
        self.len -= 1;
        self.bytes -= entries[index as usize].cost();
    }
}

#[cfg(test)]
#[path = "cache_test.rs"]
mod tests;
