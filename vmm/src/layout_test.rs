use super::*;

#[test]
fn ram_goes_around_the_hole() {
    const GIB: u64 = 1 << 30;
    let window = |start, size| Window { start, size };
    assert_eq!(ram(64 << 20), [window(0, 64 << 20)]);
    assert_eq!(ram(3 * GIB), [window(0, 3 * GIB)]);
    assert_eq!(
        ram(3 * GIB + PAGE_SIZE),
        [window(0, 3 * GIB), window(4 * GIB, PAGE_SIZE)]
    );
    assert_eq!(ram(8 * GIB), [window(0, 3 * GIB), window(4 * GIB, 5 * GIB)]);
}

#[test]
fn large_bars_go_above_ram_and_within_the_address_bits() {
    const GIB: u64 = 1 << 30;
    let window = |start, size| Some(Window { start, size });
    assert_eq!(mmio64(64 << 20, 40), window(4 * GIB, 64 * GIB));
    assert_eq!(mmio64(3 * GIB + PAGE_SIZE, 40), window(5 * GIB, 64 * GIB));
    assert_eq!(mmio64(8 * GIB, 36), window(9 * GIB, 55 * GIB));
    assert_eq!(mmio64(63 * GIB, 36), None);
    assert_eq!(mmio64(64 << 20, 32), None);
    assert_eq!(mmio64(u64::MAX, 52), None);
}

#[test]
fn nothing_lies_on_something_else() {
    let low = [
        Window {
            start: GDT,
            size: 0x100,
        },
        START_INFO,
        ZERO_PAGE,
        PAGE_TABLES,
        COMMAND_LINE,
        Window {
            start: BASE_RAM_END,
            size: 0xA_0000 - BASE_RAM_END,
        },
        ACPI_TABLES,
        GENERATION_ID,
        Window {
            start: KERNEL_MIN,
            size: LOW_RAM_LIMIT - KERNEL_MIN,
        },
        MMIO32,
        ECAM,
        Window {
            start: IO_APIC.into(),
            size: PAGE_SIZE,
        },
        Window {
            start: LOCAL_APIC.into(),
            size: 1 << 20,
        },
        Window {
            start: KVM_IDENTITY_MAP,
            size: PAGE_SIZE,
        },
        Window {
            start: KVM_TSS,
            size: 3 * PAGE_SIZE,
        },
        Window {
            start: HIGH_RAM_START,
            size: 1 << 40,
        },
    ];
    for pair in low.windows(2) {
        assert!(pair[0].end() <= pair[1].start, "{pair:x?}");
        assert!(!pair[0].overlaps(&pair[1]) && !pair[1].overlaps(&pair[0]));
    }
}

#[test]
fn ram_lies_within_the_address_bits() {
    const GIB: u64 = 1 << 30;
    // The hole takes one GiB of the 64 that 36 bits reach.
    assert!(is_reached(63 * GIB, 36) && !is_reached(64 * GIB, 36));
    assert!(is_reached(512 * GIB, 40) && !is_reached(512 * GIB, 39));
    assert!(is_reached(GIB, 32) && is_reached(1 << 50, 64));
}
