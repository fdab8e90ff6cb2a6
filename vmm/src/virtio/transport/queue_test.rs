use super::*;

const LEN: usize = 0x10000;

fn memory() -> GuestMemory {
    // Two regions with a hole between them.
    let ranges = [(GuestAddress(0), LEN), (GuestAddress(0x10_0000), LEN)];
    GuestMemory::from_ranges(&ranges).unwrap()
}

fn registers(size: u16, descriptors: u64, driver: u64, device: u64) -> QueueRegisters {
    QueueRegisters {
        size,
        descriptors,
        driver,
        device,
        ..QueueRegisters::new(256)
    }
}

#[test]
fn a_good_queue() {
    // Each part ends where its region does.
    let end = LEN as u64;
    let good = registers(4, end - 64, 0x10_0000 + end - 14, end - 64 - 40);
    let queue = good.build(&memory(), true).unwrap();
    assert!(queue.is_valid(&memory()) && queue.event_idx_enabled());
    assert_eq!((queue.size(), queue.desc_table()), (4, end - 64));
    assert_eq!(
        (queue.avail_ring(), queue.used_ring()),
        (good.driver, good.device)
    );
}

#[test]
fn sizes() {
    for size in [0, 3, 255, 512, 0xffff] {
        let built = registers(size, 0, 0x4000, 0x8000).build(&memory(), false);
        assert_eq!(built.unwrap_err(), QueueError::Size(size));
    }
    for size in [1, 2, 256] {
        assert!(
            registers(size, 0, 0x4000, 0x8000)
                .build(&memory(), false)
                .is_ok()
        );
    }
}

#[test]
fn addresses() {
    let end = LEN as u64;
    // Addresses of the descriptor table that are outside memory.
    let outside = [
        end - 63 + 15,
        end,
        0x10_0000 - 16,
        1 << 63,
        u64::MAX - 15,
        u64::MAX - 63,
    ];
    for address in outside.map(|address| address & !15) {
        let error = registers(4, address, 0, 0)
            .build(&memory(), false)
            .unwrap_err();
        assert_eq!(
            error,
            QueueError::Outside {
                ring: "descriptor table",
                address,
                len: 64
            }
        );
    }
    for (driver, device, ring) in [
        (end - 12, 0, "available ring"),
        (u64::MAX - 1, 0, "available ring"),
        (0, end - 36, "used ring"),
    ] {
        let error = registers(4, 0, driver, device)
            .build(&memory(), false)
            .unwrap_err();
        assert!(matches!(error, QueueError::Outside { ring: found, .. } if found == ring));
    }
    for (descriptors, driver, device) in [(8, 0, 0), (0, 1, 0), (0, 0, 2), (u64::MAX, 0, 0)] {
        let error = registers(4, descriptors, driver, device).build(&memory(), false);
        assert!(matches!(error, Err(QueueError::Alignment { .. })));
    }
}
