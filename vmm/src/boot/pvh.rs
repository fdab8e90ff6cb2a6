//! Structures that a PVH kernel needs: `hvm_start_info`, version 1, with its memory map and
//! modules.
use linux_loader::start_info::{
    XEN_HVM_START_MAGIC_VALUE, hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info,
};
use vm_memory::{Bytes, GuestAddress};

use super::{BootError, MemoryKind};
use crate::{
    GuestMemory,
    layout::{self, Window},
};

const MODULES: u64 = layout::START_INFO.start + 0x80;
const MEMORY_MAP: u64 = layout::START_INFO.start + 0x100;

/// Writes the structures. Returns the address of `hvm_start_info`. An initrd is the only module.
pub(super) fn write(
    memory: &GuestMemory,
    initrd: Option<Window>,
    map: &[(Window, MemoryKind)],
) -> Result<GuestAddress, BootError> {
    let address = GuestAddress(layout::START_INFO.start);
    let info = hvm_start_info {
        magic: XEN_HVM_START_MAGIC_VALUE,
        version: 1,
        nr_modules: u32::from(initrd.is_some()),
        modlist_paddr: initrd.map_or(0, |_| MODULES),
        cmdline_paddr: layout::COMMAND_LINE.start,
        rsdp_paddr: layout::RSDP,
        memmap_paddr: MEMORY_MAP,
        memmap_entries: map.len() as u32,
        ..Default::default()
    };
    let module = initrd.map(|initrd| hvm_modlist_entry {
        paddr: initrd.start,
        size: initrd.size,
        ..Default::default()
    });
    let written = || {
        memory.write_obj(info, address)?;
        if let Some(module) = module {
            memory.write_obj(module, GuestAddress(MODULES))?;
        }
        for (index, (window, kind)) in (0u64..).zip(map) {
            let entry = hvm_memmap_table_entry {
                addr: window.start,
                size: window.size,
                type_: *kind as u32,
                reserved: 0,
            };
            let at = MEMORY_MAP + index * size_of::<hvm_memmap_table_entry>() as u64;
            memory.write_obj(entry, GuestAddress(at))?;
        }
        Ok(())
    };
    written().map_err(|e| BootError::write("hvm_start_info", e))?;
    Ok(address)
}
