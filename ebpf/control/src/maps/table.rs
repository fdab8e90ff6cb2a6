//! A hash or trie map, accessed by system calls on its descriptor; or, of the user-mode engine, a hash
//! in the memory of its process.

use std::{
    hash::Hash,
    io,
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Mutex, MutexGuard, PoisonError},
};

use hashbrown::HashMap;

use aya::Pod;

use crate::{Error, Result, bpf};

/// Entries requested at a time. A hash returns whole buckets, so the batch must hold the longest.
const BATCH: u32 = 4_096;
/// The same where others wait meanwhile.
const SOME: u32 = 1_024;

/// A map from keys `K` to values `V`. Several threads may use it at once, and several processes, if it
/// is the kernel's.
#[derive(Debug)]
pub struct Table<K, V> {
    name: &'static str,
    map: OwnedFd,
    /// Contents, if the kernel does not have them: then `map` is an empty file.
    entries: Option<InMemory<K, V>>,
}

#[derive(Debug)]
struct InMemory<K, V> {
    entries: Mutex<HashMap<K, V>>,
    most: usize,
}

/// Position in a table of which some entries are read at a time.
#[derive(Debug)]
pub struct Listing {
    /// Bucket number for a hash, key for a trie; `None` at the begin.
    cursor: Option<Vec<u8>>,
    room: u32,
    is_over: bool,
}

impl Default for Listing {
    fn default() -> Self {
        Self {
            cursor: None,
            room: SOME,
            is_over: false,
        }
    }
}

impl Listing {
    /// Whether all entries have been read.
    pub fn is_over(&self) -> bool {
        self.is_over
    }
}

/// Condition of an insertion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Insert {
    /// Insert the key, or replace its value.
    Any = 0,
    /// Insert a new key only: this arbitrates between processes.
    New = 1,
    /// Replace the value of an existing key only.
    Existing = 2,
}

/// Error of an insertion.
#[derive(Debug, thiserror::Error)]
pub enum InsertError {
    /// [`Insert::New`], and the key exists.
    #[error("the key is there already")]
    Exists,
    /// [`Insert::Existing`], and the key does not exist.
    #[error("the key is not there")]
    Missing,
    /// The map has no room.
    #[error("the map is full")]
    Full,
    /// The kernel refused for another reason.
    #[error(transparent)]
    Os(#[from] io::Error),
}

impl<K, V> InMemory<K, V> {
    fn lock(&self) -> MutexGuard<'_, HashMap<K, V>> {
        // No step of a change can panic half-way.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Pod + Eq + Hash, V: Pod> Table<K, V> {
    /// Creates the table of a map that has been checked to have this key and value size. `most`: the
    /// entries of a table in memory; `None`: the kernel has it.
    pub(super) fn new(name: &'static str, map: OwnedFd, most: Option<usize>) -> Self {
        Self {
            name,
            map,
            entries: most.map(|most| InMemory {
                entries: Mutex::default(),
                most,
            }),
        }
    }

    /// Returns the value of a key; `None` if the key does not exist.
    ///
    /// # Errors
    /// The kernel refuses the look-up.
    pub fn get(&self, key: &K) -> Result<Option<V>> {
        if let Some(memory) = &self.entries {
            return Ok(memory.lock().get(key).copied());
        }
        let mut value = MaybeUninit::<V>::zeroed();
        // SAFETY: sizes as checked when the table was made.
        let found = unsafe {
            bpf::lookup(
                self.map.as_fd(),
                std::ptr::from_ref(key).cast(),
                value.as_mut_ptr().cast(),
            )
        }
        .map_err(|error| Error::os(format!("look a key up in {}", self.name))(error))?;
        // SAFETY: filled by the kernel; any bytes are a value of a `Pod`.
        Ok(found.then(|| unsafe { value.assume_init() }))
    }

    /// Inserts or replaces an entry. A replacement swaps the element under running programs: it is
    /// meant for values that are not used as counters.
    ///
    /// # Errors
    /// The condition is not met, the map is full, or the kernel refuses.
    pub fn insert(&self, key: &K, value: &V, when: Insert) -> Result<(), InsertError> {
        if let Some(memory) = &self.entries {
            let mut entries = memory.lock();
            let (len, exists) = (entries.len(), entries.contains_key(key));
            return match when {
                Insert::New if exists => Err(InsertError::Exists),
                Insert::Existing if !exists => Err(InsertError::Missing),
                _ if !exists && len >= memory.most => Err(InsertError::Full),
                _ => {
                    entries.insert(*key, *value);
                    Ok(())
                }
            };
        }
        // SAFETY: sizes as checked when the table was made.
        let done = unsafe {
            bpf::update(
                self.map.as_fd(),
                std::ptr::from_ref(key).cast(),
                std::ptr::from_ref(value).cast(),
                when as u64,
            )
        };
        done.map_err(|error| match error.raw_os_error() {
            Some(libc::EEXIST) => InsertError::Exists,
            Some(libc::ENOENT) => InsertError::Missing,
            // A hash returns E2BIG, a trie ENOSPC; a preallocated hash whose free elements are on
            // other CPUs' lists for a moment returns ENOMEM.
            Some(libc::E2BIG | libc::ENOSPC | libc::ENOMEM) => InsertError::Full,
            _ => InsertError::Os(error),
        })
    }

