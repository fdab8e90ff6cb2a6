//! The guest's work: random requests to its disk, for a time.

use std::{
    fs::File,
    io,
    os::{fd::AsFd as _, unix::fs::FileExt as _},
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use super::{
    aio::Aio,
    blocks::{DISK_BLOCK_BYTES, fill_disk_block, is_disk_block},
    buffers::Buffers,
    case::DiskCase,
    lines::{DiskFigures, DiskLine},
};
use crate::{
    error::{Error, Result, Tried},
    impairment::SplitMix64,
};

/// Most requests under way at once.
const MOST_AT_ONCE: u16 = 128;
/// Requests whose times have room from the start. More get it as they come.
const EXPECTED: usize = 1 << 20;

/// All that the guest does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskWork {
    /// Cases, in order.
    pub cases: Vec<DiskCase>,
    /// Blocks at the disk's start that are read and written.
    pub blocks: u64,
    /// Time of requests that are not counted, before each case, ms.
    pub warm_up_ms: u64,
    /// Time of the requests that are, ms.
    pub measured_ms: u64,
    /// Rest before and behind these, ms: who measures takes the CPU time then.
    pub rest_ms: u64,
}

impl DiskWork {
    /// Returns the work as [`DiskWork::of_text`] reads it.
    pub fn to_text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Reads the work.
    ///
    /// # Errors
    /// The text is none.
    pub fn of_text(text: &str) -> Result<Self> {
        serde_json::from_str(text).map_err(|why| Error::unexpected(format!("{text:?}: {why}")))
    }

    /// How long all of it lasts, but for the boot and requests that the disk keeps waiting.
    pub fn lasts(&self) -> Duration {
        let case = self.warm_up_ms + self.measured_ms + 2 * self.rest_ms;
        Duration::from_millis(case * self.cases.len() as u64)
    }

    /// Does all of it on a disk, and says a line before and behind each case.
    ///
    /// # Errors
    /// A request fails or is not whole, or a block is not the one that was asked for.
    pub fn run(&self, disk: &File, clock: &str, mut say: impl FnMut(DiskLine)) -> Result<()> {
        let mut places = SplitMix64(1);
        let rest = || std::thread::sleep(Duration::from_millis(self.rest_ms));
        for (case, what) in self.cases.iter().enumerate() {
            let mut run = |ms| {
                let until = Until {
                    blocks: self.blocks,
                    time: Duration::from_millis(ms),
                };
                until.requests(disk, *what, &mut places)
            };
            run(self.warm_up_ms)?;
            let clock = clock.to_owned();
            say(DiskLine::Ready { case, clock });
            rest();
            let done = run(self.measured_ms)?;
            say(DiskLine::Figures(done.figures(case, *what)));
            rest();
        }
        Ok(())
    }
}

/// Where requests go, and for how long they are begun.
struct Until {
    blocks: u64,
    time: Duration,
}

/// What has been done.
struct Done {
    /// Times of the requests, ns.
    times: Vec<u32>,
    flushes: u64,
    took: Duration,
}

impl Until {
    fn requests(&self, disk: &File, what: DiskCase, places: &mut SplitMix64) -> Result<Done> {
        if what.at_once == 0 || what.at_once > MOST_AT_ONCE || self.blocks == 0 {
            let why = format!("{what:?} in {} blocks is no work", self.blocks);
            return Err(Error::unexpected(why));
        }
        match what.at_once {
            1 => self.one_by_one(disk, what, places),
            _ => self.together(disk, what, places),
        }
    }

    fn one_by_one(&self, disk: &File, what: DiskCase, places: &mut SplitMix64) -> Result<Done> {
        let mut buffers = Buffers::new(1);
        let bytes = buffers.of(0);
        let mut done = Done::new();
        let started = Instant::now();
        while done.times.is_empty() || started.elapsed() < self.time {
            let number = places.next() % self.blocks;
            if what.writes {
                fill_disk_block(bytes, number, true);
            }
            let offset = number * DISK_BLOCK_BYTES as u64;
            let begun = Instant::now();
            let moved = match what.writes {
                true => disk.write_at(bytes, offset),
                false => disk.read_at(bytes, offset),
            };
            done.times.push(nanoseconds(begun.elapsed()));
            check(what, number, bytes, moved)?;
            done.flush_if_due(disk, what)?;
        }
        done.took = started.elapsed();
        Ok(done)
    }

