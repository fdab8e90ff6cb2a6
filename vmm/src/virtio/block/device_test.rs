#[path = "gated_file_test.rs"]
mod gated;
#[path = "stable_test.rs"]
mod stable;

use std::{
    fs::File,
    os::unix::fs::FileExt,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst, fence},
    time::{Duration, Instant},
};

use proptest::prelude::*;
use virtio_bindings::virtio_ring::{VRING_DESC_F_NEXT, VRING_DESC_F_WRITE, VRING_USED_F_NO_NOTIFY};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::*;
use crate::snapshot::Progress;
use crate::{
    GuestMemory,
    virtio::{
        EnabledQueue, Signals,
        block::{Cache, file_io::held::Gate},
        rate::BucketConfig,
    },
};

const MEMORY: usize = 1 << 20;
/// Addresses of the rings. The descriptor table is at 0.
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const HEADER: u64 = 0x1_0000;
const STATUS: u64 = 0x1_1000;
const DATA: u64 = 0x2_0000;
const SIZE: u16 = 16;
const WRITE: u16 = VRING_DESC_F_WRITE as u16;
const NEXT: u16 = VRING_DESC_F_NEXT as u16;
const SECTORS: u64 = 64;
const FLUSH: u64 = 1 << VIRTIO_BLK_F_FLUSH;
const EVENT_IDX: u64 = 1 << VIRTIO_RING_F_EVENT_IDX;
const NO_NOTIFY: u16 = VRING_USED_F_NO_NOTIFY as u16;
/// Types and statuses of requests, by the specification.
const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSHING: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const ZERO: u32 = 13;
const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;

#[derive(Default)]
struct Recorder {
    /// Index of the queue that is served.
    served: AtomicU64,
    interrupts: AtomicU64,
    needs_reset: AtomicBool,
}

impl Signals for Recorder {
    fn queue(&self, index: u16) {
        assert_eq!(index, self.served.load(SeqCst) as u16);
        self.interrupts.fetch_add(1, SeqCst);
    }
    fn config(&self) {}
    fn needs_reset(&self) {
        self.needs_reset.store(true, SeqCst);
    }
}

struct Rig {
    disk: Disk,
    /// Queue that the driver uses.
    queue: u16,
    file: File,
    memory: Arc<GuestMemory>,
    recorder: Arc<Recorder>,
    counters: Arc<DiskCounters>,
    bell: EventFd,
    available: u16,
}

/// Buffer of a chain: address, bytes, whether the device writes it.
type Buffer = (u64, u32, bool);

impl Rig {
    /// A disk of which each sector begins with its number, and is otherwise 0x5a.
    fn new(read_only: bool) -> Rig {
        Rig::limited(read_only, RateConfig::default())
    }

    fn limited(read_only: bool, rate: RateConfig) -> Rig {
        Rig::patient(read_only, rate, &|| Patience::new(LONGEST_LOOK))
    }

    fn patient(read_only: bool, rate: RateConfig, patience: &dyn Fn() -> Patience) -> Rig {
        let change = |config: &mut DiskConfig| {
            config.read_only = read_only;
            config.rate = rate;
        };
        Rig::with(change, Method::Auto, patience)
    }

    fn by(method: Method, change: impl FnOnce(&mut DiskConfig)) -> Rig {
        Rig::with(change, method, &|| Patience::new(LONGEST_LOOK))
    }

    fn with(
        change: impl FnOnce(&mut DiskConfig),
        method: Method,
        patience: &dyn Fn() -> Patience,
    ) -> Rig {
        let file = tempfile::tempfile().unwrap();
        for sector in 0..SECTORS {
            let mut bytes = [0x5a; SECTOR_BYTES as usize];
            bytes[..8].copy_from_slice(&sector.to_le_bytes());
            file.write_all_at(&bytes, sector * SECTOR_BYTES).unwrap();
        }
        let mut config = DiskConfig::plain(file.try_clone().unwrap());
        change(&mut config);
        let (queues, rate) = (config.queues, config.rate);
        let image = Image::new(config).unwrap();
        Rig::of(image, file, (queues, rate), (method, patience))
    }

    /// A disk of this image, whose file is given again.
    fn of(
        image: Image,
        file: File,
        queues: (u16, RateConfig),
        how: (Method, &dyn Fn() -> Patience),
    ) -> Rig {
        let counters: Arc<DiskCounters> = Arc::default();
        let disk = Disk::with(3, image, queues, &setup(), counters.clone(), how).unwrap();
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap();
        Rig {
            disk,
            queue: 0,
            file,
            memory: Arc::new(memory),
            recorder: Arc::default(),
            counters,
            bell: EventFd::new(EFD_NONBLOCK).unwrap(),
            available: 0,
        }
    }

    fn activate(&mut self, features: u64) {
        let none = DeviceState {
            queues: vec![Progress::default()],
            model: Model::Plain,
        };
        self.go_on(features, &none);
    }

