//! The sleep registers of a hardware-reduced ACPI machine (ACPI 6.5, 4.8.3.7). The only sleep state
//! that the DSDT offers is S5, off.
use crate::layout;

/// SLP_EN of the sleep control register: enters the sleep state.
const SLEEP_ENABLE: u8 = 1 << 5;
/// Position and width of SLP_TYP in the sleep control register.
const SLEEP_TYPE_SHIFT: u8 = 2;
const SLEEP_TYPE_MASK: u8 = 0b111;

/// Reads either register. Both read as zero: the machine never wakes, so WAK_STS is never set.
pub(crate) fn read(_port: u16) -> u8 {
    0
}

/// Writes a register. Returns true for the write that powers the machine off.
pub(crate) fn write(port: u16, byte: u8) -> bool {
    let sleep_type = (byte >> SLEEP_TYPE_SHIFT) & SLEEP_TYPE_MASK;
    port == layout::ports::SLEEP_CONTROL
        && byte & SLEEP_ENABLE != 0
        && sleep_type == layout::SLEEP_TYPE_S5
}

#[cfg(test)]
#[path = "power_test.rs"]
mod tests;
