//! The PVH start-of-day structure (`struct hvm_start_info`, Xen: public/arch-x86/hvm/start_info.h).
use super::PhysicalMemory;

const MAGIC: u64 = 0x336E_C578;
const RAM: u64 = 1;

/// Fields of the structure that the guest needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StartInfo<'a> {
    /// Command line of the kernel.
    pub command_line: &'a str,
    /// Physical address of ACPI's root pointer; 0 if it must be searched for.
    pub rsdp: u64,
    /// Largest range of RAM from `floor` on and below 3 GiB: start and length in bytes.
    pub heap: (u64, u64),
}

/// Reads the structure at `address`. The heap may not lie below `floor`.
///
/// # Errors
/// The structure is missing, malformed, or outside memory, or there is no RAM for the heap.
pub fn read<M: PhysicalMemory>(
    memory: &M,
    address: u64,
    floor: u64,
) -> Result<StartInfo<'_>, &'static str> {
    /// End of the write-back mapping of ring 3.
    const CEILING: u64 = 0xC000_0000;
    let field32 = |offset| {
        memory
            .integer::<4>(address + offset)
            .ok_or("start_info is outside memory")
    };
    let field64 = |offset| {
        memory
            .integer::<8>(address + offset)
            .ok_or("start_info is outside memory")
    };
    if field32(0)? != MAGIC {
        return Err("not started by PVH: no magic in start_info");
    }
    if field32(4)? < 1 {
        return Err("start_info has no memory map: version 0");
    }
    let (map, entries) = (field64(40)?, field32(48)?);
    let mut heap = (0, 0);
    for entry in 0..entries.min(256) {
        let at = map + entry * 24;
        let get = |offset| {
            memory
                .integer::<8>(at + offset)
                .ok_or("the memory map is outside memory")
        };
        let (start, length, kind) = (get(0)?, get(8)?, get(16)? & 0xFFFF_FFFF);
        let end = start.saturating_add(length).min(CEILING);
        let start = start.max(floor);
        if kind == RAM && end > start && end - start > heap.1 {
            heap = (start, end - start);
        }
    }
    if heap.1 == 0 {
        return Err("the memory map has no memory above the image");
    }
    Ok(StartInfo {
        command_line: command_line(memory, field64(24)?)?,
        rsdp: field64(32)?,
        heap,
    })
}

fn command_line<M: PhysicalMemory>(memory: &M, address: u64) -> Result<&str, &'static str> {
    const LIMIT: u64 = 4096;
    if address == 0 {
        return Ok("");
    }
    let length = (0..LIMIT)
        .find(|offset| memory.integer::<1>(address + offset) == Some(0))
        .ok_or("the command line has no end")?;
    let bytes = memory
        .bytes(address, length as usize)
        .ok_or("the command line is outside memory")?;
    str::from_utf8(bytes).map_err(|_| "the command line is not UTF-8")
}

#[cfg(test)]
#[path = "pvh_test.rs"]
mod tests;
