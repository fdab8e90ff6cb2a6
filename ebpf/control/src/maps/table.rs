//! A hash or trie, reached by system calls on its descriptor.

use std::{
    io,
    marker::PhantomData,
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use aya::Pod;

use crate::{Error, Result, bpf};

/// Entries asked for at a time. A hash answers whole buckets, so it must hold the longest.
const BATCH: u32 = 4_096;

/// Keys `K` to values `V`. Safe to use from several threads and processes at once.
#[derive(Debug)]
pub struct Table<K, V> {
    name: &'static str,
    map: OwnedFd,
    entry: PhantomData<fn(K) -> V>,
}

/// When an insertion may happen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Insert {
    /// Whether the key is there or not.
    Any = 0,
    /// Only a new key: this arbitrates between processes.
    New = 1,
    /// Only over an existing key.
    Existing = 2,
}

/// Why an insertion did not happen.
#[derive(Debug, thiserror::Error)]
pub enum InsertError {
    /// [`Insert::New`], and the key is there.
    #[error("the key is there already")]
    Exists,
    /// [`Insert::Existing`], and the key is not there.
    #[error("the key is not there")]
    Missing,
    /// No room.
    #[error("the map is full")]
    Full,
    /// The kernel refused otherwise.
    #[error(transparent)]
    Os(#[from] io::Error),
}

impl<K: Pod + PartialEq, V: Pod> Table<K, V> {
    /// `map` was checked to have this key and value size.
    pub(super) fn new(name: &'static str, map: OwnedFd) -> Self {
        Self {
            name,
            map,
            entry: PhantomData,
        }
    }

    /// The value of a key.
    pub fn get(&self, key: &K) -> Result<Option<V>> {
        let mut value = MaybeUninit::<V>::zeroed();
        // SAFETY: sizes as checked when the table was made.
        let found = unsafe {
            bpf::lookup(
                self.map.as_fd(),
                std::ptr::from_ref(key).cast(),
                value.as_mut_ptr().cast(),
            )
        }
        .map_err(Error::os(format!("look a key up in {}", self.name)))?;
        // SAFETY: filled by the kernel; any bytes are a value of a `Pod`.
        Ok(found.then(|| unsafe { value.assume_init() }))
    }

    /// Inserts or replaces. Replacing swaps the element under running programs: meant for entries
    /// whose value is not counted in.
    pub fn insert(&self, key: &K, value: &V, when: Insert) -> Result<(), InsertError> {
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
            // A hash says E2BIG, a trie ENOSPC; a preallocated hash whose free elements are on
            // other CPUs' lists for a moment says ENOMEM.
            Some(libc::E2BIG | libc::ENOSPC | libc::ENOMEM) => InsertError::Full,
            _ => InsertError::Os(error),
        })
    }

    /// Deletes a key; whether it was there.
    pub fn remove(&self, key: &K) -> Result<bool> {
        // SAFETY: sizes as checked when the table was made.
        unsafe { bpf::delete(self.map.as_fd(), std::ptr::from_ref(key).cast()) }
            .map_err(Error::os(format!("delete a key from {}", self.name)))
    }

    /// All entries. What changes meanwhile may or may not be among them; what does not change is,
    /// once.
    pub fn entries(&self) -> Result<Vec<(K, V)>> {
        self.entries_in_batches(BATCH)
            .map_err(Error::os(format!("read {}", self.name)))
    }

    fn entries_in_batches(&self, mut room: u32) -> io::Result<Vec<(K, V)>> {
        let mut entries = Vec::new();
        // The cursor: a bucket number for a hash, a key for a trie.
        let mut cursors = [
            vec![0u8; size_of::<K>().max(8)],
            vec![0u8; size_of::<K>().max(8)],
        ];
        let mut first = true;
        loop {
            let mut keys = Vec::<K>::with_capacity(room as usize);
            let mut values = Vec::<V>::with_capacity(room as usize);
            let [input, output] = &mut cursors;
            let input = if first {
                std::ptr::null()
            } else {
                input.as_ptr()
            };
            // SAFETY: room as the capacities say; cursors as large as a key and eight bytes.
            let batch = unsafe {
                bpf::lookup_batch(
                    self.map.as_fd(),
                    input,
                    output.as_mut_ptr(),
                    keys.as_mut_ptr().cast(),
                    values.as_mut_ptr().cast(),
                    room,
                )
            };
            let batch = match batch {
                Err(error) if error.raw_os_error() == Some(libc::ENOSPC) && room < 1 << 24 => {
                    room *= 2;
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
            entries.extend(keys.into_iter().zip(values));
            if !batch.more {
                return Ok(entries);
            }
            first = false;
            cursors.swap(0, 1);
        }
    }

    /// Deletes every entry that `unwanted` says; how many.
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
