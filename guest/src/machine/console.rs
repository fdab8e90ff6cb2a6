//! The serial console, and the ends of the machine: the exit port, the i8042's reset, a panic's
//! JSON line.
use core::{
    fmt::{self, Write},
    hint,
    sync::atomic::{AtomicBool, Ordering},
};

use super::cpu::{Cpu, port};

const SERIAL: u16 = 0x3F8;
const LINE_STATUS: u16 = SERIAL + 5;
const TRANSMITTER_EMPTY: u8 = 1 << 6;
/// Exit port of QEMU's isa-debug-exit and of slipgate's VMM.
const EXIT_PORT: u16 = 0xF4;
const KEYBOARD_COMMAND: u16 = 0x64;
const KEYBOARD_RESET: u8 = 0xFE;
/// Exit status of a panic or an unexpected trap.
const PANICKED: u8 = 2;

static BUSY: AtomicBool = AtomicBool::new(false);

/// Prints `line` and a newline, without interleaving.
pub(crate) fn print_line(line: &str) {
    while BUSY.swap(true, Ordering::Acquire) {
        hint::spin_loop();
    }
    write(line.as_bytes());
    write(b"\n");
    BUSY.store(false, Ordering::Release);
}

/// Writes all bytes with one string instruction, not with one trap per byte. The VMM's end has no
/// line rate, so the transmitter is polled only once.
fn write(bytes: &[u8]) {
    // SAFETY: a PC's first serial port.
    unsafe {
        while port::read8(LINE_STATUS) & TRANSMITTER_EMPTY == 0 {
            hint::spin_loop();
        }
        port::write_string(SERIAL, bytes);
    }
}

/// Ends the machine with an exit status, if it has an exit port; with a reset otherwise.
pub(crate) fn exit(status: u8) -> ! {
    // SAFETY: ends the machine, as intended. The interrupt flag no longer matters.
    unsafe {
        port::write8(EXIT_PORT, status);
        port::write8(KEYBOARD_COMMAND, KEYBOARD_RESET);
    }
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
