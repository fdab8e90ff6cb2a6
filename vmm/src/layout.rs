//! Layout of the guest's physical address space and port space: that of a PC, as far as a
//! kernel uses it.
//!
//! ```text
//!           0 .. 640 KiB       RAM, with the structures that the VMM writes for the kernel
//!     640 KiB .. 1 MiB         no RAM, except the ACPI tables at 0xE0000 and a page behind them
//!       1 MiB .. 3 GiB         RAM (kernel low, initrd high)
//! 0xC000_0000 .. 0xE000_0000   PCI, 32-bit BARs
//! 0xE000_0000 .. 0xE010_0000   PCI configuration space (ECAM)
//! 0xFEC0_0000, 0xFEE0_0000     I/O APIC, local APICs
//! 0xFFFB_C000 .. 0xFFFC_0000   pages KVM wants for itself
//!       4 GiB ..               the rest of RAM, then PCI, 64-bit BARs
//! ```

/// Range of an address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// First address of the range.
    pub start: u64,
    /// Length of the range, bytes.
    pub size: u64,
}

impl Window {
    /// Returns the first address after the window.
    pub const fn end(&self) -> u64 {
        self.start + self.size
    }

    /// Returns whether `address` is inside.
    pub const fn contains(&self, address: u64) -> bool {
        address >= self.start && address - self.start < self.size
    }

    /// Returns whether the two windows share an address.
    pub const fn overlaps(&self, other: &Self) -> bool {
        self.start < other.end() && other.start < self.end()
    }
}

/// Size of a page, bytes.
pub const PAGE_SIZE: u64 = 4096;
/// Largest number of CPUs of a machine.
pub const MAX_CPUS: u8 = 32;

/// End of low RAM and start of the hole below 4 GiB. RAM continues at [`HIGH_RAM_START`].
pub const LOW_RAM_LIMIT: u64 = 0xC000_0000;
/// Start of the RAM that does not fit below the hole.
pub const HIGH_RAM_START: u64 = 1 << 32;
/// Window for 32-bit BARs.
pub const MMIO32: Window = Window {
    start: 0xC000_0000,
    size: 0x2000_0000,
};
/// Number of the last PCI bus. The first is 0.
pub const LAST_BUS: u8 = 0;
/// Configuration space: 1 MiB per bus (PCI Express, Enhanced Configuration Access Mechanism).
pub const ECAM: Window = Window {
    start: 0xE000_0000,
    size: (LAST_BUS as u64 + 1) << 20,
};
/// Address of the I/O APIC's registers.
pub const IO_APIC: u32 = 0xFEC0_0000;
/// Address of the local APICs' registers. MSIs are writes to this page and those behind it.
pub const LOCAL_APIC: u32 = 0xFEE0_0000;
/// Page in which KVM keeps an identity map (Intel without unrestricted guest).
pub const KVM_IDENTITY_MAP: u64 = 0xFFFB_C000;
/// First of the three pages in which KVM keeps a TSS (Intel without unrestricted guest).
pub const KVM_TSS: u64 = 0xFFFB_D000;

/// Address of the first CPU's GDT.
pub const GDT: u64 = 0x500;
/// `hvm_start_info` (PVH), followed by its module list and memory map.
pub const START_INFO: Window = Window {
    start: 0x6000,
    size: 0x1000,
};
/// `boot_params` (Linux), the "zero page".
pub const ZERO_PAGE: Window = Window {
    start: 0x7000,
    size: 0x1000,
};
/// Page tables that map the first 4 GiB to themselves (Linux, 64-bit entry).
pub const PAGE_TABLES: Window = Window {
    start: 0x9000,
    size: 0x6000,
};
/// Command line, with its NUL.
pub const COMMAND_LINE: Window = Window {
    start: 0x2_0000,
    size: 0x1_0000,
};
/// End of the RAM below 640 KiB, as on a PC (the extended BIOS data area would follow).
pub const BASE_RAM_END: u64 = 0x9_FC00;
/// ACPI tables. The RSDP comes first, where a legacy scan finds it too.
pub const ACPI_TABLES: Window = Window {
    start: 0xE_0000,
    size: 0x1_F000,
};
/// Page that begins with the generation id of the VM (VMGENID): 16 bytes that are others in each
/// machine restored from a snapshot.
pub const GENERATION_ID: Window = Window {
    start: 0xF_F000,
    size: 0x1000,
};
/// Address of the RSDP.
pub const RSDP: u64 = ACPI_TABLES.start;
/// Lowest address at which a kernel may be loaded.
pub const KERNEL_MIN: u64 = 0x10_0000;

