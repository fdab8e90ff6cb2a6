//! The thread of the balloon.
use std::{
    os::fd::AsRawFd as _,
    sync::{Arc, mpsc},
};

use super::{BalloonCounters, Target, counters::count, requests::Requests};
use crate::{
    snapshot::Progress,
    virtio::{
        Activation,
        mailbox::{Inbox, Rested},
        ring::Broken,
    },
};

/// Command to the thread.
pub(super) enum Command {
    Start(Box<Activation>),
    /// Drop the activation and serve no longer.
    Stop,
    /// Rest, and say how far the queues are served.
    Suspend(mpsc::Sender<Vec<Progress>>),
    Resume,
    Exit,
}

/// State of the thread.
pub(super) struct Worker {
    pub(super) inbox: Inbox<Command>,
    pub(super) target: Target,
    pub(super) counters: Arc<BalloonCounters>,
}

impl Worker {
    /// Body of the thread.
    pub(super) fn run(self) {
        let mut command = self.inbox.wait();
        while let Some(given) = command {
            self.inbox.answer();
            command = match given {
                Command::Start(activation) => self.serve(*activation),
                Command::Stop | Command::Suspend(_) | Command::Resume => self.inbox.wait(),
                Command::Exit => return,
            };
        }
    }

    /// Serves until there is another command, which is returned. The activation is dropped by
    /// then.
    fn serve(&self, activation: Activation) -> Option<Command> {
        let signals = activation.signals.clone();
        self.answer(activation).unwrap_or_else(|Stopped| {
            count(&self.counters.broken_rings, 1);
            signals.needs_reset();
            drop(signals);
            self.inbox.wait()
        })
    }

    fn answer(&self, activation: Activation) -> Result<Option<Command>, Stopped> {
        let Activation {
            memory,
            features,
            queues,
            signals,
            ..
        } = activation;
        let mut requests = Requests::new(&queues, features, memory, &self.counters)?;
        let kicks = queues.iter().map(|queue| queue.kick.as_raw_fd());
        let watched: Vec<_> = kicks.chain([self.target.descriptor()]).collect();
        loop {
            self.inbox.quiet();
            for queue in &queues {
                // It only signals that there may be work; an empty eventfd is no error.
                let _ = queue.kick.read();
            }
            if self.target.has_changed() {
                signals.config();
            }
            match self.inbox.take() {
                None => {}
                Some(Command::Suspend(to)) => {
                    // Requests are carried out in order, so none is taken and not given back.
                    let _ = to.send(requests.progress());
                    drop(to);
                    match self.inbox.rest(|next| matches!(next, Command::Resume)) {
                        Rested::Resumed => continue,
                        Rested::Command(command) => return Ok(Some(command)),
                        Rested::Over => return Ok(None),
                    }
                }
                command => return Ok(command),
            }
            if !requests.turn(&*signals)? && !requests.listen()? {
                self.inbox.wait_beside_all(&watched).map_err(|_| Stopped)?;
            }
        }
    }
}

/// The queues can't be served any more: the driver's rings are invalid, or the host failed.
struct Stopped;

impl From<Broken> for Stopped {
    fn from(_: Broken) -> Self {
        Stopped
    }
}
