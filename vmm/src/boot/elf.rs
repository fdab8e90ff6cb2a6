//! ELF kernels: vmlinux, and any ELF file with a PVH note.
//!
//! Segments are loaded at their physical addresses. The RAM of a segment beyond its bytes in the
//! file is zero already.
use linux_loader::elf::{
    EI_CLASS, EI_DATA, ELFCLASS64, ELFDATA2LSB, Elf64_Ehdr, Elf64_Nhdr, Elf64_Phdr, PT_INTERP,
    PT_LOAD, PT_NOTE,
};
use vm_memory::ByteValued;

use super::{
    BootError, MAX_COMMAND_LINE, Placed, Protocol,
    image::{Image, check_place},
};
use crate::{
    GuestMemory,
    layout::{self, Window},
};

/// EM_X86_64, a value of `e_machine`.
const X86_64: u16 = 62;
/// ET_EXEC and ET_DYN, values of `e_type`.
const EXECUTABLE: [u16; 2] = [2, 3];
/// Type of a PVH entry note, XEN_ELFNOTE_PHYS32_ENTRY.
const PHYS32_ENTRY: u32 = 18;
/// Largest number of program headers that is accepted; no kernel has more. Each header is read.
const MAX_PROGRAM_HEADERS: u16 = 256;
/// Largest note segment that is read, bytes. The notes of a Linux kernel take a few hundred bytes.
const MAX_NOTES: u64 = 64 << 10;
/// Last address for an initrd: the value that x86-64 Linux has in a bzImage's `initrd_addr_max`.
const INITRD_LAST: u64 = 0x7FFF_FFFF;

pub(super) fn is_elf(image: &Image<'_>) -> bool {
    let mut magic = [0; 4];
    image.read_at(0, &mut magic, "the magic").is_ok() && magic == *b"\x7fELF"
}

pub(super) fn load(memory: &GuestMemory, image: &Image<'_>) -> Result<Placed, BootError> {
    let header: Elf64_Ehdr = image.read(0, "the ELF header")?;
    check_header(&header)?;
    let mut loads: Vec<Elf64_Phdr> = Vec::new();
    let (mut note_entry, mut interpreted) = (None, false);
    for index in 0..u64::from(header.e_phnum) {
        let offset = header
            .e_phoff
            .saturating_add(index * size_of::<Elf64_Phdr>() as u64);
        let segment: Elf64_Phdr = image.read(offset, "the program headers")?;
        match segment.p_type {
            PT_LOAD if segment.p_memsz > 0 => {
                if segment.p_filesz > segment.p_memsz {
                    return Err(BootError::Elf {
                        what: "a segment larger in file than in memory",
                    });
                }
                loads.push(segment);
            }
            PT_NOTE if note_entry.is_none() => note_entry = pvh_entry(image, &segment)?,
            PT_INTERP => interpreted = true,
            _ => {}
        }
    }
    let low = |segment: &Elf64_Phdr| segment.p_paddr < layout::KERNEL_MIN;
    if note_entry.is_none() && (interpreted || loads.iter().any(low)) {
        return Err(BootError::UserProgram);
    }
    let mut segments: Vec<Window> = Vec::with_capacity(loads.len());
    for segment in &loads {
        segments.push(check_place(memory, segment.p_paddr, segment.p_memsz)?);
        image.copy_to(
            memory,
            segment.p_paddr,
            segment.p_offset,
            segment.p_filesz,
            "a segment",
        )?;
    }
    let start = segments.iter().map(|s| s.start).min();
    let end = segments.iter().map(Window::end).max();
    let (Some(start), Some(end)) = (start, end) else {
        return Err(BootError::Elf {
            what: "no segment to load",
        });
    };
    let (protocol, which, entry) = match note_entry {
        Some(entry) => (Protocol::Pvh, "PVH", entry),
        None => (Protocol::Linux64, "ELF", header.e_entry),
    };
    if !segments.iter().any(|segment| segment.contains(entry)) {
        return Err(BootError::Entry { which, entry });
    }
    Ok(Placed {
        entry,
        protocol,
        taken: Window {
            start,
            size: end - start,
        },
        initrd_last: INITRD_LAST,
        max_command_line: MAX_COMMAND_LINE,
        header: None,
    })
}

fn check_header(header: &Elf64_Ehdr) -> Result<(), BootError> {
    let what = if header.e_ident[EI_CLASS] != ELFCLASS64 {
        "a class other than 64-bit"
    } else if header.e_ident[EI_DATA] != ELFDATA2LSB {
        "big-endian data"
    } else if header.e_machine != X86_64 {
        "another machine's code"
    } else if !EXECUTABLE.contains(&header.e_type) {
        "a type that can't be started, such as an object file's"
    } else if usize::from(header.e_phentsize) != size_of::<Elf64_Phdr>() {
        "program headers of an unknown size"
    } else if header.e_phnum > MAX_PROGRAM_HEADERS {
        "more program headers than any kernel"
    } else {
        return Ok(());
    };
    Err(BootError::Elf { what })
}

/// Returns the PVH entry address from a note segment; `None` if the segment has no such note.
fn pvh_entry(image: &Image<'_>, segment: &Elf64_Phdr) -> Result<Option<u64>, BootError> {
    if segment.p_filesz > MAX_NOTES {
        return Err(BootError::Elf {
            what: "more notes than any kernel",
        });
    }
    let mut notes = vec![0; segment.p_filesz as usize];
    image.read_at(segment.p_offset, &mut notes, "a note segment")?;
    // Linux pads its notes to four bytes, whatever alignment the linker gave to the segment. The
    // ELF specification has eight bytes where the segment's alignment is eight.
    match find_note(&notes, 4) {
        None if segment.p_align == 8 => find_note(&notes, 8),
        found => found,
    }
    .map(entry_of)
    .transpose()
}

/// Returns the description of the first PVH entry note; `None` if there is none.
fn find_note(mut notes: &[u8], align: usize) -> Option<&[u8]> {
    loop {
        let mut header = Elf64_Nhdr::default();
        let head = header.as_mut_slice();
        head.copy_from_slice(notes.get(..head.len())?);
        let name_at = head.len();
        let name_end = name_at + header.n_namesz as usize;
        let described_at = name_end.next_multiple_of(align);
        let described_end = described_at + header.n_descsz as usize;
        let name = notes.get(name_at..name_end)?;
        let description = notes.get(described_at..described_end)?;
        if header.n_type == PHYS32_ENTRY && name == b"Xen\0" {
            return Some(description);
        }
        notes = notes.get(described_end.next_multiple_of(align)..)?;
    }
}

/// Returns the entry address of a PVH note. It has 32 bits, or 64 as Linux writes it.
fn entry_of(description: &[u8]) -> Result<u64, BootError> {
    let entry = match description.len() {
        4 => description
            .try_into()
            .map(u32::from_le_bytes)
            .map(u64::from)
            .ok(),
        8 => description.try_into().map(u64::from_le_bytes).ok(),
        _ => None,
    };
    entry
        .filter(|&entry| u32::try_from(entry).is_ok())
        .ok_or(BootError::Elf {
            what: "a PVH note without a 32-bit entry",
        })
}
