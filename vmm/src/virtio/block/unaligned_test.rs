//! Direct transfers: buffers that are aligned and others, the blocks, and the page cache.
use std::{
    fs::OpenOptions,
    os::{fd::AsRawFd as _, unix::fs::OpenOptionsExt as _},
};

use slipgate_testbed::skipped;

use super::*;
use crate::virtio::block::direct::Alignment;

const DISK_BYTES: usize = 256 << 10;
/// What lies around the driver's buffers.
const AROUND: u8 = 0xa5;

impl Rig {
    /// A disk of zeroes that takes only what is aligned.
    fn aligned(method: Method, [memory, block]: [u32; 2]) -> Rig {
        let file = tempfile::tempfile().unwrap();
        file.set_len(DISK_BYTES as u64).unwrap();
        let config = DiskConfig::plain(file.try_clone().unwrap());
        let alignment = Alignment::new(memory, block).unwrap();
        let image = Image::aligned(config, Some(alignment)).unwrap();
        let patience = || Patience::new(LONGEST_LOOK);
        let queues = (1, RateConfig::default());
        Rig::of(image, file, queues, (method, &patience))
    }

    /// Writes a pattern from buffers of these lengths, reads it into buffers at other places, and
    /// checks both, and what lies around.
    fn write_and_read(&mut self, sector: u64, shift: u64, lengths: &[u32]) {
        let all: u32 = lengths.iter().sum();
        let data = pattern(shift as u8, all as usize);
        let chain = |kind: u32, from: u64, gap: u64| {
            let mut at = from;
            let mut buffers = vec![(HEADER, 16, false)];
            for bytes in lengths {
                buffers.push((at, *bytes, kind == IN));
                at += u64::from(*bytes) + gap;
            }
            buffers.push((STATUS, 1, true));
            buffers
        };
        let from = DATA + shift;
        self.put(from, &data);
        assert_eq!(self.ask(OUT, sector, &chain(OUT, from, 0)), (OK, 1));
        assert_eq!(self.on_disk(sector, all as usize), data);
        let (to, gap) = (0x8_0000 + 2 * shift, 0);
        self.put(to - 64, &vec![AROUND; all as usize + 128]);
        assert_eq!(self.ask(IN, sector, &chain(IN, to, gap)), (OK, all + 1));
        let there = self.get(to - 64, all as usize + 128);
        let (before, rest) = there.split_at(64);
        assert_eq!(rest[..all as usize], data);
        let behind = &rest[all as usize..];
        assert!(before.iter().chain(behind).all(|byte| *byte == AROUND));
    }

    fn unaligned(&self) -> u64 {
        self.counters.unaligned.load(SeqCst)
    }
}

/// Alignments of memory and of blocks.
const ALIGNMENTS: [[u32; 2]; 4] = [[4, 512], [512, 512], [4096, 512], [512, 4096]];

#[test]
fn buffers_may_lie_anywhere_and_be_divided_in_any_way() {
    for alignment in ALIGNMENTS {
        let mut rig = Rig::aligned(Method::Strict, alignment);
        rig.activate(FLUSH);
        for (number, (sector, shift, lengths)) in [
            (0, 1, &[8192][..]),
            (8, 3, &[100, 4000, 4092]),
            (16, 0, &[1, 8191]),
            // Longer than a buffer, and no multiple of it.
            (24, 7, &[70_001, 61_071]),
            (504, 5, &[4096]),
        ]
        .into_iter()
        .enumerate()
        {
            rig.write_and_read(sector, shift, lengths);
            assert_eq!(rig.unaligned(), 2 * (number as u64 + 1), "{alignment:?}");
        }
        assert_eq!(rig.counters.failed.load(SeqCst), 0);
    }
}

#[test]
fn buffers_that_are_aligned_are_not_copied() {
    for alignment in ALIGNMENTS {
        let mut rig = Rig::aligned(Method::Strict, alignment);
        rig.activate(FLUSH);
        rig.write_and_read(0, 0, &[4096]);
        rig.write_and_read(8, 4096, &[8192, 4096, 131_072]);
        assert_eq!(rig.unaligned(), 0, "{alignment:?}");
    }
}

#[test]
fn a_disk_of_longer_blocks_says_so_and_refuses_parts_of_them() {
    let mut rig = Rig::aligned(Method::Strict, [512, 4096]);
    let mut config = [0; 60];
    rig.disk.read_config(0, &mut config);
    assert_eq!(config[20..24], 4096_u32.to_le_bytes());
    assert_eq!(config[44..48], 8_u32.to_le_bytes());
    rig.activate(FLUSH);
    for (sector, bytes) in [(1, 4096), (0, 512), (8, 4608), (4, 8192)] {
        for kind in [IN, OUT] {
            assert_eq!(rig.simple(kind, sector, bytes).0, IOERR);
        }
    }
    for kind in [DISCARD, ZERO] {
        rig.put(DATA, &range(1, 8, 0));
        assert_eq!(rig.ask(kind, 0, &RANGE).0, IOERR);
        rig.put(DATA, &range(8, 8, 0));
        assert_eq!(rig.ask(kind, 0, &RANGE).0, OK);
    }
    assert_eq!(rig.counters.invalid.load(SeqCst), 10);
    let file = tempfile::tempfile().unwrap();
    file.set_len(4096 + 512).unwrap();
    let alignment = Alignment::new(512, 4096).unwrap();
    let refused = Image::aligned(DiskConfig::plain(file), Some(alignment)).unwrap_err();
    let said = refused.to_string();
    assert!(
        said.contains("4608 bytes") && said.contains("of 4096"),
        "{said}"
    );
}

