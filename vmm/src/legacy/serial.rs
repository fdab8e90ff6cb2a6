//! The serial console: a 16550A (`vm-superio`) at COM1's ports, on IRQ 4.
//!
//! # Theory of operation
//! The UART is behind a lock; a vCPU holds it for one register access. What the guest writes goes
//! to a buffer, from which a thread writes to the output in lines (`serial/output.rs`), so that a
//! guest's byte costs no system call. A second thread reads the input and fills the UART's FIFO, as
//! far as it has room; the UART tells it when the guest has emptied it (`serial/input.rs`).
//!
//! A reader of the console that falls asleep must not take the machine with it: a byte that finds
//! the buffer full waits a while for room, once; from then on bytes are lost, and counted, until
//! the reader has taken something.
use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex},
};

use vm_superio::{Serial, Trigger, serial::SerialEvents};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::{
    ThreadSetup,
    counters::{Count, SerialCounters},
};

mod input;
mod output;

use output::{Feed, Output, Writer};

/// Where the console's bytes come from and go to.
#[derive(Debug)]
pub struct SerialIo {
    /// What the user types; `None` for a console that nobody types on. Its end is no error. A
    /// terminal is to be in raw mode already if the guest is to see each key.
    pub input: Option<OwnedFd>,
    /// What the guest prints goes here.
    pub output: OwnedFd,
}

/// The console and its threads.
pub(crate) struct Console {
    uart: Arc<Mutex<Uart>>,
    output: Arc<Output>,
    writer: Option<Writer>,
    input: Option<input::Reader>,
}

type Uart = Serial<Interrupt, Drained, Feed>;

impl Console {
    /// Starts the console's threads. `interrupt` is IRQ 4's.
    pub(crate) fn start(
        io: SerialIo,
        interrupt: EventFd,
        counters: &Arc<SerialCounters>,
        threads: &ThreadSetup,
    ) -> io::Result<Self> {
        let drained = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?;
        let output = Arc::new(Output::new(counters.clone(), output::PATIENCE));
        let interrupt = Interrupt {
            line: interrupt,
            counters: counters.clone(),
        };
        let uart = Serial::with_events(
            interrupt,
            Drained(drained.try_clone()?),
            Feed(output.clone()),
        );
        let uart = Arc::new(Mutex::new(uart));
        let writer = Writer::start(output.clone(), io.output, threads)?;
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

    /// Writes the register at `offset`.
    pub(crate) fn write(&self, offset: u8, byte: u8) {
        // Fails when an output byte was lost, which is counted, or an eventfd was at its limit,
        // when the interrupt is on its way already.
        let _ = self
            .uart
            .lock()
            .expect("no holder panics")
            .write(offset, byte);
    }

    /// From now on no vCPU waits for the output. Called before the vCPUs are waited for.
    pub(crate) fn let_go(&self) {
        self.output.let_go();
    }

    /// Ends the threads, after what the guest printed was written, or the reader took none of it
    /// for a while.
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

/// IRQ 4.
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

/// Wakes the input's thread when the guest has read all there was.
struct Drained(EventFd);

impl SerialEvents for Drained {
    fn buffer_read(&self) {}
    fn out_byte(&self) {}
    fn tx_lost_byte(&self) {}
    fn in_buffer_empty(&self) {
        // Fails only when the count is at its limit: then the thread is on its way.
        let _ = self.0.write(1);
    }
}

/// Waits until one of the descriptors can be read, or written where `true` is given with it.
/// Which can, or were hung up.
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

/// The eventfd, to be polled.
fn borrowed(eventfd: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: the eventfd is open for as long as it is borrowed.
    unsafe { BorrowedFd::borrow_raw(eventfd.as_raw_fd()) }
}
