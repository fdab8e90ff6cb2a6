//! The serial console, and the ends of the machine: the exit port, ACPI's power-off, the i8042's
//! reset, a panic's JSON line.
use core::{
    fmt::{self, Write},
    hint, ptr,
    sync::atomic::{AtomicBool, Ordering},
};

use slipgate_guest::firmware::acpi::{PowerOff, Register};
use spin::Once;

use super::{
    cpu::{Cpu, port},
    memory,
};

const SERIAL: u16 = 0x3F8;
const LINE_STATUS: u16 = SERIAL + 5;
const TRANSMITTER_EMPTY: u8 = 1 << 6;
/// Exit port of QEMU's isa-debug-exit and of slipgate's VMM.
const EXIT_PORT: u16 = 0xF4;
const KEYBOARD_COMMAND: u16 = 0x64;
const KEYBOARD_RESET: u8 = 0xFE;
/// Exit status of a panic or an unexpected trap.
const PANICKED: u8 = 2;

/// Number of port reads during which a VMM may carry out a power-off. Each is an exit, of a
/// microsecond at least.
const POWER_OFF_WAIT: u32 = 100_000;

static BUSY: AtomicBool = AtomicBool::new(false);
static POWER_OFF: Once<PowerOff> = Once::new();

/// Sets how [`exit`] powers the machine off. Called once there is a heap, and before the other CPUs
/// start.
pub(crate) fn powers_off_by(power_off: PowerOff) {
    if let Register::SleepMemory(address) = power_off.register {
        memory::map_registers(address, 1);
    }
    POWER_OFF.call_once(|| power_off);
}

/// Prints `line` and a newline, without interleaving.
pub(crate) fn print_line(line: &str) {
    while BUSY.swap(true, Ordering::Acquire) {
        hint::spin_loop();
    }
    write(line.as_bytes());
    write(b"\n");
    BUSY.store(false, Ordering::Release);
}

/// Writes all bytes, one a time, in one call of ring 0. The VMM's end has no line rate, so the
/// transmitter is polled only once.
fn write(bytes: &[u8]) {
    // SAFETY: a PC's first serial port.
    unsafe {
        while port::read8(LINE_STATUS) & TRANSMITTER_EMPTY == 0 {
            hint::spin_loop();
        }
        port::write_string(SERIAL, bytes);
    }
}

/// Ends the machine: with an exit status, if it has an exit port; by ACPI's power-off otherwise; by
/// a reset if the tables name none. A reset comes last because some VMMs then boot the guest again.
pub(crate) fn exit(status: u8) -> ! {
    // SAFETY: ends the machine, as intended. The interrupt flag no longer matters.
    unsafe {
        port::write8(EXIT_PORT, status);
        if let Some(PowerOff { register, value }) = POWER_OFF.get() {
            match *register {
                Register::SleepPort(at) => port::write8(at, *value as u8),
                Register::SleepMemory(at) => ptr::write_volatile(at as *mut u8, *value as u8),
                Register::Pm1Control(at) => port::write16(at, *value),
            }
            for _ in 0..POWER_OFF_WAIT {
                port::read8(LINE_STATUS);
            }
        }
    }
    reset()
}

/// Resets the machine by the i8042.
pub(crate) fn reset() -> ! {
    // SAFETY: ends the machine, as intended.
    unsafe { port::write8(KEYBOARD_COMMAND, KEYBOARD_RESET) };
    loop {
        Cpu::current().halt();
    }
}

/// Prints `{"panic":...}` and exits with status 2. It needs no heap. If two CPUs call it at once,
/// the second waits until the first ends the machine.
pub(crate) fn die(message: fmt::Arguments<'_>) -> ! {
    static DYING: AtomicBool = AtomicBool::new(false);
    while DYING.swap(true, Ordering::Acquire) {
        hint::spin_loop();
    }
    let mut line = Line {
        bytes: [0; 512],
        used: 0,
    };
    // A line that is too long is truncated: the important part comes first.
    let _ = write!(Quoted(&mut line), "{message}");
    write(b"\n{\"panic\":\"");
    write(&line.bytes[..line.used]);
    write(b"\"}\n");
    exit(PANICKED)
}

struct Line {
    bytes: [u8; 512],
    used: usize,
}

/// Writes text into the inside of a JSON string. Characters that JSON would escape are replaced.
struct Quoted<'a>(&'a mut Line);

impl Write for Quoted<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            let byte = match byte {
                b'"' | b'\\' => b'\'',
                0..0x20 => b' ',
                byte => byte,
            };
            *self.0.bytes.get_mut(self.0.used).ok_or(fmt::Error)? = byte;
            self.0.used += 1;
        }
        Ok(())
    }
}
