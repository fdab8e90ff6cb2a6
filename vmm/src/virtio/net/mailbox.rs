//! Commands to a thread that may be asleep, each answered before the sender goes on.
use std::{
    io,
    os::fd::{AsRawFd, RawFd},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// The sender's end.
pub(super) struct Mailbox<C> {
    line: Mutex<Line<C>>,
    bell: Arc<Bell>,
}

struct Line<C> {
    commands: mpsc::Sender<C>,
    answers: mpsc::Receiver<()>,
}

/// The thread's end.
pub(super) struct Inbox<C> {
    commands: mpsc::Receiver<C>,
    answers: mpsc::Sender<()>,
    bell: Arc<Bell>,
}

struct Bell {
    /// Looked at on the way, so that a busy thread needs no system call.
    rung: AtomicBool,
    event: EventFd,
}

/// Both ends.
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
    /// Sends a command and waits until it was carried out. A thread that has ended carries out
    /// nothing, and so keeps nobody waiting.
    pub(super) fn send(&self, command: C) {
        let line = self.line.lock().unwrap_or_else(PoisonError::into_inner);
        if line.commands.send(command).is_ok() {
            self.bell.rung.store(true, Ordering::Release);
            // It fails only when the count is at its end: then the thread wakes all the same.
            let _ = self.bell.event.write(1);
            let _ = line.answers.recv();
        }
    }
}

impl<C> Inbox<C> {
    /// Signalled when a command is there. Watch it edge-triggered.
    pub(super) fn descriptor(&self) -> RawFd {
        self.bell.event.as_raw_fd()
    }

    /// Whether a command may be there.
    pub(super) fn rung(&self) -> bool {
        self.bell.rung.load(Ordering::Acquire)
    }

    /// The next command. Each is to be answered.
    pub(super) fn take(&self) -> Option<C> {
        self.bell.rung.store(false, Ordering::Release);
        self.commands.try_recv().ok()
    }

    /// Waits for the next command; `None` when no more can come.
    pub(super) fn wait(&self) -> Option<C> {
        self.commands.recv().ok()
    }

    /// Says that the command was carried out.
    pub(super) fn answer(&self) {
        let _ = self.answers.send(());
    }
}
