//! Actions that a driver may not take, and their results.
use super::*;

#[test]
fn features_that_do_not_agree() {
    let rig = Rig::new();
    let driver = rig.driver();
    // Not offered; without VERSION_1; one without another that it needs.
    for features in [
        VERSION_1 | 8,
        FEATURES,
        VERSION_1 | 0b10,
        VERSION_1 | 1 << 63,
    ] {
        assert!(!driver.negotiate(features), "{features:#x}");
        assert_eq!(driver.status(), 3);
        assert!(!driver.driver_ok(), "DRIVER_OK needs FEATURES_OK");
        assert_eq!(driver.status(), 3);
    }
    let counters = rig.counters.snapshot();
    assert_eq!((counters.features_refused, counters.status_refused), (4, 4));
    assert!(driver.negotiate(VERSION_1));
    driver.write(driver.common + 12, &[0xff; 4]);
    assert_eq!(driver.read(driver.common + 12), [1, 0, 0, 0], "settled");
    // Feature windows that do not exist.
    driver.reset();
    driver.write(driver.common + 8, &[2, 0, 0, 0]);
    driver.write(driver.common + 12, &[0xff; 4]);
    driver.write(driver.common, &[2, 0, 0, 0]);
    assert_eq!(driver.read(driver.common + 4), [0; 4]);
    assert_eq!(driver.read(driver.common + 12), [0; 4]);
}

#[test]
fn the_status_goes_step_by_step() {
    let rig = Rig::new();
    let driver = rig.driver();
    assert_eq!(driver.add_status(2), 0, "not before ACKNOWLEDGE");
    assert_eq!(driver.add_status(1), 1);
    driver.write(driver.common + 20, &[2]);
    assert_eq!(driver.status(), 3, "a bit is not cleared by a write");
    assert_eq!(driver.add_status(0x40 | 0x30), 3, "not the driver's bits");
    assert_eq!(driver.add_status(128), 131, "FAILED");
    driver.reset();
    driver.write(driver.common + 8, &[1, 0, 0, 0]);
    driver.write(driver.common + 12, &[1, 0, 0, 0]);
    assert_eq!(driver.add_status(15), 15, "all at once");
    assert!(rig.is_active());
}

#[test]
fn queues_that_can_not_be() {
    let rig = Rig::new();
    let driver = rig.up();
    let bad = [
        (0, RINGS),
        (3, RINGS),
        (512, RINGS),
        (256, [0x1008, 0x2000, 0x3000]),
        (256, [0x1000, 0x2001, 0x3000]),
        (256, [0x1000, 0x2000, 0x3002]),
        (256, [0xf010, 0x2000, 0x3000]),
        (256, [u64::MAX - 15, 0x2000, 0x3000]),
        (256, [0x1000, 1 << 40, 0x3000]),
    ];
    for (count, (size, rings)) in (1..).zip(bad) {
        assert!(driver.negotiate(VERSION_1));
        driver.set_config_vector(CONFIG);
        driver.set_up_queue(0, 16, RINGS, 1);
        driver.set_up_queue(1, size, rings, 2);
        assert!(!driver.driver_ok(), "{size} {rings:x?}");
        assert_eq!(driver.status(), 0b0100_1111, "DEVICE_NEEDS_RESET");
        assert!(!rig.is_active());
        assert_eq!(rig.fabric.take(0).0, 1, "the driver is told");
        let counters = rig.counters.snapshot();
        assert_eq!((counters.bad_queues, counters.needs_reset), (count, count));
    }
    rig.bring_up(&driver);
}

#[test]
fn a_device_that_refuses() {
    let rig = Rig::new();
    let driver = rig.driver();
    assert!(driver.negotiate(VERSION_1));
    rig.witness.seen().refuse = true;
    assert!(!driver.driver_ok());
    assert!(!rig.is_active());
    rig.bring_up(&driver);
    rig.signals().needs_reset();
    rig.signals().needs_reset();
    assert_eq!(driver.status(), 0b0100_1111);
    assert!(rig.is_active(), "until the driver resets it");
    driver.reset();
    assert_eq!(rig.counters.needs_reset.load(Relaxed), 2);
}

