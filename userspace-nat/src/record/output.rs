//! Output to files, so that no turn of the event loop waits for a disk.
//!
//! # Theory of operation
//! A write to a regular file may take any time, depending on the disk or the server behind it, and
//! `O_NONBLOCK` does not change that. So a [`Background`] has a thread that writes, and before it a
//! queue of [`MOST_QUEUED`] bytes. A batch for which there is no room is refused at once, and the
//! caller counts it as lost. The thread is started before the process is confined, and receives its
//! file later.
//!
//! A batch has a number. [`Output::is_done`] says whether the kernel has accepted it or it can't be
//! written. Only then may its subject be forgotten, so that after a crash the successor finds
//! either the line or the flow. Batches are done in order.
//!
//! Without a thread ([`Output::direct`]) a batch is done when it was given: for tests, and for
//! files that never block.
use std::{
    collections::VecDeque,
    io::{self, Read, Seek, SeekFrom, Write},
    sync::{Arc, Condvar, Mutex, MutexGuard},
    thread,
    time::Duration,
};

/// Most bytes that wait for the thread; as many may be in a write besides. This is far less than
/// the part of a log that an adopter searches.
pub const MOST_QUEUED: usize = 1 << 20;
/// Time between two attempts to write a stream that must not be lost.
const RETRY_AFTER: Duration = Duration::from_millis(200);
/// Stack of the writing thread, bytes; it makes no deep calls.
const STACK_BYTES: usize = 128 << 10;

type File = Box<dyn Write + Send>;

/// Treatment of bytes that a file does not accept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unwritten {
    /// The bytes are lost, and the next line starts on a line of its own: for lines.
    Lost,
    /// The bytes are written again: for a stream, which is of no use with a gap.
    TriedAgain,
}

/// Results of batches since the last look.
#[derive(Debug, Default)]
pub struct WriteResults {
    /// Lines that were written.
    pub written: u64,
    /// Lines that could not be written.
    pub lost: u64,
    /// Cause of the last loss.
    pub error: Option<io::Error>,
}

/// A file that is written at once or by a thread.
pub struct Output {
    to: To,
}

enum To {
    Direct {
        writing: Writing,
        outcome: WriteResults,
        given: u64,
    },
    Background(Background),
}

impl std::fmt::Debug for Output {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut f = f.debug_struct("Output");
        match &self.to {
            To::Direct { given, .. } => f.field("given", given),
            To::Background(background) => f.field("to", background),
        };
        f.finish_non_exhaustive()
    }
}

impl From<Background> for Output {
    fn from(background: Background) -> Self {
        Self {
            to: To::Background(background),
        }
    }
}

impl Output {
    /// Creates an output that the calling thread writes.
    pub fn direct(file: File) -> Self {
        Self {
            to: To::Direct {
                writing: Writing::whole(file),
                outcome: WriteResults::default(),
                given: 0,
            },
        }
    }

    /// Replaces the file. Batches given before go to the old one.
    pub fn set_file(&mut self, file: File) {
        match &mut self.to {
            To::Direct { writing, .. } => *writing = Writing::whole(file),
            To::Background(background) => background.set_file(file),
        }
    }

    /// The same by a log, which appends. If it ends within a line, the next line ends that: it may be the
    /// file of before, by another descriptor.
    pub fn set_log(&mut self, log: impl Read + Write + Seek + Send + 'static) {
        match &mut self.to {
            To::Direct { writing, .. } => *writing = Writing::log(log),
            To::Background(background) => background.replace(|| Writing::log(log)),
        }
    }

    /// Takes a batch of `lines` whole lines, all of it or nothing. Returns its number; `None` when
    /// there is no room, and the batch is lost.
    pub fn give(&mut self, bytes: &[u8], lines: u64) -> Option<u64> {
        match &mut self.to {
            To::Direct {
                writing,
                outcome,
                given,
            } => {
                match writing.write_lines(bytes) {
                    Ok(()) => outcome.written += lines,
                    Err(error) => {
                        outcome.lost += lines;
                        outcome.error = Some(error);
                    }
                }
                *given += 1;
                Some(*given)
            }
            To::Background(background) => background.give(bytes, lines),
        }
    }

    /// Takes as many bytes of a stream as there is room for. Returns how many.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when there is no room; an error of the file when it is written
    /// directly.
    pub fn take_some(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.to {
            To::Direct { writing, .. } => writing.file.as_mut().map_or(Ok(0), |f| f.write(bytes)),
            To::Background(background) => match bytes.len().min(background.room()) {
                0 => Err(io::ErrorKind::WouldBlock.into()),
                some => {
                    let given = background.give(&bytes[..some], 0);
                    given.map(|_| some).ok_or(io::ErrorKind::WouldBlock.into())
                }
            },
        }
    }

