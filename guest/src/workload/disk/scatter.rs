//! `disk N scatter`: blocks of a pattern, each once and none behind its neighbour, several at once, and a
//! flush behind so many of them.
use alloc::string::{String, ToString as _};

use crate::{
    pattern::Pattern,
    pci::Registers,
    platform::Platform,
    virtio::block::{BLOCK_BYTES, Disk, Done, Work},
};

/// Writes the first `blocks` of a disk, `at_once` at a time. Behind each `every` of them, and the last, is a
/// flush, where the disk has flushes; none is begun meanwhile. Calls `took` with the time of each write.
/// Returns the number of flushes.
///
/// # Errors
/// A request fails.
pub(super) fn scatter<R: Registers + Clone>(
    disk: &mut Disk<R>,
    platform: &impl Platform,
    (seed, blocks): (u64, u64),
    (every, at_once): (u32, u16),
    took: &mut impl FnMut(u64),
) -> Result<u64, String> {
    let step = step(blocks);
    let has_flushes = disk.has_flushes();
    // One place is the flush's.
    let mut requests = disk.blocks(at_once + 1);
    let mut asked_ns = alloc::vec![0; usize::from(at_once) + 1];
    let (mut begun, mut answered, mut flushes) = (0, 0, 0);
    // How many were answered when the last flush began, and whether it is under way.
    let (mut flushed, mut flushing) = (0, false);
    while answered < blocks || flushing {
        while !flushing && begun < blocks && requests.room() > 1 {
            let block = (u128::from(begun) * u128::from(step) % u128::from(blocks)) as u64;
            let mut pattern = Pattern::at(seed, block * BLOCK_BYTES as u64);
            let asked = platform.now_ns();
            let write = requests.write(block, |data| pattern.fill(data));
            asked_ns[write.map_err(|e| e.to_string())?] = asked;
            begun += 1;
        }
        requests.publish();
        let Done { place, work } = requests.wait().map_err(|e| e.to_string())?;
        requests.release(place);
        if work == Work::Flush {
            flushing = false;
        } else {
            took(platform.now_ns() - asked_ns[place]);
            answered += 1;
        }
        let is_due = answered - flushed >= u64::from(every) || answered == blocks;
        if has_flushes && !flushing && is_due && flushed < answered {
            requests.flush().map_err(|e| e.to_string())?;
            (flushed, flushing) = (answered, true);
            flushes += 1;
        }
    }
    Ok(flushes)
}

/// Returns a distance between blocks written one after another, so that each of `blocks` has its turn once.
fn step(blocks: u64) -> u64 {
    // About the golden section: neighbours in time are far apart, and so are those a few writes apart.
    let wanted = (u128::from(blocks) * 618 / 1000) as u64;
    let has_all = |step: &u64| gcd(*step, blocks) == 1;
    (wanted.max(1)..).find(has_all).unwrap_or(1)
}

fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
#[path = "scatter_test.rs"]
mod tests;
