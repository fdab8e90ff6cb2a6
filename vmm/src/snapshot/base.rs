//! Snapshots that are differences from another, and the snapshots below them.
//!
//! # Theory of operation
//! A snapshot may be made from a *base*: its file of memory has the pages that differ from the base's,
//! and its state says which those are ([`Runs`]) and which snapshot is the base ([`SnapshotId`]). What
//! differs is found by comparing all memory with the base's files, so it does not matter who wrote a
//! page, the guest or a device, nor what happened between the two snapshots. The holes of the base's
//! file are zeroes without a read. The pages are listed, and
//! not known by the holes of the sparse file: a page of zeroes may differ too, and who copies a file
//! may make holes or fill them.
//!
//! A base may have a base itself, up to [`MAX_BASES`] below a snapshot. To restore one the lowest memory
//! is mapped, and the runs of each one above it over that, from its own file. Each run is a mapping, of
//! which the kernel permits a process 65,530, and a mapping amid another splits that: so runs that are
//! near to each other are joined, with the pages between them, until there are at most [`MAX_RUNS`].
use std::{
    fmt,
    fs::File,
    io,
    os::{fd::AsRawFd as _, unix::fs::FileExt as _},
};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::{MAX_STATE_BYTES, SnapshotError, decode};
use crate::layout::PAGE_SIZE;

/// Most snapshots below one.
pub const MAX_BASES: usize = 7;
/// Most runs of pages of one snapshot.
pub const MAX_RUNS: usize = 4096;

/// Identity of a snapshot: the SHA-256 of its state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SnapshotId(pub [u8; 32]);

impl SnapshotId {
    /// That of an encoded state.
    pub(super) fn of(state: &[u8]) -> Self {
        Self(Sha256::digest(state).into())
    }
}

impl fmt::Display for SnapshotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Reference to the base of a snapshot that is made of differences.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct BaseState {
    /// Which snapshot that is.
    pub id: SnapshotId,
    /// The pages that this one has in its place.
    pub runs: Runs,
}

/// Runs of pages of the file of memory: number of the first page, and of pages. In order, apart from
/// each other.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Runs(pub Vec<(u64, u64)>);

impl Runs {
    /// Adds a page behind all that are there. Those near to each other are joined now and then, so that
    /// the guest, which chooses the pages, does not choose how much there is to keep. At the end
    /// [`Runs::join`] is for the caller.
    pub(super) fn add(&mut self, page: u64) {
        match self.0.last_mut() {
            Some((first, count)) if *first + *count == page => *count += 1,
            _ => self.0.push((page, 1)),
        }
        if self.0.len() > 2 * MAX_RUNS {
            self.join();
        }
    }

    /// Joins runs that are near to each other, with the pages between them, until there are few enough.
    pub(super) fn join(&mut self) {
        let mut apart = 1;
        while self.0.len() > MAX_RUNS {
            self.0.dedup_by(|(first, count), (before, length)| {
                let is_near = *first - (*before + *length) <= apart;
                if is_near {
                    *length = *first + *count - *before;
                }
                is_near
            });
            apart *= 2;
        }
    }

    /// The parts of these bytes of the file that the runs have: offset and end of each.
    pub(crate) fn within(&self, at: u64, end: u64) -> impl Iterator<Item = (u64, u64)> {
        let is_before = |(first, count): &(u64, u64)| (first + count) * PAGE_SIZE <= at;
        let later = &self.0[self.0.partition_point(is_before)..];
        let ends = |(first, count): &(u64, u64)| (first * PAGE_SIZE, (first + count) * PAGE_SIZE);
        let there = later
            .iter()
            .map(ends)
            .take_while(move |(from, _)| *from < end);
        there.map(move |(from, until)| (from.max(at), until.min(end)))
    }

    /// The runs in bytes of the file: offset and length.
    pub fn bytes(&self) -> impl Iterator<Item = (u64, u64)> {
        let runs = self.0.iter();
        runs.map(|(first, count)| (first * PAGE_SIZE, count * PAGE_SIZE))
    }

