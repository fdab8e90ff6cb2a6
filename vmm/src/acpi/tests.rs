//! Reads the tables back as a guest does: from the RSDP on, by their bytes.
use super::*;
use crate::{
    layout::{ACPI_TABLES, ECAM, MMIO32, ports},
    memory,
};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const MMIO64: Window = Window {
    start: 4 * GIB,
    size: 64 * GIB,
};

fn written(bytes: u64, config: AcpiConfig) -> GuestMemory {
    let memory = memory::create(bytes).unwrap();
    assert_eq!(write(&memory, &config).unwrap().0, layout::RSDP);
    memory
}

fn bytes_at(memory: &GuestMemory, address: u64, size: usize) -> Vec<u8> {
    let inside = address >= ACPI_TABLES.start && address + size as u64 <= ACPI_TABLES.end();
    assert!(inside, "{address:#x}");
    let mut bytes = vec![0; size];
    memory
        .read_slice(&mut bytes, GuestAddress(address))
        .unwrap();
    bytes
}

fn sum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
}

fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes(bytes[offset..offset + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    u64::from_le_bytes(bytes[offset..offset + 8].try_into().unwrap())
}

/// Returns a whole table, after a check of its checksum.
fn table(memory: &GuestMemory, address: u64) -> Vec<u8> {
    let length = u32_at(&bytes_at(memory, address, 36), 4) as usize;
    let bytes = bytes_at(memory, address, length);
    assert_eq!(sum(&bytes), 0, "{:?}", str::from_utf8(&bytes[..4]));
    assert_eq!(bytes[10..24], *b"SLIPGTSLIPGATE");
    bytes
}

/// Returns the tables of the XSDT, and the DSDT, by signature.
fn tables(memory: &GuestMemory) -> Vec<(String, Vec<u8>)> {
    let rsdp = bytes_at(memory, layout::RSDP, 36);
    assert_eq!(rsdp[..8], *b"RSD PTR ");
    assert_eq!((sum(&rsdp[..20]), sum(&rsdp), rsdp[15]), (0, 0, 2));
    let root = table(memory, u64_at(&rsdp, 24));
    assert_eq!(root[..4], *b"XSDT");
    let mut found: Vec<_> = root[36..]
        .chunks_exact(8)
        .map(|pointer| table(memory, u64_at(pointer, 0)))
        .collect();
    let fadt = &found[0];
    found.push(table(memory, u64_at(fadt, 140)));
    found
        .into_iter()
        .map(|bytes| (str::from_utf8(&bytes[..4]).unwrap().to_owned(), bytes))
        .collect()
}

fn named(memory: &GuestMemory, signature: &str) -> Vec<u8> {
    let all = tables(memory);
    all.into_iter()
        .find(|(name, _)| name == signature)
        .unwrap()
        .1
}

#[test]
fn all_tables_are_found_from_the_rsdp() {
    for bytes in [64 * MIB, 3 * GIB, 3 * GIB + layout::PAGE_SIZE, 8 * GIB] {
        for cpus in [1, 2, layout::MAX_CPUS] {
            let mmio64 = layout::mmio64(bytes, 40);
            let memory = written(bytes, AcpiConfig { cpus, mmio64 });
            let found = tables(&memory);
            let names: Vec<&str> = found.iter().map(|(name, _)| &name[..]).collect();
            assert_eq!(names, ["FACP", "APIC", "MCFG", "DSDT"]);
        }
    }
}

#[test]
fn a_machine_of_no_or_too_many_cpus_is_refused() {
    let memory = memory::create(64 * MIB).unwrap();
    for cpus in [0, layout::MAX_CPUS + 1, 255] {
        let config = AcpiConfig { cpus, mmio64: None };
        let refused = write(&memory, &config).unwrap_err();
        assert_eq!(refused.to_string(), format!("{cpus} CPUs: give 1 to 32"));
    }
}

#[test]
fn the_machine_is_hardware_reduced_and_says_how_it_ends() {
    let memory = written(
        64 * MIB,
        AcpiConfig {
            cpus: 1,
            mmio64: None,
        },
    );
    let fadt = named(&memory, "FACP");
    // ACPI 6.5, table 5.9.
    let flags = u32_at(&fadt, 112);
    assert_eq!(flags >> 20 & 1, 1, "HW_REDUCED_ACPI");
    assert_eq!(flags >> 10 & 1, 1, "RESET_REG_SUP");
    assert_eq!(
        fadt[109..111],
        [0x24, 0],
        "IAPC_BOOT_ARCH: no keyboard, no VGA, no CMOS clock"
    );
    let register = |offset: usize| {
        let place = &fadt[offset..offset + 12];
        // System I/O, 8 bits at offset 0, byte access.
        assert_eq!(place[..4], [1, 8, 0, 1]);
        u64_at(place, 4)
    };
    assert_eq!((register(116), fadt[128]), (0x64, 0xFE));
    assert_eq!((register(244), register(256)), (0x600, 0x601));
    assert_eq!(layout::POWER_OFF, 0x34);
    // The PM timer, 32 bits of system I/O by dwords.
    assert_eq!(fadt[208..212], [1, 32, 0, 3]);
    assert_eq!(u64_at(&fadt, 212), 0x608);
    assert_eq!(flags >> 8 & 1, 1, "TMR_VAL_EXT");
    // No event or control block, no FACS, and only the wide pointer to the DSDT.
    let others = fadt[148..208].iter().chain(&fadt[220..244]);
    assert!(others.copied().all(|byte| byte == 0));
    assert_eq!(
        (u32_at(&fadt, 36), u32_at(&fadt, 40), fadt.len()),
        (0, 0, 276)
    );
}

#[test]
fn every_cpu_has_its_apic_and_the_io_apic_another_id() {
    for cpus in [1, 2, 32] {
        let memory = written(64 * MIB, AcpiConfig { cpus, mmio64: None });
        let madt = named(&memory, "APIC");
        assert_eq!(u32_at(&madt, 36), 0xFEE0_0000);
        let (apics, io_apic) = madt[44..].split_at(8 * usize::from(cpus));
        for (cpu, entry) in (0u8..).zip(apics.chunks_exact(8)) {
            assert_eq!(entry, [0, 8, cpu, cpu, 1, 0, 0, 0]);
        }
        assert_eq!(io_apic[..4], [1, 12, cpus, 0]);
        assert_eq!((u32_at(io_apic, 4), u32_at(io_apic, 8)), (0xFEC0_0000, 0));
        assert_eq!(io_apic.len(), 12);
    }
}

#[test]
fn mcfg_names_ecam() {
    let memory = written(
        64 * MIB,
        AcpiConfig {
            cpus: 1,
            mmio64: None,
        },
    );
    let mcfg = named(&memory, "MCFG");
    assert_eq!(mcfg.len(), 44 + 16);
    assert_eq!(u64_at(&mcfg, 44), 0xE000_0000);
    // Segment 0, bus 0 to 0.
    assert_eq!(mcfg[52..60], [0; 8]);
    assert_eq!(ECAM.size, 1 << 20);
}

/// Resource descriptor (ACPI 6.5, 6.4), of the kinds that the DSDT has.
#[derive(Debug, PartialEq)]
enum Resource {
    /// Type (0 memory, 1 I/O, 2 bus), first, last.
    Range(u8, u64, u64),
    Ports(u16, u8),
    Fixed(u32, u32),
    Interrupt(u8, u32),
}

/// Returns the `_CRS` buffers of an AML block, in order.
fn resources(aml: &[u8]) -> Vec<Vec<Resource>> {
    let name = b"\x08_CRS\x11";
    let found = aml.windows(name.len()).enumerate();
    found
        .filter(|(_, window)| window == name)
        .map(|(at, _)| template(&aml[at + name.len()..]))
        .collect()
}

/// Parses PkgLength, buffer size (one byte or two), and descriptors up to the end tag.
fn template(buffer: &[u8]) -> Vec<Resource> {
    let length_bytes = 1 + usize::from(buffer[0] >> 6);
    let mut rest = match buffer[length_bytes] {
        0x0A => &buffer[length_bytes + 2..],
        0x0B => &buffer[length_bytes + 3..],
        other => panic!("buffer size with prefix {other:#x}"),
    };
    let mut found = Vec::new();
    loop {
        let u16_at = |offset| u16::from_le_bytes([rest[offset], rest[offset + 1]]);
        let (resource, length) = match rest[0] {
            0x79 => return found,
            0x47 => {
                assert_eq!(u16_at(2), u16_at(4), "at one place");
                (Resource::Ports(u16_at(2), rest[7]), 8)
            }
            0x86 => (Resource::Fixed(u32_at(rest, 4), u32_at(rest, 8)), 12),
            0x89 => (Resource::Interrupt(rest[3], u32_at(rest, 5)), 9),
            0x88 => {
                let range = Resource::Range(rest[3], u16_at(8).into(), u16_at(10).into());
                assert_eq!(u16_at(14), u16_at(10) - u16_at(8) + 1, "length");
                (range, 16)
            }
            0x87 => {
                let (first, last) = (u32_at(rest, 10), u32_at(rest, 14));
                assert_eq!(u32_at(rest, 22), last - first + 1, "length");
                (Resource::Range(rest[3], first.into(), last.into()), 26)
            }
            0x8A => {
                let (first, last) = (u64_at(rest, 14), u64_at(rest, 22));
                assert_eq!(u64_at(rest, 38), last - first + 1, "length");
                (Resource::Range(rest[3], first, last), 46)
            }
            other => panic!("descriptor {other:#x}"),
        };
        found.push(resource);
        rest = &rest[length..];
    }
}

#[test]
fn the_dsdt_says_which_windows_and_devices_there_are() {
    use Resource::*;
    for mmio64 in [None, Some(MMIO64)] {
        let memory = written(64 * MIB, AcpiConfig { cpus: 2, mmio64 });
        let dsdt = named(&memory, "DSDT");
        assert_eq!(dsdt[8], 2, "revision: 64-bit integers");
        let mut pci = vec![
            Range(2, 0, 0),
            Ports(0xCF8, 8),
            Range(1, 0, 0xCF7),
            Range(1, 0xD00, 0xFFFF),
            Range(0, MMIO32.start, MMIO32.end() - 1),
        ];
        pci.extend(mmio64.map(|w| Range(0, w.start, w.end() - 1)));
        let board = vec![
            Fixed(ECAM.start as u32, ECAM.size as u32),
            Ports(ports::SLEEP_CONTROL, 2),
            Ports(ports::PM_TIMER, 4),
        ];
        // Edge-triggered, active high, not shared, consumed.
        let serial = vec![Ports(0x3F8, 8), Interrupt(3, 4)];
        let events = vec![Interrupt(3, 5)];
        assert_eq!(resources(&dsdt[36..]), [pci, board, serial, events]);
        // ADDR is a package of two: the low half of the address, and 0.
        let address = b"\x08ADDR\x12\x08\x02\x0C\x00\xF0\x0F\x00\x00";
        assert!(dsdt.windows(address.len()).any(|window| window == address));
        // Notify (\_SB_.VGEN, 0x80).
        let notify = b"\x86\x5C\x2E_SB_VGEN\x0A\x80";
        assert!(dsdt.windows(notify.len()).any(|window| window == notify));
        // _S5 is a package of two: sleep type 5, and 0.
        let s5 = b"\x08_S5_\x12\x05\x02\x0A\x05\x00";
        assert!(dsdt.windows(s5.len()).any(|window| window == s5));
    }
}
