//! One kind of requests.

use serde::{Deserialize, Serialize};

/// Random requests of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskCase {
    /// Whether they write. Else they read, and each block is checked.
    pub writes: bool,
    /// Requests under way at once: one by pread(2) or pwrite(2), more by io_submit(2).
    pub at_once: u16,
    /// Number of requests behind which there is a flush (fdatasync(2)); 0 for none. Meanwhile the others
    /// stay under way, and no new one begins.
    pub flush_each: u32,
}

impl DiskCase {
    /// Reads, this many at once.
    pub const fn reads(at_once: u16) -> Self {
        DiskCase {
            writes: false,
            at_once,
            flush_each: 0,
        }
    }

    /// Writes, this many at once, and a flush behind each `flush_each` of them.
    pub const fn writes(at_once: u16, flush_each: u32) -> Self {
        DiskCase {
            writes: true,
            at_once,
            flush_each,
        }
    }
}
