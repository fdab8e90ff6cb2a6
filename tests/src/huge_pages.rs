//! The host's pool of huge pages, of 2 MiB.

use std::{fs, path::Path};

use crate::turns::Turn;

const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

/// Pages that the host has in its pool for a test, until this is dropped.
#[derive(Debug)]
pub struct HugePages {
    before: u64,
}

impl HugePages {
    /// Adds pages to the pool, which is the whole host's: so it takes a turn alone. `None`: this
    /// process may not, or the host's memory has no room for so many more.
    pub fn more(pages: u64, _alone: &Turn) -> Option<Self> {
        let before = Self::count("nr_hugepages")?;
        set(before + pages)?;
        let reserved = Self { before };
        (Self::count("nr_hugepages")? >= before + pages).then_some(reserved)
    }

    /// Reads a count of the pool's, such as `free_hugepages`. `None`: there is no such pool.
    pub fn count(name: &str) -> Option<u64> {
        let text = fs::read_to_string(Path::new(POOL).join(name)).ok()?;
        text.trim().parse().ok()
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        set(self.before);
    }
}

fn set(pages: u64) -> Option<()> {
    fs::write(Path::new(POOL).join("nr_hugepages"), pages.to_string()).ok()
}
