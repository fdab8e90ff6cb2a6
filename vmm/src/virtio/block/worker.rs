//! The thread of a disk's queue.
use std::{
    io,
    os::fd::AsRawFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    time::{Duration, Instant},
};

use vmm_sys_util::eventfd::EventFd;

use super::{
    DiskCounters,
    counters::count,
    direct::Buffers,
    file::Image,
    file_io::{FileIo, MAX_OPERATIONS, Method, new as new_io},
    request::{Answer, ID_BYTES, Next, Request, Target},
};
use crate::{
    GuestMemory,
    snapshot::Progress,
    virtio::{
        EnabledQueue, Signals,
        look::{Look, Patience},
        mailbox::{Inbox, Rested},
        pieces::Translation,
        rate::Limiter,
        ring::{Broken, Published, Ring},
    },
};

/// Command to the thread.
pub(super) enum Command {
    Start(Box<Start>),
    /// Drop the activation and serve no longer.
    Stop,
    /// Rest, and say how far the queue is served.
    Suspend(mpsc::Sender<Progress>),
    Resume,
    Exit,
}

/// Queue that [`Command::Start`] has served, and its context.
pub(super) struct Start {
    pub(super) memory: Arc<GuestMemory>,
    pub(super) features: u64,
    pub(super) queue: EnabledQueue,
    pub(super) signals: Arc<dyn Signals>,
    /// Whether each write is to be made stable before it is answered.
    pub(super) write_through: bool,
}

/// State of the thread.
pub(super) struct Worker {
    pub(super) inbox: Inbox<Command>,
    pub(super) image: Arc<Image>,
    pub(super) io: Box<dyn FileIo>,
    pub(super) id: [u8; ID_BYTES],
    pub(super) counters: Arc<DiskCounters>,
    /// The disk's, of all its queues. Kept over resets, so that none makes it full again; `None`:
    /// there is no limit.
    pub(super) limiter: Option<Arc<Mutex<Limiter>>>,
    /// How long it looks for the next request before it sleeps.
    pub(super) patience: Patience,
    pub(super) requests: Requests,
}

/// Requests that are taken and not answered, by the numbers of their operations.
pub(super) struct Requests {
    all: Vec<Request>,
    free: Vec<u16>,
    /// For requests whose memory is not aligned; `None`: it need not be.
    buffers: Option<Buffers>,
}

impl Requests {
    /// Returns no requests, of an image.
    ///
    /// # Errors
    /// The host has no memory for buffers.
    pub(super) fn of(image: &Image) -> io::Result<Requests> {
        Ok(Requests {
            all: (0..MAX_OPERATIONS).map(|_| Request::default()).collect(),
            free: (0..MAX_OPERATIONS as u16).rev().collect(),
            buffers: image.alignment().map(|_| Buffers::new()).transpose()?,
        })
    }

    /// Returns whether any request may be taken.
    fn has_room(&self) -> bool {
        !self.free.is_empty() && self.buffers.as_ref().is_none_or(Buffers::has_room)
    }

    /// A request is over: no operation of it is under way.
    fn release(&mut self, id: u16) {
        let buffer = self.all[usize::from(id)].take_buffer();
        if let (Some(buffers), Some(buffer)) = (&mut self.buffers, buffer) {
            buffers.give_back(buffer);
        }
        self.free.push(id);
    }

    pub(super) fn under_way(&self) -> usize {
        self.all.len() - self.free.len()
    }
}

impl Worker {
    /// Body of the thread.
    pub(super) fn run(mut self) {
        if self.io.begin().is_err()
            && let Ok(other) = new_io(Method::Vectored, &self.image)
        {
            self.io = other;
        }
        count(&self.counters.uring_queues, self.io.is_uring().into());
        let mut command = self.inbox.wait();
        while let Some(given) = command {
            self.inbox.answer();
            command = match given {
                Command::Start(start) => self.serve(*start),
                Command::Stop | Command::Suspend(_) | Command::Resume => self.inbox.wait(),
                Command::Exit => return,
            };
        }
    }

    /// Serves until there is another command, which is returned. The activation is dropped by
    /// then, and no operation is under way.
    fn serve(&mut self, start: Start) -> Option<Command> {
        let signals = start.signals.clone();
        let memory = Translation::new(start.memory.clone());
        let command = self.answer(&start, &memory);
        self.abandon();
        drop((memory, start));
        command.unwrap_or_else(|Stopped| {
            count(&self.counters.broken_rings, 1);
            signals.needs_reset();
            drop(signals);
            self.inbox.wait()
        })
    }