    /// Whether a batch was written or lost.
    pub fn is_done(&self, batch: u64) -> bool {
        match &self.to {
            To::Direct { .. } => true,
            To::Background(background) => background.state().done >= batch,
        }
    }

    /// Returns the results of batches since the last call.
    pub fn take_outcome(&mut self) -> WriteResults {
        match &mut self.to {
            To::Direct { outcome, .. } => std::mem::take(outcome),
            To::Background(background) => std::mem::take(&mut background.state().outcome),
        }
    }

    /// Waits, at most `within`, until all batches are done. Returns whether they are.
    pub fn finish(&self, within: Duration) -> bool {
        match &self.to {
            To::Direct { .. } => true,
            To::Background(background) => background.finish(within),
        }
    }
}

/// A file, and whether it ends within a line.
#[derive(Default)]
struct Writing {
    file: Option<File>,
    torn: bool,
}

impl Writing {
    fn whole(file: File) -> Self {
        let file = Some(file);
        Self { file, torn: false }
    }

    /// Looks at the log's end. One that can't be read, a pipe for one, is taken to be whole.
    fn log(mut log: impl Read + Write + Seek + Send + 'static) -> Self {
        let torn = ends_within_line(&mut log).unwrap_or(false);
        let file: Option<File> = Some(Box::new(log));
        Self { file, torn }
    }

    /// Writes lines, in one write where the file accepts it. If it has accepted a part of a line, the next
    /// call ends that by the same write.
    fn write_lines(&mut self, bytes: &[u8]) -> io::Result<()> {
        let file = self.file.as_mut().ok_or(io::ErrorKind::NotConnected)?;
        let ended;
        let mut left = bytes;
        if self.torn {
            ended = [b"\n", bytes].concat();
            left = &ended;
        }
        while !left.is_empty() {
            match file.write(left) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(some) => {
                    self.torn = left[..some].last() != Some(&b'\n');
                    left = &left[some..];
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        // What is given is whole, whatever it ends with.
        self.torn = false;
        file.flush()
    }
}

/// A file that a thread writes.
#[derive(Debug)]
pub struct Background {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// Signals that there is something to write, or that the thread is to end.
    work: Condvar,
    /// Signals that something was written, or that the thread has started.
    news: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    queued_bytes: usize,
    /// Batches that were queued, and batches that are done.
    given: u64,
    done: u64,
    outcome: WriteResults,
    has_begun: bool,
    waits: bool,
    is_over: bool,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State")
            .field("queued_bytes", &self.queued_bytes)
            .field("given", &self.given)
            .field("done", &self.done)
            .finish_non_exhaustive()
    }
}

enum Job {
    /// Another file. The thread calls this, since a look at the file may take long too.
    File(Box<dyn FnOnce() -> Writing + Send>),
    /// Batches up to and with number `up_to`.
    Write {
        bytes: Vec<u8>,
        lines: u64,
        up_to: u64,
    },
}

impl Background {
    /// Starts a thread of this name, which waits for a file. When this returns, the thread has made
    /// the system calls that a thread makes at its start.
    ///
    /// # Errors
    /// When the thread can't be started.
    pub fn start(name: &str, unwritten: Unwritten) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let threads = shared.clone();
        thread::Builder::new()
            .name(name.to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || threads.write(unwritten))?;
        let mut state = shared.lock();
        while !state.has_begun {
            state = wait(&shared.news, state);
        }
        drop(state);
        Ok(Self { shared })
    }

    /// Replaces the file. Batches given before go to the previous file; batches given before the
    /// first file go to that.
    pub fn set_file(&mut self, file: File) {
        self.replace(|| Writing::whole(file));
    }

    /// The same of a log, which appends. If its last writer was killed within a line, that line is ended,
    /// so that the next one has a line of its own. Where others append to it too, an empty line may be the
    /// result.
    ///
    /// # Errors
    /// The log can't be read, or the line can't be ended now: the disk is full, for one. The log is
    /// written all the same, and the next lines end the torn one by the same write.
    pub fn continue_log(
        &mut self,
        mut log: impl Read + Write + Seek + Send + 'static,
    ) -> io::Result<()> {
        let ended = end_torn_line(&mut log);
        let file: File = Box::new(log);
        let torn = ended.is_err();
        self.replace(move || Writing {
            file: Some(file),
            torn,
        });
        ended
    }

