//! What a disk does, by the specification: one request after the other, on arrays in place of the
//! guest's memory and the file.
use std::{collections::VecDeque, ops::Range};

use slipgate_vmm::virtio::block::{Cache, DiskSnapshot, SECTOR_BYTES};

use super::{DISK_BYTES, MEMORY_BYTES, REGION_BYTES, SIZE, available, descriptors, used};

/// Feature bits that change what is done.
pub(super) const FLUSH: u64 = 1 << 9;
pub(super) const INDIRECT: u64 = 1 << 28;
pub(super) const EVENT_IDX: u64 = 1 << 29;

/// Longest range of a discard or of zeroes, sectors.
const MAX_RANGE_SECTORS: u64 = 64 << 11;
const HEADER_BYTES: usize = 16;
const RANGE_BYTES: usize = 16;

/// The disk and its guest.
pub(super) struct Model {
    pub(super) memory: Vec<u8>,
    pub(super) disk: Vec<u8>,
    pub(super) counted: DiskSnapshot,
    read_only: bool,
    cache: Cache,
    /// What memory, and places and lengths, have to be aligned to; `None`: sectors.
    alignment: Option<[u32; 2]>,
    /// Whether the file makes zeroes by FALLOC_FL_ZERO_RANGE.
    zeroes_ranges: bool,
    features: u64,
    queues: Vec<Queue>,
}

/// How far a queue is served.
#[derive(Clone, Default)]
struct Queue {
    is_broken: bool,
    next_available: u16,
    next_used: u16,
    /// Chains that were begun and are to be begun anew.
    again: VecDeque<u16>,
}

/// The driver broke the ring.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Broken;

/// How a request ends.
enum End {
    /// These bytes of the answer are written.
    Done(u64),
    Unsupported,
    Invalid,
    /// A pause came when a part of it was done.
    Cut,
}

impl Model {
    pub(super) fn new(
        disk: Vec<u8>,
        (read_only, cache, alignment): (bool, Cache, Option<[u32; 2]>),
        zeroes_ranges: bool,
    ) -> Model {
        Model {
            memory: vec![0; MEMORY_BYTES as usize],
            disk,
            counted: DiskSnapshot::default(),
            read_only,
            cache,
            alignment,
            zeroes_ranges,
            features: 0,
            queues: Vec::new(),
        }
    }

    /// A driver begins with these features and this number of queues.
    pub(super) fn activate(&mut self, features: u64, queues: u16) {
        self.features = features;
        self.queues = vec![Queue::default(); queues.into()];
        for queue in 0..queues {
            if features & EVENT_IDX == 0 {
                // Notifications are not wanted while the queue is served.
                self.put(used(queue), &1_u16.to_le_bytes());
            }
        }
    }

    /// Writes memory as the driver.
    pub(super) fn put(&mut self, at: u64, bytes: &[u8]) {
        self.memory[at as usize..][..bytes.len()].copy_from_slice(bytes);
    }

    fn half(&self, at: u64) -> u16 {
        u16::from_le_bytes(self.get(at))
    }

    fn get<const N: usize>(&self, at: u64) -> [u8; N] {
        let bytes = &self.memory[at as usize..][..N];
        bytes.try_into().expect("the length fits")
    }

    /// Takes the next request and carries it out; with `pauses` up to the end of its first operation.
    pub(super) fn turn(&mut self, queue: u16, pauses: bool) -> Result<bool, Broken> {
        if self.queues[usize::from(queue)].is_broken {
            return Ok(false);
        }
        let result = self.next(queue, pauses);
        if result.is_err() {
            self.queues[usize::from(queue)].is_broken = true;
        }
        result
    }

    fn next(&mut self, index: u16, pauses: bool) -> Result<bool, Broken> {
        let queue = &self.queues[usize::from(index)];
        let waiting = self
            .half(available(index) + 2)
            .wrapping_sub(queue.next_available);
        if waiting > SIZE {
            return Err(Broken);
        }
        let entry = u64::from(queue.next_available % SIZE);
        let head = self.half(available(index) + 4 + 2 * entry);
        let queue = &mut self.queues[usize::from(index)];
        let head = match queue.again.pop_front() {
            Some(head) => head,
            None if waiting == 0 => return Ok(false),
            None => {
                queue.next_available = queue.next_available.wrapping_add(1);
                head
            }
        };
        let (read, mut write) = self.walk(index, head)?;
        let status = take_last(&mut write).ok_or(Broken)?;
        let room = total(&write);
        let (code, done) = match self.carry_out(&read, &write, pauses) {
            End::Done(bytes) => (0, bytes),
            End::Unsupported => {
                self.counted.unsupported += 1;
                (2, 0)
            }
            End::Invalid => {
                self.counted.invalid += 1;
                (1, 0)
            }
            End::Cut => {
                self.queues[usize::from(index)].again.push_back(head);
                return Ok(true);
            }
        };
        self.memory[status] = code;
        let written = if done == room { done + 1 } else { done } as u32;
        let queue = &mut self.queues[usize::from(index)];
        let entry = u64::from(queue.next_used % SIZE);
        queue.next_used = queue.next_used.wrapping_add(1);
        let next_used = queue.next_used;
        let at = used(index) + 4 + 8 * entry;
        self.put(at, &u32::from(head).to_le_bytes());
        self.put(at + 4, &written.to_le_bytes());
        self.put(used(index) + 2, &next_used.to_le_bytes());
        Ok(true)
    }

