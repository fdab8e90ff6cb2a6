use std::sync::atomic::Ordering::Relaxed;

use vm_memory::GuestAddress;

use super::*;
use crate::{
    fake::{Device, Driver, Fabric, Witness},
    interrupt::MsiMessage,
    pci::{Root, Windows},
};

const VERSION_1: u64 = 1 << 32;
const RING_RESET: u64 = 1 << 40;
const FEATURES: u64 = 0b111 | 1 << 29 | RING_RESET;
const RINGS: [u64; 3] = [0x1000, 0x2000, 0x3000];
const CONFIG: u16 = 0;
const NONE: [u64; 0] = [];

#[path = "refused_test.rs"]
mod refused;

struct Rig {
    root: Root,
    fabric: Arc<Fabric>,
    witness: Witness,
    counters: Arc<TransportCounters>,
}

fn message(vector: u16) -> MsiMessage {
    MsiMessage {
        address: 0xfee0_0000,
        data: 0x20 + u32::from(vector),
    }
}

impl Rig {
    /// Returns a device with three queues, the last of size 16.
    fn new() -> Self {
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 0x10000)]).unwrap();
        let fabric: Arc<Fabric> = Arc::default();
        let (device, witness) = Device::new(&[256, 256, 16], FEATURES);
        let device = Box::new(device);
        let function =
            VirtioPci::new(device, Arc::new(memory), fabric.clone(), fabric.clone()).unwrap();
        let counters = function.counters();
        let windows = Windows {
            mmio32: 0xc000_0000..0xc100_0000,
            mmio64: 1 << 36..1 << 37,
        };
        let mut root = Root::new(windows);
        assert_eq!(root.add(Box::new(function)), Ok(1));
        Self {
            root,
            fabric,
            witness,
            counters,
        }
    }

    fn driver(&self) -> Driver<'_> {
        Driver::find(&self.root, 1)
    }

    /// Brings the device up with two queues, a vector each, and messages for all.
    fn up(&self) -> Driver<'_> {
        let driver = self.driver();
        for vector in 0..4 {
            driver.set_message(vector, message(vector));
        }
        driver.set_msix(true, false);
        self.bring_up(&driver);
        driver
    }

    fn bring_up(&self, driver: &Driver<'_>) {
        assert!(driver.negotiate(FEATURES | VERSION_1));
        driver.set_config_vector(CONFIG);
        driver.set_up_queue(0, 256, RINGS, 1);
        driver.set_up_queue(2, 8, RINGS, 3);
        assert!(driver.driver_ok());
    }

    fn signals(&self) -> Arc<dyn Signals> {
        let seen = self.witness.seen();
        seen.activation
            .as_ref()
            .expect("it is active")
            .signals
            .clone()
    }

    fn is_active(&self) -> bool {
        self.witness.seen().activation.is_some()
    }

    /// Returns the pending notifications of the `at`th queue that the device serves.
    fn kicks(&self, at: usize) -> u64 {
        let seen = self.witness.seen();
        seen.activation.as_ref().expect("active").queues[at]
            .kick
            .read()
            .unwrap_or(0)
    }
}

#[test]
fn a_driver_brings_the_device_up() {
    let rig = Rig::new();
    let driver = rig.driver();
    assert_eq!(driver.offered(), FEATURES | VERSION_1);
    assert_eq!(driver.read(driver.common + 18), [3, 0], "queues");
    let driver = rig.up();
    {
        use virtio_queue::QueueT;
        let seen = rig.witness.seen();
        let activation = seen.activation.as_ref().unwrap();
        assert_eq!(activation.features, FEATURES | VERSION_1);
        let [first, last] = &activation.queues[..] else {
            panic!("two queues")
        };
        assert_eq!((first.index, last.index), (0, 2));
        assert_eq!((first.queue.size(), last.queue.size()), (256, 8));
        assert_eq!(first.queue.used_ring(), RINGS[2]);
        assert!(first.queue.event_idx_enabled());
    }
    driver.reset();
    assert!(!rig.is_active());
    driver.reset();
    rig.bring_up(&driver);
    let seen = rig.witness.seen();
    assert_eq!((seen.activations, seen.resets), (2, 1));
}

