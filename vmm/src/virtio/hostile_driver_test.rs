//! The whole path of the network card, from registers to sockets, under a driver that does
//! anything. The driver may break its own device as often as it likes. Then it behaves, and
//! everything must work.
use std::{
    os::{fd::OwnedFd, unix::net::UnixDatagram},
    sync::{Arc, atomic::Ordering, mpsc},
    thread,
    time::{Duration, Instant},
};

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

use super::{
    net::{Net, NetConfig, NetCounters},
    transport::VirtioPci,
};
use crate::{
    GuestMemory, ThreadSetup,
    fake::{Driver, Fabric},
    interrupt::MsiMessage,
    pci::{Root, Windows},
};

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const MEMORY_BYTES: usize = 0x10_0000;
/// Number of queues: two pairs and the control queue.
const QUEUES: u16 = 5;
const SIZE: u16 = 16;
const BUFFERS: u64 = 0x6_0000;
const BUFFER_BYTES: u64 = 0x2000;
/// Longest time that a case may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// Returns the addresses of a queue's parts.
fn rings(queue: u16) -> [u64; 3] {
    [0, 0x1000, 0x2000].map(|part| 0x1000 + u64::from(queue) * 0x4000 + part)
}

#[derive(Clone, Debug)]
enum Step {
    /// Reset and bring up the device, without these features.
    BringUp(u64),
    /// Chain on a queue: its descriptors, and the increment of the available index.
    Chain(u16, Vec<Descriptor>, u16),
    /// Any bytes in a queue's rings: queue, offset, bytes.
    Garbage(u16, u64, Vec<u8>),
    /// Command on the control queue.
    Command(Vec<u8>),
    Kick(u16),
    /// Write to the common configuration: offset, bytes.
    Register(u64, Vec<u8>),
    /// Move BAR 2 to this address.
    Move(u64),
    Decode(u8),
    Mask(u16, bool),
    /// Frame for the guest: queue pair, length in bytes.
    Frame(usize, usize),
}

#[derive(Clone, Debug)]
struct Descriptor {
    address: u64,
    bytes: u32,
    flags: u16,
    next: u16,
}

struct Rig {
    root: Root,
    fabric: Arc<Fabric>,
    memory: Arc<GuestMemory>,
    peers: Vec<UnixDatagram>,
    home: u64,
}