    /// Returns the memory that a chain lends for reading, and for writing.
    #[expect(clippy::type_complexity, reason = "two lists of one kind")]
    fn walk(
        &self,
        queue: u16,
        head: u16,
    ) -> Result<(Vec<Range<usize>>, Vec<Range<usize>>), Broken> {
        let (mut table, mut entries) = (descriptors(queue), u32::from(SIZE));
        let (mut index, mut is_nested) = (u32::from(head), false);
        let (mut read, mut write) = (Vec::new(), Vec::new());
        for _ in 0..SIZE {
            if index >= entries {
                return Err(Broken);
            }
            let mut one = Descriptor(self.get(table + 16 * u64::from(index)));
            if one.flags() & 4 != 0 {
                let (at, bytes) = (one.address(), one.bytes());
                let is_allowed = self.features & INDIRECT != 0 && !is_nested;
                let is_whole = bytes > 0 && bytes.is_multiple_of(16);
                if !is_allowed || one.flags() & 1 != 0 || !is_whole || !in_one_region(at, bytes) {
                    return Err(Broken);
                }
                (table, entries, is_nested) = (at, bytes / 16, true);
                one = Descriptor(self.get(table));
                if one.flags() & 4 != 0 {
                    return Err(Broken);
                }
            }
            let (at, bytes) = (one.address(), u64::from(one.bytes()));
            let is_writable = one.flags() & 2 != 0;
            if !is_writable && !write.is_empty() {
                return Err(Broken);
            }
            if bytes > 0 {
                let end = at.checked_add(bytes).filter(|end| *end <= MEMORY_BYTES);
                let range = at as usize..end.ok_or(Broken)? as usize;
                if is_writable {
                    write.push(range);
                } else {
                    read.push(range);
                }
            }
            if one.flags() & 1 == 0 {
                return Ok((read, write));
            }
            index = one.next().into();
        }
        Err(Broken)
    }

    fn carry_out(&mut self, read: &[Range<usize>], write: &[Range<usize>], pauses: bool) -> End {
        let Some(header) = self.gathered::<HEADER_BYTES>(read, 0) else {
            return End::Invalid;
        };
        let (kind, sector) = (number(&header[..4]), number(&header[8..]));
        if self.read_only && matches!(kind, 1 | 11 | 13) {
            return End::Invalid;
        }
        match kind {
            0 => self.read(sector, write),
            1 => self.write(sector, read),
            4 => {
                if !self.read_only && self.cache != Cache::Unsafe {
                    self.counted.flushes += 1;
                }
                End::Done(0)
            }
            8 => {
                let mut name = [0; 20];
                name[..5].copy_from_slice(b"disk0");
                End::Done(self.scatter(write, &name))
            }
            11 | 13 => match self.gathered::<RANGE_BYTES>(read, HEADER_BYTES) {
                Some(range) if total(read) == (HEADER_BYTES + RANGE_BYTES) as u64 => {
                    self.clear(kind == 11, &range, pauses)
                }
                _ => End::Invalid,
            },
            _ => End::Unsupported,
        }
    }

    fn read(&mut self, sector: u64, into: &[Range<usize>]) -> End {
        let Some(place) = self.place(sector, total(into)) else {
            return End::Invalid;
        };
        self.count_unaligned(into, 0);
        let data = self.disk[place].to_vec();
        self.scatter(into, &data);
        self.counted.reads += 1;
        self.counted.read_bytes += data.len() as u64;
        End::Done(data.len() as u64)
    }

    fn write(&mut self, sector: u64, from: &[Range<usize>]) -> End {
        let bytes = total(from) - HEADER_BYTES as u64;
        let Some(place) = self.place(sector, bytes) else {
            return End::Invalid;
        };
        self.count_unaligned(from, HEADER_BYTES);
        let all = from.iter().cloned().flatten().skip(HEADER_BYTES);
        let to = self.disk[place].iter_mut();
        to.zip(all).for_each(|(to, at)| *to = self.memory[at]);
        self.counted.writes += 1;
        self.counted.written_bytes += bytes;
        self.counted.flushes += u64::from(bytes > 0 && self.is_write_through());
        End::Done(0)
    }