#[test]
fn signals_become_messages() {
    let rig = Rig::new();
    let driver = rig.up();
    let signals = rig.signals();
    signals.queue(0);
    signals.queue(2);
    assert_eq!(rig.fabric.take(1), (1, Some(message(1))));
    assert_eq!(rig.fabric.take(3), (1, Some(message(3))));
    // A queue without a vector, and a queue that does not exist.
    signals.queue(1);
    signals.queue(77);
    let [before] = driver.read(driver.common + 21);
    signals.config();
    assert_eq!(
        driver.read(driver.common + 21),
        [before.wrapping_add(1)],
        "the generation"
    );
    assert_eq!(rig.fabric.take(0), (1, Some(message(0))));
    driver.mask(1, true);
    signals.queue(0);
    assert!(driver.is_pending(1));
    driver.mask(1, false);
    assert_eq!(rig.fabric.take(1).0, 1);
    assert_eq!(rig.counters.snapshot().interrupts, [1, 2, 0, 1]);
}

#[test]
fn isr_is_cleared_by_reading() {
    let rig = Rig::new();
    let driver = rig.up();
    driver.set_msix(false, false);
    rig.signals().queue(1);
    rig.signals().config();
    assert_eq!(driver.read(driver.isr), [3]);
    assert_eq!(driver.read(driver.isr), [0]);
}

#[test]
fn notifications_ring_and_exit() {
    let rig = Rig::new();
    let driver = rig.up();
    for (queue, at) in [(0, 0), (2, 1)] {
        assert!(rig.fabric.ring(driver.bell(queue)));
        assert_eq!(rig.kicks(at), 1);
        driver.write(driver.bell(queue), &queue.to_le_bytes());
        assert_eq!(rig.kicks(at), 1);
    }
    assert_eq!(rig.counters.notify_exits.load(Relaxed), 2);
    // Between two notification addresses, and past the last.
    driver.write(driver.notify + 1, &[0]);
    driver.write(driver.notify + 12, &[0]);
    driver.write(driver.notify + 0xfff, &[0]);
    assert_eq!(rig.counters.writes_ignored.load(Relaxed), 3);
}

#[test]
fn bells_follow_the_bar() {
    let rig = Rig::new();
    let driver = rig.driver();
    assert_eq!(rig.fabric.bells(), NONE);
    rig.bring_up(&driver);
    let at = |base: u64| [0, 4, 8].map(|offset| base + 0x3000 + offset);
    let home = driver.bar(2);
    assert_eq!(rig.fabric.bells(), at(home));
    driver.config_write(0x18, &(home + 0x10_0000).to_le_bytes());
    assert_eq!(rig.fabric.bells(), at(home + 0x10_0000));
    driver.config_write(0x18, &0_u64.to_le_bytes());
    assert_eq!(rig.fabric.bells(), NONE, "over RAM");
    driver.config_write(0x18, &home.to_le_bytes());
    driver.config_write(4, &[0b100]);
    assert_eq!(rig.fabric.bells(), NONE, "not decoded");
    driver.config_write(4, &[0b110]);
    assert_eq!(rig.fabric.bells(), at(home));
    driver.reset();
    assert_eq!(rig.fabric.bells(), NONE, "not active");
    rig.bring_up(&driver);
    drop(rig.root);
    assert_eq!(
        (rig.fabric.bells(), rig.fabric.lines()),
        (vec![], 0),
        "all is given back"
    );
}

#[test]
fn a_bell_that_can_not_be_had_is_an_exit() {
    let rig = Rig::new();
    let driver = rig.driver();
    let taken = EventFd::new(0).unwrap();
    Doorbells::connect(&*rig.fabric, driver.bell(2), &taken).unwrap();
    rig.bring_up(&driver);
    assert_eq!(rig.counters.doorbells_failed.load(Relaxed), 1);
    driver.write(driver.bell(2), &[2, 0]);
    assert_eq!(rig.kicks(1), 1);
    driver.reset();
    assert_eq!(
        rig.fabric.bells(),
        [driver.bell(2)],
        "somebody else's is left alone"
    );
}

