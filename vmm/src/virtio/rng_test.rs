use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
};

use virtio_bindings::virtio_ring::{VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
use virtio_queue::{Queue, desc::split::Descriptor};
use vm_memory::GuestAddress;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::*;
use crate::{GuestMemory, virtio::Signals};

const MEMORY: usize = 1 << 20;
/// Addresses of the rings. The descriptor table is at 0.
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
/// Address of the buffers.
const BUFFERS: u64 = 0x4_0000;
const WRITE: u16 = VRING_DESC_F_WRITE as u16;
const NEXT: u16 = VRING_DESC_F_NEXT as u16;

#[derive(Default)]
struct Recorder {
    interrupts: AtomicU64,
    needs_reset: AtomicBool,
    /// If set, an interrupt panics, which ends the device's thread.
    panics: AtomicBool,
}

impl Signals for Recorder {
    fn queue(&self, index: u16) {
        assert_eq!(index, 0);
        assert!(!self.panics.load(SeqCst), "as the test wants it");
        self.interrupts.fetch_add(1, SeqCst);
    }
    fn config(&self) {}
    fn needs_reset(&self) {
        self.needs_reset.store(true, SeqCst);
    }
}

struct Rig {
    rng: Rng,
    memory: Arc<GuestMemory>,
    recorder: Arc<Recorder>,
}

fn descriptor(address: u64, len: u32, flags: u16, next: u16) -> Descriptor {
    Descriptor::new(address, len, flags, next)
}

fn no_setup() -> ThreadSetup {
    ThreadSetup::new(|_| Ok(()))
}

impl Rig {
    fn new() -> Self {
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap();
        let rng = Rng::new(no_setup()).unwrap();
        Self {
            rng,
            memory: Arc::new(memory),
            recorder: Arc::default(),
        }
    }

    /// Writes the table from its start, and makes the chains that begin at `heads` available.
    fn offer(&self, table: &[Descriptor], heads: &[u16]) {
        for (at, descriptor) in (0..).zip(table) {
            let at = GuestAddress(16 * at);
            self.memory.write_obj(*descriptor, at).unwrap();
        }
        for (at, head) in (0..).zip(heads) {
            let at = GuestAddress(AVAILABLE + 4 + 2 * at);
            self.memory.write_obj(head.to_le(), at).unwrap();
        }
        self.set_available(u16::try_from(heads.len()).unwrap());
    }

    fn set_available(&self, index: u16) {
        let at = GuestAddress(AVAILABLE + 2);
        self.memory.store(index.to_le(), at, SeqCst).unwrap();
    }

    /// Activates the device. Returns the eventfd for notifications.
    fn activate(&mut self) -> EventFd {
        let mut queue = Queue::new(64).unwrap();
        queue.set_avail_ring_address(Some(AVAILABLE as u32), None);
        queue.set_used_ring_address(Some(USED as u32), None);
        queue.set_ready(true);
        let bell = EventFd::new(EFD_NONBLOCK).unwrap();
        let kick = bell.try_clone().unwrap();
        let activation = Activation {
            memory: self.memory.clone(),
            features: 0,
            queues: vec![EnabledQueue {
                index: 0,
                queue,
                kick,
                taken: Vec::new(),
            }],
            signals: self.recorder.clone(),
            restored: None,
        };
        self.rng.activate(activation).unwrap();
        bell
    }

    fn used(&self) -> u16 {
        let at = GuestAddress(USED + 2);
        u16::from_le(self.memory.load(at, SeqCst).unwrap())
    }

    fn wait(&self, what: &str, done: impl Fn(&Self) -> bool) {
        let begin = Instant::now();
        while !done(self) {
            assert!(begin.elapsed() < Duration::from_secs(10), "{what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn is_random(&self, address: u64, len: usize) -> bool {
        let mut bytes = vec![0; len];
        self.memory
            .read_slice(&mut bytes, GuestAddress(address))
            .unwrap();
        // Of each 64 random bytes, fewer than half are zero.
        bytes
            .chunks(64)
            .all(|part| part.iter().filter(|byte| **byte != 0).count() > part.len() / 2)
    }

    fn used_len(&self, at: u16) -> u32 {
        let at = GuestAddress(USED + 8 + 8 * u64::from(at));
        u32::from_le(self.memory.read_obj(at).unwrap())
    }
}

#[test]
fn buffers_are_filled() {
    let mut rig = Rig::new();
    // One of 64 bytes; one in two parts with a readable one between; one too large.
    let table = [
        descriptor(BUFFERS, 64, WRITE, 0),
        descriptor(BUFFERS + 0x1000, 64, WRITE | NEXT, 2),
        descriptor(BUFFERS + 0x2000, 64, NEXT, 3),
        descriptor(BUFFERS + 0x3000, 64, WRITE, 0),
        descriptor(BUFFERS + 0x4000, 0x4000, WRITE, 0),
    ];
    rig.offer(&table, &[0, 1, 4]);
    rig.activate().write(1).unwrap();
    rig.wait("three answers", |rig| rig.used() == 3);
    assert_eq!([0, 1, 2].map(|at| rig.used_len(at)), [64, 128, 4096]);
    assert!(rig.is_random(BUFFERS, 64));
    assert!(rig.is_random(BUFFERS + 0x1000, 64) && rig.is_random(BUFFERS + 0x3000, 64));
    assert!(!rig.is_random(BUFFERS + 0x2000, 64), "only to be read");
    assert!(rig.is_random(BUFFERS + 0x4000, 4096));
    assert!(
        !rig.is_random(BUFFERS + 0x5000, 64),
        "past the most for one request"
    );
    rig.wait("an interrupt", |rig| {
        rig.recorder.interrupts.load(SeqCst) == 1
    });
    rig.rng.reset();
}

#[test]
fn reset_lets_go_and_it_begins_again() {
    let mut rig = Rig::new();
    for _ in 0..50 {
        rig.activate().write(1).unwrap();
        assert_eq!(Arc::strong_count(&rig.memory), 2);
        rig.rng.reset();
        assert_eq!(Arc::strong_count(&rig.memory), 1, "nobody holds the memory");
    }
    rig.activate();
    drop(rig.rng);
    assert_eq!(Arc::strong_count(&rig.memory), 1);
}

#[test]
fn rings_without_sense_need_a_reset() {
    let mut rig = Rig::new();
    // More chains available than the ring has entries.
    rig.set_available(100);
    rig.activate().write(1).unwrap();
    rig.wait("a reset is needed", |rig| {
        rig.recorder.needs_reset.load(SeqCst)
    });
    rig.rng.reset();
    assert_eq!(rig.used(), 0);
    // A buffer outside memory.
    let mut rig = Rig::new();
    rig.offer(&[descriptor(MEMORY as u64 - 8, 64, WRITE, 0)], &[0]);
    rig.activate().write(1).unwrap();
    rig.wait("a reset is needed", |rig| {
        rig.recorder.needs_reset.load(SeqCst)
    });
    rig.rng.reset();
}

#[test]
fn an_endless_chain_ends() {
    let mut rig = Rig::new();
    rig.offer(&[descriptor(BUFFERS, 1, WRITE | NEXT, 0)], &[0]);
    rig.activate().write(1).unwrap();
    rig.wait("an answer", |rig| rig.used() == 1);
    assert_eq!(rig.used_len(0), 64, "a byte for each turn");
    // An indirect table of empty descriptors, and one of invalid length.
    let mut rig = Rig::new();
    let flags = VRING_DESC_F_INDIRECT as u16;
    let table = [0x8000, 0x8001].map(|len| descriptor(BUFFERS, len, flags, 0));
    rig.offer(&table, &[0, 1]);
    rig.activate().write(1).unwrap();
    rig.wait("two answers", |rig| rig.used() == 2);
    assert_eq!([0, 1].map(|at| rig.used_len(at)), [0, 0]);
}

/// Returns the ticks of CPU time that the threads named "rng" of this process used.
fn ticks() -> u64 {
    let of_thread = |stat: String| -> Option<u64> {
        let (name, rest) = stat.rsplit_once(')')?;
        let mut fields = rest.split_whitespace().skip(11);
        let both = [
            fields.next()?.parse::<u64>().ok()?,
            fields.next()?.parse().ok()?,
        ];
        name.ends_with("(rng").then_some(both.iter().sum())
    };
    let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
    tasks
        .filter_map(|task| of_thread(fs::read_to_string(task.path().join("stat")).ok()?))
        .sum()
}

/// A guest that requests as much as it can, without end.
#[test]
fn a_greedy_guest_gets_so_much_a_second() {
    const TIME: Duration = Duration::from_millis(600);
    let mut rig = Rig::new();
    let bell = rig.activate();
    let table: Vec<_> = (0..64)
        .map(|slot| descriptor(BUFFERS + slot * 0x1000, 0x1000, WRITE, 0))
        .collect();
    let heads: Vec<_> = (0..64).collect();
    rig.offer(&table, &heads);
    let begin = Instant::now();
    let before = ticks();
    while begin.elapsed() < TIME {
        // Makes all buffers available again.
        rig.set_available(rig.used().wrapping_add(64));
        bell.write(1).unwrap();
        std::thread::sleep(Duration::from_micros(200));
    }
    let given = i64::from(rig.used()) * 0x1000;
    let seconds = begin.elapsed().as_secs_f64();
    let allowed = BURST_BYTES as f64 + BYTES_PER_SECOND as f64 * seconds + 0x1000 as f64;
    assert!(
        given > BURST_BYTES && given as f64 <= allowed,
        "{given} of {allowed} bytes"
    );
    // A tick is 10 ms. A busy loop would take 60.
    assert!(ticks() - before < 20, "{} ticks", ticks() - before);
    rig.rng.reset();
}

#[test]
fn what_can_not_be_served() {
    let mut rig = Rig::new();
    let activation = Activation {
        memory: rig.memory.clone(),
        features: 0,
        queues: vec![],
        signals: rig.recorder.clone(),
        restored: None,
    };
    assert!(matches!(
        rig.rng.activate(activation),
        Err(ActivateError::Queues { .. })
    ));
    rig.activate();
    rig.rng.reset();
    let refuse = ThreadSetup::new(|_| Err(io::ErrorKind::PermissionDenied.into()));
    let _refused = Rng::new(refuse.clone()).unwrap();
    assert_eq!(
        refuse.finish().err().map(|error| error.kind()),
        Some(io::ErrorKind::PermissionDenied)
    );
}

/// A panic of the device's thread must cost the guest its entropy, not its machine: a vCPU that
/// resets the device does not wait for a thread that has ended.
#[test]
fn a_thread_that_died_keeps_nobody_waiting() {
    let mut rig = Rig::new();
    rig.recorder.panics.store(true, SeqCst);
    let bell = rig.activate();
    rig.offer(&[descriptor(BUFFERS, 64, WRITE, 0)], &[0]);
    bell.write(1).unwrap();
    let worker = rig.rng.worker.as_ref().unwrap();
    let begin = Instant::now();
    while !worker.is_finished() {
        assert!(begin.elapsed() < Duration::from_secs(10), "it lives");
        std::thread::sleep(Duration::from_millis(1));
    }
    let (done, is_done) = std::sync::mpsc::channel();
    let mut rng = rig.rng;
    std::thread::spawn(move || {
        rng.reset();
        done.send(rng).unwrap();
    });
    let mut rng = is_done.recv_timeout(Duration::from_secs(10)).unwrap();
    rng.reset();
}
