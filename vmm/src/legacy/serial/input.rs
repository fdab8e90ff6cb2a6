//! The console's input: a thread that reads it and fills the UART's FIFO.
use std::{
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    sync::{Arc, Mutex},
    thread::JoinHandle,
};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::{Uart, borrowed, ready};
use crate::{
    ThreadKind, ThreadSetup,
    counters::{Count, SerialCounters},
    kick, thread,
};

/// The input thread. It ends when this is dropped.
pub(super) struct Reader {
    over: EventFd,
    thread: Option<JoinHandle<()>>,
}

impl Reader {
    /// Starts the thread. `drained` is signalled when the UART's FIFO becomes empty.
    pub(super) fn start(
        from: OwnedFd,
        uart: Arc<Mutex<Uart>>,
        drained: EventFd,
        counters: Arc<SerialCounters>,
        threads: &ThreadSetup,
    ) -> io::Result<Self> {
        let over = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?;
        let seen = over.try_clone()?;
        let thread = thread::spawn("console-in", ThreadKind::Device, threads, move || {
            read_all_of(&from, &uart, &drained, &seen, &counters);
        })?;
        Ok(Self {
            over,
            thread: Some(thread),
        })
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        // The write fails only when the count is at its limit: then the thread is awake already.
        let _ = self.over.write(1);
        if let Some(thread) = self.thread.take() {
            kick::until_joined(thread);
        }
    }
}

/// Copies the input to the UART until the input ends. No byte is read before the FIFO has room for
/// it, so none is lost.
fn read_all_of(
    from: &OwnedFd,
    uart: &Mutex<Uart>,
    drained: &EventFd,
    over: &EventFd,
    counters: &SerialCounters,
) {
    let lock = || uart.lock().expect("no holder panics");
    let mut buffer = [0; 64];
    loop {
        let room = lock().fifo_capacity().min(buffer.len());
        // Without room, wait until the FIFO is drained.
        let next = match room {
            0 => borrowed(drained),
            _ => from.as_fd(),
        };
        match ready([(next, false), (borrowed(over), false)], -1) {
            Ok([_, true]) => return,
            Ok([true, _]) => {}
            Ok(_) | Err(_) => continue,
        }
        if room == 0 {
            // The eventfd is non-blocking, and its count does not matter.
            let _ = drained.read();
            continue;
        }
        // SAFETY: the pointer is the buffer's, and `room` is no more than its length.
        let read = unsafe { libc::read(from.as_raw_fd(), buffer.as_mut_ptr().cast(), room) };
        match usize::try_from(read) {
            Ok(0) => return,
            Ok(read) => {
                counters.input_bytes.add(read as u64);
                // Fails in loopback mode, which disconnects the line, or when that mode filled the
                // FIFO meanwhile: bytes on a disconnected line are lost.
                let _ = lock().enqueue_raw_bytes(&buffer[..read]);
            }
            Err(_) => match io::Error::last_os_error().kind() {
                io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock => {}
                _ => return,
            },
        }
    }
}