impl Rig {
    fn new() -> Self {
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)]);
        let memory = Arc::new(memory.unwrap());
        let fabric: Arc<Fabric> = Arc::default();
        let pairs = [UnixDatagram::pair().unwrap(), UnixDatagram::pair().unwrap()];
        let (taps, peers): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        for peer in &peers {
            peer.set_nonblocking(true).unwrap();
        }
        let config = NetConfig::new(MAC, 1500, taps.into_iter().map(OwnedFd::from).collect());
        let net = Net::new(config, ThreadSetup::new(|_| Ok(())), NetCounters::new(2)).unwrap();
        let (net, doorbells) = (Box::new(net), fabric.clone());
        let function = VirtioPci::new(net, memory.clone(), fabric.clone(), doorbells).unwrap();
        let windows = Windows {
            mmio32: 0xc000_0000..0xc100_0000,
            mmio64: 1 << 36..1 << 37,
        };
        let mut root = Root::new(windows);
        root.add(Box::new(function)).unwrap();
        let home = Driver::find(&root, 1).bar(2);
        Self {
            root,
            fabric,
            memory,
            peers,
            home,
        }
    }

    fn act(&self, step: &Step) {
        match step {
            Step::BringUp(without) => self.bring_up(*without),
            Step::Chain(queue, descriptors, ahead) => self.offer(*queue, descriptors, *ahead),
            Step::Garbage(queue, at, bytes) => {
                let at = GuestAddress(rings(*queue)[0] + at % 0x3000);
                self.memory.write_slice(bytes, at).unwrap();
            }
            Step::Command(bytes) => {
                self.memory
                    .write_slice(bytes, GuestAddress(BUFFERS))
                    .unwrap();
                let len = bytes.len() as u32;
                let command = Descriptor {
                    address: BUFFERS,
                    bytes: len,
                    flags: 1,
                    next: 1,
                };
                let answer = Descriptor {
                    address: BUFFERS + 0x1000,
                    bytes: 1,
                    flags: 2,
                    next: 0,
                };
                self.offer(QUEUES - 1, &[command, answer], 1);
                self.kick(QUEUES - 1);
            }
            Step::Kick(queue) => self.kick(*queue),
            Step::Register(at, bytes) => drop(self.write(*at, bytes)),
            Step::Move(to) => self.config_write(0x18, &to.to_le_bytes()),
            Step::Decode(command) => self.config_write(4, &[*command]),
            Step::Mask(vector, masked) => {
                let table = self.config(0x10) & !0xf;
                let at = table + 16 * u64::from(*vector) + 12;
                self.root.mmio_write(at, &[u8::from(*masked), 0, 0, 0]);
            }
            Step::Frame(pair, bytes) => {
                // The frame is lost when the socket is full.
                let _ = self.peers[*pair].send(&vec![0x11; *bytes]);
            }
        }
    }

    fn config(&self, at: u64) -> u64 {
        let mut bytes = [0; 4];
        self.root.ecam_read(1 << 15 | at, &mut bytes);
        u32::from_le_bytes(bytes).into()
    }

    fn config_write(&self, at: u64, bytes: &[u8]) {
        self.root.ecam_write(1 << 15 | at, bytes);
    }

    fn bar2(&self) -> u64 {
        self.config(0x1c) << 32 | self.config(0x18) & !0xf
    }

    fn write(&self, at: u64, bytes: &[u8]) -> bool {
        self.root.mmio_write(self.bar2().wrapping_add(at), bytes)
    }

    fn bring_up(&self, without: u64) {
        let mut offered = [0; 8];
        for window in 0..2_u8 {
            self.write(0, &[window, 0, 0, 0]);
            let half = &mut offered[4 * usize::from(window)..][..4];
            self.root.mmio_read(self.bar2().wrapping_add(4), half);
        }
        let features = u64::from_le_bytes(offered) & !without;
        self.write(20, &[0]);
        self.write(20, &[3]);
        for window in 0..2_u8 {
            self.write(8, &[window, 0, 0, 0]);
            let half = (features >> (32 * window)) as u32;
            self.write(12, &half.to_le_bytes());
        }
        self.write(20, &[11]);
        for queue in 0..QUEUES {
            self.write(22, &queue.to_le_bytes());
            self.write(24, &SIZE.to_le_bytes());
            self.write(26, &queue.to_le_bytes());
            for (at, ring) in [32, 40, 48].into_iter().zip(rings(queue)) {
                self.write(at, &ring.to_le_bytes());
            }
            self.write(28, &[1, 0]);
        }
        self.write(20, &[15]);
    }

    /// Writes descriptors from the table's start and makes the first of them available, `ahead`
    /// times.
    fn offer(&self, queue: u16, descriptors: &[Descriptor], ahead: u16) {
        let [table, available, _] = rings(queue);
        for (at, descriptor) in (0..).zip(descriptors) {
            let Descriptor {
                address,
                bytes,
                flags,
                next,
            } = descriptor;
            let raw = u128::from(*address)
                | u128::from(*bytes) << 64
                | u128::from(*flags) << 96
                | u128::from(*next) << 112;
            let at = GuestAddress(table + 16 * at);
            self.memory.write_slice(&raw.to_le_bytes(), at).unwrap();
        }
        let index = GuestAddress(available + 2);
        let before: u16 = self.memory.read_obj(index).unwrap();
        let slot = GuestAddress(available + 4 + 2 * u64::from(before % SIZE));
        self.memory.write_obj(0_u16, slot).unwrap();
        let now = before.wrapping_add(ahead);
        self.memory.store(now, index, Ordering::Release).unwrap();
    }

    /// Notifies a queue as a guest's write does: by the doorbell, or else by the exit.
    fn kick(&self, queue: u16) {
        let at = self.bar2().wrapping_add(0x3000 + 4 * u64::from(queue));
        if !self.fabric.ring(at) {
            self.root.mmio_write(at, &queue.to_le_bytes());
        }
    }

    fn used(&self, queue: u16) -> u16 {
        self.memory
            .read_obj(GuestAddress(rings(queue)[2] + 2))
            .unwrap()
    }

    fn eventually(what: &str, mut done: impl FnMut() -> bool) {
        let begin = Instant::now();
        while !done() {
            assert!(begin.elapsed() < Duration::from_secs(10), "{what}");
            thread::sleep(Duration::from_micros(200));
        }
    }

    /// Restores the function's BARs, brings it up as specified, and passes a frame each way.
    fn behave(&self) {
        self.config_write(4, &[6]);
        self.config_write(0x18, &self.home.to_le_bytes());
        let driver = Driver::find(&self.root, 1);
        driver.reset();
        for at in (0..BUFFERS).step_by(0x1000) {
            self.memory
                .write_slice(&[0; 0x1000], GuestAddress(at))
                .unwrap();
        }
        let mut frame = [0; 0x1_0010];
        for peer in &self.peers {
            while peer.recv(&mut frame).is_ok() {}
        }
        driver.set_msix(true, false);
        for vector in 0..=QUEUES {
            let message = MsiMessage {
                address: 0xfee0_0000,
                data: vector.into(),
            };
            driver.set_message(vector, message);
            self.fabric.take(vector);
        }
        // Without EVENT_IDX, each batch interrupts.
        assert!(driver.negotiate(driver.offered() & !(1 << 29)));
        for queue in 0..QUEUES {
            driver.set_up_queue(queue, SIZE, rings(queue), queue);
        }
        assert!(driver.driver_ok());

        let sent: Vec<u8> = (0..64).collect();
        let bytes = [&[0; 12][..], &sent].concat();
        self.memory
            .write_slice(&bytes, GuestAddress(BUFFERS))
            .unwrap();
        let len = bytes.len() as u32;
        self.offer(
            1,
            &[Descriptor {
                address: BUFFERS,
                bytes: len,
                flags: 0,
                next: 0,
            }],
            1,
        );
        self.kick(1);
        let mut got = 0;
        Self::eventually("the frame goes out", || {
            got = self.peers[0].recv(&mut frame).unwrap_or(0);
            // Less than a header tells of offloads.
            got > 12
        });
        assert_eq!(frame[12..got], sent);
        Self::eventually("it is given back", || self.used(1) == 1);
        Self::eventually("an interrupt", || self.fabric.take(1).0 > 0);

        let address = |slot: u64| BUFFERS + BUFFER_BYTES * (slot + 1);
        for slot in 0..SIZE {
            let [table, available, _] = rings(0);
            let raw = u128::from(address(slot.into())) | u128::from(BUFFER_BYTES) << 64 | 2 << 96;
            let at = GuestAddress(table + 16 * u64::from(slot));
            self.memory.write_slice(&raw.to_le_bytes(), at).unwrap();
            let at = GuestAddress(available + 4 + 2 * u64::from(slot));
            self.memory.write_obj(slot, at).unwrap();
        }
        Self::eventually("the frame comes in", || {
            // Frames that came before are received first. Buffers come back in order.
            let available = self.used(0).wrapping_add(SIZE);
            let at = GuestAddress(rings(0)[1] + 2);
            self.memory.store(available, at, Ordering::Release).unwrap();
            self.kick(0);
            let _ = self.peers[0].send(&bytes);
            (0..SIZE.into()).any(|slot| {
                let mut there = vec![0; sent.len()];
                let at = GuestAddress(address(slot) + 12);
                self.memory.read_slice(&mut there, at).unwrap();
                there == sent
            })
        });
        Self::eventually("an interrupt", || self.fabric.take(0).0 > 0);
        driver.reset();
    }
}