#[test]
fn without_bus_mastering_there_is_neither_dma_nor_msi() {
    let rig = Rig::new();
    let driver = rig.up();
    let signals = rig.signals();
    driver.config_write(4, &[0b010]);
    assert!(!rig.is_active());
    assert_eq!(driver.status(), 0b0100_1111);
    assert!(driver.is_pending(0), "the driver is told once it may be");
    signals.queue(0);
    assert_eq!((rig.fabric.take(0).0, rig.fabric.take(1).0), (0, 0));
    driver.config_write(4, &[0b110]);
    assert_eq!((rig.fabric.take(0).0, rig.fabric.take(1).0), (1, 1));
    driver.config_write(4, &[0b010]);
    assert!(driver.negotiate(VERSION_1));
    assert!(!driver.driver_ok());
    driver.config_write(4, &[0b110]);
    rig.bring_up(&driver);
}

#[test]
fn an_enabled_queue_stays_as_it_is() {
    let rig = Rig::new();
    let driver = rig.driver();
    assert!(driver.negotiate(VERSION_1));
    driver.set_up_queue(0, 64, RINGS, 1);
    for (at, bytes) in [
        (24, vec![1, 0]),
        (28, vec![0, 0]),
        (32, vec![0; 4]),
        (52, vec![0; 4]),
    ] {
        driver.write(driver.common + at, &bytes);
    }
    assert_eq!(driver.read(driver.common + 24), [64, 0]);
    assert_eq!(driver.read(driver.common + 28), [1, 0]);
    assert_eq!(driver.read(driver.common + 32), RINGS[0].to_le_bytes());
    assert!(driver.driver_ok());
    driver.set_up_queue(1, 64, RINGS, 2);
    assert_eq!(
        driver.read(driver.common + 28),
        [0, 0],
        "too late for another"
    );
    assert_eq!(
        rig.witness.seen().activation.as_ref().unwrap().queues.len(),
        1
    );
    driver.reset();
    driver.write(driver.common + 22, &[0, 0]);
    let registers: [u8; 28] = driver.read(driver.common + 24);
    assert_eq!(
        registers[..8],
        [0, 1, 0xff, 0xff, 0, 0, 0, 0],
        "as at power-on"
    );
    assert_eq!(registers[8..], [0; 20]);
}

#[test]
fn queues_and_vectors_that_do_not_exist() {
    let rig = Rig::new();
    let driver = rig.driver();
    driver.write(driver.common + 22, &[3, 0]);
    driver.write(driver.common + 24, &[8, 0]);
    driver.write(driver.common + 28, &[1, 0]);
    assert_eq!(driver.read(driver.common + 24), [0; 36]);
    driver.write(driver.common + 22, &[0, 0]);
    for (vector, taken) in [(3_u16, 3_u16), (4, 0xffff), (2, 2), (0xffff, 0xffff)] {
        for register in [16, 26] {
            driver.write(driver.common + register, &vector.to_le_bytes());
            assert_eq!(driver.read(driver.common + register), taken.to_le_bytes());
        }
    }
}

#[test]
fn only_natural_widths_are_written() {
    let rig = Rig::new();
    let driver = rig.driver();
    let before: [u8; 60] = driver.read(driver.common);
    for (at, len) in [
        (0, 2),
        (1, 4),
        (20, 2),
        (22, 4),
        (24, 1),
        (33, 4),
        (56, 2),
        (60, 4),
        (4, 4),
    ] {
        driver.write(driver.common + at, &vec![1; len]);
        assert_eq!(
            driver.read::<60>(driver.common),
            before,
            "{len} bytes at {at}"
        );
    }
    assert_eq!(rig.counters.writes_ignored.load(Relaxed), 9);
    driver.write(driver.common + 40, &0x1122_3344_5566_7788_u64.to_le_bytes());
    assert_eq!(driver.read(driver.common + 44), [0x44, 0x33, 0x22, 0x11]);
}

#[test]
fn devices_that_can_not_be() {
    let memory = Arc::new(GuestMemory::from_ranges(&[(GuestAddress(0), 4096)]).unwrap());
    let fabric: Arc<Fabric> = Arc::default();
    for sizes in [&[3][..], &[0], &[1; 1025], &[16, 0x8001]] {
        let (device, _) = Device::new(sizes, 0);
        let made = VirtioPci::new(
            Box::new(device),
            memory.clone(),
            fabric.clone(),
            fabric.clone(),
        );
        assert!(matches!(made, Err(TransportError::Queues(found)) if found == sizes));
    }
    let (device, _) = Device::new(&[2; 1024], 0);
    let most = VirtioPci::new(Box::new(device), memory, fabric.clone(), fabric.clone());
    assert_eq!(fabric.lines(), 1025);
    drop(most);
}
