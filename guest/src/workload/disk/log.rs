//! `disk N log`: blocks of a pattern in order, several at once, and flushes beside them. After each
//! flush the guest says how many blocks are safe, from the first one on: these are there whatever
//! happens to the VMM then.
use alloc::string::{String, ToString as _};

use crate::{
    json::Object,
    pattern::Pattern,
    pci::Registers,
    platform::Platform,
    virtio::block::{BLOCK_BYTES, Blocks, Disk, Done, Work},
};

/// Writes the first `blocks` of a disk, `at_once` at a time, with a flush for each `every` of them.
/// No more than twice as many are written or being written behind the last flush. Where the disk
/// has no flushes, a block is safe with the answer to its write. Calls `took` with the time of each
/// write.
///
/// # Errors
/// A request fails.
pub(super) fn log<R: Registers + Clone>(
    disk: &mut Disk<R>,
    platform: &impl Platform,
    (seed, blocks): (u64, u64),
    (every, at_once): (u32, u16),
    took: &mut impl FnMut(u64),
) -> Result<(), String> {
    let every = u64::from(every);
    let has_flushes = disk.has_flushes();
    let mut requests = disk.blocks(at_once + 1);
    let mut asked_ns = alloc::vec![0; usize::from(at_once) + 1];
    // The next block to be written, and how many are safe.
    let (mut next, mut safe) = (0, 0);
    // How many are safe when the flush under way is answered.
    let mut flushing = None;
    while safe < blocks {
        // One place is the flush's.
        let room = requests.room() - usize::from(flushing.is_none());
        let end = blocks.min(safe + 2 * every).min(next + room as u64);
        while next < end {
            let mut pattern = Pattern::at(seed, next * BLOCK_BYTES as u64);
            let asked = platform.now_ns();
            let write = requests.write(next, |block| pattern.fill(block));
            asked_ns[write.map_err(|e| e.to_string())?] = asked;
            next += 1;
        }
        let answered = answered(&requests, next);
        let is_due = answered - safe >= every || answered == blocks;
        if is_due && !has_flushes {
            safe = answered;
            say(platform, safe);
            continue;
        }
        if is_due && flushing.is_none() {
            requests.flush().map_err(|e| e.to_string())?;
            flushing = Some(answered);
        }
        requests.publish();
        let Done { place, work } = requests.wait().map_err(|e| e.to_string())?;
        requests.release(place);
        match work {
            Work::Flush => {
                safe = flushing.take().unwrap_or(safe);
                say(platform, safe);
            }
            _ => took(platform.now_ns() - asked_ns[place]),
        }
    }
    Ok(())
}

/// Returns how many blocks, from the first one on, have their answer. `next` have begun.
fn answered<R: Registers + Clone>(requests: &Blocks<'_, R>, next: u64) -> u64 {
    let writes = requests.under_way().filter_map(|work| match work {
        Work::Write(block) => Some(block),
        _ => None,
    });
    writes.min().unwrap_or(next)
}

fn say(platform: &impl Platform, safe: u64) {
    platform.print_line(&Object::default().number("safe", safe).into_line());
}