fn descriptor() -> impl Strategy<Value = Descriptor> {
    let end = MEMORY_BYTES as u64;
    let places = vec![
        BUFFERS,
        BUFFERS + 1,
        0x1000,
        0x3000,
        end - 16,
        end,
        u64::MAX - 8,
        1 << 40,
    ];
    let lengths = vec![0, 1, 11, 12, 60, 100, 0x2000, 0x1_0000, u32::MAX];
    let flags = vec![0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 7];
    let (place, bytes) = (prop::sample::select(places), prop::sample::select(lengths));
    (place, bytes, prop::sample::select(flags), 0..20_u16).prop_map(
        |(address, bytes, flags, next)| Descriptor {
            address,
            bytes,
            flags,
            next,
        },
    )
}

fn step() -> impl Strategy<Value = Step> {
    let queue = 0..QUEUES;
    let without = prop::sample::select(vec![0, 1 << 29, 1 << 28, 1 << 15, 1 << 17, 1 << 32]);
    let ahead = prop::sample::select(vec![1_u16, 1, 1, 2, 16, 17, 0x8000]);
    let command = (0..6_u8, 0..4_u8, prop::collection::vec(0..4_u8, 0..20))
        .prop_map(|(class, command, data)| [&[class, command][..], &data].concat());
    let status =
        prop::sample::select(vec![0, 3, 11, 15, 128]).prop_map(|status| (20, vec![status]));
    let register = prop_oneof![status, (0..60_u64, prop::collection::vec(0..4_u8, 1..5)),];
    let place = prop::sample::select(vec![
        1 << 36,
        (1 << 36) + 0x8000,
        0,
        0xc000_0000,
        0xfee0_0000,
    ]);
    let command_register = prop::sample::select(vec![0, 2, 4, 6, 6]);
    let frame = prop::sample::select(vec![1, 12, 26, 100, 1526, 9000, 65_000]);
    prop_oneof![
        4 => without.prop_map(Step::BringUp),
        12 => (queue.clone(), prop::collection::vec(descriptor(), 1..5), ahead)
            .prop_map(|(queue, chain, ahead)| Step::Chain(queue, chain, ahead)),
        2 => (queue.clone(), 0..0x3000_u64, prop::collection::vec(any::<u8>(), 1..40))
            .prop_map(|(queue, at, bytes)| Step::Garbage(queue, at, bytes)),
        4 => command.prop_map(Step::Command),
        12 => queue.clone().prop_map(Step::Kick),
        3 => register.prop_map(|(at, bytes)| Step::Register(at, bytes)),
        1 => place.prop_map(Step::Move),
        1 => command_register.prop_map(Step::Decode),
        2 => (queue, any::<bool>()).prop_map(|(vector, masked)| Step::Mask(vector, masked)),
        6 => (0..2_usize, frame).prop_map(|(pair, bytes)| Step::Frame(pair, bytes)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn the_card_outlives_any_driver(steps in prop::collection::vec(step(), 1..100)) {
        let (done, is_done) = mpsc::channel();
        let case = thread::spawn(move || {
            let rig = Rig::new();
            for step in &steps {
                rig.act(step);
            }
            rig.behave();
            let Rig { root, fabric, memory, .. } = rig;
            drop(root);
            assert_eq!(Arc::strong_count(&memory), 1, "nobody holds the memory");
            assert_eq!((fabric.lines(), fabric.bells().len()), (0, 0));
            let _ = done.send(());
        });
        // The timeout shows a hang.
        if is_done.recv_timeout(PATIENCE) == Err(mpsc::RecvTimeoutError::Timeout) {
            prop_assert!(false, "a thread hangs");
        }
        prop_assert!(case.join().is_ok());
    }
}