    fn replace(&mut self, by: impl FnOnce() -> Writing + Send + 'static) {
        let mut state = self.state();
        state.queue.push_back(Job::File(Box::new(by)));
        self.shared.wake(state);
    }

    fn room(&self) -> usize {
        MOST_QUEUED.saturating_sub(self.state().queued_bytes)
    }

    /// Queues a batch. Returns its number; `None` when there is no room.
    fn give(&mut self, more: &[u8], more_lines: u64) -> Option<u64> {
        let mut state = self.state();
        // A batch larger than the queue finds room in an empty one.
        if state.queued_bytes > 0 && state.queued_bytes + more.len() > MOST_QUEUED {
            return None;
        }
        state.given += 1;
        state.queued_bytes += more.len();
        let now_up_to = state.given;
        match state.queue.back_mut() {
            Some(Job::Write {
                bytes,
                lines,
                up_to,
            }) => {
                bytes.extend_from_slice(more);
                *lines += more_lines;
                *up_to = now_up_to;
            }
            _ => state.queue.push_back(Job::Write {
                bytes: more.to_vec(),
                lines: more_lines,
                up_to: now_up_to,
            }),
        }
        self.shared.wake(state);
        Some(now_up_to)
    }

    fn finish(&self, within: Duration) -> bool {
        let is_behind = |state: &mut State| state.done < state.given;
        let waited = self
            .shared
            .news
            .wait_timeout_while(self.state(), within, is_behind);
        let (state, _) = waited.unwrap_or_else(std::sync::PoisonError::into_inner);
        state.done == state.given
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.lock()
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        let mut state = self.state();
        state.is_over = true;
        self.shared.wake(state);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No holder of the lock panics.
        self.state
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Releases the lock and wakes the thread if it waits, which is a system call.
    fn wake(&self, state: MutexGuard<'_, State>) {
        let waits = state.waits;
        drop(state);
        if waits {
            self.work.notify_one();
        }
    }

    /// Body of the writing thread.
    fn write(&self, unwritten: Unwritten) {
        let mut to = Writing::default();
        let mut state = self.lock();
        state.has_begun = true;
        self.news.notify_all();
        loop {
            let Some(job) = state.queue.pop_front() else {
                if state.is_over {
                    return;
                }
                state.waits = true;
                state = wait(&self.work, state);
                state.waits = false;
                continue;
            };
            let (bytes, lines, up_to) = match job {
                Job::File(other) => {
                    drop(state);
                    to = other();
                    state = self.lock();
                    continue;
                }
                Job::Write {
                    bytes,
                    lines,
                    up_to,
                } => (bytes, lines, up_to),
            };
            state.queued_bytes -= bytes.len();
            drop(state);
            let written = match unwritten {
                Unwritten::Lost => to.write_lines(&bytes),
                Unwritten::TriedAgain => self.write_stream(&mut to, &bytes),
            };
            state = self.lock();
            state.done = up_to;
            match written {
                Ok(()) => state.outcome.written += lines,
                Err(error) => {
                    state.outcome.lost += lines;
                    state.outcome.error = Some(error);
                }
            }
            self.news.notify_all();
        }
    }

    /// Writes until all bytes are written, or the output is closed or replaced.
    fn write_stream(&self, to: &mut Writing, mut bytes: &[u8]) -> io::Result<()> {
        let file = to.file.as_mut().ok_or(io::ErrorKind::NotConnected)?;
        while !bytes.is_empty() {
            match file.write(bytes) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(some) => bytes = &bytes[some..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    let state = self.lock();
                    // A file that was given meanwhile begins another stream.
                    let has_other = state.queue.iter().any(|job| matches!(job, Job::File(..)));
                    if state.is_over || has_other {
                        return Err(error);
                    }
                    drop(state);
                    thread::sleep(RETRY_AFTER);
                }
            }
        }
        Ok(())
    }
}

/// Ends a log's last line, if it is torn.
fn end_torn_line(log: &mut (impl Read + Write + Seek)) -> io::Result<()> {
    match ends_within_line(log)? {
        true => log.write_all(b"\n"),
        false => Ok(()),
    }
}

/// Whether a log's last line is torn.
fn ends_within_line(log: &mut (impl Read + Seek)) -> io::Result<bool> {
    if log.seek(SeekFrom::End(0))? == 0 {
        return Ok(false);
    }
    log.seek(SeekFrom::End(-1))?;
    let mut last = [0];
    log.read_exact(&mut last)?;
    Ok(last != *b"\n")
}

fn wait<'a>(on: &Condvar, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
    on.wait(state)
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
#[path = "output_test.rs"]
mod tests;
