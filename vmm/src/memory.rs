//! The guest's memory: anonymous or of a snapshot's file, private, or of a file that another process has
//! too; and not touched before the guest touches it.
use std::{fs::File, io, os::fd::AsRawFd as _, sync::Arc};

use thiserror::Error;
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap,
    mmap::MmapRegionBuilder,
};

use crate::{
    GuestMemory,
    layout::{self, PAGE_SIZE},
    snapshot::Layers,
};

/// Size of a huge page, bytes.
pub const HUGE_PAGE_BYTES: u64 = 2 << 20;
/// Least memory of a machine, bytes.
pub const MIN_BYTES: u64 = 4 << 20;

/// Reason why [`create`] fails.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// The size is not whole pages, or is below [`MIN_BYTES`].
    #[error(
        "{0} bytes of memory asked for: give a multiple of {PAGE_SIZE}, {MIN_BYTES} at the least"
    )]
    Size(u64),
    /// The host could not map the memory.
    #[error("mapping {bytes} bytes of guest memory: {why}; give less memory to the machine")]
    Map {
        /// Requested size of the memory, bytes.
        bytes: u64,
        /// Error from the kernel or vm-memory, as text.
        why: String,
    },
    /// The host has not enough huge pages.
    #[error(
        "mapping {bytes} bytes of guest memory in huge pages of 2 MiB: {why}; give the host enough of \
         them (`sysctl vm.nr_hugepages={pages}` at the least; HugePages_Free in /proc/meminfo says what \
         is left), or do without"
    )]
    HugePages {
        /// Requested size of the memory, bytes.
        bytes: u64,
        /// Number of pages that it takes.
        pages: u64,
        /// Error from the kernel or vm-memory, as text.
        why: String,
    },
    /// The size is no whole number of huge pages.
    #[error("{0} bytes of memory asked for: huge pages take a multiple of 2 MiB")]
    NoHugePages(u64),
    /// The snapshot's file can't be asked for its size.
    #[error("looking at the file of the memory")]
    File(#[source] io::Error),
    /// The snapshot's file has another size than the memory.
    #[error("the file of the memory has {found} bytes, and the machine {wanted}: it is not whole")]
    FileSize {
        /// Size of the file, bytes.
        found: u64,
        /// Size of the memory, bytes.
        wanted: u64,
    },
}

/// Maps `bytes` of zeroes at the addresses of [`layout::ram`].
///
/// # Errors
/// The size is invalid, or the host has no address space for it.
pub fn create(bytes: u64) -> Result<GuestMemory, MemoryError> {
    check(bytes)?;
    let pieces: Vec<_> = layout::ram(bytes)
        .into_iter()
        .map(|piece| (GuestAddress(piece.start), piece.size as usize))
        .collect();
    GuestMemory::from_ranges(&pieces).map_err(|e| refused(bytes, e))
}

/// As [`create`], in huge pages of 2 MiB, which the host reserves for it at once.
///
/// # Errors
/// The size is invalid, or the host has not enough huge pages.
pub fn create_huge(bytes: u64) -> Result<GuestMemory, MemoryError> {
    check(bytes)?;
    if !bytes.is_multiple_of(HUGE_PAGE_BYTES) {
        return Err(MemoryError::NoHugePages(bytes));
    }
    let refused = |why: String| MemoryError::HugePages {
        bytes,
        pages: bytes / HUGE_PAGE_BYTES,
        why,
    };
    let mut regions = Vec::new();
    for piece in layout::ram(bytes) {
        // Without MAP_NORESERVE: a page that is not there later would be the end of the machine.
        let flags =
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | libc::MAP_HUGE_2MB;
        let mapping = MmapRegionBuilder::new(piece.size as usize)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(flags)
            .with_hugetlbfs(true)
            .build()
            .map_err(|e| refused(e.to_string()))?;
        let region = GuestRegionMmap::new(mapping, GuestAddress(piece.start));
        regions.push(region.ok_or_else(|| refused("beyond 64 bits".to_owned()))?);
    }
    GuestMemory::from_regions(regions).map_err(|e| refused(e.to_string()))
}

/// Maps the memory that [`write_memory`](crate::snapshot::write_memory) wrote, privately: what the
/// guest writes does not reach the file, and a page that nobody writes to is the host's page cache.
///
/// # Errors
/// The size is invalid or not that of the file, or the host has no address space for it.
pub fn of_file(bytes: u64, file: File) -> Result<GuestMemory, MemoryError> {
    check(bytes)?;
    mapped(bytes, file, libc::MAP_PRIVATE, bytes)
}

/// Maps a file of zeroes, whose first bytes are the memory; others that have the file share it.
/// `file_bytes`: its length.
///
/// # Errors
/// As of [`of_file`].
pub fn shared(bytes: u64, file: File, file_bytes: u64) -> Result<GuestMemory, MemoryError> {
    check(bytes)?;
    mapped(bytes, file, libc::MAP_SHARED, file_bytes)
}

