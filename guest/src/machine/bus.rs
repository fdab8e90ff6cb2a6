//! PCI of a PC: configuration space by memory (ECAM) or by ports, and mapped registers.
use core::ptr;

use slipgate_guest::pci::{ConfigSpace, Function, Registers};

use super::{cpu::port, memory};

/// Access method to bus 0's configuration space.
pub(crate) enum Config {
    /// By memory (ECAM), at this address.
    Memory(*mut u8),
    /// By the ports 0xCF8 and 0xCFC. Only CPU 0 uses them, without interruption.
    Ports,
}

impl Config {
    /// Selects memory where ACPI gives its address: it takes one exit less than the ports.
    pub(crate) fn new(ecam: Option<u64>) -> Self {
        const BUS_BYTES: u64 = 1 << 20;
        ecam.map_or(Config::Ports, |base| {
            Config::Memory(memory::map_registers(base, BUS_BYTES))
        })
    }
}

const PORT_ADDRESS: u16 = 0xCF8;
const PORT_DATA: u16 = 0xCFC;

fn port_address(function: Function, offset: u16) -> u32 {
    1 << 31
        | u32::from(function.device) << 11
        | u32::from(function.function) << 8
        | u32::from(offset & 0xFC)
}

fn memory_offset(function: Function, offset: u16) -> usize {
    usize::from(function.device) << 15
        | usize::from(function.function) << 12
        | usize::from(offset & 0xFFC)
}

impl ConfigSpace for Config {
    fn read(&self, function: Function, offset: u16) -> u32 {
        // SAFETY: configuration space, mapped or by its ports; reading has no effect.
        unsafe {
            match self {
                Config::Memory(base) => {
                    ptr::read_volatile(base.add(memory_offset(function, offset)).cast())
                }
                Config::Ports => {
                    port::write32(PORT_ADDRESS, port_address(function, offset));
                    port::read32(PORT_DATA)
                }
            }
        }
    }

    fn write(&self, function: Function, offset: u16, value: u32) {
        // SAFETY: configuration space, mapped or by its ports; the caller knows the register.
        unsafe {
            match self {
                Config::Memory(base) => {
                    ptr::write_volatile(base.add(memory_offset(function, offset)).cast(), value);
                }
                Config::Ports => {
                    port::write32(PORT_ADDRESS, port_address(function, offset));
                    port::write32(PORT_DATA, value);
                }
            }
        }
    }
}

/// Window of mapped device registers.
#[derive(Clone, Copy)]
pub(crate) struct Window {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: device registers belong to no thread.
unsafe impl Send for Window {}

impl Window {
    /// Maps `bytes` at a physical address.
    pub(crate) fn map(address: u64, bytes: usize) -> Self {
        Window {
            start: memory::map_registers(address, bytes as u64),
            bytes,
        }
    }

    fn at<T>(&self, offset: usize) -> *mut T {
        assert!(
            offset + size_of::<T>() <= self.bytes,
            "register {offset:#x} of {:#x}",
            self.bytes
        );
        self.start.wrapping_add(offset).cast()
    }
}

// SAFETY, of all below: inside the window, which is mapped; the registers are aligned.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Registers for Window {
    fn read8(&self, offset: usize) -> u8 {
        unsafe { ptr::read_volatile(self.at(offset)) }
    }
    fn read16(&self, offset: usize) -> u16 {
        unsafe { ptr::read_volatile(self.at(offset)) }
    }
    fn read32(&self, offset: usize) -> u32 {
        unsafe { ptr::read_volatile(self.at(offset)) }
    }
    fn write8(&self, offset: usize, value: u8) {
        unsafe { ptr::write_volatile(self.at(offset), value) }
    }
    fn write16(&self, offset: usize, value: u16) {
        unsafe { ptr::write_volatile(self.at(offset), value) }
    }
    fn write32(&self, offset: usize, value: u32) {
        unsafe { ptr::write_volatile(self.at(offset), value) }
    }
}