/// Addresses of I/O ports.
pub mod ports {
    /// First of the eight registers of the serial port (16550, COM1).
    pub const SERIAL: u16 = 0x3F8;
    /// Data register of the keyboard controller.
    pub const I8042_DATA: u16 = 0x60;
    /// Command and status register of the keyboard controller.
    pub const I8042_COMMAND: u16 = 0x64;
    /// Index register of the real-time clock.
    pub const RTC_INDEX: u16 = 0x70;
    /// Data register of the real-time clock.
    pub const RTC_DATA: u16 = 0x71;
    /// PCI configuration address register.
    pub const PCI_ADDRESS: u16 = 0xCF8;
    /// PCI configuration data, four bytes.
    pub const PCI_DATA: u16 = 0xCFC;
    /// ACPI sleep control register (one byte).
    pub const SLEEP_CONTROL: u16 = 0x600;
    /// ACPI sleep status register (one byte).
    pub const SLEEP_STATUS: u16 = 0x601;
    /// ACPI PM timer (four bytes).
    pub const PM_TIMER: u16 = 0x608;
    /// Exit port. A byte written here is the guest's own exit status.
    pub const EXIT: u16 = 0xF4;
}

/// Command of the keyboard controller that resets the machine.
pub const I8042_RESET: u8 = 0xFE;
/// Value that powers the machine off when written to [`ports::SLEEP_CONTROL`]: SLP_TYP 5 and
/// SLP_EN.
pub const POWER_OFF: u8 = (SLEEP_TYPE_S5 << 2) | 0x20;
/// Sleep type that `_S5` gives.
pub const SLEEP_TYPE_S5: u8 = 5;
/// Interrupt line (GSI) of the serial port.
pub const SERIAL_IRQ: u32 = 4;

/// Interrupt line (GSI) that says that the generation id is another.
pub const GENERATION_IRQ: u32 = 5;

/// Returns the ranges of RAM of a machine with `memory_bytes` of it.
pub fn ram(memory_bytes: u64) -> Vec<Window> {
    let low = memory_bytes.min(LOW_RAM_LIMIT);
    let high = memory_bytes - low;
    let mut pieces = vec![Window {
        start: 0,
        size: low,
    }];
    if high > 0 {
        pieces.push(Window {
            start: HIGH_RAM_START,
            size: high,
        });
    }
    pieces
}

/// Returns whether a CPU with `physical_bits` of address reaches all RAM of a machine with
/// `memory_bytes`.
pub fn is_reached(memory_bytes: u64, physical_bits: u8) -> bool {
    let limit = 1u64.checked_shl(physical_bits.into()).unwrap_or(u64::MAX);
    ram(memory_bytes).iter().all(|piece| piece.end() <= limit)
}

/// Returns the window for 64-bit BARs: above RAM, below the end of the addresses that a CPU with
/// `physical_bits` can reach, at most 64 GiB. `None` if no space is left there.
pub fn mmio64(memory_bytes: u64, physical_bits: u8) -> Option<Window> {
    const GIB: u64 = 1 << 30;
    let high = memory_bytes.saturating_sub(LOW_RAM_LIMIT);
    let start = HIGH_RAM_START
        .checked_add(high)?
        .checked_next_multiple_of(GIB)?;
    let limit = 1u64.checked_shl(physical_bits.into()).unwrap_or(u64::MAX);
    let size = limit.checked_sub(start)?.min(64 * GIB);
    (size > 0).then_some(Window { start, size })
}

#[cfg(test)]
#[path = "layout_test.rs"]
mod tests;
