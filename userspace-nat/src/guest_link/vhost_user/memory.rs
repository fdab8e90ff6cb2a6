//! The guest's memory, as the VMM describes it by a table: ranges of guest addresses, each with a
//! descriptor of a file, and with the VMM's own addresses, in which it names the rings.
//!
//! A VMM that shortens such a file afterwards ends the engine by SIGBUS, its own and no other's. Slipgate's
//! own VMM can't: its files are sealed, or refused.
use std::{fs::File, os::fd::OwnedFd, sync::Arc};

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

use super::message::{MOST_FDS, Message, Wrong};

/// Bytes of a region in the table: four words of 64 bits.
const REGION_LEN: usize = 32;
/// Bytes before the regions: their number, and padding.
const TABLE_HEADER: usize = 8;
const PAGE: u64 = 4_096;

/// Memory that is mapped.
#[derive(Debug)]
pub(super) struct Memory {
    /// What is on its way out of it keeps it mapped ([`crate::payload::Rest`]).
    pub(super) guest: Arc<GuestMemoryMmap>,
    ranges: Vec<Range>,
}

/// Addresses of a region.
#[derive(Clone, Copy, Debug)]
struct Range {
    guest: u64,
    len: u64,
    vmm: u64,
    /// Where it begins in its file.
    offset: u64,
}

impl Memory {
    /// Maps the memory of a table. `is_sealed`: whether its files must keep their length.
    pub(super) fn map(message: Message, is_sealed: bool) -> Result<Self, Wrong> {
        let body = &message.body;
        let ranges: Vec<Range> = body
            .get(TABLE_HEADER..)
            .unwrap_or_default()
            .chunks_exact(REGION_LEN)
            .map(range)
            .collect();
        let told = body.first_chunk().map(|count| u32::from_ne_bytes(*count));
        let is_whole = body.len() == TABLE_HEADER + ranges.len() * REGION_LEN;
        if !is_whole || told != Some(ranges.len() as u32) || ranges.is_empty() {
            return Err(Wrong::Body(message.request));
        }
        if message.fds.len() != ranges.len() || ranges.len() > MOST_FDS {
            return Err(Wrong::Descriptors(message.request));
        }
        let mut sorted = ranges.clone();
        sorted.sort_by_key(|range| range.guest);
        let mut fds: Vec<Option<OwnedFd>> = message.fds.into_iter().map(Some).collect();
        let regions = sorted.iter().map(|range| {
            let at = ranges.iter().position(|other| other.guest == range.guest);
            let fd = at.and_then(|at| fds[at].take());
            // None is left for a region that begins where another does.
            range.map(fd.ok_or(Wrong::Memory)?, is_sealed)
        });
        let regions = regions.collect::<Result<Vec<_>, _>>()?;
        Ok(Self {
            // Refuses regions that overlap.
            guest: GuestMemoryMmap::from_regions(regions)
                .map_err(|_| Wrong::Memory)?
                .into(),
            ranges,
        })
    }

    /// Returns the guest's address of one of the VMM's, if it is within a region.
    pub(super) fn of_vmm(&self, address: u64) -> Option<GuestAddress> {
        self.ranges.iter().find_map(|range| {
            let offset = address.checked_sub(range.vmm)?;
            (offset < range.len).then(|| GuestAddress(range.guest + offset))
        })
    }
}

impl Range {
    fn map(&self, fd: OwnedFd, is_sealed: bool) -> Result<GuestRegionMmap, Wrong> {
        let file = File::from(fd);
        if is_sealed && !keeps_length(&file) {
            return Err(Wrong::Memory);
        }
        let end = self.offset.checked_add(self.len);
        let has = file.metadata().map_or(0, |metadata| metadata.len());
        let is_of_pages = [self.guest, self.len, self.offset]
            .iter()
            .all(|value| value.is_multiple_of(PAGE));
        if self.len == 0 || !is_of_pages || end.is_none_or(|end| end > has) {
            return Err(Wrong::Memory);
        }
        let len = usize::try_from(self.len).map_err(|_| Wrong::Memory)?;
        let file = FileOffset::new(file, self.offset);
        let mapped = MmapRegion::from_file(file, len).map_err(|_| Wrong::Memory)?;
        GuestRegionMmap::new(mapped, GuestAddress(self.guest)).ok_or(Wrong::Memory)
    }
}

/// Whether nobody can shorten a file.
pub(super) fn keeps_length(file: &File) -> bool {
    let seals = fcntl(file, FcntlArg::F_GET_SEALS);
    seals.is_ok_and(|seals| seals & SealFlag::F_SEAL_SHRINK.bits() != 0)
}

fn range(bytes: &[u8]) -> Range {
    let word = |nth: usize| {
        let bytes = bytes.get(8 * nth..8 * nth + 8).unwrap_or_default();
        bytes.try_into().map_or(0, u64::from_ne_bytes)
    };
    Range {
        guest: word(0),
        len: word(1),
        vmm: word(2),
        offset: word(3),
    }
}
