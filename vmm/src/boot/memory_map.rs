//! The memory map (E820): which addresses the kernel may use as RAM, and which are reserved.
use crate::layout::{self, Window};

/// Type of a range of the address space. The values are those of E820 and of PVH.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum MemoryKind {
    /// RAM that the kernel may use.
    Ram = 1,
    /// Not RAM, or not for the kernel to use.
    Reserved = 2,
    /// ACPI tables. The kernel may use the range as RAM once it has read them.
    AcpiTables = 3,
}

/// Returns the memory map of a machine with `memory_bytes` of RAM, in ascending order.
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
        (layout::GENERATION_ID, MemoryKind::Reserved),
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