    /// Deletes a key. Returns whether it existed.
    ///
    /// # Errors
    /// The kernel refuses the deletion.
    pub fn remove(&self, key: &K) -> Result<bool> {
        self.delete(key)
            .map_err(|error| Error::os(format!("delete a key from {}", self.name))(error))
    }

    /// Deletes keys in this order, by as few system calls as the kernel allows. An absent key is
    /// passed over, and so is one that the kernel refuses to delete. Returns how many were deleted.
    ///
    /// # Errors
    /// The first refusal of the kernel, after all other keys were deleted.
    pub fn remove_all(&self, keys: &[K]) -> Result<usize> {
        let (mut rest, mut removed, mut refused) = (keys, 0, None);
        while !rest.is_empty() {
            let count = u32::try_from(rest.len()).unwrap_or(u32::MAX);
            let batch = match &self.entries {
                Some(_) => None,
                // SAFETY: as many keys of the size that was checked when the table was made.
                None => unsafe { bpf::delete_batch(self.map.as_fd(), rest.as_ptr().cast(), count) },
            };
            let (done, result) = match batch {
                Some((deleted, result)) => (deleted as usize, result),
                // One by one: the key is counted as deleted, or it is the one that is passed over.
                None => match self.delete(&rest[0]) {
                    Ok(true) => (1, Ok(())),
                    Ok(false) => (0, Err(io::Error::from_raw_os_error(libc::ENOENT))),
                    Err(error) => (0, Err(error)),
                },
            };
            removed += done;
            let passed_over = usize::from(result.is_err());
            if let Err(error) = result
                && error.raw_os_error() != Some(libc::ENOENT)
            {
                refused.get_or_insert(error);
            }
            rest = &rest[(done + passed_over).min(rest.len())..];
        }
        match refused {
            Some(error) => Err(Error::os(format!("delete keys from {}", self.name))(error)),
            None => Ok(removed),
        }
    }

    fn delete(&self, key: &K) -> io::Result<bool> {
        if let Some(memory) = &self.entries {
            return Ok(memory.lock().remove(key).is_some());
        }
        // SAFETY: sizes as checked when the table was made.
        unsafe { bpf::delete(self.map.as_fd(), std::ptr::from_ref(key).cast()) }
    }

    /// Returns all entries. An entry that changes meanwhile may or may not be among them; one that
    /// does not change is included once.
    ///
    /// # Errors
    /// The kernel refuses the look-up.
    pub fn entries(&self) -> Result<Vec<(K, V)>> {
        self.entries_in_batches(BATCH)
            .map_err(Error::os(format!("read {}", self.name)))
    }

    fn entries_in_batches(&self, room: u32) -> io::Result<Vec<(K, V)>> {
        let mut entries = Vec::new();
        let mut listing = Listing {
            room,
            ..Listing::default()
        };
        while !listing.is_over {
            entries.append(&mut self.batch(&mut listing)?);
        }
        Ok(entries)
    }

    /// Returns the next entries of a listing: some thousand, or all of a table in memory. Over the
    /// whole listing the same holds as for [`Table::entries`].
    ///
    /// # Errors
    /// The kernel refuses the look-up.
    pub fn next_entries(&self, listing: &mut Listing) -> Result<Vec<(K, V)>> {
        self.batch(listing)
            .map_err(Error::os(format!("read some of {}", self.name)))
    }

    fn batch(&self, listing: &mut Listing) -> io::Result<Vec<(K, V)>> {
        if let Some(memory) = &self.entries {
            listing.is_over = true;
            return Ok(memory.lock().iter().map(|(k, v)| (*k, *v)).collect());
        }
        let mut cursor = vec![0u8; size_of::<K>().max(size_of::<u64>())];
        loop {
            let room = listing.room;
            let mut keys = Vec::<K>::with_capacity(room as usize);
            let mut values = Vec::<V>::with_capacity(room as usize);
            let from = listing.cursor.as_ref();
            // SAFETY: room as the capacities say; cursors as large as a key and eight bytes.
            let batch = unsafe {
                bpf::lookup_batch(
                    self.map.as_fd(),
                    from.map_or(std::ptr::null(), |from| from.as_ptr()),
                    cursor.as_mut_ptr(),
                    keys.as_mut_ptr().cast(),
                    values.as_mut_ptr().cast(),
                    room,
                )
            };
            let batch = match batch {
                Err(error) if error.raw_os_error() == Some(libc::ENOSPC) && room < 1 << 24 => {
                    listing.room *= 2;
                    continue;
                }
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => continue,
                other => other?,
            };
            let count = batch.count.min(room) as usize;
            // SAFETY: the kernel filled so many; any bytes are a value of a `Pod`.
            unsafe {
                keys.set_len(count);
                values.set_len(count);
            }
            listing.is_over = !batch.more;
            listing.cursor = Some(cursor);
            return Ok(keys.into_iter().zip(values).collect());
        }
    }

    /// Deletes every entry for which `unwanted` returns true. Returns how many.
    ///
    /// # Errors
    /// The entries cannot be read, or one cannot be deleted.
    pub fn remove_if(&self, unwanted: impl Fn(&K, &V) -> bool) -> Result<usize> {
        let mut removed = 0;
        for (key, value) in self.entries()? {
            if unwanted(&key, &value) && self.remove(&key)? {
                removed += 1;
            }
        }
        Ok(removed)
    }
}

impl<K, V> AsFd for Table<K, V> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.map.as_fd()
    }
}

#[cfg(test)]
#[path = "table_test.rs"]
mod tests;