    /// Activates the disk, which goes on from there.
    fn go_on(&mut self, features: u64, state: &DeviceState) {
        let mut queue = Queue::new(SIZE).unwrap();
        queue.set_avail_ring_address(Some(AVAILABLE as u32), None);
        queue.set_used_ring_address(Some(USED as u32), None);
        queue.set_next_avail(state.queues[0].next_available);
        queue.set_next_used(state.queues[0].next_used);
        queue.set_ready(true);
        let kick = self.bell.try_clone().unwrap();
        self.recorder.served.store(self.queue.into(), SeqCst);
        let activation = Activation {
            memory: self.memory.clone(),
            features,
            queues: vec![EnabledQueue {
                index: self.queue,
                queue,
                kick,
                taken: state.queues[0].taken.clone(),
            }],
            signals: self.recorder.clone(),
            restored: Some(state.model.clone()),
        };
        self.disk.activate(activation).unwrap();
    }

    /// Writes a chain from the table's start, makes it available, and notifies.
    fn offer(&mut self, chain: &[Buffer]) {
        self.add(chain);
        self.bell.write(1).unwrap();
    }

    /// Writes a chain from the table's start and makes it available.
    fn add(&mut self, chain: &[Buffer]) {
        for (at, (address, bytes, writable)) in chain.iter().enumerate() {
            let next = if at + 1 < chain.len() { NEXT } else { 0 };
            let flags = next | if *writable { WRITE } else { 0 };
            let raw = u128::from(*address)
                | u128::from(*bytes) << 64
                | u128::from(flags) << 96
                | (at as u128 + 1) << 112;
            let at = GuestAddress(16 * at as u64);
            self.memory.write_slice(&raw.to_le_bytes(), at).unwrap();
        }
        let slot = AVAILABLE + 4 + 2 * u64::from(self.available % SIZE);
        self.memory.write_obj(0_u16, GuestAddress(slot)).unwrap();
        self.available = self.available.wrapping_add(1);
        let index = GuestAddress(AVAILABLE + 2);
        self.memory.store(self.available, index, SeqCst).unwrap();
    }

    /// Adds a read of a sector's data and notifies as a driver has to: only if the disk asked for it.
    /// Returns whether it had, once the read is answered.
    fn read_as_a_driver(&mut self, features: u64, sector: u64) -> bool {
        let header = [u64::from(IN).to_le_bytes(), sector.to_le_bytes()].concat();
        self.put(HEADER, &header);
        self.add(&[(HEADER, 16, false), (DATA, 512, true), (STATUS, 1, true)]);
        fence(SeqCst);
        let notifies = self.is_listening(features, self.available.wrapping_sub(1));
        if notifies {
            self.bell.write(1).unwrap();
        }
        let all = self.available;
        let begin = Instant::now();
        while self.used() != all {
            assert!(begin.elapsed() < Duration::from_secs(10), "no answer");
            std::hint::spin_loop();
        }
        assert_eq!(self.get(DATA, 8), sector.to_le_bytes());
        notifies
    }

    /// Whether the disk wants to be notified of the chain of this index.
    fn is_listening(&self, features: u64, index: u16) -> bool {
        let word = |at| -> u16 { self.memory.load(GuestAddress(USED + at), SeqCst).unwrap() };
        if features & EVENT_IDX == 0 {
            word(0) & NO_NOTIFY == 0
        } else {
            word(4 + 8 * u64::from(SIZE)) == index
        }
    }

    fn used(&self) -> u16 {
        self.memory.load(GuestAddress(USED + 2), SeqCst).unwrap()
    }

    /// Carries out a request whose chain is given, and returns its status and used length.
    fn ask(&mut self, kind: u32, sector: u64, chain: &[Buffer]) -> (u8, u32) {
        let header = [u64::from(kind).to_le_bytes(), sector.to_le_bytes()].concat();
        self.put(HEADER, &header);
        self.put(STATUS, &[0xee]);
        self.offer(chain);
        let all = self.available;
        self.wait("an answer", |rig| rig.used() == all);
        let entry = USED + 8 + 8 * u64::from((all - 1) % SIZE);
        let used = self.memory.read_obj(GuestAddress(entry)).unwrap();
        (self.get(STATUS, 1)[0], used)
    }

    /// As [`Rig::ask`], with the data in one buffer behind the header.
    fn simple(&mut self, kind: u32, sector: u64, bytes: u32) -> (u8, u32) {
        let data = (DATA, bytes, kind != OUT);
        self.ask(
            kind,
            sector,
            &[(HEADER, 16, false), data, (STATUS, 1, true)],
        )
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        self.memory.write_slice(bytes, GuestAddress(at)).unwrap();
    }

    fn get(&self, at: u64, bytes: usize) -> Vec<u8> {
        let mut there = vec![0; bytes];
        self.memory
            .read_slice(&mut there, GuestAddress(at))
            .unwrap();
        there
    }

    fn on_disk(&self, sector: u64, bytes: usize) -> Vec<u8> {
        let mut there = vec![0; bytes];
        self.file
            .read_exact_at(&mut there, sector * SECTOR_BYTES)
            .unwrap();
        there
    }