/// A driver that was told of sectors sends requests of them.
#[test]
fn a_driver_that_knows_shorter_blocks_does_not_go_on() {
    let long = Rig::aligned(Method::Strict, [512, 4096]).disk;
    let mut short = Rig::aligned(Method::Strict, [512, 512]);
    short.activate(FLUSH);
    let of_short = short.disk.suspend();
    assert_eq!(of_short.model, Model::Plain);
    let why = long.mismatch(&of_short).unwrap();
    assert!(why.contains("take 4096"), "{why}");
    let mut rig = Rig::aligned(Method::Strict, [512, 4096]);
    rig.activate(FLUSH);
    let of_long = rig.disk.suspend();
    assert_eq!(long.mismatch(&of_long), None);
    assert_eq!(short.disk.mismatch(&of_long), None);
}

/// An odd driver has a few requests under way, and is given the buffers of those that a reset has
/// ended.
#[test]
fn requests_that_find_no_buffer_wait_in_the_ring() {
    const MANY: u16 = 20;
    let odd: [Buffer; 3] = [
        (HEADER, 16, false),
        (DATA + 1, 512, true),
        (STATUS, 1, true),
    ];
    let gate = Gate::shut(false);
    let mut rig = Rig::aligned(Method::Held(gate), [512, 512]);
    for resets in [true, false] {
        held_read(&mut rig, gate, &odd);
        for number in 2..=MANY {
            rig.offer(&odd);
            let due = usize::from(number.min(8));
            rig.wait("it is under way, if there is a buffer", |_| {
                gate.held() == due
            });
        }
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!((rig.used(), gate.held()), (0, 8));
        if resets {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(20));
                    gate.open();
                });
                in_time("the reset", || rig.disk.reset());
            });
            gate.shut_again();
            rig.put(0, &[0; 0x3000]);
            rig.available = 0;
        }
    }
    gate.open();
    rig.wait("all are answered", |rig| rig.used() == MANY);
    assert!(!rig.is_broken());
}

/// A file of zeroes that is open past the page cache; `None` where temporary files can't be.
fn direct_file(folder: &tempfile::TempDir) -> Option<File> {
    let path = folder.path().join("disk");
    let file = File::create(&path).unwrap();
    file.write_all_at(&vec![0; DISK_BYTES], 0).unwrap();
    file.sync_all().unwrap();
    // SAFETY: no memory is passed.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_DIRECT);
    options.open(&path).ok()
}

/// Number of pages of the file in the page cache.
fn cached_pages(file: &File) -> usize {
    let (none, shared) = (std::ptr::null_mut(), libc::MAP_SHARED);
    let mut pages = [0_u8; DISK_BYTES / 4096];
    // SAFETY: a new mapping, as long as the file, and a byte for each of its pages.
    unsafe {
        let at = libc::mmap(
            none,
            DISK_BYTES,
            libc::PROT_READ,
            shared,
            file.as_raw_fd(),
            0,
        );
        assert_ne!(at, libc::MAP_FAILED);
        assert_eq!(libc::mincore(at, DISK_BYTES, pages.as_mut_ptr()), 0);
        libc::munmap(at, DISK_BYTES);
    }
    pages.iter().filter(|page| **page & 1 != 0).count()
}

#[test]
fn the_page_cache_is_passed_by_in_both_methods() {
    for (method, cache) in [
        (Method::IoUring, Cache::None),
        (Method::Vectored, Cache::None),
        (Method::Auto, Cache::WriteBack),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let Some(direct) = direct_file(&folder) else {
            return skipped!("the file system of temporary files has no direct transfers");
        };
        let path = folder.path().join("disk");
        let plain = OpenOptions::new().read(true).write(true).open(path);
        let plain = plain.unwrap();
        // Files in memory are in the page cache only.
        let passes_by = cached_pages(&plain) == 0;
        let file = if cache == Cache::None {
            &direct
        } else {
            &plain
        };
        let mut config = DiskConfig::plain(file.try_clone().unwrap());
        config.cache = cache;
        let patience = || Patience::new(LONGEST_LOOK);
        let image = Image::new(config).unwrap();
        let mut rig = Rig::of(
            image,
            plain,
            (1, RateConfig::default()),
            (method, &patience),
        );
        assert_ne!(rig.disk.features() & FLUSH, 0, "there is a cache to flush");
        rig.activate(FLUSH);
        let (data, bytes) = (pattern(5, 64 << 10), 64 << 10);
        for (number, shift) in [0, 1, 513].into_iter().enumerate() {
            let (sector, at) = (128 * number as u64, DATA + shift);
            rig.put(at, &data);
            let chain = [(HEADER, 16, false), (at, bytes, false), (STATUS, 1, true)];
            assert_eq!(rig.ask(OUT, sector, &chain), (OK, 1));
            rig.put(at, &vec![0; bytes as usize]);
            let chain = [(HEADER, 16, false), (at, bytes, true), (STATUS, 1, true)];
            assert_eq!(rig.ask(IN, sector, &chain), (OK, bytes + 1));
            assert_eq!(rig.get(at, bytes as usize), data);
        }
        assert_eq!(rig.simple(FLUSHING, 0, 0), (OK, 1));
        assert_eq!(rig.counters.flushes.load(SeqCst), 1);
        assert_eq!(rig.unaligned() > 0, cache == Cache::None);
        if passes_by {
            let is_cached = cached_pages(&rig.file) > 0;
            assert_eq!(is_cached, cache != Cache::None, "{method:?}");
        }
        assert_eq!(rig.on_disk(0, bytes as usize), data);
    }
}
