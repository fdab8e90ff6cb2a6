//! The thread of a disk.
use std::{
    os::fd::AsRawFd,
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use virtio_bindings::virtio_blk::VIRTIO_BLK_F_FLUSH;

use super::{
    DiskCounters,
    counters::count,
    file::Image,
    request::{ID_BYTES, Request, Target},
};
use crate::{
    snapshot::Progress,
    virtio::{
        Activation, EnabledQueue, Signals,
        look::{Look, Patience},
        mailbox::{Inbox, Rested, Woken},
        pieces::Translation,
        rate::Limiter,
        ring::{Broken, Published, Ring},
    },
};

/// Command to the thread.
pub(super) enum Command {
    Start(Box<Activation>),
    /// Drop the activation and serve no longer.
    Stop,
    /// Rest, and say how far the queue is served.
    Suspend(mpsc::Sender<Progress>),
    Resume,
    Exit,
}

/// State of the thread.
pub(super) struct Worker {
    pub(super) inbox: Inbox<Command>,
    pub(super) image: Arc<Image>,
    pub(super) id: [u8; ID_BYTES],
    pub(super) counters: Arc<DiskCounters>,
    /// Kept over resets, so that none makes it full again; `None`: there is no limit.
    pub(super) limiter: Option<Limiter>,
    /// How long it looks for the next request before it sleeps.
    pub(super) patience: Patience,
}

impl Worker {
    /// Body of the thread.
    pub(super) fn run(mut self) {
        let mut request = Request::default();
        let mut command = self.inbox.wait();
        while let Some(given) = command {
            self.inbox.answer();
            command = match given {
                Command::Start(activation) => self.serve(*activation, &mut request),
                Command::Stop | Command::Suspend(_) | Command::Resume => self.inbox.wait(),
                Command::Exit => return,
            };
        }
    }

    /// Serves until there is another command, which is returned. The activation is dropped by
    /// then.
    fn serve(&mut self, activation: Activation, request: &mut Request) -> Option<Command> {
        let signals = activation.signals.clone();
        self.answer(activation, request).unwrap_or_else(|Stopped| {
            count(&self.counters.broken_rings, 1);
            signals.needs_reset();
            drop(signals);
            self.inbox.wait()
        })
    }

    fn answer(
        &mut self,
        activation: Activation,
        request: &mut Request,
    ) -> Result<Option<Command>, Stopped> {
        let Activation {
            memory,
            features,
            queues,
            signals,
            ..
        } = activation;
        let Some(queue) = queues.first() else {
            return Ok(self.inbox.wait());
        };
        let memory = Translation::new(memory);
        let mut ring = Ring::of(queue, features, &memory)?;
        let target = Target {
            image: &self.image,
            id: &self.id,
            write_through: features & 1 << VIRTIO_BLK_F_FLUSH == 0,
            counters: &self.counters,
        };
        let mut was_throttled = false;
        loop {
            ring.quiet();
            let closed_until = loop {
                match self.inbox.take() {
                    None => {}
                    Some(Command::Suspend(to)) => {
                        // Requests are carried out in order, so none is taken and not given back.
                        let _ = to.send(ring.progress(queue.index, []));
                        drop(to);
                        match self.inbox.rest(|next| matches!(next, Command::Resume)) {
                            Rested::Resumed => {}
                            Rested::Command(command) => return Ok(Some(command)),
                            Rested::Over => return Ok(None),
                        }
                    }
                    command => return Ok(command),
                }
                let now = Instant::now;
                let limiter = self.limiter.as_mut();
                let closed = limiter.and_then(|limiter| limiter.closed_until(now()));
                if closed.is_some() && ring.waiting()? > 0 {
                    break closed;
                }
                let Some(head) = ring.next()? else { break None };
                let written = request.carry_out(&ring, head, &memory, &target)?;
                if let Some(limiter) = &mut self.limiter {
                    limiter.charge(request.data_bytes(), 1);
                }
                ring.push_used(head, written);
                signal(&mut ring, queue.index, &*signals);
            };
            if let Some(until) = closed_until {
                count(&self.counters.throttled, (!was_throttled).into());
                was_throttled = true;
                let time = Some(rounded_up(until.saturating_duration_since(Instant::now())));
                let woken = self.inbox.wait_beside(None, time).map_err(|_| Stopped)?;
                self.acknowledge(woken, queue);
                continue;
            }
            was_throttled = false;
            let mut look = self.patience.look();
            let found = self.finds_work(&ring, &mut look)?;
            self.patience.looked(&look);
            if found || ring.listen()? {
                continue;
            }
            let kick = Some(queue.kick.as_raw_fd());
            let woken = self.inbox.wait_beside(kick, None).map_err(|_| Stopped)?;
            // Neither a command nor a notification for nothing is what a look is for.
            if ring.waiting()? > 0 {
                self.patience.slept(look.since().elapsed());
            }
            self.acknowledge(woken, queue);
        }
    }

    /// Looks for the next request, or a command, while the driver does not notify.
    fn finds_work(&self, ring: &Ring, look: &mut Look) -> Result<bool, Broken> {
        loop {
            if look.rings(|| Ok::<_, Broken>(ring.waiting()? > 0 || self.inbox.rung()))? {
                return Ok(true);
            }
            if !look.goes_on() {
                return Ok(false);
            }
        }
    }

    /// Ends the signals that ended a wait, before the next commands and requests are taken. One that
    /// came at another time ends the next wait at once, and is ended then.
    fn acknowledge(&self, woken: Woken, queue: &EnabledQueue) {
        if woken.kick {
            // It only signals that there may be work.
            let _ = queue.kick.read();
        }
        if woken.command {
            self.inbox.quiet();
        }
    }
}

/// A time that poll(2), which counts milliseconds, does not cut short.
fn rounded_up(time: Duration) -> Duration {
    Duration::from_millis(
        u64::try_from(time.as_millis())
            .unwrap_or(u64::MAX)
            .saturating_add(1),
    )
}

/// Publishes the request that was answered, before the next one makes it wait.
fn signal(ring: &mut Ring, queue: u16, signals: &dyn Signals) {
    if ring.publish() == Published::Interrupt {
        signals.queue(queue);
    }
}

/// The queue can't be served any more: the driver's rings are invalid, or the host failed.
struct Stopped;

impl From<Broken> for Stopped {
    fn from(_: Broken) -> Self {
        Stopped
    }
}