    fn wait(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let begin = Instant::now();
        while !done(self) {
            assert!(begin.elapsed() < Duration::from_secs(10), "{what}");
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    fn is_broken(&self) -> bool {
        self.recorder.needs_reset.load(SeqCst)
    }
}

fn setup() -> ThreadSetup {
    ThreadSetup::new(|kind| {
        assert_eq!(kind, ThreadKind::Disk);
        Ok(())
    })
}

fn pattern(seed: u8, bytes: usize) -> Vec<u8> {
    (0..bytes)
        .map(|at| (at / 7) as u8 ^ at as u8 ^ seed)
        .collect()
}

#[test]
fn a_disk_that_rests_answers_nothing_and_goes_on_also_in_another_process() {
    let mut rig = Rig::new(false);
    rig.activate(FLUSH);
    assert_eq!(rig.simple(IN, 1, 512), (OK, 513));
    let state = rig.disk.suspend();
    assert_eq!(state.queues.len(), 1);
    let progress = &state.queues[0];
    assert_eq!((progress.next_available, progress.next_used), (1, 1));
    let header = [u64::from(IN).to_le_bytes(), 2_u64.to_le_bytes()].concat();
    rig.put(HEADER, &header);
    let data = (DATA, 512, true);
    rig.offer(&[(HEADER, 16, false), data, (STATUS, 1, true)]);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(rig.used(), 1, "it rests");
    rig.disk.resume();
    rig.wait("an answer", |rig| rig.used() == 2);
    assert_eq!(rig.get(DATA, 8), 2_u64.to_le_bytes());

    // Another device on the same file and memory.
    let state = rig.disk.suspend();
    let config = DiskConfig::plain(rig.file.try_clone().unwrap());
    rig.disk = Disk::new(3, config, &setup(), rig.counters.clone()).unwrap();
    rig.go_on(FLUSH, &state);
    assert_eq!(rig.simple(IN, 7, 512), (OK, 513));
    assert_eq!(rig.get(DATA, 8), 7_u64.to_le_bytes());
    assert!(!rig.is_broken());
}

#[test]
fn what_is_written_and_flushed_is_read_back() {
    let mut rig = Rig::new(false);
    rig.activate(FLUSH);
    let data = pattern(9, 0x2000);
    rig.put(DATA, &data);
    assert_eq!(rig.simple(OUT, 5, 0x2000), (OK, 1));
    assert_eq!(rig.simple(FLUSHING, 0, 0), (OK, 1));
    assert_eq!(rig.on_disk(5, 0x2000), data);
    rig.put(DATA, &[0; 0x2400]);
    assert_eq!(rig.simple(IN, 4, 0x2400), (OK, 0x2401));
    let there = rig.get(DATA, 0x2400);
    assert_eq!(there[..8], 4_u64.to_le_bytes());
    assert_eq!(there[0x200..0x2200], data);
    assert_eq!(there[0x2200..0x2208], 21_u64.to_le_bytes());
    rig.wait("an interrupt each", |rig| {
        rig.recorder.interrupts.load(SeqCst) == 3
    });
    let counters = &rig.counters;
    let counted = [
        &counters.reads,
        &counters.read_bytes,
        &counters.writes,
        &counters.written_bytes,
        &counters.flushes,
    ];
    let counted = counted.map(|counter| counter.load(SeqCst));
    assert_eq!(counted, [1, 0x2400, 1, 0x2000, 1]);
}

#[test]
fn a_look_finds_requests_of_which_the_disk_is_not_notified() {
    for features in [FLUSH, FLUSH | EVENT_IDX] {
        let patience = || Patience::undisturbed(Duration::from_secs(1));
        let mut rig = Rig::patient(false, RateConfig::default(), &patience);
        rig.activate(features);
        // The patience grows by some requests first.
        rig.wait("a read without a notification", |rig| {
            !rig.read_as_a_driver(features, 5)
        });
    }
}

/// Requests come at all moments of looks and of falling asleep. One that is lost between the two has
/// no answer.
#[test]
fn no_request_is_lost_between_a_look_and_a_sleep() {
    for features in [FLUSH, FLUSH | EVENT_IDX] {
        let mut rig = Rig::new(false);
        rig.activate(features);
        for round in 0..4_000_u32 {
            let pause = Duration::from_nanos(u64::from(round * 7919 % 60_000));
            let begin = Instant::now();
            while begin.elapsed() < pause {
                std::hint::spin_loop();
            }
            rig.read_as_a_driver(features, u64::from(round) % SECTORS);
        }
    }
}

#[test]
fn an_idle_disk_asks_for_notifications() {
    for features in [FLUSH, FLUSH | EVENT_IDX] {
        let mut rig = Rig::new(false);
        rig.activate(features);
        for sector in 0..8 {
            rig.read_as_a_driver(features, sector);
        }
        rig.wait("the end of the look", |rig| {
            rig.is_listening(features, rig.available)
        });
        // A notification that came too late for its request may have it look once more.
        rig.wait("a read with a notification", |rig| {
            rig.read_as_a_driver(features, 8)
        });
        // A command is taken at once, also while it looks.
        let state = rig.disk.suspend();
        assert_eq!(state.queues[0].next_used, rig.available);
        rig.disk.resume();
        rig.read_as_a_driver(features, 9);
        rig.disk.reset();
    }
}

fn bucket(size: u64, refill: Duration) -> Option<BucketConfig> {
    Some(BucketConfig {
        size,
        one_time_burst: 0,
        refill,
    })
}

#[test]
fn requests_beyond_the_limit_wait_in_the_ring_and_no_reset_renews_it() {
    const HOUR: Duration = Duration::from_secs(3600);
    for (operations, bytes) in [
        (bucket(4, HOUR), None),
        // The fourth read takes what is left, and a debt.
        (None, bucket(3 * 4096 + 1, HOUR)),
    ] {
        let mut rig = Rig::limited(false, RateConfig { bytes, operations });
        rig.activate(FLUSH);
        for sector in 0..4 {
            assert_eq!(rig.simple(IN, sector, 4096), (OK, 4097));
        }
        let header = [u64::from(IN).to_le_bytes(), 5_u64.to_le_bytes()].concat();
        rig.put(HEADER, &header);
        rig.offer(&[(HEADER, 16, false), (DATA, 4096, true), (STATUS, 1, true)]);
        let throttled = |rig: &Rig| rig.counters.throttled.load(SeqCst);
        rig.wait("the wait is counted", |rig| throttled(rig) == 1);
        // Notifications change nothing.
        rig.bell.write(1).unwrap();
        // It rests and is reset at once, however long it has to wait.
        let state = rig.disk.suspend();
        let progress = &state.queues[0];
        assert_eq!((progress.next_available, progress.next_used), (4, 4));
        rig.disk.resume();
        rig.disk.reset();
        assert_eq!(rig.used(), 4);
        rig.put(0, &[0; 0x3000]);
        rig.available = 0;
        rig.activate(FLUSH);
        rig.offer(&[(HEADER, 16, false), (DATA, 512, true), (STATUS, 1, true)]);
        rig.wait("the wait is counted", |rig| throttled(rig) == 2);
        assert_eq!(rig.used(), 0);
    }
}

#[test]
fn a_limited_disk_refuses_nothing_and_holds_its_rate() {
    const REQUESTS: u32 = 24;
    // 100 a second, four at once.
    let operations = bucket(4, Duration::from_millis(40));
    let begin = Instant::now();
    let rate = RateConfig {
        operations,
        bytes: None,
    };
    let mut rig = Rig::limited(false, rate);
    rig.activate(FLUSH);
    for _ in 0..REQUESTS {
        assert_eq!(rig.simple(OUT, 3, 512), (OK, 1));
    }
    let least = Duration::from_millis(10) * (REQUESTS - 4 - 1);
    assert!(begin.elapsed() >= least, "{:?}", begin.elapsed());
    assert!(rig.counters.throttled.load(SeqCst) > 0);
    assert!(!rig.is_broken());
}

#[test]
fn without_flushes_each_write_is_stable_before_its_answer() {
    let mut rig = Rig::new(false);
    for (features, flushes) in [(FLUSH, 0), (0, 2)] {
        rig.activate(features);
        assert_eq!([1, 2].map(|sector| rig.simple(OUT, sector, 512).0), [OK; 2]);
        assert_eq!(rig.counters.flushes.load(SeqCst), flushes);
        rig.disk.reset();
        rig.put(0, &[0; 0x3000]);
        rig.available = 0;
    }
}

#[test]
fn a_request_may_be_divided_in_any_way() {
    let mut rig = Rig::new(false);
    rig.activate(FLUSH);
    let data = pattern(1, 1024);
    rig.put(DATA, &data);
    // The header in two parts, the second with the first bytes of the data behind it.
    let chain = [
        (HEADER, 7, false),
        (HEADER + 7, 9, false),
        (DATA, 100, false),
        (DATA + 100, 924, false),
        (STATUS, 1, true),
    ];
    assert_eq!(rig.ask(OUT, 2, &chain), (OK, 1));
    assert_eq!(rig.on_disk(2, 1024), data);
    // Data and status in one buffer: the status is the last byte.
    rig.put(DATA, &[0; 1025]);
    let (_, used) = rig.ask(IN, 2, &[(HEADER, 16, false), (DATA, 1025, true)]);
    assert_eq!(used, 1025);
    assert_eq!(rig.get(DATA, 1024), data);
    assert_eq!(rig.get(DATA + 1024, 1), [OK]);
}

#[test]
fn what_lies_outside_the_disk_is_refused_and_the_next_request_served() {
    let mut rig = Rig::new(false);
    let before = rig.on_disk(0, (SECTORS * SECTOR_BYTES) as usize);
    rig.activate(FLUSH);
    for kind in [IN, OUT] {
        for (sector, bytes) in [
            (SECTORS, 512),
            (SECTORS - 1, 1024),
            (u64::MAX, 512),
            (u64::MAX / 512, 512),
            (1 << 55, 512),
            (0, 511),
            (0, 513),
        ] {
            let answer = rig.simple(kind, sector, bytes);
            assert_eq!(answer, (IOERR, u32::from(kind == OUT)), "{sector} {bytes}");
        }
    }
    let header = [(HEADER, 15, false), (STATUS, 1, true)];
    assert_eq!(rig.ask(IN, 0, &header).0, IOERR, "half a header");
    // The same buffer again and again.
    let mut chain = vec![(HEADER, 16, false)];
    chain.extend([(0x4_0000, 0xb_0000, false); 13]);
    chain.push((STATUS, 1, true));
    assert_eq!(rig.ask(OUT, 0, &chain).0, IOERR, "longer than the disk");
    assert_eq!(rig.on_disk(0, before.len()), before, "nothing was written");
    let size = rig.file.metadata().unwrap().len();
    assert_eq!(size, SECTORS * SECTOR_BYTES, "nothing was appended");
    assert_eq!(rig.simple(IN, SECTORS - 1, 512).0, OK);
    assert_eq!(rig.counters.invalid.load(SeqCst), 16);
}

/// Request for a range: its header, the range, and the status.
const RANGE: [Buffer; 3] = [(HEADER, 16, false), (DATA, 16, false), (STATUS, 1, true)];

fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    [
        &sector.to_le_bytes()[..],
        &sectors.to_le_bytes(),
        &flags.to_le_bytes(),
    ]
    .concat()
}

#[test]
fn ranges_are_discarded_and_made_zeroes() {
    for method in [Method::IoUring, Method::Vectored] {
        for cache in [Cache::WriteBack, Cache::WriteThrough] {
            let mut rig = Rig::by(method, |config| config.cache = cache);
            rig.activate(0);
            for (kind, sector, flags) in [(ZERO, 8, 0), (ZERO, 24, 1), (DISCARD, 40, 0)] {
                rig.put(DATA, &range(sector, 8, flags));
                assert_eq!(rig.ask(kind, 0, &RANGE), (OK, 1), "{kind} {flags}");
                assert_eq!(rig.on_disk(sector, 8 * 512), [0; 8 * 512]);
                let before = rig.on_disk(sector - 1, 8);
                assert_eq!(before, (sector - 1).to_le_bytes(), "nothing before it");
                let behind = rig.on_disk(sector + 8, 8);
                assert_eq!(behind, (sector + 8).to_le_bytes(), "nothing behind it");
            }
            let count = |counter: &AtomicU64| counter.load(SeqCst);
            assert_eq!(count(&rig.counters.zeroed_bytes), 2 * 8 * 512);
            assert_eq!(count(&rig.counters.discarded_bytes), 8 * 512);
            assert_eq!(count(&rig.counters.flushes), 2, "zeroes are made stable");
            rig.put(DATA, &range(3, 0, 0));
            assert_eq!(rig.ask(ZERO, 0, &RANGE).0, OK, "an empty range");
        }
    }
}

#[test]
fn a_range_without_sense_is_refused() {
    let mut rig = Rig::new(false);
    rig.activate(FLUSH);
    let before = rig.on_disk(0, (SECTORS * SECTOR_BYTES) as usize);
    let most = (MAX_RANGE_BYTES / SECTOR_BYTES) as u32;
    for (kind, (sector, sectors, flags), status) in [
        (DISCARD, (SECTORS, 1, 0), IOERR),
        (ZERO, (SECTORS - 1, 2, 0), IOERR),
        (ZERO, (u64::MAX, 1, 0), IOERR),
        (ZERO, (0, most + 1, 0), IOERR),
        (DISCARD, (0, u32::MAX, 0), IOERR),
        (DISCARD, (0, 1, 1), UNSUPP),
        (ZERO, (0, 1, 2), UNSUPP),
    ] {
        rig.put(DATA, &range(sector, sectors, flags));
        assert_eq!(
            rig.ask(kind, 0, &RANGE).0,
            status,
            "{kind} {sector} {sectors} {flags}"
        );
    }
    rig.put(DATA, &range(0, 1, 0));
    for bytes in [0, 15, 17, 32] {
        let chain = [(HEADER, 16, false), (DATA, bytes, false), (STATUS, 1, true)];
        assert_eq!(rig.ask(ZERO, 0, &chain).0, IOERR, "{bytes} bytes");
    }
    assert_eq!(rig.on_disk(0, before.len()), before);
    let mut rig = Rig::new(true);
    let written = 1 << VIRTIO_BLK_F_DISCARD | 1 << VIRTIO_BLK_F_WRITE_ZEROES;
    assert_eq!(rig.disk.features() & written, 0);
    rig.activate(FLUSH);
    rig.put(DATA, &range(0, 1, 0));
    for kind in [DISCARD, ZERO] {
        assert_eq!(rig.ask(kind, 0, &RANGE).0, IOERR);
    }
    assert_eq!(rig.on_disk(0, before.len()), before);
}

#[test]
fn the_cache_mode_says_when_writes_are_stable() {
    for (cache, features, flushes) in [
        (Cache::WriteBack, FLUSH, 1),
        (Cache::WriteBack, 0, 2),
        (Cache::WriteThrough, 0, 2),
        (Cache::None, FLUSH, 1),
        (Cache::None, 0, 2),
        (Cache::Unsafe, FLUSH, 0),
        (Cache::Unsafe, 0, 0),
    ] {
        let file = tempfile::tempfile().unwrap();
        file.set_len(SECTORS * SECTOR_BYTES).unwrap();
        let mut config = DiskConfig::plain(file.try_clone().unwrap());
        config.cache = cache;
        // Direct transfers or not, the mode says it.
        let image = Image::aligned(config, None).unwrap();
        let patience = || Patience::new(LONGEST_LOOK);
        let how = (Method::Auto, &patience as _);
        let mut rig = Rig::of(image, file, (1, RateConfig::default()), how);
        let offered = rig.disk.features() & FLUSH != 0;
        assert_eq!(offered, cache != Cache::WriteThrough);
        rig.activate(features);
        assert_eq!(rig.simple(OUT, 1, 512), (OK, 1));
        match features & FLUSH {
            0 => assert_eq!(rig.simple(OUT, 2, 512), (OK, 1)),
            _ => assert_eq!(rig.simple(FLUSHING, 0, 0), (OK, 1)),
        }
        assert_eq!(rig.counters.flushes.load(SeqCst), flushes, "{cache:?}");
    }
}

#[test]
fn each_queue_is_served_and_a_driver_may_use_one_of_them() {
    let mut rig = Rig::by(Method::Auto, |config| config.queues = 3);
    assert_ne!(rig.disk.features() & 1 << VIRTIO_BLK_F_MQ, 0);
    assert_eq!(rig.disk.queue_sizes(), [128; 3]);
    let mut config = [0; 36];
    rig.disk.read_config(0, &mut config);
    assert_eq!(config[34..], 3_u16.to_le_bytes());
    for queue in 0..3 {
        rig.queue = queue;
        rig.activate(FLUSH);
        assert_eq!(rig.simple(IN, 1 + u64::from(queue), 512), (OK, 513));
        assert_eq!(rig.get(DATA, 8), (1 + u64::from(queue)).to_le_bytes());
        let state = rig.disk.suspend();
        let served: Vec<u16> = state.queues.iter().map(|it| it.queue).collect();
        assert_eq!(served, [queue]);
        rig.disk.resume();
        rig.disk.reset();
        assert_eq!(Arc::strong_count(&rig.memory), 1, "nobody holds it");
        rig.put(0, &[0; 0x3000]);
        rig.available = 0;
    }
    for queues in [0, MAX_QUEUES + 1] {
        let mut config = DiskConfig::plain(rig.file.try_clone().unwrap());
        config.queues = queues;
        let error = Disk::new(0, config, &setup(), Arc::default()).err();
        assert!(matches!(error, Some(DiskError::Queues(got)) if got == queues));
    }
}

#[test]
fn a_read_only_disk_is_not_written() {
    let mut rig = Rig::new(true);
    assert_ne!(rig.disk.features() & 1 << VIRTIO_BLK_F_RO, 0);
    rig.activate(FLUSH);
    let before = rig.on_disk(1, 512);
    assert_eq!(rig.simple(OUT, 1, 512).0, IOERR);
    assert_eq!(rig.on_disk(1, 512), before);
    assert_eq!(rig.simple(IN, 1, 512).0, OK);
    assert_eq!(rig.simple(FLUSHING, 0, 0).0, OK);
    assert_eq!(
        rig.counters.flushes.load(SeqCst),
        0,
        "there is nothing to flush"
    );
}

#[test]
fn a_name_is_given_and_unknown_types_are_unsupported() {
    let mut rig = Rig::new(false);
    rig.activate(0);
    assert_eq!(rig.simple(GET_ID, 0, 20), (OK, 21));
    assert_eq!(rig.get(DATA, 6), b"disk3\0");
    for kind in [2, 12, 14, u32::MAX] {
        assert_eq!(rig.simple(kind, 0, 512).0, UNSUPP);
    }
    assert_eq!(rig.counters.unsupported.load(SeqCst), 4);
}

#[test]
fn a_file_that_fails_is_an_error_of_the_request() {
    let mut rig = Rig::new(false);
    rig.activate(FLUSH);
    rig.file.set_len(SECTOR_BYTES).unwrap();
    assert_eq!(rig.simple(IN, 8, 512), (IOERR, 0));
    assert_eq!(rig.counters.failed.load(SeqCst), 1);
    assert_eq!(rig.simple(IN, 0, 512).0, OK);
}

#[test]
fn chains_without_sense_need_a_reset_and_then_it_serves() {
    let chains: [&[Buffer]; 4] = [
        // No room for the status.
        &[(HEADER, 16, false)],
        &[(HEADER, 16, false), (STATUS, 0, true)],
        // A buffer to read behind one to write.
        &[(HEADER, 16, false), (STATUS, 1, true), (DATA, 1, false)],
        // Outside the guest's memory.
        &[(HEADER, 16, false), (MEMORY as u64 - 8, 512, true)],
    ];
    let mut rig = Rig::new(false);
    for chain in chains {
        rig.activate(FLUSH);
        rig.offer(chain);
        rig.wait("a reset is needed", |rig| rig.is_broken());
        assert_eq!(rig.used(), 0);
        rig.disk.reset();
        assert_eq!(Arc::strong_count(&rig.memory), 1, "nobody holds it");
        rig.recorder.needs_reset.store(false, SeqCst);
        rig.put(AVAILABLE, &[0; 4]);
        rig.available = 0;
    }
    rig.activate(FLUSH);
    assert_eq!(rig.simple(IN, 1, 512), (OK, 513));
    assert_eq!(rig.counters.broken_rings.load(SeqCst), 4);
}

#[test]
fn the_configuration_tells_size_and_limits() {
    let rig = Rig::new(false);
    let mut config = [0xff; 64];
    rig.disk.read_config(0, &mut config);
    assert_eq!(config[..8], SECTORS.to_le_bytes());
    assert_eq!(config[8..12], MAX_SEGMENT_BYTES.to_le_bytes());
    assert_eq!(config[12..16], 126_u32.to_le_bytes());
    assert_eq!(config[20..24], 512_u32.to_le_bytes());
    assert_eq!(config[24..34], [0; 10]);
    assert_eq!(config[34..36], 1_u16.to_le_bytes());
    let ranges: Vec<u32> = (config[36..56].chunks_exact(4))
        .map(|word| u32::from_le_bytes(word.try_into().unwrap()))
        .collect();
    assert_eq!(ranges, [131_072, 1, 1, 131_072, 1]);
    assert_eq!(config[56], 1);
    assert_eq!(config[57..], [0; 7]);
    let mut last = [0xff; 4];
    rig.disk.read_config(usize::MAX, &mut last);
    assert_eq!(last, [0; 4]);
}

#[test]
fn files_that_are_no_disks() {
    let create = |file: File| Disk::new(0, DiskConfig::plain(file), &setup(), Arc::default()).err();
    for bytes in [0, 511, 513] {
        let file = tempfile::tempfile().unwrap();
        file.set_len(bytes).unwrap();
        assert!(matches!(create(file), Some(DiskError::Size(got)) if got == bytes));
    }
    let null = File::open("/dev/null").unwrap();
    assert!(matches!(create(null), Some(DiskError::Kind)));
    let folder = File::open("/").unwrap();
    assert!(matches!(create(folder), Some(DiskError::Kind)));
}

/// Waits for what another thread does, for so long that only a hang takes longer.
fn in_time<T: Send>(what: &str, work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let worker = scope.spawn(work);
        let begin = Instant::now();
        while !worker.is_finished() {
            // A scope would wait for it for ever.
            if begin.elapsed() > Duration::from_secs(20) {
                eprintln!("{what} does not end");
                std::process::abort();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        worker.join().unwrap()
    })
}

/// Adds a read of a sector that stays under way, as the gate is shut.
fn held_read(rig: &mut Rig, gate: &Gate, chain: &[Buffer]) {
    rig.activate(FLUSH);
    let header = [u64::from(IN).to_le_bytes(), 7_u64.to_le_bytes()].concat();
    rig.put(HEADER, &header);
    rig.offer(chain);
    rig.wait("it is under way", |_| gate.held() == 1);
    assert_eq!(rig.used(), 0);
}

const READ: [Buffer; 3] = [(HEADER, 16, false), (DATA, 512, true), (STATUS, 1, true)];

#[test]
fn operations_under_way_end_before_a_pause_and_a_reset() {
    for pauses in [true, false] {
        let gate = Gate::shut(false);
        let mut rig = Rig::by(Method::Held(gate), |_| {});
        held_read(&mut rig, gate, &READ);
        let opener = std::thread::spawn(|| {
            std::thread::sleep(Duration::from_millis(50));
            gate.open();
        });
        if pauses {
            let state = in_time("the pause", || rig.disk.suspend());
            let progress = &state.queues[0];
            assert_eq!((progress.next_available, progress.next_used), (1, 1));
            assert!(progress.taken.is_empty());
            assert_eq!(rig.get(DATA, 8), 7_u64.to_le_bytes());
            rig.disk.resume();
        } else {
            in_time("the reset", || rig.disk.reset());
            assert_eq!(rig.used(), 0, "the driver does not want it");
            assert_eq!(Arc::strong_count(&rig.memory), 1, "nobody holds it");
        }
        assert_eq!(gate.held(), 0);
        opener.join().unwrap();
    }
}

#[test]
fn a_request_of_which_a_part_is_done_is_begun_anew_after_a_pause() {
    let gate = Gate::shut(true);
    let mut rig = Rig::by(Method::Held(gate), |_| {});
    let chain = [
        (HEADER, 16, false),
        (DATA, 256, true),
        (DATA + 256, 256, true),
        (STATUS, 1, true),
    ];
    held_read(&mut rig, gate, &chain);
    let opener = std::thread::spawn(|| {
        std::thread::sleep(Duration::from_millis(200));
        gate.open();
    });
    let state = in_time("the pause", || rig.disk.suspend());
    opener.join().unwrap();
    // It is taken again, if the pause came before the gate was open.
    let progress = state.queues[0].clone();
    let again = progress.taken.len();
    assert_eq!(usize::from(progress.next_used) + again, 1);
    rig.disk.resume();
    rig.wait("an answer", |rig| rig.used() == 1);
    assert_eq!(rig.get(DATA, 8), 7_u64.to_le_bytes());
    assert_eq!(rig.get(DATA + 256, 256), [0x5a; 256]);
    assert!(!rig.is_broken());
}

#[test]
fn a_broken_chain_behind_an_operation_waits_for_it() {
    let gate = Gate::shut(false);
    let mut rig = Rig::by(Method::Held(gate), |_| {});
    held_read(&mut rig, gate, &READ);
    rig.offer(&[(HEADER, 16, false)]);
    std::thread::sleep(Duration::from_millis(20));
    assert!(!rig.is_broken());
    gate.open();
    rig.wait("a reset is needed", |rig| rig.is_broken());
    assert_eq!(rig.used(), 0);
    in_time("the reset", || rig.disk.reset());
    assert_eq!(Arc::strong_count(&rig.memory), 1, "nobody holds it");
}

/// A driver that makes more available than the queue has entries, while none is given back.
#[test]
fn requests_beyond_those_that_may_be_under_way_wait_in_the_ring() {
    const MANY: u16 = 136;
    let gate = Gate::shut(false);
    let mut rig = Rig::by(Method::Held(gate), |_| {});
    held_read(&mut rig, gate, &READ);
    for number in 2..=MANY {
        rig.offer(&READ);
        let due = usize::from(number.min(128));
        rig.wait("it is under way, if there is room", |_| gate.held() == due);
    }
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!((rig.used(), gate.held()), (0, 128));
    gate.open();
    rig.wait("all are answered", |rig| rig.used() == MANY);
    assert!(!rig.is_broken());
}

/// Another thread of the guest makes requests available and takes them back.
#[test]
fn a_driver_that_takes_requests_back_stops_nobody() {
    for _ in 0..20 {
        let mut rig = Rig::new(false);
        rig.activate(FLUSH);
        rig.put(HEADER, &[0; 16]);
        rig.add(&READ);
        let memory = rig.memory.clone();
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let index = GuestAddress(AVAILABLE + 2);
                let used = GuestAddress(USED + 2);
                while !over.load(SeqCst) {
                    // One that is there for a moment.
                    let next: u16 = memory.load(used, SeqCst).unwrap();
                    for available in [next, next.wrapping_add(1)].repeat(8) {
                        memory.store(available, index, SeqCst).unwrap();
                    }
                }
            });
            for _ in 0..200 {
                rig.bell.write(1).unwrap();
                std::thread::sleep(Duration::from_micros(20));
            }
            in_time("the pause", || drop(rig.disk.suspend()));
            rig.disk.resume();
            in_time("the reset", || rig.disk.reset());
            over.store(true, SeqCst);
        });
        drop(memory);
        assert_eq!(Arc::strong_count(&rig.memory), 1, "nobody holds it");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Any contents of table and ring: an end, nothing beyond the guest's memory or the disk, and
    /// a disk that serves after a reset.
    #[test]
    fn the_disk_outlives_any_ring(
        descriptors in prop::collection::vec(
            (
                prop_oneof![4 => HEADER..MEMORY as u64, 1 => Just(HEADER), 1 => any::<u64>()],
                prop_oneof![4 => 0_u32..2_000, 2 => Just(512), 1 => any::<u32>()],
                prop_oneof![3 => Just(1_u16), 3 => Just(3), 2 => Just(2), 1 => 0_u16..8],
                0..SIZE + 1,
            ),
            usize::from(SIZE),
        ),
        heads in prop::collection::vec(0..SIZE + 1, usize::from(SIZE)),
        available in 0..SIZE + 2,
        header in prop::collection::vec(0_u8..14, 16),
        features in any::<u64>(),
        method in prop::sample::select(vec![Method::IoUring, Method::Vectored]),
    ) {
        let mut rig = Rig::by(method, |_| {});
        rig.put(HEADER, &header);
        for (at, (address, bytes, flags, next)) in descriptors.iter().enumerate() {
            let raw = u128::from(*address)
                | u128::from(*bytes) << 64
                | u128::from(*flags) << 96
                | u128::from(*next) << 112;
            rig.put(16 * at as u64, &raw.to_le_bytes());
        }
        for (at, head) in (0..).zip(&heads) {
            rig.put(AVAILABLE + 4 + 2 * at, &head.to_le_bytes());
        }
        rig.put(AVAILABLE + 2, &available.to_le_bytes());
        rig.activate(features & rig.disk.features());
        rig.bell.write(1).unwrap();
        rig.wait("it ends", |rig| rig.is_broken() || rig.used() == available);
        rig.disk.reset();
        prop_assert_eq!(Arc::strong_count(&rig.memory), 1);
        prop_assert_eq!(rig.file.metadata().unwrap().len(), SECTORS * SECTOR_BYTES);
        rig.put(0, &[0; 0x3000]);
        rig.activate(0);
        rig.put(DATA, &pattern(3, 512));
        prop_assert_eq!(rig.simple(OUT, 7, 512), (OK, 1));
        prop_assert_eq!(rig.on_disk(7, 512), pattern(3, 512));
    }
}

#[path = "unaligned_test.rs"]
mod unaligned;
