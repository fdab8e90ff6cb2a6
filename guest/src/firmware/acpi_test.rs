use super::{super::test_memory::TestMemory, *};

const ROOT: u64 = 0xE_0040;
const SYSTEM_TABLE: u64 = 0xE_0100;
const MADT: u64 = 0xE_0200;
const MCFG: u64 = 0xE_0400;

fn table(memory: &mut TestMemory, at: u64, signature: &[u8], body: &[u8]) {
    memory.put(at, signature);
    memory.put(at + 4, &(36 + body.len() as u32).to_le_bytes());
    memory.put(at + 36, body);
}

fn local_apic(id: u8, flags: u32) -> Vec<u8> {
    [&[0, 8, id, id][..], &flags.to_le_bytes()].concat()
}

fn local_x2apic(id: u32, flags: u32) -> Vec<u8> {
    [
        &[9, 16, 0, 0][..],
        &id.to_le_bytes(),
        &flags.to_le_bytes(),
        &[0; 4],
    ]
    .concat()
}

fn machine(width: usize, entries: &[Vec<u8>]) -> TestMemory {
    let mut memory = TestMemory::new(0xE_0000, 0x2_0000);
    memory.put(ROOT, b"RSD PTR ");
    let addresses: Vec<u8> = [MADT, MCFG]
        .iter()
        .flat_map(|at| at.to_le_bytes()[..width].to_vec())
        .collect();
    if width == 8 {
        memory.put(ROOT + 15, &[2]);
        memory.put(ROOT + 24, &SYSTEM_TABLE.to_le_bytes());
        table(&mut memory, SYSTEM_TABLE, b"XSDT", &addresses);
    } else {
        memory.put(ROOT + 16, &(SYSTEM_TABLE as u32).to_le_bytes());
        table(&mut memory, SYSTEM_TABLE, b"RSDT", &addresses);
    }
    table(
        &mut memory,
        MADT,
        b"APIC",
        &[&[0; 8][..], &entries.concat()].concat(),
    );
    let ecam = [&[0; 8][..], &0xE000_0000_u64.to_le_bytes(), &[0; 8]].concat();
    table(&mut memory, MCFG, b"MCFG", &ecam);
    memory
}

#[test]
fn both_kinds_of_root_table_name_the_cpus_and_the_configuration_space() {
    let entries = [
        local_apic(0, 1),
        vec![1, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], // an I/O APIC
        local_apic(2, 1),
        local_apic(3, 0), // not there
        local_x2apic(300, 1),
    ];
    for width in [4, 8] {
        let tables = read(&machine(width, &entries), ROOT).unwrap();
        assert_eq!(tables.apic_ids(), [0, 2, 300]);
        assert_eq!(tables.ecam, Some(0xE000_0000));
    }
}

#[test]
fn the_root_is_found_where_a_pc_has_it() {
    let tables = read(&machine(8, &[local_apic(7, 1)]), 0).unwrap();
    assert_eq!(tables.apic_ids(), [7]);
}

#[test]
fn more_cpus_than_we_start_are_left_out() {
    let entries: Vec<_> = (0..40).map(|id| local_apic(id, 1)).collect();
    let memory = machine(4, &entries);
    assert_eq!(read(&memory, ROOT).unwrap().apic_ids().len(), CPU_LIMIT);
}

#[test]
fn broken_tables_are_refused() {
    assert!(read(&TestMemory::new(0xE_0000, 0x2_0000), 0).is_err());
    assert!(read(&machine(8, &[]), ROOT + 16).is_err());
    assert!(
        read(&machine(8, &[vec![0, 0, 0, 0]]), ROOT)
            .unwrap_err()
            .contains("length")
    );
    let mut memory = machine(8, &[local_apic(0, 1)]);
    memory.put(MADT + 4, &u32::MAX.to_le_bytes());
    assert!(read(&memory, ROOT).unwrap_err().contains("outside memory"));
    let mut memory = machine(8, &[local_apic(0, 1)]);
    memory.put(SYSTEM_TABLE + 36, &u64::MAX.to_le_bytes());
    assert!(
        read(&memory, ROOT).is_ok(),
        "a table that can't be read has no name that we look for"
    );
}