    /// Checks runs that were read from a file against the size of memory.
    ///
    /// # Errors
    /// They are too many, out of order, or reach beyond it.
    pub fn check(&self, memory_bytes: u64) -> Result<(), SnapshotError> {
        let pages = memory_bytes / PAGE_SIZE;
        let mut end = 0;
        let is_right = |(first, count): &(u64, u64)| {
            let next = first.checked_add(*count);
            let fits = *count > 0 && *first >= end && next.is_some_and(|next| next <= pages);
            end = next.unwrap_or(u64::MAX);
            fits
        };
        match self.0.len() <= MAX_RUNS && self.0.iter().all(is_right) {
            true => Ok(()),
            false => Err(SnapshotError::Mismatch(
                "the pages that differ from its base are none of its memory's".into(),
            )),
        }
    }
}

/// Files of a snapshot, opened for reading.
#[derive(Debug)]
pub struct SavedFiles {
    /// File with the state of CPUs and devices.
    pub state: File,
    /// The memory. It must not change for as long as a machine of it is there.
    pub memory: File,
}

/// The memory of a snapshot, and of those below it.
#[derive(Debug)]
pub(crate) struct Layers {
    /// That of the lowest, which has all pages.
    pub(crate) lowest: File,
    /// Those above it, the lowest first, each with the pages that it has.
    pub(crate) above: Vec<(File, Runs)>,
}

impl Layers {
    /// Puts the memory of a snapshot on that of its bases, the nearest first. `base`: what its state says
    /// of them.
    ///
    /// # Errors
    /// One is missing, is another than the one above it was made from, or one too many.
    pub(crate) fn of(
        memory: File,
        memory_bytes: u64,
        base: Option<BaseState>,
        bases: Vec<SavedFiles>,
    ) -> Result<Self, SnapshotError> {
        let mut above = Vec::new();
        let (mut memory, mut wanted) = (memory, base);
        if bases.len() > MAX_BASES {
            return Err(SnapshotError::TooManyBases);
        }
        let mut bases = bases.into_iter();
        while let Some(BaseState { id, runs }) = wanted {
            runs.check(memory_bytes)?;
            let files = bases.next().ok_or(SnapshotError::NoBase { wanted: id })?;
            let (state, found) = read_base(&files.state)?;
            if found != id {
                return Err(SnapshotError::OtherBase { wanted: id, found });
            }
            if state.memory_bytes != memory_bytes {
                let (there, here) = (state.memory_bytes, memory_bytes);
                let why = format!("its base has {there} bytes of memory, and it has {here}");
                return Err(SnapshotError::Mismatch(why));
            }
            above.insert(0, (std::mem::replace(&mut memory, files.memory), runs));
            wanted = state.base;
        }
        match bases.next() {
            None => Ok(Self {
                lowest: memory,
                above,
            }),
            Some(_) => Err(SnapshotError::NotABase),
        }
    }

    /// The layers of the nearest of these snapshots, and its id: what a snapshot that is made from it
    /// differs from.
    ///
    /// # Errors
    /// They don't belong together, or have another size of memory.
    pub(crate) fn to_differ_from(
        mut bases: Vec<SavedFiles>,
        memory_bytes: u64,
    ) -> Result<(Self, SnapshotId), SnapshotError> {
        if bases.len() > MAX_BASES {
            return Err(SnapshotError::TooManyBases);
        }
        let nearest = bases.remove(0);
        let (state, id) = read_base(&nearest.state)?;
        if state.memory_bytes != memory_bytes {
            let (there, here) = (state.memory_bytes, memory_bytes);
            let why = format!("the base has {there} bytes of memory, and the machine {here}");
            return Err(SnapshotError::Mismatch(why));
        }
        let layers = Self::of(nearest.memory, memory_bytes, state.base, bases)?;
        layers.check_sizes(memory_bytes)?;
        Ok((layers, id))
    }