fn mapped(
    bytes: u64,
    file: File,
    how: libc::c_int,
    file_bytes: u64,
) -> Result<GuestMemory, MemoryError> {
    check_size(&file, file_bytes)?;
    let file = Arc::new(file);
    let mut at = 0;
    let mut regions = Vec::new();
    for piece in layout::ram(bytes) {
        let mapping = MmapRegionBuilder::new(piece.size as usize)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(how | libc::MAP_NORESERVE)
            .with_file_offset(FileOffset::from_arc(file.clone(), at))
            .build()
            .map_err(|e| refused(bytes, e))?;
        let region = GuestRegionMmap::new(mapping, GuestAddress(piece.start));
        regions.push(region.ok_or_else(|| refused(bytes, "beyond 64 bits"))?);
        at += piece.size;
    }
    GuestMemory::from_regions(regions).map_err(|e| refused(bytes, e))
}

/// Maps the memory of a snapshot that holds differences: the lowest of its bases as [`of_file`], and
/// over it the pages that each snapshot above has, from its own file.
///
/// # Errors
/// As of [`of_file`].
pub(crate) fn of_layers(bytes: u64, layers: Layers) -> Result<GuestMemory, MemoryError> {
    let memory = of_file(bytes, layers.lowest)?;
    for (file, runs) in &layers.above {
        check_size(file, bytes)?;
        let mut start = 0;
        for region in memory.iter() {
            let end = start + region.len();
            for (from, until) in runs.within(start, end) {
                map_over(region.as_ptr(), from - start, file, from, until - from)
                    .map_err(|e| refused(bytes, e))?;
            }
            start = end;
        }
    }
    Ok(memory)
}

/// Maps a part of a file over a region at `at`, privately.
fn map_over(region: *mut u8, at: u64, file: &File, from: u64, length: u64) -> io::Result<()> {
    let to = region.wrapping_add(at as usize);
    let (prot, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_NORESERVE | libc::MAP_FIXED,
    );
    let offset = i64::try_from(from).map_err(io::Error::other)?;
    // SAFETY: the range is a part of the region's mapping, which nobody uses yet; what is mapped there
    // instead is unmapped with it.
    let mapped = unsafe {
        libc::mmap(
            to.cast(),
            length as usize,
            prot,
            flags,
            file.as_raw_fd(),
            offset,
        )
    };
    match mapped == libc::MAP_FAILED {
        true => Err(io::Error::last_os_error()),
        false => Ok(()),
    }
}

fn check_size(file: &File, wanted: u64) -> Result<(), MemoryError> {
    let found = file.metadata().map_err(MemoryError::File)?.len();
    match found == wanted {
        true => Ok(()),
        false => Err(MemoryError::FileSize { found, wanted }),
    }
}

fn refused(bytes: u64, why: impl ToString) -> MemoryError {
    let why = why.to_string();
    MemoryError::Map { bytes, why }
}

/// Checks a size. Sums with addresses can't overflow then.
fn check(bytes: u64) -> Result<(), MemoryError> {
    if bytes < MIN_BYTES || !bytes.is_multiple_of(PAGE_SIZE) {
        return Err(MemoryError::Size(bytes));
    }
    match bytes.checked_add(layout::HIGH_RAM_START) {
        Some(_) => Ok(()),
        None => Err(refused(bytes, "beyond 64 bits")),
    }
}

/// Makes all of it zeroes again, and gives it back to the host. It is anonymous ([`create`]) or of a file
/// of memory ([`shared`]), and nobody uses it.
///
/// # Errors
/// The host refuses.
pub fn clear(memory: &GuestMemory) -> io::Result<()> {
    for region in memory.iter() {
        let (start, bytes) = (region.as_ptr(), region.len() as usize);
        let advice = discarding(region);
        // SAFETY: the range is that of a mapping, which stays; its pages are private and anonymous, or
        // those of a file of memory, so they are zeroes when they are touched again.
        if unsafe { libc::madvise(start.cast(), bytes, advice) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Returns the advice to the kernel that gives pages of a region back to the host.
pub(crate) fn discarding(region: &GuestRegionMmap<()>) -> libc::c_int {
    match region.flags() & libc::MAP_SHARED {
        0 => libc::MADV_DONTNEED,
        // Pages of a file are freed there, for all who have it.
        _ => libc::MADV_REMOVE,
    }
}

/// Returns the size of the host's pages of a region, which are given back whole or not at all.
pub(crate) fn page_bytes(region: &GuestRegionMmap<()>) -> u64 {
    match region.is_hugetlbfs() {
        Some(true) => HUGE_PAGE_BYTES,
        _ => PAGE_SIZE,
    }
}

/// Returns the size of RAM, bytes.
pub fn total_bytes(memory: &GuestMemory) -> u64 {
    memory.iter().map(GuestMemoryRegion::len).sum()
}

/// Returns the end address of the RAM below the hole.
pub fn low_end(memory: &GuestMemory) -> u64 {
    memory
        .iter()
        .filter(|region| region.start_addr().0 < layout::LOW_RAM_LIMIT)
        .map(|region| region.start_addr().0 + region.len())
        .max()
        .unwrap_or(0)
}

#[cfg(test)]
#[path = "memory_test.rs"]
mod tests;