    fn together(&self, disk: &File, what: DiskCase, places: &mut SplitMix64) -> Result<Done> {
        let mut buffers = Buffers::new(what.at_once.into());
        let aio = Aio::new(disk.as_fd(), &mut buffers);
        let mut aio = aio.tried("prepare asynchronous I/O (io_setup)")?;
        let mut done = Done::new();
        let mut ended = Vec::new();
        let started = Instant::now();
        // The block of each buffer's request, and when that was begun.
        let mut under_way = vec![(0, started); what.at_once.into()];
        let mut begin = |aio: &mut Aio, under_way: &mut [(u64, Instant)], buffer: usize| {
            let number = places.next() % self.blocks;
            if what.writes {
                fill_disk_block(aio.buffer(buffer), number, true);
            }
            under_way[buffer] = (number, Instant::now());
            let offset = number * DISK_BLOCK_BYTES as u64;
            let begun = aio.begin(buffer, what.writes, offset);
            begun.tried(format!("begin {what:?} of block {number} (io_submit)"))
        };
        for buffer in 0..under_way.len() {
            begin(&mut aio, &mut under_way, buffer)?;
        }
        let mut left = under_way.len();
        while left > 0 {
            aio.wait(&mut ended)
                .tried("wait for the disk (io_getevents)")?;
            for one in ended.drain(..) {
                let (number, begun) = under_way[one.buffer];
                done.times.push(nanoseconds(begun.elapsed()));
                check(what, number, aio.buffer(one.buffer), one.result)?;
                done.flush_if_due(disk, what)?;
                match started.elapsed() < self.time {
                    true => begin(&mut aio, &mut under_way, one.buffer)?,
                    false => left -= 1,
                }
            }
        }
        done.took = started.elapsed();
        Ok(done)
    }
}

impl Done {
    fn new() -> Self {
        Done {
            times: Vec::with_capacity(EXPECTED),
            flushes: 0,
            took: Duration::ZERO,
        }
    }

    fn flush_if_due(&mut self, disk: &File, what: DiskCase) -> Result<()> {
        let each = u64::from(what.flush_each);
        if each == 0 || !(self.times.len() as u64).is_multiple_of(each) {
            return Ok(());
        }
        disk.sync_data().tried("flush the disk (fdatasync)")?;
        self.flushes += 1;
        Ok(())
    }

    fn figures(mut self, case: usize, what: DiskCase) -> DiskFigures {
        self.times.sort_unstable();
        let requests = self.times.len();
        let percentile = |percent: usize| {
            let at = (requests * percent / 100).min(requests.saturating_sub(1));
            f64::from(self.times.get(at).copied().unwrap_or(0)) / 1e3
        };
        DiskFigures {
            case,
            what,
            requests: requests as u64,
            flushes: self.flushes,
            took_us: self.took.as_secs_f64() * 1e6,
            p50_us: percentile(50),
            p99_us: percentile(99),
        }
    }
}

/// Checks that a request moved its block, and that a block that was read is the right one.
fn check(what: DiskCase, number: u64, bytes: &[u8], moved: io::Result<usize>) -> Result<()> {
    let moved = moved.tried(format!("{what:?}, block {number}"))?;
    if moved != DISK_BLOCK_BYTES {
        let why = format!("{what:?}, block {number}: {moved} bytes were moved");
        return Err(Error::unexpected(why));
    }
    match what.writes || is_disk_block(bytes, number) {
        true => Ok(()),
        false => Err(Error::unexpected(format!("block {number} is another one"))),
    }
}

/// A request's time; one of four seconds and more is the longest that is told.
fn nanoseconds(time: Duration) -> u32 {
    u32::try_from(time.as_nanos()).unwrap_or(u32::MAX)
}

#[cfg(test)]
#[path = "work_test.rs"]
mod tests;
