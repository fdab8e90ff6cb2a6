//! Counts of the frames that the rings have carried, for slipgate's own VMM: words of 64 bits in
//! memory of its own, which it reads at any time. They are never read here.
use std::{fs::File, sync::atomic::Ordering};

use vm_memory::{Bytes as _, FileOffset, GuestAddress, GuestMemoryMmap};

use super::{
    memory::keeps_length,
    message::{Message, Wrong},
    ring::Ring,
    session::{RX, TX},
};

/// Length of the memory, bytes.
const TALLY_LEN: usize = 4_096;

/// The memory, mapped at the address 0.
#[derive(Debug)]
pub(super) struct Tally(GuestMemoryMmap);

impl Tally {
    /// Maps the memory of a message: its offset in the file, a whole number of pages.
    pub(super) fn map(message: Message) -> Result<Self, Wrong> {
        let [offset] = message.longs(0)?;
        let mut fds = message.fds.into_iter();
        let (Some(fd), None) = (fds.next(), fds.next()) else {
            return Err(Wrong::Descriptors(message.request));
        };
        let file = File::from(fd);
        let has = file.metadata().map_or(0, |metadata| metadata.len());
        let end = offset.checked_add(TALLY_LEN as u64);
        let is_within = end.is_some_and(|end| end <= has);
        if !is_within || !offset.is_multiple_of(TALLY_LEN as u64) || !keeps_length(&file) {
            return Err(Wrong::Memory);
        }
        let range = (
            GuestAddress(0),
            TALLY_LEN,
            Some(FileOffset::new(file, offset)),
        );
        let mapped = GuestMemoryMmap::from_ranges_with_files([range]);
        Ok(Self(mapped.map_err(|_| Wrong::Memory)?))
    }

    /// Sets the words: kicks, then for the ring to the guest and for that from it its frames, their
    /// bytes, chains, calls, and calls that the driver did not want; then bytes that sockets took straight
    /// out of the guest's buffers, and that were received straight into them.
    pub(super) fn set(&self, kicks: u64, rings: &[Ring]) {
        let of_rings = rings.iter().flat_map(|ring| {
            let counts = ring.counts;
            [
                counts.frames,
                counts.bytes,
                counts.chains,
                counts.calls,
                counts.calls_suppressed,
            ]
        });
        let direct = [TX, RX].into_iter().filter_map(|nth| rings.get(nth));
        let direct = direct.map(|ring| ring.counts.direct);
        let words = [kicks].into_iter().chain(of_rings).chain(direct);
        for (nth, word) in (0..).zip(words) {
            // It is as long as that.
            let _ = self.0.store(word, GuestAddress(8 * nth), Ordering::Relaxed);
        }
    }
}
