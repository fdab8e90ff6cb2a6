//! The memory map (E820): what the kernel may use as RAM, and what is something else.
use crate::layout::{self, Window};

/// What a piece of the address space is. The numbers are those of E820 and of PVH.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum MemoryKind {
    /// The kernel's to use.
    Ram = 1,
    /// Something else.
    Reserved = 2,
    /// ACPI tables, RAM once they are read.
    AcpiTables = 3,
}

/// The map of a machine with `memory_bytes` of RAM, in ascending order.
pub fn memory_map(memory_bytes: u64) -> Vec<(Window, MemoryKind)> {
    let between = |start: u64, end: u64, kind| {
        (
            Window {
                start,
                size: end.saturating_sub(start),
            },
            kind,
        )
    };
    let mut map = vec![
        between(0, layout::BASE_RAM_END, MemoryKind::Ram),
        between(layout::BASE_RAM_END, 0xA_0000, MemoryKind::Reserved),
        (layout::ACPI_TABLES, MemoryKind::AcpiTables),
    ];
    for piece in layout::ram(memory_bytes) {
        let start = piece.start.max(layout::KERNEL_MIN);
        map.push(between(start, piece.end(), MemoryKind::Ram));
    }
    // Linux uses ECAM only if it is reserved here or in ACPI's motherboard resources.
    map.push((layout::ECAM, MemoryKind::Reserved));
    map.sort_by_key(|(window, _)| window.start);
    map
}
