//! The keyboard controller. A PC without a keyboard needs one command of it: pulse the CPU's reset
//! line. Linux restarts a machine this way if ACPI names no reset register.
use std::cell::Cell;

use vm_superio::{I8042Device, Trigger};

use crate::layout;

/// Reads the data or status register: no key was pressed, and a command may be written.
pub(crate) fn read(port: u16) -> u8 {
    I8042Device::new(ResetLine::default()).read(offset(port))
}

/// Writes the data or command register. Returns true for the command that resets the machine.
pub(crate) fn write(port: u16, byte: u8) -> bool {
    let mut controller = I8042Device::new(ResetLine::default());
    let Ok(()) = controller.write(offset(port), byte);
    controller.reset_evt().0.get()
}

fn offset(port: u16) -> u8 {
    (port - layout::ports::I8042_DATA) as u8
}

#[derive(Default)]
struct ResetLine(Cell<bool>);

impl Trigger for ResetLine {
    type E = std::convert::Infallible;

    fn trigger(&self) -> Result<(), Self::E> {
        self.0.set(true);
        Ok(())
    }
}

#[cfg(test)]
#[path = "i8042_test.rs"]
mod tests;
