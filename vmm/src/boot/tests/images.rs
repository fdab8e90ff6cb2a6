//! Small kernel images for tests.
use linux_loader::{
    bootparam::{LOADED_HIGH, XLF_KERNEL_64, setup_header},
    elf::{Elf64_Ehdr, Elf64_Phdr, PT_LOAD, PT_NOTE},
};
use vm_memory::ByteValued;

/// Load address of the ELF images.
pub(super) const ELF_AT: u64 = 0x20_0000;
/// Code of the images.
pub(super) const CODE: [u8; 0x300] = [0x90; 0x300];
/// Length of a segment in memory, bytes.
pub(super) const ELF_MEMORY: u64 = 0x4000;

/// Returns an ELF with one segment, and a note segment if `notes` is not empty.
pub(super) fn elf(entry: u64, notes: &[u8]) -> Vec<u8> {
    let headers = size_of::<Elf64_Ehdr>() + 2 * size_of::<Elf64_Phdr>();
    let header = elf_header(entry, 2);
    let load = Elf64_Phdr {
        p_type: PT_LOAD,
        p_offset: headers as u64,
        p_paddr: ELF_AT,
        p_filesz: CODE.len() as u64,
        p_memsz: ELF_MEMORY,
        p_align: 0x1000,
        ..Default::default()
    };
    let note = Elf64_Phdr {
        p_type: PT_NOTE,
        p_offset: (headers + CODE.len()) as u64,
        p_filesz: notes.len() as u64,
        p_memsz: notes.len() as u64,
        p_align: 4,
        ..Default::default()
    };
    [
        header.as_slice(),
        load.as_slice(),
        note.as_slice(),
        &CODE,
        notes,
    ]
    .concat()
}

pub(super) fn elf_header(entry: u64, segments: u16) -> Elf64_Ehdr {
    let mut header = Elf64_Ehdr {
        e_type: 2,
        e_machine: 62,
        e_version: 1,
        e_entry: entry,
        e_phoff: size_of::<Elf64_Ehdr>() as u64,
        e_phentsize: size_of::<Elf64_Phdr>() as u16,
        e_phnum: segments,
        ..Default::default()
    };
    header.e_ident[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    header
}

/// Returns a note, padded to `align`.
pub(super) fn note(name: &[u8], kind: u32, description: &[u8], align: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for number in [name.len() as u32, description.len() as u32, kind] {
        bytes.extend(number.to_le_bytes());
    }
    bytes.extend(name);
    bytes.resize(bytes.len().next_multiple_of(align), 0);
    bytes.extend(description);
    bytes.resize(bytes.len().next_multiple_of(align), 0);
    bytes
}

pub(super) fn pvh_note(entry: u32) -> Vec<u8> {
    note(b"Xen\0", 18, &entry.to_le_bytes(), 4)
}

pub(super) fn pvh_elf() -> Vec<u8> {
    elf(ELF_AT, &pvh_note(ELF_AT as u32 + 0x10))
}

/// Returns a bzImage's header like that of Linux 6.1, but smaller.
pub(super) fn setup() -> setup_header {
    setup_header {
        setup_sects: 1,
        syssize: (CODE.len() / 16) as u32,
        boot_flag: 0xAA55,
        jump: 0x6AEB,
        header: 0x5372_6448,
        version: 0x20F,
        loadflags: LOADED_HIGH,
        xloadflags: XLF_KERNEL_64,
        code32_start: 0x10_0000,
        initrd_addr_max: 0x7FFF_FFFF,
        cmdline_size: 1000,
        relocatable_kernel: 1,
        kernel_alignment: 0x20_0000,
        pref_address: 0x100_0000,
        init_size: 0x20_0000,
        ..Default::default()
    }
}

pub(super) fn bzimage(setup: setup_header) -> Vec<u8> {
    let mut image = vec![0; 1024];
    image[0x1F1..0x1F1 + size_of::<setup_header>()].copy_from_slice(setup.as_slice());
    image.extend(CODE);
    image
}
