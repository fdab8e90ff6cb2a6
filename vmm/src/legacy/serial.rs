//! The serial console: a 16550A (`vm-superio`) at COM1's ports, on IRQ 4.
//!
//! # Theory of operation
//! The UART is behind a lock; a vCPU holds it for one register access. The guest's output goes to a
//! buffer, from which a thread writes to the output in lines (`serial/output.rs`), so that a
//! guest's byte costs no system call. A second thread reads the input and fills the UART's FIFO, as
//! far as it has room. The UART signals that thread when the guest has emptied the FIFO
//! (`serial/input.rs`).
//!
//! A reader of the console that stops reading must not stop the machine: a byte that finds the
//! buffer full waits a while for room, once. From then on bytes are lost, and counted, until the
//! reader has taken some.
use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex},
};

use vm_superio::{Serial, SerialState as Registers, Trigger, serial::SerialEvents};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::{
    ThreadSetup,
    counters::{Count, SerialCounters},
    snapshot::SerialState,
};

mod input;
mod output;

use output::{Feed, Output, Writer};

/// Input and output of the console.
#[derive(Debug)]
pub struct SerialIo {
    /// Source of the console's input; `None` for a console without input. Its end is no error. A
    /// terminal must be in raw mode already if the guest is to see each key.
    pub input: Option<OwnedFd>,
    /// Destination of the guest's output.
    pub output: OwnedFd,
    /// Most bytes that are written there; `None`: no limit. What comes after is lost, and counted.
    pub limit_bytes: Option<u64>,
}

/// Most bytes of input that the UART holds.
const UART_FIFO_BYTES: usize = 64;

/// The console's UART and its threads.
pub(crate) struct Console {
    uart: Arc<Mutex<Uart>>,
    output: Arc<Output>,
    writer: Option<Writer>,
    input: Option<input::Reader>,
}

type Uart = Serial<Interrupt, Drained, Feed>;

impl Console {
    /// Starts the console's threads. `interrupt` raises IRQ 4. `state`: that of a snapshot.
    ///
    /// # Errors
    /// The host refuses a thread or a descriptor, or the state is none of a UART.
    pub(crate) fn start(
        io: SerialIo,
        interrupt: EventFd,
        state: Option<&SerialState>,
        counters: &Arc<SerialCounters>,
        threads: &ThreadSetup,
    ) -> io::Result<Self> {
        let drained = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?;
        let output = Arc::new(Output::new(counters.clone(), output::PATIENCE));
        let interrupt = Interrupt {
            line: interrupt,
            counters: counters.clone(),
        };
        let (events, feed) = (Drained(drained.try_clone()?), Feed(output.clone()));
        let uart = match state {
            Some(state) => Serial::from_state(&registers(state), interrupt, events, feed)
                .map_err(|_| io::Error::other("the snapshot's serial port has too much input"))?,
            None => Serial::with_events(interrupt, events, feed),
        };
        let uart = Arc::new(Mutex::new(uart));
        let writer = Writer::start(output.clone(), io.output, io.limit_bytes, threads)?;
        let input = match io.input {
            Some(from) => Some(input::Reader::start(
                from,
                uart.clone(),
                drained,
                counters.clone(),
                threads,
            )?),
            None => None,
        };
        Ok(Self {
            uart,
            output,
            writer: Some(writer),
            input,
        })
    }

    /// Reads the register at `offset` (0 to 7).
    pub(crate) fn read(&self, offset: u8) -> u8 {
        self.uart.lock().expect("no holder panics").read(offset)
    }

    /// Writes the register at `offset` (0 to 7).
    pub(crate) fn write(&self, offset: u8, byte: u8) {
        // The write fails when an output byte was lost, which is counted, or when an eventfd is at
        // its limit: then the interrupt is pending already.
        let _ = self
            .uart
            .lock()
            .expect("no holder panics")
            .write(offset, byte);
    }

