use std::{
    io::{Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::PathBuf,
    sync::atomic::{AtomicBool, Ordering::SeqCst},
    time::{Duration, Instant},
};

use proptest::prelude::*;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::*;
use crate::{
    GuestMemory,
    virtio::{
        EnabledQueue, Signals,
        vsock::{
            packet::{HEADER_BYTES, HOST_CID, Header, STREAM, operation},
            requests::tests::Played,
        },
    },
};

const MEMORY: usize = 1 << 20;
/// Addresses of a queue's rings, from the queue's start. The table is at its start.
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
/// Bytes between the queues' starts, in order of their index.
const QUEUE_BYTES: u64 = 0x4000;
const DATA: u64 = 0x2_0000;
const SIZE: u16 = 16;
const CID: u32 = 3;

#[derive(Default)]
struct Recorder {
    needs_reset: AtomicBool,
}

impl Signals for Recorder {
    fn queue(&self, index: u16) {
        assert!(index < 2);
    }
    fn config(&self) {}
    fn needs_reset(&self) {
        self.needs_reset.store(true, SeqCst);
    }
}

struct Rig {
    device: Vsock,
    path: PathBuf,
    memory: Arc<GuestMemory>,
    recorder: Arc<Recorder>,
    counters: Arc<VsockCounters>,
    bell: EventFd,
    available: [u16; 2],
    programs: Played,
    _folder: tempfile::TempDir,
}

impl Rig {
    fn new() -> Rig {
        // However busy the machine is, no request is refused by time.
        Rig::with(Duration::from_secs(1000))
    }

    /// With so much time for the connector's answers.
    fn with(answered_within: Duration) -> Rig {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let counters: Arc<VsockCounters> = Arc::default();
        let programs = Played::new();
        let config = VsockConfig {
            cid: CID,
            listener,
            connector: Some(Box::new(programs.clone())),
        };
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap();
        Rig {
            device: Vsock::with(config, &setup(), counters.clone(), answered_within).unwrap(),
            path,
            memory: Arc::new(memory),
            recorder: Arc::default(),
            counters,
            bell: EventFd::new(EFD_NONBLOCK).unwrap(),
            available: [0; 2],
            programs,
            _folder: folder,
        }
    }

    fn activate(&mut self, features: u64) {
        self.activate_with(features, None);
    }

    fn activate_with(&mut self, features: u64, restored: Option<Model>) {
        let queue = |index: u16| {
            let start = u64::from(index) * QUEUE_BYTES;
            let mut queue = Queue::new(SIZE).unwrap();
            queue.set_desc_table_address(Some(start as u32), None);
            queue.set_avail_ring_address(Some((start + AVAILABLE) as u32), None);
            queue.set_used_ring_address(Some((start + USED) as u32), None);
            queue.set_ready(true);
            let kick = self.bell.try_clone().unwrap();
            EnabledQueue {
                index,
                queue,
                kick,
                taken: Vec::new(),
            }
        };
        let activation = Activation {
            memory: self.memory.clone(),
            features,
            queues: vec![queue(RX), queue(TX)],
            signals: self.recorder.clone(),
            restored,
        };
        self.device.activate(activation).unwrap();
    }

    /// Resets, with empty rings.
    fn reset(&mut self) {
        self.device.reset();
        assert_eq!(Arc::strong_count(&self.memory), 1, "nobody holds it");
        self.recorder.needs_reset.store(false, SeqCst);
        self.put(0, &vec![0; 2 * QUEUE_BYTES as usize]);
        self.available = [0; 2];
    }

    /// Makes one buffer available.
    fn offer(&mut self, index: u16, address: u64, bytes: u32) {
        let start = u64::from(index) * QUEUE_BYTES;
        let available = &mut self.available[usize::from(index)];
        let descriptor = *available % SIZE;
        *available = available.wrapping_add(1);
        let available = *available;
        let writable = u128::from(index == RX) << 1;
        let raw = u128::from(address) | u128::from(bytes) << 64 | writable << 96;
        self.put(start + 16 * u64::from(descriptor), &raw.to_le_bytes());
        let slot = start + AVAILABLE + 4 + 2 * u64::from(descriptor);
        self.put(slot, &descriptor.to_le_bytes());
        let at = GuestAddress(start + AVAILABLE + 2);
        self.memory.store(available, at, SeqCst).unwrap();
        self.bell.write(1).unwrap();
    }

    fn used(&self, index: u16) -> u16 {
        let at = u64::from(index) * QUEUE_BYTES + USED + 2;
        self.memory.load(GuestAddress(at), SeqCst).unwrap()
    }

    /// Sends a packet of the guest, and waits until it is taken.
    fn send(&mut self, header: Header, data: &[u8]) {
        let len = data.len() as u32;
        self.put(DATA, &Header { len, ..header }.to_bytes());
        self.put(DATA + HEADER_BYTES as u64, data);
        self.offer(TX, DATA, HEADER_BYTES as u32 + len);
        let all = self.available[usize::from(TX)];
        self.wait("it is taken", |rig| rig.used(TX) == all);
    }

    /// Gives the device a buffer, and waits for a packet in it.
    fn receive(&mut self) -> (Header, Vec<u8>) {
        self.offer(RX, DATA, 4096);
        let all = self.available[usize::from(RX)];
        self.wait("a packet", |rig| rig.used(RX) == all);
        let packet = self.get(DATA, 4096);
        let header = Header::from_bytes(packet[..HEADER_BYTES].try_into().unwrap());
        let end = HEADER_BYTES + header.len as usize;
        (header, packet[HEADER_BYTES..end].to_vec())
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

    fn wait(&self, what: &str, done: impl Fn(&Self) -> bool) {
        let begin = Instant::now();
        while !done(self) {
            assert!(begin.elapsed() < Duration::from_secs(10), "{what}");
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    fn is_broken(&self) -> bool {
        self.recorder.needs_reset.load(SeqCst)
    }

    /// Connects to port 80 and exchanges some bytes.
    fn exchange(&mut self) -> UnixStream {
        let mut stream = UnixStream::connect(&self.path).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        stream.write_all(b"CONNECT 80\n").unwrap();
        let (request, _) = self.receive();
        assert_eq!((request.op, request.dst_port), (operation::REQUEST, 80));
        let header = Header {
            op: operation::RESPONSE,
            buf_alloc: 1000,
            ..request.reset()
        };
        self.send(header, &[]);
        let rw = Header {
            op: operation::RW,
            ..header
        };
        self.send(rw, b"to the host");
        let line = format!("OK {}\nto the host", request.src_port);
        let mut got = vec![0; line.len()];
        stream.read_exact(&mut got).unwrap();
        assert_eq!(got, line.as_bytes());
        stream.write_all(b"to the guest").unwrap();
        assert_eq!(self.receive().1, b"to the guest");
        stream
    }
}

fn setup() -> ThreadSetup {
    ThreadSetup::new(|kind| {
        assert_eq!(kind, ThreadKind::Vsock);
        Ok(())
    })
}

#[test]
fn a_program_that_came_before_the_driver_is_served_and_a_reset_ends_all() {
    let mut rig = Rig::new();
    for features in [0, rig.device.features()] {
        let mut early = UnixStream::connect(&rig.path).unwrap();
        early.write_all(b"CONNECT 9\n").unwrap();
        rig.activate(features);
        assert_eq!(rig.receive().0.dst_port, 9);
        let mut stream = rig.exchange();
        rig.reset();
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
        assert_eq!(early.read(&mut [0]).unwrap(), 0);
    }
}

/// A request of the guest for a connection to port 52.
fn request(guest_port: u32) -> Header {
    Header {
        src_cid: CID.into(),
        dst_cid: HOST_CID,
        src_port: guest_port,
        dst_port: 52,
        kind: STREAM,
        op: operation::REQUEST,
        buf_alloc: 1000,
        ..Header::default()
    }
}

impl Rig {
    /// Asks for a connection. Returns the request's number.
    fn ask(&mut self, guest_port: u32) -> u32 {
        self.send(request(guest_port), &[]);
        match self.programs.asked().as_slice() {
            [(id, 52)] => *id,
            asked => panic!("{asked:?}"),
        }
    }
}

#[test]
fn a_request_that_waits_delays_nobody() {
    let mut rig = Rig::new();
    rig.activate(rig.device.features());
    let slow = rig.ask(1000);
    let stream = rig.exchange();
    let quick = rig.ask(1001);
    let mut program = rig.programs.connect(quick);
    let (response, _) = rig.receive();
    assert_eq!(
        (response.op, response.dst_port),
        (operation::RESPONSE, 1001)
    );
    let rw = Header {
        op: operation::RW,
        ..request(1001)
    };
    rig.send(rw, b"to the host");
    let mut got = [0; 11];
    program.set_nonblocking(false).unwrap();
    program.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"to the host");
    rig.programs.answer(slow, None);
    let (reset, _) = rig.receive();
    assert_eq!((reset.op, reset.dst_port), (operation::RST, 1000));
    drop(stream);
}

#[test]
fn a_request_is_refused_when_nobody_answers_in_time() {
    let mut rig = Rig::with(Duration::from_millis(20));
    rig.activate(rig.device.features());
    let id = rig.ask(1000);
    let (reset, _) = rig.receive();
    assert_eq!((reset.op, reset.dst_port), (operation::RST, 1000));
    assert_eq!(rig.counters.refused_requests_silent.load(SeqCst), 1);
    let mut late = rig.programs.connect(id);
    late.set_nonblocking(false).unwrap();
    assert_eq!(late.read(&mut [0]).unwrap(), 0, "it is closed");
}

#[test]
fn an_answer_to_the_driver_before_a_reset_is_none_to_the_next() {
    let mut rig = Rig::new();
    rig.activate(0);
    let (first, second) = (rig.ask(1000), rig.ask(1001));
    rig.reset();
    // Without a driver, and with the next one, which asks by the same ports.
    let without = rig.programs.connect(first);
    rig.activate(0);
    let third = rig.ask(1000);
    let late = rig.programs.connect(second);
    for mut closed in [without, late] {
        closed.set_nonblocking(false).unwrap();
        assert_eq!(closed.read(&mut [0]).unwrap(), 0);
    }
    let mut program = rig.programs.connect(third);
    assert_eq!(rig.receive().0.op, operation::RESPONSE);
    program.write_all(b"to the guest").unwrap();
    assert_eq!(rig.receive().1, b"to the guest");
    // A reset ends the connection too.
    rig.reset();
    program.set_nonblocking(false).unwrap();
    assert_eq!(program.read(&mut [0]).unwrap(), 0);
}

/// Nothing is kept for a driver that was reset, or has broken its rings, and that no other follows.
#[test]
fn an_answer_to_a_driver_that_is_gone_is_taken_without_another() {
    for breaks in [false, true] {
        let mut rig = Rig::new();
        rig.activate(0);
        let (early, late) = (rig.ask(1000), rig.ask(1001));
        if breaks {
            // Outside the guest's memory.
            rig.offer(TX, MEMORY as u64 - 8, 44);
            rig.wait("a reset is needed", Rig::is_broken);
        } else {
            rig.reset();
        }
        let limit = Some(Duration::from_secs(10));
        for id in [early, late] {
            let mut program = rig.programs.connect(id);
            program.set_nonblocking(false).unwrap();
            program.set_read_timeout(limit).unwrap();
            assert_eq!(program.read(&mut [0]).unwrap(), 0, "it is closed");
        }
        // Commands are heard meanwhile, and the next driver is served.
        rig.reset();
        rig.activate(0);
        let id = rig.ask(1000);
        let _program = rig.programs.connect(id);
        assert_eq!(rig.receive().0.op, operation::RESPONSE);
    }
}

#[test]
fn a_request_outlives_a_pause_and_is_not_there_when_a_snapshot_is_restored() {
    let mut rig = Rig::new();
    rig.activate(0);
    let (answered, pending) = (rig.ask(1000), rig.ask(1001));
    let saved = rig.device.suspend();
    let mut program = rig.programs.connect(answered);
    rig.device.resume();
    assert_eq!(rig.receive().0.op, operation::RESPONSE);
    program.write_all(b"to the guest").unwrap();
    assert_eq!(rig.receive().1, b"to the guest");

    // As it is restored: by another device, which knows of neither.
    let mut clone = Rig::new();
    clone.activate_with(0, Some(saved.model));
    for (guest_port, op) in [
        (1000, operation::RW),
        (1000, operation::CREDIT_UPDATE),
        (1001, operation::SHUTDOWN),
    ] {
        let packet = Header {
            op,
            ..request(guest_port)
        };
        clone.send(packet, &[]);
        let (reset, _) = clone.receive();
        assert_eq!((reset.op, reset.dst_port), (operation::RST, guest_port));
    }
    let id = clone.ask(1000);
    let _program = clone.programs.connect(id);
    assert_eq!(clone.receive().0.op, operation::RESPONSE);
    // The first one goes on.
    rig.programs.answer(pending, None);
    assert_eq!(rig.receive().0.op, operation::RST);
}

#[test]
fn a_connector_that_is_gone_has_all_requests_refused() {
    let mut rig = Rig::new();
    rig.activate(0);
    rig.ask(1000);
    rig.programs.go();
    assert_eq!(rig.receive().0.op, operation::RST);
    rig.send(request(1001), &[]);
    let (reset, _) = rig.receive();
    assert_eq!((reset.op, reset.dst_port), (operation::RST, 1001));
    assert_eq!(rig.counters.refused_requests_silent.load(SeqCst), 2);
    // The other way is served on, and so is the next driver.
    drop(rig.exchange());
    rig.reset();
    rig.activate(0);
    rig.send(request(1002), &[]);
    assert_eq!(rig.receive().0.op, operation::RST);
    drop(rig.exchange());
}

#[test]
fn the_address_is_told_and_reserved_ones_are_refused() {
    let rig = Rig::new();
    let mut config = [0xff; 12];
    rig.device.read_config(0, &mut config);
    assert_eq!(config, [3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    let mut last = [0xff; 4];
    rig.device.read_config(usize::MAX, &mut last);
    assert_eq!(last, [0; 4]);
    for cid in [0, 1, 2, u32::MAX] {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
        let config = VsockConfig {
            cid,
            listener,
            connector: None,
        };
        let refused = Vsock::new(config, &setup(), Arc::default()).err();
        assert!(matches!(refused, Some(VsockError::Cid(got)) if got == cid));
    }
}

#[test]
fn buffers_without_sense_need_a_reset_and_then_it_serves() {
    let mut rig = Rig::new();
    // Outside the guest's memory; too small for a header.
    let cases = [(TX, MEMORY as u64 - 8, 44), (RX, DATA, 43)];
    for (index, address, bytes) in cases {
        rig.activate(0);
        rig.offer(index, address, bytes);
        // For a packet to be there.
        let mut stream = UnixStream::connect(&rig.path).unwrap();
        stream.write_all(b"CONNECT 80\n").unwrap();
        rig.wait("a reset is needed", Rig::is_broken);
        rig.reset();
    }
    rig.activate(0);
    drop(rig.exchange());
    assert_eq!(rig.counters.broken_rings.load(SeqCst), 2);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Any contents of the tx queue's table and ring: an end, nothing beyond the guest's memory,
    /// and a device that serves after a reset.
    #[test]
    fn the_device_outlives_any_ring(
        descriptors in prop::collection::vec(
            (
                prop_oneof![4 => DATA..MEMORY as u64, 1 => Just(DATA), 1 => any::<u64>()],
                prop_oneof![4 => 0_u32..2_000, 2 => Just(44), 1 => any::<u32>()],
                prop_oneof![3 => Just(0_u16), 3 => Just(1), 2 => Just(2), 1 => 0_u16..8],
                0..SIZE + 1,
            ),
            usize::from(SIZE),
        ),
        heads in prop::collection::vec(0..SIZE + 1, usize::from(SIZE)),
        available in 0..SIZE + 2,
        header in prop::collection::vec(any::<u8>(), HEADER_BYTES),
        features in any::<u64>(),
    ) {
        let mut rig = Rig::new();
        rig.put(DATA, &header);
        let start = u64::from(TX) * QUEUE_BYTES;
        for (at, (address, bytes, flags, next)) in descriptors.iter().enumerate() {
            let raw = u128::from(*address)
                | u128::from(*bytes) << 64
                | u128::from(*flags) << 96
                | u128::from(*next) << 112;
            rig.put(start + 16 * at as u64, &raw.to_le_bytes());
        }
        for (at, head) in (0..).zip(&heads) {
            rig.put(start + AVAILABLE + 4 + 2 * at, &head.to_le_bytes());
        }
        rig.put(start + AVAILABLE + 2, &available.to_le_bytes());
        rig.activate(features & rig.device.features());
        rig.bell.write(1).unwrap();
        rig.wait("it ends", |rig| rig.is_broken() || rig.used(TX) == available);
        rig.reset();
        rig.activate(0);
        drop(rig.exchange());
    }
}

#[path = "copies_test.rs"]
mod copies;