    /// Discards a range, or makes it zeroes.
    fn clear(&mut self, discards: bool, range: &[u8; RANGE_BYTES], pauses: bool) -> End {
        let (sector, sectors) = (number(&range[..8]), number(&range[8..12]));
        let flags = number(&range[12..]);
        let unmap = flags & 1 != 0;
        if flags > 1 || discards && unmap {
            return End::Unsupported;
        }
        let bytes = sectors * SECTOR_BYTES;
        let place = self
            .place(sector, bytes)
            .filter(|_| sectors <= MAX_RANGE_SECTORS);
        let Some(place) = place else {
            return End::Invalid;
        };
        if bytes == 0 {
            return End::Done(0);
        }
        if discards {
            self.disk[place].fill(0);
            self.counted.discarded_bytes += bytes;
            return End::Done(0);
        }
        // By one operation of the file that makes zeroes, or by writing them behind one that can't.
        let by_file = unmap || self.zeroes_ranges;
        if pauses && !by_file {
            return End::Cut;
        }
        self.disk[place].fill(0);
        if pauses && self.is_write_through() {
            // The zeroes are there, and not stable.
            return End::Cut;
        }
        self.counted.flushes += u64::from(by_file && self.is_write_through());
        self.counted.zeroed_bytes += bytes;
        End::Done(0)
    }

    fn is_write_through(&self) -> bool {
        match self.cache {
            Cache::WriteThrough => true,
            Cache::WriteBack | Cache::None => self.features & FLUSH == 0,
            Cache::Unsafe => false,
        }
    }

    /// Returns a range of the disk; `None` unless it is whole blocks of it.
    fn place(&self, sector: u64, bytes: u64) -> Option<Range<usize>> {
        let block = self
            .alignment
            .map_or(SECTOR_BYTES, |[_, block]| block.into());
        let start = sector.checked_mul(SECTOR_BYTES)?;
        let end = start.checked_add(bytes)?;
        let is_whole = start.is_multiple_of(block) && bytes.is_multiple_of(block);
        (is_whole && end <= DISK_BYTES).then_some(start as usize..end as usize)
    }

    /// Counts a transfer if its memory behind the first `skip` bytes, in any part of it, is not
    /// aligned.
    fn count_unaligned(&mut self, memory: &[Range<usize>], mut skip: usize) {
        let Some([address, block]) = self.alignment else {
            return;
        };
        let unit = address.max(block) as usize;
        let border = REGION_BYTES as usize;
        let mut is_unaligned = false;
        for range in memory {
            for part in [
                range.start..range.end.min(border),
                range.start.max(border)..range.end,
            ] {
                let start = (part.start + skip).min(part.end.max(part.start));
                skip -= start - part.start;
                if start < part.end {
                    let is_placed = start.is_multiple_of(address as usize);
                    is_unaligned |= !is_placed || !(part.end - start).is_multiple_of(unit);
                }
            }
        }
        self.counted.unaligned += u64::from(is_unaligned);
    }

    /// Returns bytes that lie in several ranges; `None` if there are fewer.
    fn gathered<const N: usize>(&self, from: &[Range<usize>], skip: usize) -> Option<[u8; N]> {
        let all = from.iter().cloned().flatten().skip(skip).take(N);
        let bytes: Vec<u8> = all.map(|at| self.memory[at]).collect();
        bytes.try_into().ok()
    }

    /// Writes bytes into several ranges, as far as there is room. Returns how many.
    fn scatter(&mut self, to: &[Range<usize>], bytes: &[u8]) -> u64 {
        let places = to.iter().cloned().flatten();
        let mut done = 0;
        for (at, byte) in places.zip(bytes) {
            self.memory[at] = *byte;
            done += 1;
        }
        done
    }

    /// Returns the number of requests that were answered.
    pub(super) fn answered(&self) -> u64 {
        let queues = self.queues.iter();
        queues.map(|queue| u64::from(queue.next_used)).sum()
    }
}

struct Descriptor([u8; 16]);

impl Descriptor {
    fn address(&self) -> u64 {
        number(&self.0[..8])
    }

    fn bytes(&self) -> u32 {
        number(&self.0[8..12]) as u32
    }

    fn flags(&self) -> u64 {
        number(&self.0[12..14])
    }

    fn next(&self) -> u16 {
        number(&self.0[14..]) as u16
    }
}

/// Reads a number of up to eight bytes, little-endian.
fn number(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .rev()
        .fold(0, |all, byte| all << 8 | u64::from(*byte))
}

fn total(ranges: &[Range<usize>]) -> u64 {
    ranges.iter().map(|range| range.len() as u64).sum()
}

/// Takes the last byte away, and returns its place.
fn take_last(ranges: &mut Vec<Range<usize>>) -> Option<usize> {
    let last = ranges.last_mut()?;
    last.end -= 1;
    let at = last.end;
    if last.start == last.end {
        ranges.pop();
    }
    Some(at)
}

/// Returns whether bytes lie in one of the two regions of the memory.
fn in_one_region(at: u64, bytes: u32) -> bool {
    let end = at.checked_add(bytes.into());
    let limit = if at < REGION_BYTES {
        REGION_BYTES
    } else {
        MEMORY_BYTES
    };
    end.is_some_and(|end| end <= limit)
}
