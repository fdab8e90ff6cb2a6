//! A question to a daemon, which may take long to answer or never do: a thread asks it, so that a signal
//! ends the wait.
use std::{
    os::{
        fd::{AsFd as _, BorrowedFd},
        unix::net::UnixStream,
    },
    sync::mpsc::{self, Receiver, RecvError, TryRecvError},
    thread,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{signal::Signal, signalfd::SignalFd},
};

/// A question that is being asked. Once this is dropped, nobody listens for the answer: the thread ends
/// when it comes, or with the process.
#[derive(Debug)]
pub(crate) struct Asking<T> {
    /// Its other end is closed when the answer is there.
    over: UnixStream,
    answer: Receiver<T>,
}

impl<T: Send + 'static> Asking<T> {
    /// Has a thread of this name ask.
    ///
    /// # Errors
    /// No thread can be made.
    pub(crate) fn begin(
        thread_name: &str,
        ask: impl FnOnce() -> T + Send + 'static,
    ) -> anyhow::Result<Self> {
        let (over, theirs) = UnixStream::pair().context("making a pair of sockets")?;
        let (answer, receiver) = mpsc::channel();
        let asks = move || {
            // Nobody may listen any more.
            let _ = answer.send(ask());
            drop(theirs);
        };
        let spawned = thread::Builder::new()
            .name(thread_name.to_owned())
            .spawn(asks);
        spawned.context("starting a thread that asks the daemon")?;
        let answer = receiver;
        Ok(Self { over, answer })
    }

    /// Readable when [`Asking::answer`] does not wait.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.over.as_fd()
    }

    /// Waits for the answer.
    ///
    /// # Errors
    /// The thread has panicked.
    pub(crate) fn answer(self) -> Result<T, RecvError> {
        self.answer.recv()
    }

    /// Returns the answer once it is there. Does not wait, and is not called again afterwards.
    ///
    /// # Errors
    /// The thread has panicked.
    pub(crate) fn answer_if_over(&self) -> Result<Option<T>, RecvError> {
        match self.answer.try_recv() {
            Ok(answer) => Ok(Some(answer)),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Err(RecvError),
        }
    }

    /// Waits for the answer, for so long at most. Returns whether it is there.
    ///
    /// # Errors
    /// A signal asks to stop ([`StoppedEarly`]).
    pub(crate) fn is_over_within(
        &self,
        signals: &SignalFd,
        time: Duration,
    ) -> anyhow::Result<bool> {
        let until = Instant::now() + time;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if self.is_over(signals, timeout_of(left))? {
                return Ok(true);
            }
            if left.is_zero() {
                return Ok(false);
            }
        }
    }

    /// Waits for the answer.
    ///
    /// # Errors
    /// A signal asks to stop ([`StoppedEarly`]), or the thread has panicked.
    pub(crate) fn answer_unless_stopped(self, signals: &SignalFd) -> anyhow::Result<T> {
        while !self.is_over(signals, PollTimeout::NONE)? {}
        self.answer().context("the thread that asks has failed")
    }

    /// Waits for the answer, a signal or an end of the time. Returns whether the answer is there.
    fn is_over(&self, signals: &SignalFd, timeout: PollTimeout) -> anyhow::Result<bool> {
        let input = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let mut fds = [input(self.fd()), input(signals.as_fd())];
        match poll(&mut fds, timeout) {
            Ok(_) | Err(nix::Error::EINTR) => {}
            Err(e) => return Err(e).context("waiting for the daemon's answer"),
        }
        let is_over = fds[0].any().unwrap_or(true);
        match signal_to_stop(signals)? {
            Some(signal) => Err(StoppedEarly { signal }.into()),
            None => Ok(is_over),
        }
    }
}

/// Returns a signal that has come and asks to stop.
pub(crate) fn signal_to_stop(signals: &SignalFd) -> anyhow::Result<Option<Signal>> {
    let info = signals.read_signal()?;
    let signal =
        info.map(|info| Signal::try_from(info.ssi_signo as i32).unwrap_or(Signal::SIGTERM));
    // The policy and the flow log are the daemon's.
    Ok(signal.filter(|signal| *signal != Signal::SIGHUP))
}

/// A signal has asked to stop before the guest ran.
#[derive(Debug, thiserror::Error)]
#[error("stopped by {signal} before the guest ran")]
pub(crate) struct StoppedEarly {
    pub(crate) signal: Signal,
}

/// Returns the time-out of a poll that is not to return before this is over.
pub(crate) fn timeout_of(wait: Duration) -> PollTimeout {
    // Cut to milliseconds, the last one would be spent on polls that do not wait.
    let ms = wait.as_nanos().div_ceil(1_000_000);
    PollTimeout::try_from(ms).unwrap_or(PollTimeout::MAX)
}

#[cfg(test)]
#[path = "asking_test.rs"]
mod tests;
