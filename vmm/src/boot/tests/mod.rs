//! Loading of kernels: addresses, structures handed over, and refusals.
mod hostile;
mod images;

use std::{
    fs::File,
    io::{Seek, Write},
};

use images::{CODE, ELF_AT, ELF_MEMORY, bzimage, elf, note, pvh_elf, pvh_note, setup};
use linux_loader::{
    bootparam::{boot_params, setup_header},
    start_info::{hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info},
};
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::layout::PAGE_SIZE;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Memory sizes up to, at and beyond the hole.
const SIZES: [u64; 4] = [64 * MIB, 3 * GIB, 3 * GIB + PAGE_SIZE, 8 * GIB];

fn file_of(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

/// Returns a file of zeroes that takes no space on disk.
fn sparse(bytes: u64) -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(bytes).unwrap();
    file
}

fn bytes_at(memory: &GuestMemory, address: u64, size: usize) -> Vec<u8> {
    let mut bytes = vec![0; size];
    memory
        .read_slice(&mut bytes, GuestAddress(address))
        .unwrap();
    bytes
}

fn command_line_at(memory: &GuestMemory, address: u64) -> String {
    let bytes = bytes_at(memory, address, 64);
    String::from_utf8(bytes.split(|&b| b == 0).next().unwrap().to_vec()).unwrap()
}

/// Returns start, length and kind of each entry in a PVH kernel's memory map.
fn pvh_memory_map(memory: &GuestMemory, info: &hvm_start_info) -> Vec<(u64, u64, u32)> {
    (0..u64::from(info.memmap_entries))
        .map(|index| {
            let at = info.memmap_paddr + index * size_of::<hvm_memmap_table_entry>() as u64;
            let entry: hvm_memmap_table_entry = memory.read_obj(GuestAddress(at)).unwrap();
            (entry.addr, entry.size, entry.type_)
        })
        .collect()
}