    /// Returns the UART's state. The guest does not run.
    pub(crate) fn state(&self) -> SerialState {
        let registers = self.uart.lock().expect("no holder panics").state();
        SerialState {
            divisor: [registers.baud_divisor_low, registers.baud_divisor_high],
            registers: [
                registers.interrupt_enable,
                registers.interrupt_identification,
                registers.line_control,
                registers.line_status,
                registers.modem_control,
                registers.modem_status,
                registers.scratch,
            ],
            input: registers.in_buffer,
        }
    }

    /// Resets the UART. Input that the guest had not read is lost. The guest does not run.
    pub(crate) fn reset(&self) {
        let mut uart = self.uart.lock().expect("no holder panics");
        let mut write = |offset, byte| drop(uart.write(offset, byte));
        // Divisor latch, divisor of 9,600 baud; then 8 bits, no interrupts, OUT2 (vm-superio's
        // state at power-on), scratch.
        for (offset, byte) in [(3, 0x80), (0, 12), (1, 0), (3, 3), (1, 0), (4, 8), (7, 0)] {
            write(offset, byte);
        }
        for _ in 0..UART_FIFO_BYTES {
            if uart.read(5) & 1 == 0 {
                break;
            }
            uart.read(0);
        }
        // Acknowledges what is pending.
        uart.read(2);
    }

    /// Interrupts once: an interrupt may have been under way when the machine was saved.
    pub(crate) fn signal_again(&self) {
        let uart = self.uart.lock().expect("no holder panics");
        // The write fails only when the count is at its limit: then an interrupt is pending.
        let _ = uart.interrupt_evt().trigger();
    }

    /// Ends all waiting of vCPUs for the output. Must be called before the vCPUs are joined.
    pub(crate) fn end_waits(&self) {
        self.output.end_waits();
    }

    /// Ends the threads, once the guest's output is written, or the reader has taken none of it for
    /// a while.
    pub(crate) fn close(&mut self) {
        drop(self.input.take());
        if let Some(writer) = self.writer.take() {
            writer.close();
        }
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        self.close();
    }
}

fn registers(state: &SerialState) -> Registers {
    let [low, high] = state.divisor;
    let [ier, iir, lcr, lsr, mcr, msr, scr] = state.registers;
    Registers {
        baud_divisor_low: low,
        baud_divisor_high: high,
        interrupt_enable: ier,
        interrupt_identification: iir,
        line_control: lcr,
        line_status: lsr,
        modem_control: mcr,
        modem_status: msr,
        scratch: scr,
        in_buffer: state.input.clone(),
    }
}

/// Interrupt line of the UART, IRQ 4.
struct Interrupt {
    line: EventFd,
    counters: Arc<SerialCounters>,
}

impl Trigger for Interrupt {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.counters.interrupts.one();
        self.line.write(1)
    }
}

/// Wakes the input thread when the guest has emptied the FIFO.
struct Drained(EventFd);

impl SerialEvents for Drained {
    fn buffer_read(&self) {}
    fn out_byte(&self) {}
    fn tx_lost_byte(&self) {}
    fn in_buffer_empty(&self) {
        // The write fails only when the count is at its limit: then the thread is awake already.
        let _ = self.0.write(1);
    }
}

/// Waits until one of the descriptors can be read, or written where `true` is given with it.
/// Returns which of them are ready or were hung up.
fn ready<const N: usize>(
    descriptors: [(BorrowedFd<'_>, bool); N],
    timeout_ms: i32,
) -> io::Result<[bool; N]> {
    let mut polled = descriptors.map(|(descriptor, write)| libc::pollfd {
        fd: descriptor.as_raw_fd(),
        events: if write { libc::POLLOUT } else { libc::POLLIN },
        revents: 0,
    });
    // SAFETY: the pointer and the number are those of `polled`.
    match unsafe { libc::poll(polled.as_mut_ptr(), N as libc::nfds_t, timeout_ms) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(polled.map(|p| p.revents != 0)),
    }
}

/// Borrows the eventfd, for polling.
fn borrowed(eventfd: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: the eventfd is open for as long as it is borrowed.
    unsafe { BorrowedFd::borrow_raw(eventfd.as_raw_fd()) }
}
