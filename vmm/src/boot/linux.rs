//! Structures that Linux needs at its 64-bit entry: `boot_params` and page tables.
use linux_loader::bootparam::{boot_e820_entry, boot_params};
use vm_memory::{Bytes, GuestAddress};

use super::{BootError, MemoryKind, Placed};
use crate::{
    GuestMemory,
    layout::{self, PAGE_SIZE, Window},
};

/// Boot loader id for loaders without an assigned number.
const LOADER_UNDEFINED: u8 = 0xFF;
/// Magic of the setup header, "HdrS".
const HEADER_MAGIC: u32 = 0x5372_6448;
const PRESENT_WRITABLE: u64 = 0b11;
const LARGE_PAGE: u64 = 1 << 7;

pub(super) fn write(
    memory: &GuestMemory,
    kernel: &Placed,
    initrd: Option<Window>,
    command_line_bytes: usize,
    map: &[(Window, MemoryKind)],
) -> Result<GuestAddress, BootError> {
    write_page_tables(memory).map_err(|e| BootError::write("page tables", e))?;
    let mut params = boot_params::default();
    if let Some(header) = kernel.header {
        params.hdr = header;
    } else {
        // vmlinux has no setup header of its own, but checks that one is in `boot_params`.
        params.hdr.header = HEADER_MAGIC;
        params.hdr.boot_flag = 0xAA55;
        params.hdr.cmdline_size = command_line_bytes as u32;
        params.hdr.kernel_alignment = 0x100_0000;
    }
    params.hdr.type_of_loader = LOADER_UNDEFINED;
    params.hdr.code32_start = kernel.taken.start as u32;
    params.hdr.cmd_line_ptr = layout::COMMAND_LINE.start as u32;
    if let Some(initrd) = initrd {
        // The initrd lies below the hole, so 32 bits hold its address.
        params.hdr.ramdisk_image = initrd.start as u32;
        params.hdr.ramdisk_size = initrd.size as u32;
    }
    params.acpi_rsdp_addr = layout::RSDP;
    let mut table = params.e820_table;
    for (entry, (window, kind)) in table.iter_mut().zip(map) {
        *entry = boot_e820_entry {
            addr: window.start,
            size: window.size,
            r#type: *kind as u32,
        };
    }
    params.e820_table = table;
    params.e820_entries = map.len() as u8;
    let address = GuestAddress(layout::ZERO_PAGE.start);
    memory
        .write_obj(params, address)
        .map_err(|e| BootError::write("boot_params", e))?;
    Ok(address)
}

/// Writes page tables that map the first 4 GiB to themselves in pages of 2 MiB: one table of level
/// 4, one of level 3, four of level 2.
fn write_page_tables(memory: &GuestMemory) -> Result<(), vm_memory::GuestMemoryError> {
    let level4 = layout::PAGE_TABLES.start;
    let level3 = level4 + PAGE_SIZE;
    let level2 = level3 + PAGE_SIZE;
    memory.write_obj(level3 | PRESENT_WRITABLE, GuestAddress(level4))?;
    for gib in 0..4u64 {
        let table = level2 + gib * PAGE_SIZE;
        memory.write_obj(table | PRESENT_WRITABLE, GuestAddress(level3 + gib * 8))?;
        for index in 0..512u64 {
            let page = (gib * 512 + index) << 21;
            let entry = page | LARGE_PAGE | PRESENT_WRITABLE;
            memory.write_obj(entry, GuestAddress(table + index * 8))?;
        }
    }
    Ok(())
}