#[test]
fn one_queue_is_reset() {
    let rig = Rig::new();
    let driver = rig.up();
    let served = || rig.witness.seen().activation.as_ref().unwrap().queues.len();
    let select_and_reset = |queue: u16| {
        driver.write(driver.common + 22, &queue.to_le_bytes());
        driver.write(driver.common + 58, &[1, 0]);
    };
    select_and_reset(1);
    select_and_reset(9);
    assert_eq!(served(), 2, "those are not served");
    select_and_reset(2);
    select_and_reset(2);
    assert_eq!(served(), 1);
    assert_eq!(driver.read(driver.common + 58), [0, 0], "over");
    assert_eq!(driver.read(driver.common + 28), [0, 0], "not enabled");
    assert_eq!(driver.read(driver.common + 24), [16, 0], "the default");
    driver.set_up_queue(2, 16, RINGS, 3);
    assert_eq!(served(), 2);
    rig.signals().queue(2);
    assert_eq!(rig.fabric.take(3).0, 1);
    // Enabled with an invalid size.
    select_and_reset(2);
    driver.set_up_queue(2, 5, RINGS, 3);
    assert_eq!((served(), driver.status()), (1, 0b0100_1111));
    select_and_reset(2);
    driver.reset();
    // Ring reset was not negotiated.
    assert!(driver.negotiate(VERSION_1));
    driver.set_up_queue(0, 16, RINGS, 1);
    assert!(driver.driver_ok());
    select_and_reset(0);
    assert_eq!(served(), 1);
}

#[test]
fn the_device_has_its_own_configuration() {
    let rig = Rig::new();
    let driver = rig.driver();
    driver.write(driver.device + 14, &[1, 2, 3, 4]);
    assert_eq!(driver.read(driver.device + 13), [0, 1, 2, 0, 0]);
    assert_eq!(driver.read(driver.device + 0xffc), [0; 8]);
}

#[test]
fn access_by_configuration_space() {
    let rig = Rig::new();
    let driver = rig.driver();
    let at = driver.access;
    let aim = |bar: u8, offset: u32, len: u32| {
        driver.config_write(at + 4, &[bar]);
        driver.config_write(at + 8, &offset.to_le_bytes());
        driver.config_write(at + 12, &len.to_le_bytes());
    };
    // With memory decoding off, as firmware uses it.
    driver.config_write(4, &[0]);
    aim(2, 20, 1);
    driver.config_write(at + 16, &[1]);
    assert_eq!(driver.config(at + 16), [1, 0, 0, 0], "the status");
    aim(2, 18, 2);
    assert_eq!(driver.config(at + 16), [3, 0], "queues");
    aim(2, 0x3008, 4);
    driver.config_write(at + 16, &[2, 0, 0, 0]);
    assert_eq!(rig.counters.notify_exits.load(Relaxed), 1);
    aim(0, 12, 4);
    assert_eq!(driver.config(at + 16), [1, 0, 0, 0], "a vector is masked");
    let ignored = rig.counters.writes_ignored.load(Relaxed);
    for (bar, offset, len) in [
        (1, 0, 4),
        (3, 0, 4),
        (9, 0, 4),
        (2, 20, 0),
        (2, 20, 3),
        (2, 20, 8),
        (2, 1, 4),
        (2, 0x4000, 4),
        (2, u32::MAX, 1),
        (0, u32::MAX - 3, 4),
    ] {
        aim(bar, offset, len);
        driver.config_write(at + 16, &[7; 4]);
        assert_eq!(driver.config(at + 16), [7; 4], "bytes, no access");
    }
    assert_eq!(rig.counters.writes_ignored.load(Relaxed), ignored);
}

#[test]
fn a_function_level_reset() {
    let rig = Rig::new();
    let driver = rig.up();
    driver.mask(1, true);
    rig.signals().queue(0);
    let home = driver.bar(2);
    let mut at = driver.config::<1>(0x34)[0].into();
    while driver.config(at) != [0x13] {
        at = driver.config::<2>(at)[1].into();
    }
    assert_eq!(driver.config(at + 2), [6, 3]);
    driver.config_write(at + 4, &[1]);
    assert!(!rig.is_active());
    assert_eq!(driver.config(4), [0, 0]);
    assert_eq!(driver.bar(2), 0);
    assert_eq!(driver.config(driver.msix + 2), [3, 0], "MSI-X is off");
    assert_eq!(rig.fabric.bells(), NONE);
    // A driver that saved the BARs restores them.
    driver.config_write(0x10, &0xc000_0000_u32.to_le_bytes());
    driver.config_write(0x18, &home.to_le_bytes());
    let driver = rig.driver();
    assert_eq!(driver.status(), 0);
    assert!(!driver.is_pending(1));
    let driver = rig.up();
    assert_eq!(rig.fabric.take(1).0, 0, "what was pending is void");
    driver.reset();
}