    fn answer(&mut self, start: &Start, memory: &Translation) -> Result<Option<Command>, Stopped> {
        let (image, counters, id) = (self.image.clone(), self.counters.clone(), self.id);
        let mut serving = Serving {
            ring: Ring::of(&start.queue, start.features, memory)?,
            memory,
            queue: start.queue.index,
            signals: &*start.signals,
            target: Target {
                image: &image,
                id: &id,
                write_through: start.write_through,
                counters: &counters,
            },
        };
        let kick = &start.queue.kick;
        let mut was_throttled = false;
        loop {
            serving.ring.quiet();
            let closed_until = loop {
                match self.inbox.take() {
                    None => {}
                    Some(Command::Suspend(to)) => {
                        self.settle(&mut serving);
                        let _ = to.send(serving.ring.progress(serving.queue, []));
                        drop(to);
                        match self.inbox.rest(|next| matches!(next, Command::Resume)) {
                            Rested::Resumed => {}
                            Rested::Command(command) => return Ok(Some(command)),
                            Rested::Over => return Ok(None),
                        }
                    }
                    command => return Ok(command),
                }
                let (worked, closed) = self.turn(&mut serving)?;
                if !worked {
                    break closed;
                }
            };
            let throttled = closed_until.is_some();
            let begins = throttled && !was_throttled;
            count(&self.counters.throttled, begins.into());
            was_throttled = throttled;
            if throttled {
                self.sleep(kick, closed_until, None, &serving)?;
                continue;
            }
            let mut look = self.patience.look();
            let found = self.finds_work(&serving.ring, &mut look)?;
            self.patience.looked(&look);
            // Without room for a request there is no use in being notified of one.
            let has_more = found || (self.has_room() && serving.ring.listen()?);
            if !has_more {
                self.sleep(kick, None, Some(look.since()), &serving)?;
            }
        }
    }

    /// Takes requests, begins their operations, and answers what is done. Returns whether there was
    /// anything to do, and until when the limit is closed for requests that wait.
    pub(super) fn turn(
        &mut self,
        serving: &mut Serving,
    ) -> Result<(bool, Option<Instant>), Broken> {
        let (taken, closed) = self.take(serving)?;
        self.io.submit();
        let ended = self.give_back(serving);
        serving.publish();
        Ok((taken || ended, closed))
    }

    /// Takes requests from the ring, as many as are begun at once. Returns whether it took one, and
    /// until when the limit is closed for requests that wait.
    pub(super) fn take(
        &mut self,
        serving: &mut Serving,
    ) -> Result<(bool, Option<Instant>), Broken> {
        let mut taken = false;
        for _ in 0..self.io.batch() {
            if !self.has_room() || serving.ring.waiting()? == 0 {
                break;
            }
            let closed = (self.limiter()).and_then(|mut it| it.closed_until(Instant::now()));
            if closed.is_some() {
                return Ok((taken, closed));
            }
            // The driver may have taken it back meanwhile.
            let Some(head) = serving.ring.next()? else {
                break;
            };
            let Some(id) = self.requests.free.pop() else {
                break;
            };
            taken = true;
            let request = &mut self.requests.all[usize::from(id)];
            let chain = (&serving.ring, head, serving.memory);
            let next = request.take(chain, &serving.target, self.requests.buffers.as_mut());
            let next = match next {
                Ok(next) => next,
                Err(broken) => {
                    self.requests.release(id);
                    return Err(broken);
                }
            };
            let bytes = request.data_bytes();
            if let Some(mut limiter) = self.limiter() {
                limiter.charge(bytes, 1);
            }
            self.follow(id, next, serving);
        }
        Ok((taken, None))
    }

    /// Does what is next for a request.
    fn follow(&mut self, id: u16, next: Next, serving: &mut Serving) {
        match next {
            // SAFETY: the pieces are the request's, which changes none before the result, or
            // `ZEROES`. The guest's memory is mapped while `serving.memory` is there, which
            // `serve` drops when no operation is under way.
            Next::Operation(operation) => unsafe { self.io.push(id, &operation) },
            Next::Answer(answer) => self.answer_one(id, answer, serving),
        }
    }