fn linux_memory_map(params: &boot_params) -> Vec<(u64, u64, u32)> {
    let table = params.e820_table;
    let used = &table[..usize::from(params.e820_entries)];
    used.iter()
        .map(|entry| (entry.addr, entry.size, entry.r#type))
        .collect()
}

#[test]
fn a_pvh_kernel_gets_start_info() {
    let memory = memory::create(64 * MIB).unwrap();
    let source = BootSource {
        kernel: Kernel::File(file_of(&pvh_elf())),
        initrd: Some(file_of(&[7; 5000])),
        cmdline: "selftest; dns example.test".into(),
    };
    let loaded = load(&memory, &source).unwrap();
    assert_eq!(loaded.protocol, Protocol::Pvh);
    assert_eq!(loaded.entry.0, ELF_AT + 0x10);
    assert_eq!(
        loaded.kernel,
        Window {
            start: ELF_AT,
            size: ELF_MEMORY
        }
    );
    assert_eq!(bytes_at(&memory, ELF_AT, CODE.len()), CODE);

    let info: hvm_start_info = memory.read_obj(loaded.boot_info).unwrap();
    assert_eq!((info.magic, info.version, info.flags), (0x336e_c578, 1, 0));
    assert_eq!(info.rsdp_paddr, layout::RSDP);
    assert_eq!(command_line_at(&memory, info.cmdline_paddr), source.cmdline);
    assert_eq!(info.nr_modules, 1);
    let module: hvm_modlist_entry = memory.read_obj(GuestAddress(info.modlist_paddr)).unwrap();
    let initrd = loaded.initrd.unwrap();
    assert_eq!((module.paddr, module.size), (initrd.start, 5000));
    assert_eq!(initrd.start, 64 * MIB - 2 * PAGE_SIZE);
    assert_eq!(
        bytes_at(&memory, initrd.start, 5001),
        [&[7; 5000][..], &[0]].concat()
    );
    let map = pvh_memory_map(&memory, &info);
    assert!(map.contains(&(MIB, 63 * MIB, 1)), "{map:x?}");
}

#[test]
fn a_file_is_loaded_wherever_it_stands() {
    let memory = memory::create(64 * MIB).unwrap();
    let mut kernel = file_of(&pvh_elf());
    kernel.seek(std::io::SeekFrom::End(0)).unwrap();
    let source = BootSource {
        kernel: Kernel::File(kernel),
        initrd: None,
        cmdline: String::new(),
    };
    let first = load(&memory, &source).unwrap();
    assert_eq!(load(&memory, &source).unwrap(), first);
    let info: hvm_start_info = memory.read_obj(first.boot_info).unwrap();
    assert_eq!((info.nr_modules, info.modlist_paddr), (0, 0));
}

#[test]
fn vmlinux_without_a_note_is_entered_in_64_bit_mode() {
    let memory = memory::create(64 * MIB).unwrap();
    let others = note(b"GNU\0", 18, &[0; 16], 4);
    let image = elf(ELF_AT + 0x20, &others);
    let initrd = file_of(b"cpio");
    let loaded = load_bytes(&memory, &image, Some(&initrd), "console=ttyS0").unwrap();
    assert_eq!(
        (loaded.protocol, loaded.entry.0),
        (Protocol::Linux64, ELF_AT + 0x20)
    );
    let params: boot_params = memory.read_obj(loaded.boot_info).unwrap();
    let header = params.hdr;
    let (magic, flag, loader) = (header.header, header.boot_flag, header.type_of_loader);
    assert_eq!((magic, flag, loader), (0x5372_6448, 0xAA55, 0xFF));
    assert_eq!(
        command_line_at(&memory, header.cmd_line_ptr.into()),
        "console=ttyS0"
    );
    let rsdp = params.acpi_rsdp_addr;
    assert_eq!(rsdp, layout::RSDP);
    let (start, size) = (header.ramdisk_image, header.ramdisk_size);
    assert_eq!((u64::from(start), size), (loaded.initrd.unwrap().start, 4));
}

#[test]
fn a_bzimage_keeps_its_header() {
    let memory = memory::create(64 * MIB).unwrap();
    let image = bzimage(setup());
    let loaded = load_bytes(&memory, &image, None, "quiet").unwrap();
    assert_eq!(
        (loaded.protocol, loaded.entry.0),
        (Protocol::Linux64, 0x100_0200)
    );
    assert_eq!(
        loaded.kernel,
        Window {
            start: 0x100_0000,
            size: 0x20_0000
        }
    );
    assert_eq!(bytes_at(&memory, 0x100_0000, CODE.len()), CODE);
    let params: boot_params = memory.read_obj(loaded.boot_info).unwrap();
    let expected = setup_header {
        type_of_loader: 0xFF,
        code32_start: 0x100_0000,
        cmd_line_ptr: layout::COMMAND_LINE.start as u32,
        ..setup()
    };
    let header = params.hdr;
    assert_eq!(header, expected);
    let ramdisk = header.ramdisk_size;
    assert_eq!(ramdisk, 0);
}

#[test]
fn a_header_is_as_long_as_the_kernel_says() {
    // A kernel that knows no field after `init_size` has other data there.
    let mut image = bzimage(setup_header {
        handover_offset: 0x190,
        ..setup()
    });
    image[0x201] = 0x62;
    let memory = memory::create(64 * MIB).unwrap();
    let loaded = load_bytes(&memory, &image, None, "").unwrap();
    let params: boot_params = memory.read_obj(loaded.boot_info).unwrap();
    let (known, unknown) = (params.hdr.init_size, params.hdr.handover_offset);
    assert_eq!((known, unknown), (0x20_0000, 0));
}

#[test]
fn memory_is_told_around_the_hole() {
    for bytes in SIZES {
        let memory = memory::create(bytes).unwrap();
        let pvh = load_bytes(&memory, &pvh_elf(), None, "").unwrap();
        let info: hvm_start_info = memory.read_obj(pvh.boot_info).unwrap();
        let linux = load_bytes(&memory, &bzimage(setup()), None, "").unwrap();
        let params: boot_params = memory.read_obj(linux.boot_info).unwrap();
        let map = pvh_memory_map(&memory, &info);
        assert_eq!(map, linux_memory_map(&params));
        for pair in map.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{bytes}: {map:x?}");
        }
        let ram: u64 = map
            .iter()
            .filter(|(.., kind)| *kind == 1)
            .map(|(_, size, _)| size)
            .sum();
        // There is no RAM between 639 KiB and 1 MiB.
        assert_eq!(
            ram,
            bytes - (MIB - layout::BASE_RAM_END),
            "{bytes}: {map:x?}"
        );
        let high = map.iter().find(|(start, ..)| *start == 4 * GIB);
        assert_eq!(
            high.map(|entry| entry.1).unwrap_or(0),
            bytes.saturating_sub(3 * GIB)
        );
        assert!(map.contains(&(layout::ECAM.start, layout::ECAM.size, 2)));
    }
}

#[test]
fn an_initrd_goes_below_its_limit_and_the_hole() {
    for bytes in SIZES {
        let memory = memory::create(bytes).unwrap();
        for last in [0x37FF_FFFFu32, 0x7FFF_FFFF, u32::MAX] {
            let image = bzimage(setup_header {
                initrd_addr_max: last,
                ..setup()
            });
            let loaded = load_bytes(&memory, &image, Some(&sparse(5 * MIB + 1)), "").unwrap();
            let initrd = loaded.initrd.unwrap();
            let limit = (u64::from(last) + 1).min(bytes.min(3 * GIB));
            assert_eq!(initrd.start, limit - 5 * MIB - PAGE_SIZE);
            assert_eq!(initrd.size, 5 * MIB + 1);
        }
    }
}

#[test]
fn page_tables_map_the_first_4_gib_to_themselves() {
    let memory = memory::create(64 * MIB).unwrap();
    let loaded = load_bytes(&memory, &bzimage(setup()), None, "").unwrap();
    let root = registers::special(&loaded, &Default::default()).cr3;
    let entry = |table: u64, index: u64| -> u64 {
        memory
            .read_obj(GuestAddress((table & !0xFFF) + index * 8))
            .unwrap()
    };
    for address in [
        0,
        0x1234,
        0x100_0000,
        0x7FFF_FFFF,
        0xC000_0000,
        0xFFFF_FFFFu64,
    ] {
        let level3 = entry(root, address >> 39);
        let level2 = entry(level3, address >> 30 & 511);
        let page = entry(level2, address >> 21 & 511);
        for table in [level3, level2] {
            assert_eq!(table & 0x83, 0b11, "present, writable, a table");
            assert!(layout::PAGE_TABLES.contains(table & !0xFFF));
        }
        assert_eq!(page & 0x83, 0x83, "present, writable, a large page");
        assert_eq!((page & !0x1F_FFFF) | (address & 0x1F_FFFF), address);
    }
    assert_eq!(entry(root, 1), 0);
}

#[test]
fn the_gdt_says_what_the_segment_registers_hold() {
    for (image, code) in [
        (pvh_elf(), 0x00CF_9B00_0000_FFFFu64),
        (bzimage(setup()), 0x00AF_9B00_0000_FFFF),
    ] {
        let memory = memory::create(64 * MIB).unwrap();
        let loaded = load_bytes(&memory, &image, None, "").unwrap();
        let special = registers::special(&loaded, &Default::default());
        let entry = |selector: u16| -> u64 {
            memory
                .read_obj(GuestAddress(special.gdt.base + u64::from(selector)))
                .unwrap()
        };
        assert_eq!(special.gdt.limit, 47);
        assert_eq!((special.cs.selector, entry(0x10)), (0x10, code));
        assert_eq!(
            (special.ds.selector, entry(0x18)),
            (0x18, 0x00CF_9300_0000_FFFF)
        );
        assert_eq!(
            (special.tr.selector, entry(0x20)),
            (0x20, 0x0000_8B00_0000_0067)
        );
        assert_eq!((entry(0), entry(0x28)), (0, 0));
    }
}

#[test]
fn registers_name_what_is_handed_over() {
    let memory = memory::create(64 * MIB).unwrap();
    let pvh = load_bytes(&memory, &pvh_elf(), None, "").unwrap();
    let general = registers::general(&pvh);
    assert_eq!(
        (general.rip, general.rbx, general.rsi),
        (ELF_AT + 0x10, pvh.boot_info.0, 0)
    );
    let initial = kvm_bindings::kvm_sregs {
        apic_base: 0xFEE0_0900,
        ..Default::default()
    };
    let special = registers::special(&pvh, &initial);
    assert_eq!(
        (special.cr0 & 0x8000_0001, special.cr4, special.efer),
        (1, 0, 0)
    );
    assert_eq!(
        (special.cs.db, special.cs.l, special.apic_base),
        (1, 0, 0xFEE0_0900)
    );

    let linux = load_bytes(&memory, &bzimage(setup()), None, "").unwrap();
    let general = registers::general(&linux);
    assert_eq!(
        (general.rip, general.rbx, general.rsi),
        (0x100_0200, 0, linux.boot_info.0)
    );
    assert_eq!(general.rflags, 2);
    let special = registers::special(&linux, &initial);
    assert_eq!(special.cr0 & 0x8000_0001, 0x8000_0001);
    assert_eq!((special.cr4, special.efer), (0x20, 0x500));
    assert_eq!((special.cs.db, special.cs.l), (0, 1));
}

#[test]
fn a_note_is_found_among_others() {
    let memory = memory::create(64 * MIB).unwrap();
    let entry = ELF_AT as u32 + 0x10;
    let word = u64::from(entry).to_le_bytes();
    let odd = note(b"Linux\0", 6, &[1, 2, 3], 4);
    for notes in [
        [odd.clone(), pvh_note(entry)].concat(),
        [odd.clone(), note(b"Xen\0", 18, &word, 4), odd.clone()].concat(),
        [
            note(b"Xen\0", 5, &word, 4),
            note(b"Xen", 18, &word, 4),
            pvh_note(entry),
        ]
        .concat(),
    ] {
        let loaded = load_bytes(&memory, &elf(ELF_AT, &notes), None, "").unwrap();
        assert_eq!(
            (loaded.protocol, loaded.entry.0),
            (Protocol::Pvh, entry.into())
        );
    }
    // Padded to eight bytes, which is the segment's alignment.
    let notes = [note(b"Linux\0", 6, &[1], 8), note(b"Xen\0", 18, &word, 8)].concat();
    let mut image = elf(ELF_AT, &notes);
    let align = 64 + 56 + 48;
    image[align..align + 8].copy_from_slice(&8u64.to_le_bytes());
    let loaded = load_bytes(&memory, &image, None, "").unwrap();
    assert_eq!(loaded.protocol, Protocol::Pvh);
}
