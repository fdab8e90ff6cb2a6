//! The part of PCI that a driver needs: functions of bus 0, base addresses, capabilities, MSI-X.
//! The firmware or the VMM has assigned the addresses; the guest turns decoding on, and assigns
//! none.
pub mod msix;

/// Function on bus 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Function {
    /// Number of the device, 0..32.
    pub device: u8,
    /// Number of the function, 0..8.
    pub function: u8,
}

/// Access to configuration space, in aligned 32-bit words.
pub trait ConfigSpace {
    /// Reads the 32-bit word at `offset`.
    fn read(&self, function: Function, offset: u16) -> u32;
    /// Writes the 32-bit word at `offset`.
    fn write(&self, function: Function, offset: u16, value: u32);

    /// Reads one byte at `offset`.
    fn read8(&self, function: Function, offset: u16) -> u8 {
        (self.read(function, offset & !3) >> ((offset & 3) * 8)) as u8
    }
    /// Reads two bytes, at an even offset.
    fn read16(&self, function: Function, offset: u16) -> u16 {
        (self.read(function, offset & !3) >> ((offset & 2) * 8)) as u16
    }
}

/// Access to device registers, by their offset in a window.
pub trait Registers {
    /// Reads 8 bits at `offset`.
    fn read8(&self, offset: usize) -> u8;
    /// Reads 16 bits at `offset`.
    fn read16(&self, offset: usize) -> u16;
    /// Reads 32 bits at `offset`.
    fn read32(&self, offset: usize) -> u32;
    /// Writes 8 bits at `offset`.
    fn write8(&self, offset: usize, value: u8);
    /// Writes 16 bits at `offset`.
    fn write16(&self, offset: usize, value: u16);
    /// Writes 32 bits at `offset`.
    fn write32(&self, offset: usize, value: u32);

    /// Writes 64 bits, the lower half first.
    fn write64(&self, offset: usize, value: u64) {
        self.write32(offset, value as u32);
        self.write32(offset + 4, (value >> 32) as u32);
    }
}

const COMMAND: u16 = 0x04;
const COMMAND_MEMORY: u32 = 1 << 1;
const COMMAND_MASTER: u32 = 1 << 2;
const COMMAND_NO_INTX: u32 = 1 << 10;
const STATUS_CAPABILITIES: u32 = 1 << 20;

/// Returns the functions of bus 0.
pub fn functions(config: &dyn ConfigSpace) -> impl Iterator<Item = Function> + '_ {
    const MULTI_FUNCTION: u8 = 1 << 7;
    (0..32).flat_map(move |device| {
        let first = Function {
            device,
            function: 0,
        };
        let count = match config.read16(first, 0) {
            0xFFFF => 0,
            _ if config.read8(first, 0x0E) & MULTI_FUNCTION != 0 => 8,
            _ => 1,
        };
        (0..count)
            .map(move |function| Function { device, function })
            .filter(|function| config.read16(*function, 0) != 0xFFFF)
    })
}

/// Returns a function's vendor and device id.
pub fn id(config: &dyn ConfigSpace, function: Function) -> (u16, u16) {
    (config.read16(function, 0), config.read16(function, 2))
}

/// Turns memory decoding and bus mastering on, and interrupt pins off.
pub fn enable(config: &dyn ConfigSpace, function: Function) {
    // The upper half is the status, whose bits are cleared by ones: none is written.
    let command = config.read(function, COMMAND) & 0xFFFF;
    config.write(
        function,
        COMMAND,
        command | COMMAND_MEMORY | COMMAND_MASTER | COMMAND_NO_INTX,
    );
}

/// Returns the address in base address register `index`; `None` if it is not a memory BAR, or was
/// not assigned.
pub fn memory_bar(config: &dyn ConfigSpace, function: Function, index: u8) -> Option<u64> {
    const IO: u32 = 1;
    const WIDTH: u32 = 0b110;
    const WIDTH_64: u32 = 0b100;
    if index > 5 {
        return None;
    }
    let register = 0x10 + u16::from(index) * 4;
    let low = config.read(function, register);
    if low & IO != 0 {
        return None;
    }
    let high = if low & WIDTH == WIDTH_64 {
        u64::from(config.read(function, register + 4))
    } else {
        0
    };
    let address = high << 32 | u64::from(low & !0xF);
    (address != 0).then_some(address)
}

/// Returns the function's capabilities: id and offset. A circular list ends.
pub fn capabilities(
    config: &dyn ConfigSpace,
    function: Function,
) -> impl Iterator<Item = (u8, u16)> + '_ {
    /// Largest number of capabilities that fit behind the header, four bytes each.
    const MOST: usize = 48;
    let present = config.read(function, COMMAND) & STATUS_CAPABILITIES != 0;
    let mut next = if present {
        config.read8(function, 0x34) & !3
    } else {
        0
    };
    core::iter::from_fn(move || {
        if next < 0x40 {
            return None;
        }
        let offset = u16::from(next);
        let head = config.read16(function, offset);
        next = (head >> 8) as u8 & !3;
        Some((head as u8, offset))
    })
    .take(MOST)
}

#[cfg(test)]
#[path = "pci_test.rs"]
mod tests;