    /// Checks that all files are as long as the memory, by calls that the thread of orders may make.
    fn check_sizes(&self, memory_bytes: u64) -> Result<(), SnapshotError> {
        let failed = SnapshotError::file("read the memory of the base");
        let above = self.above.iter().map(|(file, _)| file);
        for file in [&self.lowest].into_iter().chain(above) {
            // The last byte, and nothing behind it.
            let read = file.read_at(&mut [0; 2], memory_bytes - 1);
            if read.map_err(&failed)? != 1 {
                return Err(SnapshotError::Mismatch(format!(
                    "a file `memory` of the base is not the {memory_bytes} bytes long that its state \
                     says: it is not whole"
                )));
            }
        }
        Ok(())
    }

    /// Reads the memory at an offset.
    ///
    /// # Errors
    /// A file can't be read, or is not whole.
    pub(crate) fn read(&self, buffer: &mut [u8], at: u64) -> Result<(), SnapshotError> {
        let failed = SnapshotError::file("read the memory of the base");
        let end = at + buffer.len() as u64;
        read_sparse(&self.lowest, buffer, at).map_err(&failed)?;
        for (file, runs) in &self.above {
            for (from, until) in runs.within(at, end) {
                let part = &mut buffer[(from - at) as usize..(until - at) as usize];
                file.read_exact_at(part, from).map_err(&failed)?;
            }
        }
        Ok(())
    }
}

/// Reads a part of a sparse file, which has all of it. Its holes are not read: the host would allocate
/// a page of its cache for each page of a hole, and fill it with zeroes.
fn read_sparse(file: &File, buffer: &mut [u8], at: u64) -> io::Result<()> {
    let end = at + buffer.len() as u64;
    // What is behind the file's end is missing, and no hole.
    if seek(file, libc::SEEK_END, 0)?.is_none_or(|length| length < end) {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut done = at;
    while done < end {
        let data = seek(file, libc::SEEK_DATA, done)?.map_or(end, |data| data.clamp(done, end));
        buffer[(done - at) as usize..(data - at) as usize].fill(0);
        if data == end {
            break;
        }
        // A file system that says that a hole begins where data does is not believed.
        let hole = seek(file, libc::SEEK_HOLE, data)?.filter(|hole| (data + 1..end).contains(hole));
        let hole = hole.unwrap_or(end);
        file.read_exact_at(
            &mut buffer[(data - at) as usize..(hole - at) as usize],
            data,
        )?;
        done = hole;
    }
    Ok(())
}

/// Returns where a file's next data or hole is, from this offset on, or its end. `None`: there is no
/// more data. A file system that knows of no holes answers that all is data, or that it does not know
/// the question (EINVAL): then all is taken for data.
fn seek(file: &File, whence: libc::c_int, from: u64) -> io::Result<Option<u64>> {
    let at = i64::try_from(from).map_err(io::Error::other)?;
    // SAFETY: the descriptor is open, and nothing else is passed but numbers. The offset that it moves
    // is nobody's: every read of the file names its own.
    let found = unsafe { libc::lseek(file.as_raw_fd(), at, whence) };
    match u64::try_from(found) {
        Ok(found) => Ok(Some(found)),
        Err(_) => match io::Error::last_os_error() {
            e if e.raw_os_error() == Some(libc::ENXIO) => Ok(None),
            e if e.raw_os_error() == Some(libc::EINVAL) && whence == libc::SEEK_DATA => {
                Ok(Some(from))
            }
            e if e.raw_os_error() == Some(libc::EINVAL) && whence == libc::SEEK_HOLE => Ok(None),
            e => Err(e),
        },
    }
}

/// Reads a base's state by calls that the thread of orders may make.
fn read_base(file: &File) -> Result<(super::MachineState, SnapshotId), SnapshotError> {
    let failed = SnapshotError::file("read the state of the base");
    // One byte more than any state, with its header, shows one that is too long.
    let mut bytes = vec![0; MAX_STATE_BYTES as usize + 4096];
    let mut length = 0;
    while length < bytes.len() {
        match file.read_at(&mut bytes[length..], length as u64) {
            Ok(0) => break,
            Ok(read) => length += read,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(failed(e)),
        }
    }
    bytes.truncate(length);
    let state = decode(&bytes)?;
    Ok((state, super::file::id_of(&bytes)))
}

#[cfg(test)]
#[path = "base_test.rs"]
mod tests;
