use super::{super::test_memory::TestMemory, *};

const ROOT: u64 = 0xE_0040;
const SYSTEM_TABLE: u64 = 0xE_0100;
const MADT: u64 = 0xE_0200;
const MCFG: u64 = 0xE_0400;
const FADT: u64 = 0xE_0500;
const DSDT: u64 = 0xE_0700;

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
    let addresses: Vec<u8> = [MADT, MCFG, FADT]
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

/// Adds a FADT of `length` bytes with these fields (offset and value), and a DSDT.
fn with_fadt(length: usize, fields: &[(u64, &[u8])], aml: &[u8]) -> TestMemory {
    let mut memory = machine(8, &[local_apic(0, 1)]);
    table(&mut memory, FADT, b"FACP", &vec![0; length - 36]);
    for (offset, value) in fields {
        memory.put(FADT + offset, value);
    }
    table(&mut memory, DSDT, b"DSDT", aml);
    memory
}

fn power_off_of(length: usize, fields: &[(u64, &[u8])], aml: &[u8]) -> Option<(Register, u16)> {
    let tables = read(&with_fadt(length, fields, aml), ROOT).unwrap();
    tables.power_off.map(|off| (off.register, off.value))
}

const HARDWARE_REDUCED: (u64, &[u8]) = (112, &(1_u32 << 20).to_le_bytes());
const NARROW_DSDT: (u64, &[u8]) = (40, &(DSDT as u32).to_le_bytes());
const WIDE_DSDT: (u64, &[u8]) = (140, &DSDT.to_le_bytes());
/// Name(_S5_, Package(2) {5, 0}), behind another object.
const TYPE_5: &[u8] = b"\x08_S4_\x0A\x04\x08_S5_\x12\x05\x02\x0A\x05\x00";
/// The same with four zeroes, and a length of two bytes.
const TYPE_0: &[u8] = b"\x08_S5_\x12\x47\x00\x04\x00\x00\x00\x00";

#[test]
fn a_hardware_reduced_machine_is_powered_off_by_its_sleep_register() {
    let port: (u64, &[u8]) = (244, &[1, 8, 0, 1, 0xC0, 3, 0, 0, 0, 0, 0, 0]);
    let fields = [HARDWARE_REDUCED, WIDE_DSDT, port];
    let off = Some((Register::SleepPort(0x3C0), 0x34));
    assert_eq!(power_off_of(276, &fields, TYPE_5), off);
    let memory: (u64, &[u8]) = (244, &[0, 8, 0, 1, 0, 2, 0xA0, 0xFE, 0, 0, 0, 0]);
    let fields = [HARDWARE_REDUCED, NARROW_DSDT, memory];
    let off = Some((Register::SleepMemory(0xFEA0_0200), 0x34));
    assert_eq!(power_off_of(276, &fields, TYPE_5), off);
}

#[test]
fn an_older_machine_is_powered_off_by_its_control_block() {
    let block: (u64, &[u8]) = (64, &0x604_u32.to_le_bytes());
    let off = |sleep_type: u16| Some((Register::Pm1Control(0x604), sleep_type << 10 | 0x2000));
    // A FADT of revision 1 ends before the wide pointers.
    assert_eq!(power_off_of(116, &[NARROW_DSDT, block], TYPE_0), off(0));
    assert_eq!(power_off_of(276, &[WIDE_DSDT, block], TYPE_5), off(5));
}

#[test]
fn a_machine_that_does_not_say_how_it_is_powered_off_is_still_read() {
    let port: (u64, &[u8]) = (244, &[1, 8, 0, 1, 0, 6, 0, 0, 0, 0, 0, 0]);
    let whole = [HARDWARE_REDUCED, WIDE_DSDT, port];
    assert!(power_off_of(276, &whole, TYPE_5).is_some());
    assert_eq!(
        power_off_of(276, &whole, b"\x08_S3_\x0A\x01"),
        None,
        "no S5"
    );
    for cut in 0..TYPE_5.len() - 1 {
        assert_eq!(power_off_of(276, &whole, &TYPE_5[..cut]), None, "{cut}");
    }
    let no_register = [HARDWARE_REDUCED, WIDE_DSDT];
    assert_eq!(power_off_of(276, &no_register, TYPE_5), None);
    let elsewhere: (u64, &[u8]) = (244, &[2, 8, 0, 1, 0, 6, 0, 0, 0, 0, 0, 0]);
    let in_pci = [HARDWARE_REDUCED, WIDE_DSDT, elsewhere];
    assert_eq!(power_off_of(276, &in_pci, TYPE_5), None);
    assert_eq!(power_off_of(200, &whole, TYPE_5), None, "a short table");
    let mut memory = with_fadt(276, &whole, TYPE_5);
    memory.put(DSDT + 4, &u32::MAX.to_le_bytes());
    let tables = read(&memory, ROOT).unwrap();
    assert_eq!((tables.power_off, tables.apic_ids()), (None, &[0][..]));
}

#[test]
fn the_generation_id_is_where_its_device_says() {
    let id_of = |aml: &[u8]| {
        let memory = with_fadt(276, &[HARDWARE_REDUCED, WIDE_DSDT], aml);
        read(&memory, ROOT).unwrap().generation_id
    };
    // Another device has a package of this name too.
    let other = b"\x08ADDR\x12\x06\x02\x0C\x01\x02\x03\x04\x00";
    let device = b"\x08_CID\x0DVM_Gen_Counter\x00\x08_DDN\x0DVM_Gen_Counter\x00";
    let package = b"\x08ADDR\x12\x08\x02\x0C\x00\xF0\x0F\x00\x01";
    let aml = [&other[..], device, package].concat();
    assert_eq!(id_of(&aml), Some(0x1_000F_F000));
    for cut in 0..aml.len() {
        assert_eq!(id_of(&aml[..cut]), None, "{cut}");
    }
    let method = b"\x14\x06ADDR\x00\xA4\x00";
    assert_eq!(id_of(&[&other[..], device, method].concat()), None);
}
