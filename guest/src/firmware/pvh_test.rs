use super::{super::test_memory::TestMemory, *};

const START: u64 = 0x6000;
const MAP: u64 = 0x6100;
const COMMAND_LINE: u64 = 0x7000;
const FLOOR: u64 = 0x20_0000;

fn machine(map: &[(u64, u64, u64)]) -> TestMemory {
    let mut memory = TestMemory::new(START, 0x4000);
    memory.put(START, &0x336E_C578_u32.to_le_bytes());
    memory.put(START + 4, &1_u32.to_le_bytes());
    memory.put(START + 24, &COMMAND_LINE.to_le_bytes());
    memory.put(START + 32, &0xE_0000_u64.to_le_bytes());
    memory.put(START + 40, &MAP.to_le_bytes());
    memory.put(START + 48, &(map.len() as u32).to_le_bytes());
    for (at, (start, length, kind)) in (MAP..).step_by(24).zip(map) {
        memory.put(at, &start.to_le_bytes());
        memory.put(at + 8, &length.to_le_bytes());
        memory.put(at + 16, &kind.to_le_bytes());
    }
    memory.put(COMMAND_LINE, b"dns example.test; selftest\0");
    memory
}

#[test]
fn the_heap_is_the_largest_memory_between_image_and_3_gib() {
    let memory = machine(&[
        (0, 0x9_F000, RAM),
        (0x10_0000, 0x8000_0000, RAM),
        (0xC000_0000, 0x4000_0000, 2),
        (1 << 32, 0x2_0000_0000, RAM),
    ]);
    let info = read(&memory, START, FLOOR).unwrap();
    assert_eq!(info.command_line, "dns example.test; selftest");
    assert_eq!(info.rsdp, 0xE_0000);
    assert_eq!(info.heap, (FLOOR, 0x8010_0000 - FLOOR));
}

#[test]
fn memory_that_reaches_over_3_gib_is_cut_there() {
    let memory = machine(&[(0x10_0000, u64::MAX, RAM)]);
    assert_eq!(
        read(&memory, START, FLOOR).unwrap().heap,
        (FLOOR, 0xC000_0000 - FLOOR)
    );
}

#[test]
fn what_can_not_be_read_is_said() {
    let good = [(0x10_0000, 0x1000_0000, RAM)];
    let mut memory = machine(&good);
    memory.put(START, &[0]);
    assert!(read(&memory, START, FLOOR).unwrap_err().contains("magic"));

    let mut memory = machine(&good);
    memory.put(START + 4, &[0]);
    assert!(
        read(&memory, START, FLOOR)
            .unwrap_err()
            .contains("version 0")
    );

    assert!(
        read(&machine(&[]), START, FLOOR)
            .unwrap_err()
            .contains("no memory")
    );
    assert!(
        read(&machine(&[(0, 0x10_0000, RAM)]), START, FLOOR)
            .unwrap_err()
            .contains("no memory")
    );

    let mut memory = machine(&good);
    memory.put(COMMAND_LINE, &[b'x'; 4096]);
    assert!(read(&memory, START, FLOOR).unwrap_err().contains("no end"));

    let mut memory = machine(&good);
    memory.put(COMMAND_LINE, &[0xFF]);
    assert!(read(&memory, START, FLOOR).unwrap_err().contains("UTF-8"));
}
