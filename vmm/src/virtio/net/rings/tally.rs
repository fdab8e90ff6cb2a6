//! Reads the engine's counts of the rings, from memory that the engine writes.
use std::{fs::File, io, sync::atomic::Ordering};

use vm_memory::{Bytes as _, FileOffset, GuestAddress, GuestMemoryMmap};

use super::super::counters::PairSnapshot;

/// Length of the memory, bytes.
pub(in super::super) const COUNTERS_LEN: u64 = 4_096;

/// The memory: words of 64 bits. Kicks, then for the ring to the guest and for that from it its frames,
/// their bytes, chains, interrupts, and interrupts that the driver did not want; then bytes that sockets
/// took straight out of the guest's buffers, and that were received straight into them.
#[derive(Debug)]
pub(in super::super) struct Tally(GuestMemoryMmap);

impl Tally {
    /// Maps the counters that begin in the file `at` this offset.
    pub(in super::super) fn map(file: File, at: u64) -> io::Result<Tally> {
        let range = (
            GuestAddress(0),
            COUNTERS_LEN as usize,
            Some(FileOffset::new(file, at)),
        );
        let mapped = GuestMemoryMmap::from_ranges_with_files([range]);
        mapped.map(Tally).map_err(io::Error::other)
    }

    /// Adds what was counted to a pair's figures.
    pub(in super::super) fn add_to(&self, pair: &mut PairSnapshot) {
        let [
            kicks,
            rx_frames,
            rx_bytes,
            rx_chains,
            rx_interrupts,
            rx_suppressed,
            tx_frames,
            tx_bytes,
            _tx_chains,
            tx_interrupts,
            tx_suppressed,
            tx_direct,
            rx_direct,
        ] = std::array::from_fn(|nth| {
            let at = GuestAddress(8 * nth as u64);
            self.0.load::<u64>(at, Ordering::Relaxed).unwrap_or(0)
        });
        let add = |to: &mut u64, counts: &[u64]| {
            *to = counts
                .iter()
                .fold(*to, |sum, count| sum.wrapping_add(*count));
        };
        add(&mut pair.kicks, &[kicks]);
        add(&mut pair.rx_frames, &[rx_frames]);
        add(&mut pair.rx_bytes, &[rx_bytes]);
        add(&mut pair.rx_buffers, &[rx_chains]);
        add(&mut pair.tx_frames, &[tx_frames]);
        add(&mut pair.tx_bytes, &[tx_bytes]);
        add(&mut pair.tx_direct_bytes, &[tx_direct]);
        add(&mut pair.rx_direct_bytes, &[rx_direct]);
        add(&mut pair.interrupts, &[rx_interrupts, tx_interrupts]);
        let suppressed = [rx_suppressed, tx_suppressed];
        add(&mut pair.interrupts_suppressed, &suppressed);
    }
}
