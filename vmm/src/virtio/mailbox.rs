//! Commands to a thread that may be asleep. The sender waits for the answer to each.
use std::{
    io,
    os::fd::{AsRawFd, RawFd},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::Duration,
};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Sender's end of a mailbox.
pub(super) struct Mailbox<C> {
    line: Mutex<Line<C>>,
    bell: Arc<Bell>,
}

struct Line<C> {
    commands: mpsc::Sender<C>,
    answers: mpsc::Receiver<()>,
}

/// Receiving thread's end of a mailbox.
pub(super) struct Inbox<C> {
    commands: mpsc::Receiver<C>,
    answers: mpsc::Sender<()>,
    bell: Arc<Bell>,
}

/// Reason for the end of a rest.
pub(super) enum Rested<C> {
    /// The thread goes on where it was.
    Resumed,
    /// Another command, not answered yet.
    Command(C),
    /// No more commands can come.
    Over,
}

/// What ended a wait. Neither, if it was something else, the time is over, or a signal came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Woken {
    /// A command has arrived: [quiet](Inbox::quiet) the inbox.
    pub(super) command: bool,
    /// `kick` can be read.
    pub(super) kick: bool,
}

struct Bell {
    /// True after a command was sent. The flag is read without a system call, for a busy thread.
    rung: AtomicBool,
    event: EventFd,
}

/// Creates a mailbox and returns both ends.
pub(super) fn mailbox<C>() -> io::Result<(Mailbox<C>, Inbox<C>)> {
    let bell = Arc::new(Bell {
        rung: AtomicBool::new(false),
        event: EventFd::new(EFD_NONBLOCK)?,
    });
    let (to, commands) = mpsc::channel();
    let (answers, from) = mpsc::channel();
    let line = Line {
        commands: to,
        answers: from,
    };
    let mailbox = Mailbox {
        line: Mutex::new(line),
        bell: Arc::clone(&bell),
    };
    Ok((
        mailbox,
        Inbox {
            commands,
            answers,
            bell,
        },
    ))
}

impl<C> Mailbox<C> {
    /// Sends a command and waits until it was carried out. Returns false, at once, if the thread
    /// has ended.
    pub(super) fn send(&self, command: C) -> bool {
        let line = self.line.lock().unwrap_or_else(PoisonError::into_inner);
        if line.commands.send(command).is_err() {
            return false;
        }
        self.bell.rung.store(true, Ordering::Release);
        // The write fails only when the count is at its limit: then the thread wakes all the same.
        let _ = self.bell.event.write(1);
        line.answers.recv().is_ok()
    }
}

impl<C> Inbox<C> {
    /// Returns an eventfd that is signalled when a command arrives. Watch it edge-triggered; or
    /// [quiet](Inbox::quiet) it before the next command is taken; or quiet it only behind a wait that it
    /// has ended, and take commands at any time: the signal of one that was taken before then ends the
    /// next wait at once, in vain.
    pub(super) fn descriptor(&self) -> RawFd {
        self.bell.event.as_raw_fd()
    }

    /// Ends the signal of the commands so far.
    pub(super) fn quiet(&self) {
        // An empty eventfd is no error.
        let _ = self.bell.event.read();
    }

    /// Returns whether a command may have arrived.
    pub(super) fn rung(&self) -> bool {
        self.bell.rung.load(Ordering::Acquire)
    }

    /// Takes the next command, if there is one. Each command must be answered.
    pub(super) fn take(&self) -> Option<C> {
        self.bell.rung.store(false, Ordering::Release);
        self.commands.try_recv().ok()
    }

    /// Waits for the next command. Returns `None` when no more can come.
    pub(super) fn wait(&self) -> Option<C> {
        self.commands.recv().ok()
    }

    /// Waits until a command arrives, until `kick` or `also` can be read, or until the time is over.
    /// Returns which of the first two it was.
    ///
    /// # Errors
    /// The host refuses to wait.
    pub(super) fn wait_beside(
        &self,
        kick: Option<RawFd>,
        also: Option<RawFd>,
        time: Option<Duration>,
    ) -> io::Result<Woken> {
        // poll(2) ignores a negative descriptor.
        let readable = |fd| libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        };
        let others = [kick, also].map(|fd| readable(fd.unwrap_or(-1)));
        let mut fds = [readable(self.descriptor()), others[0], others[1]];
        let millis = time.map_or(-1, |time| {
            i32::try_from(time.as_millis()).unwrap_or(i32::MAX)
        });
        // SAFETY: the array is valid for its elements, and outlives the call.
        let ready = unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, millis) };
        match io::Error::last_os_error() {
            error if ready < 0 && error.kind() != io::ErrorKind::Interrupted => Err(error),
            _ => Ok(Woken {
                command: fds[0].revents != 0,
                kick: fds[1].revents != 0,
            }),
        }
    }

    /// Waits until a command arrives, or until one of the descriptors can be read.
    ///
    /// # Errors
    /// The host refuses to wait.
    pub(super) fn wait_beside_all(&self, kicks: &[RawFd]) -> io::Result<()> {
        let readable = |fd| libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        };
        let all = kicks.iter().copied().chain([self.descriptor()]);
        let mut fds: Vec<_> = all.map(readable).collect();
        // SAFETY: the array is valid for its elements, and outlives the call.
        let ready = unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, -1) };
        match io::Error::last_os_error() {
            error if ready < 0 && error.kind() != io::ErrorKind::Interrupted => Err(error),
            _ => Ok(()),
        }
    }

    /// Answers the last command, which was to rest, and waits for the next one. `resumes`: whether a
    /// command ends the rest and is nothing else.
    pub(super) fn rest(&self, resumes: impl Fn(&C) -> bool) -> Rested<C> {
        self.answer();
        match self.wait() {
            Some(command) if resumes(&command) => {
                self.answer();
                Rested::Resumed
            }
            Some(command) => Rested::Command(command),
            None => Rested::Over,
        }
    }

    /// Answers the last command: it was carried out.
    pub(super) fn answer(&self) {
        let _ = self.answers.send(());
    }
}
