//! The console's output: a bounded buffer, and the thread that empties it.
use std::{
    collections::VecDeque,
    io::{self, Write},
    os::fd::{AsFd, AsRawFd, OwnedFd},
    sync::{Arc, Condvar, Mutex, MutexGuard, atomic::Ordering::Relaxed},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::{borrowed, ready};
use crate::{
    ThreadKind, ThreadSetup,
    counters::{Count, SerialCounters},
    kick, thread,
};

/// Capacity of the buffer, bytes.
const BUFFER_BYTES: usize = 64 << 10;
/// Largest write, bytes: a pipe that polls as writable takes this much without blocking (PIPE_BUF).
const WRITE_BYTES: usize = 4096;
/// Longest time that an unfinished line stays in the buffer (a prompt has no end of line).
const UNFINISHED_LINE: Duration = Duration::from_millis(5);
/// Longest time that a vCPU waits for room, and that an ending machine waits for its reader.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

/// Output buffer. The UART writes to it a byte at a time.
pub(super) struct Output {
    state: Mutex<State>,
    /// Signalled for the thread: a line is whole, a first byte came, or the output is closed.
    filled: Condvar,
    /// Signalled for a vCPU: there is room, or vCPUs must not wait any more.
    room: Condvar,
    patience: Duration,
    counters: Arc<SerialCounters>,
}

#[derive(Default)]
struct State {
    bytes: VecDeque<u8>,
    /// Time since which the first byte waits; `None` if the buffer is empty.
    since: Option<Instant>,
    /// True if the buffer holds a whole line or at least [`WRITE_BYTES`].
    due: bool,
    /// True after a vCPU waited in vain, until the reader takes a byte.
    stuck: bool,
    /// True once no vCPU may wait any more.
    waits_ended: bool,
    /// True once no more bytes will come.
    closed: bool,
}

impl Output {
    pub(super) fn new(counters: Arc<SerialCounters>, patience: Duration) -> Self {
        Self {
            patience,
            state: Mutex::default(),
            filled: Condvar::new(),
            room: Condvar::new(),
            counters,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }

    pub(super) fn end_waits(&self) {
        self.lock().waits_ended = true;
        self.room.notify_all();
    }

    /// Records the time of the first end of line.
    fn note_line(&self) {
        let at = &self.counters.first_line_at_us;
        if at.load(Relaxed) == 0 {
            at.store(monotonic_us(), Relaxed);
        }
    }

    fn push(&self, byte: u8) -> io::Result<()> {
        let mut state = self.lock();
        if state.bytes.len() >= BUFFER_BYTES && !state.stuck && !state.waits_ended {
            let full = |state: &mut State| state.bytes.len() >= BUFFER_BYTES && !state.waits_ended;
            (state, _) = self
                .room
                .wait_timeout_while(state, self.patience, full)
                .expect("no holder panics");
            state.stuck = full(&mut state);
        }
        if state.bytes.len() >= BUFFER_BYTES {
            self.counters.output_lost_bytes.one();
            return Err(io::ErrorKind::WouldBlock.into());
        }
        state.bytes.push_back(byte);
        let first = state.since.is_none();
        if first {
            state.since = Some(Instant::now());
        }
        let due = byte == b'\n' || state.bytes.len() >= WRITE_BYTES;
        if first || (due && !state.due) {
            self.filled.notify_one();
        }
        state.due |= due;
        Ok(())
    }

    /// Waits for bytes to write. Returns `None` once the output is closed and empty.
    fn next(&self) -> Option<Vec<u8>> {
        let mut state = self.lock();
        loop {
            let left = state
                .since
                .map(|at| UNFINISHED_LINE.saturating_sub(at.elapsed()));
            let now = state.due || state.closed || left == Some(Duration::ZERO);
            if now && !state.bytes.is_empty() {
                // The bytes stay in the buffer until they are written: their room is not free
                // before.
                let some = state.bytes.len().min(WRITE_BYTES);
                return Some(state.bytes.range(..some).copied().collect());
            }
            if state.closed {
                return None;
            }
            state = match left {
                None => self.filled.wait(state),
                Some(left) => self
                    .filled
                    .wait_timeout(state, left)
                    .map(|(s, _)| s)
                    .map_err(|e| std::sync::PoisonError::new(e.into_inner().0)),
            }
            .expect("no holder panics");
        }
    }

    /// Removes bytes that the reader never will take, and counts them.
    fn lose(&self, bytes: usize) {
        self.counters.output_lost_bytes.add(bytes as u64);
        self.took(bytes);
    }

    /// Removes bytes that the reader took (or never will take).
    fn took(&self, bytes: usize) {
        let mut state = self.lock();
        state.bytes.drain(..bytes);
        state.stuck = false;
        state.due = state.bytes.len() >= WRITE_BYTES || state.bytes.contains(&b'\n');
        state.since = (!state.bytes.is_empty()).then(Instant::now);
        self.room.notify_all();
    }
}

fn monotonic_us() -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the pointer is valid for the result. The call can't fail for a clock that every
    // kernel has.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1_000
}

/// The UART's end of the buffer.
pub(super) struct Feed(pub(super) Arc<Output>);

impl Write for Feed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for &byte in bytes {
            self.0.counters.output_bytes.one();
            if byte == b'\n' {
                self.0.note_line();
            }
            self.0.push(byte)?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The thread that writes the output.
pub(super) struct Writer {
    output: Arc<Output>,
    give_up: EventFd,
    thread: JoinHandle<()>,
}

impl Writer {
    pub(super) fn start(
        output: Arc<Output>,
        to: OwnedFd,
        limit_bytes: Option<u64>,
        threads: &ThreadSetup,
    ) -> io::Result<Self> {
        let give_up = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?;
        let (source, over) = (output.clone(), give_up.try_clone()?);
        let thread = thread::spawn("console-out", ThreadKind::Device, threads, move || {
            write_all_of(&source, &to, limit_bytes, &over);
        })?;
        Ok(Self {
            output,
            give_up,
            thread,
        })
    }

    /// Ends the thread once all is written, or the reader has taken nothing for the output's
    /// patience.
    pub(super) fn close(self) {
        let mut state = self.output.lock();
        state.closed = true;
        state.waits_ended = true;
        self.output.filled.notify_all();
        while !state.bytes.is_empty() {
            let before = state.bytes.len();
            let waited;
            (state, waited) = self
                .output
                .room
                .wait_timeout_while(state, self.output.patience, |state| {
                    state.bytes.len() == before
                })
                .expect("no holder panics");
            if waited.timed_out() {
                let lost = state.bytes.len() as u64;
                self.output.counters.output_lost_bytes.add(lost);
                break;
            }
        }
        drop(state);
        // The write fails only when the count is at its limit: then the thread is awake already.
        let _ = self.give_up.write(1);
        kick::until_joined(self.thread);
    }
}

/// Writes the output until it is closed. A terminal may be stopped (^S) between the poll and the
/// write: the kick that [`Writer::close`] sends interrupts such a write. `limit_bytes`: most that is
/// written.
fn write_all_of(output: &Output, to: &OwnedFd, limit_bytes: Option<u64>, over: &EventFd) {
    let mut left = limit_bytes.unwrap_or(u64::MAX);
    while let Some(mut bytes) = output.next() {
        if left == 0 {
            output.lose(bytes.len());
            continue;
        }
        bytes.truncate(usize::try_from(left).unwrap_or(usize::MAX));
        let writable = match ready([(to.as_fd(), true), (borrowed(over), false)], -1) {
            Ok([_, true]) => return,
            Ok([writable, _]) => writable,
            Err(_) => false,
        };
        if !writable {
            continue;
        }
        // SAFETY: the pointer and the length are those of `bytes`.
        let wrote = unsafe { libc::write(to.as_raw_fd(), bytes.as_ptr().cast(), bytes.len()) };
        match usize::try_from(wrote) {
            Ok(wrote) => {
                output.took(wrote);
                left -= wrote as u64;
            }
            Err(_) => match io::Error::last_os_error().kind() {
                io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock => {}
                // The reader is gone.
                _ => output.lose(bytes.len()),
            },
        }
    }
}

#[cfg(test)]
#[path = "output_test.rs"]
mod tests;
