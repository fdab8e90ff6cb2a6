//! Dispatches vCPU accesses to devices: I/O ports, and addresses without memory.
//!
//! A port of a legacy device is a byte wide. The bus splits a wider access into bytes, as a PC's
//! does. Reads that no device claims return all ones; writes that no device claims are ignored.
use crate::{
    layout::{self, ports},
    legacy::{i8042, pm_timer::PmTimer, power, rtc::Rtc, serial::Console},
    machine::Outcome,
    pci,
};

/// The devices that vCPUs reach by an exit.
pub(crate) struct Bus {
    pub(crate) console: Console,
    pub(crate) pm_timer: PmTimer,
    pub(crate) rtc: Rtc,
    pub(crate) pci: pci::Root,
}

/// Result of an access.
#[derive(Debug)]
pub(crate) enum Answer {
    /// A device served it.
    Served,
    /// No device claimed it.
    Unclaimed,
    /// A device served it, and the machine ends.
    End(Outcome),
}

/// Last register of the serial port.
const SERIAL_LAST: u16 = ports::SERIAL + 7;
/// Last port of PCI's configuration address and data, four bytes each.
const PCI_LAST: u16 = ports::PCI_DATA + 3;

/// Last byte of the PM timer.
const PM_TIMER_LAST: u16 = ports::PM_TIMER + 3;

impl Bus {
    /// Reads from a port; `into` has 1, 2 or 4 bytes.
    pub(crate) fn port_read(&self, port: u16, into: &mut [u8]) -> Answer {
        if let ports::PCI_ADDRESS..=PCI_LAST = port {
            self.pci.port_read(port, into);
            return Answer::Served;
        }
        if let ports::PM_TIMER..=PM_TIMER_LAST = port {
            // One read of the timer gives all bytes.
            let bytes = self.pm_timer.read().to_le_bytes();
            let rest = &bytes[usize::from(port - ports::PM_TIMER)..];
            into.fill(0xff);
            into.iter_mut().zip(rest).for_each(|(to, from)| *to = *from);
            return Answer::Served;
        }
        let mut served = false;
        for (place, byte) in into.iter_mut().enumerate() {
            let read = self.port_read_byte(port.wrapping_add(place as u16));
            served |= read.is_some();
            *byte = read.unwrap_or(0xff);
        }
        if served {
            Answer::Served
        } else {
            Answer::Unclaimed
        }
    }

    fn port_read_byte(&self, port: u16) -> Option<u8> {
        match port {
            ports::SERIAL..=SERIAL_LAST => Some(self.console.read((port - ports::SERIAL) as u8)),
            ports::I8042_DATA | ports::I8042_COMMAND => Some(i8042::read(port)),
            ports::SLEEP_CONTROL | ports::SLEEP_STATUS => Some(power::read(port)),
            ports::RTC_DATA => Some(self.rtc.read()),
            _ => None,
        }
    }

    /// Writes to a port; `bytes` has 1, 2 or 4.
    pub(crate) fn port_write(&self, port: u16, bytes: &[u8]) -> Answer {
        if let ports::PCI_ADDRESS..=PCI_LAST = port {
            self.pci.port_write(port, bytes);
            return Answer::Served;
        }
        let mut answer = Answer::Unclaimed;
        for (place, &byte) in bytes.iter().enumerate() {
            match self.port_write_byte(port.wrapping_add(place as u16), byte) {
                Answer::Unclaimed => {}
                Answer::Served => answer = Answer::Served,
                end => return end,
            }
        }
        answer
    }

    fn port_write_byte(&self, port: u16, byte: u8) -> Answer {
        let end = match port {
            ports::SERIAL..=SERIAL_LAST => {
                self.console.write((port - ports::SERIAL) as u8, byte);
                None
            }
            ports::I8042_DATA | ports::I8042_COMMAND => {
                i8042::write(port, byte).then_some(Outcome::Reset)
            }
            ports::SLEEP_CONTROL | ports::SLEEP_STATUS => {
                power::write(port, byte).then_some(Outcome::PoweredOff)
            }
            ports::RTC_INDEX => {
                self.rtc.select(byte);
                None
            }
            // Same port as QEMU's isa-debug-exit, which exits with status * 2 + 1; here the status
            // is unchanged.
            ports::EXIT => Some(Outcome::GuestExit(byte)),
            _ => return Answer::Unclaimed,
        };
        end.map_or(Answer::Served, Answer::End)
    }

    /// Reads from an address without memory; `into` has 1 to 8 bytes.
    pub(crate) fn mmio_read(&self, address: u64, into: &mut [u8]) -> Answer {
        let served = if layout::ECAM.contains(address) {
            self.pci.ecam_read(address - layout::ECAM.start, into);
            true
        } else {
            self.pci.mmio_read(address, into)
        };
        if served {
            return Answer::Served;
        }
        into.fill(0xff);
        Answer::Unclaimed
    }

    /// Writes to an address without memory; `bytes` has 1 to 8.
    pub(crate) fn mmio_write(&self, address: u64, bytes: &[u8]) -> Answer {
        let served = if layout::ECAM.contains(address) {
            self.pci.ecam_write(address - layout::ECAM.start, bytes);
            true
        } else {
            self.pci.mmio_write(address, bytes)
        };
        if served {
            Answer::Served
        } else {
            Answer::Unclaimed
        }
    }
}
