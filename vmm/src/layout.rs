//! Where everything lies in the guest's physical address space and port space: a PC as far as a
//! kernel looks.
//!
//! ```text
//!           0 .. 640 KiB       RAM; what the VMM writes for the kernel's first steps is here
//!     640 KiB .. 1 MiB         no RAM, except the ACPI tables at 0xE0000
//!       1 MiB .. 3 GiB         RAM (kernel low, initrd high)
//! 0xC000_0000 .. 0xE000_0000   PCI, 32-bit BARs
//! 0xE000_0000 .. 0xE010_0000   PCI configuration space (ECAM)
//! 0xFEC0_0000, 0xFEE0_0000     I/O APIC, local APICs
//! 0xFFFB_C000 .. 0xFFFC_0000   pages KVM wants for itself
//!       4 GiB ..               the rest of RAM, then PCI, 64-bit BARs
//! ```

/// A piece of an address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// First address.
    pub start: u64,
    /// Length in bytes.
    pub size: u64,
}

impl Window {
    /// The first address after it.
    pub const fn end(&self) -> u64 {
        self.start + self.size
    }

    /// Is `address` inside?
    pub const fn contains(&self, address: u64) -> bool {
        address >= self.start && address - self.start < self.size
    }

    /// Do the two share an address?
    pub const fn overlaps(&self, other: &Self) -> bool {
        self.start < other.end() && other.start < self.end()
    }
}

/// Size of a page, in bytes.
pub const PAGE_SIZE: u64 = 4096;
/// The most CPUs of a machine.
pub const MAX_CPUS: u8 = 32;

/// The hole below 4 GiB begins here: RAM goes on at [`HIGH_RAM_START`].
pub const LOW_RAM_LIMIT: u64 = 0xC000_0000;
/// Where RAM that did not fit below the hole is.
pub const HIGH_RAM_START: u64 = 1 << 32;
/// For BARs of 32 bits.
pub const MMIO32: Window = Window {
    start: 0xC000_0000,
    size: 0x2000_0000,
};
/// PCI buses that exist: 0 to this one.
pub const LAST_BUS: u8 = 0;
/// Configuration space: 1 MiB per bus (PCI Express, Enhanced Configuration Access Mechanism).
pub const ECAM: Window = Window {
    start: 0xE000_0000,
    size: (LAST_BUS as u64 + 1) << 20,
};
/// Registers of the I/O APIC.
pub const IO_APIC: u32 = 0xFEC0_0000;
/// Registers of the local APICs; also where MSIs are written to.
pub const LOCAL_APIC: u32 = 0xFEE0_0000;
/// The page that KVM keeps an identity map in (Intel without unrestricted guest).
pub const KVM_IDENTITY_MAP: u64 = 0xFFFB_C000;
/// The three pages that KVM keeps a TSS in (Intel without unrestricted guest).
pub const KVM_TSS: u64 = 0xFFFB_D000;

/// The BSP's descriptor table.
pub const GDT: u64 = 0x500;
/// `hvm_start_info` (PVH), with its module list and memory map behind it.
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
/// The command line, with its NUL.
pub const COMMAND_LINE: Window = Window {
    start: 0x2_0000,
    size: 0x1_0000,
};
/// Low RAM ends here, as on a PC (the extended BIOS data area would follow).
pub const BASE_RAM_END: u64 = 0x9_FC00;
/// The ACPI tables; the RSDP comes first, where also a legacy scan finds it.
pub const ACPI_TABLES: Window = Window {
    start: 0xE_0000,
    size: 0x2_0000,
};
/// Where the RSDP is.
pub const RSDP: u64 = ACPI_TABLES.start;
/// Kernels are loaded here or above.
pub const KERNEL_MIN: u64 = 0x10_0000;

/// Port addresses.
pub mod ports {
    /// First of the eight registers of the serial port (16550, COM1).
    pub const SERIAL: u16 = 0x3F8;
    /// Data register of the keyboard controller.
    pub const I8042_DATA: u16 = 0x60;
    /// Command and status register of the keyboard controller.
    pub const I8042_COMMAND: u16 = 0x64;
    /// Selects a register of the clock.
    pub const RTC_INDEX: u16 = 0x70;
    /// The register of the clock that was selected.
    pub const RTC_DATA: u16 = 0x71;
    /// PCI configuration address.
    pub const PCI_ADDRESS: u16 = 0xCF8;
    /// PCI configuration data, four bytes.
    pub const PCI_DATA: u16 = 0xCFC;
    /// ACPI sleep control register (one byte).
    pub const SLEEP_CONTROL: u16 = 0x600;
    /// ACPI sleep status register (one byte).
    pub const SLEEP_STATUS: u16 = 0x601;
    /// ACPI PM timer (four bytes).
    pub const PM_TIMER: u16 = 0x608;
    /// A byte written here is the guest's own exit status.
    pub const EXIT: u16 = 0xF4;
}

/// The keyboard controller's command that resets the machine.
pub const I8042_RESET: u8 = 0xFE;
/// What the guest writes to [`ports::SLEEP_CONTROL`] to power off: SLP_TYP 5 and SLP_EN.
pub const POWER_OFF: u8 = (SLEEP_TYPE_S5 << 2) | 0x20;
/// The sleep type that `_S5` names.
pub const SLEEP_TYPE_S5: u8 = 5;
/// Interrupt line (GSI) of the serial port.
pub const SERIAL_IRQ: u32 = 4;

/// The pieces of RAM of a machine with `memory_bytes` of it.
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

/// Whether a CPU with `physical_bits` of address reaches all RAM of a machine with `memory_bytes`.
pub fn is_reached(memory_bytes: u64, physical_bits: u8) -> bool {
    let limit = 1u64.checked_shl(physical_bits.into()).unwrap_or(u64::MAX);
    ram(memory_bytes).iter().all(|piece| piece.end() <= limit)
}

/// For BARs of 64 bits: above RAM, below what a CPU with `physical_bits` of address can reach, at
/// most 64 GiB. `None` if nothing is left there.
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