    fn answer_one(&mut self, id: u16, answer: Answer, serving: &mut Serving) {
        let request = &mut self.requests.all[usize::from(id)];
        request.give_back(answer, &mut serving.ring, &self.counters);
        self.requests.release(id);
    }

    /// Takes the results that are there. Returns whether there was one.
    fn give_back(&mut self, serving: &mut Serving) -> bool {
        let mut any = false;
        while let Some((id, result)) = self.io.result() {
            any = true;
            let next = self.requests.all[usize::from(id)].ended(result, &serving.target);
            self.follow(id, next, serving);
        }
        any
    }

    /// Waits until no operation is under way. A request that is done by then is answered. Another
    /// one is begun anew when the queue goes on, here or in another process: none does harm twice.
    pub(super) fn settle(&mut self, serving: &mut Serving) {
        self.io.submit();
        while self.requests.under_way() > 0 {
            self.io.wait();
            while let Some((id, result)) = self.io.result() {
                let request = &mut self.requests.all[usize::from(id)];
                match request.ended(result, &serving.target) {
                    Next::Answer(answer) => self.answer_one(id, answer, serving),
                    Next::Operation(_) => {
                        serving.ring.take_again(request.head());
                        self.requests.release(id);
                    }
                }
            }
        }
        serving.publish();
    }

    /// Waits until no operation is under way. What is left to do for its request is not done.
    pub(super) fn abandon(&mut self) {
        self.io.submit();
        while self.requests.under_way() > 0 {
            self.io.wait();
            while let Some((id, _)) = self.io.result() {
                self.requests.release(id);
            }
        }
    }

    fn has_room(&self) -> bool {
        self.requests.has_room()
    }

    fn limiter(&self) -> Option<MutexGuard<'_, Limiter>> {
        let limiter = self.limiter.as_ref()?;
        Some(limiter.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Looks for the next request, a result, or a command, while the driver does not notify.
    fn finds_work(&mut self, ring: &Ring, look: &mut Look) -> Result<bool, Broken> {
        let has_room = self.has_room();
        loop {
            let has_work = || {
                let waits = has_room && ring.waiting()? > 0;
                Ok::<_, Broken>(waits || self.io.has_result() || self.inbox.rung())
            };
            if look.rings(has_work)? {
                return Ok(true);
            }
            if !look.goes_on() {
                return Ok(false);
            }
        }
    }

    /// Sleeps until there is a command, a result, a notification, or the limit opens.
    /// `idle_since`: begin of the look before it.
    fn sleep(
        &mut self,
        kick: &EventFd,
        closed_until: Option<Instant>,
        idle_since: Option<Instant>,
        serving: &Serving,
    ) -> Result<(), Stopped> {
        // Notifications are for nothing while requests wait for the limit, or for others to end.
        let listens = closed_until.is_none() && self.has_room();
        let notified = listens.then_some(kick.as_raw_fd());
        let is_under_way = self.requests.under_way() > 0;
        let results = self.io.descriptor().filter(|_| is_under_way);
        let time = closed_until.map(|until| until.saturating_duration_since(Instant::now()));
        let woken = self
            .inbox
            .wait_beside(notified, results, time.map(rounded_up))
            .map_err(|_| Stopped)?;
        // Neither a command nor a notification for nothing is what a look is for.
        if let Some(since) = idle_since
            && (self.io.has_result() || serving.ring.waiting()? > 0)
        {
            self.patience.slept(since.elapsed());
        }
        // The signals that ended the wait end before the next commands and requests are taken. One
        // that came at another time ends the next wait at once, and is ended then.
        if woken.kick {
            // It only signals that there may be work.
            let _ = kick.read();
        }
        if woken.command {
            self.inbox.quiet();
        }
        Ok(())
    }
}

/// The queue that is served.
pub(super) struct Serving<'a> {
    pub(super) ring: Ring,
    /// Keeps mapped the memory that operations under way use.
    pub(super) memory: &'a Translation,
    pub(super) queue: u16,
    pub(super) signals: &'a dyn Signals,
    pub(super) target: Target<'a>,
}

impl Serving<'_> {
    /// Publishes what was answered, and interrupts where the driver wants it.
    fn publish(&mut self) {
        if self.ring.publish() == Published::Interrupt {
            self.signals.queue(self.queue);
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

/// The queue can't be served any more: the driver's rings are invalid, or the host failed.
struct Stopped;

impl From<Broken> for Stopped {
    fn from(_: Broken) -> Self {
        Stopped
    }
}
