//! A card whose rings another process serves: the user-mode engine.
//!
//! # Theory of operation
//! The guest's memory is in a file that both processes have mapped. The card's one thread is the front
//! end of the vhost-user protocol ([`engine`]): it tells the engine where memory and rings are, and no
//! frame passes it. The driver's notifications reach the engine by the queues' ioeventfds, and the
//! engine's interrupts the guest by the vectors' irqfds ([`Signals::line`]): while a vector is held, its
//! irqfd is not connected and keeps what is signalled
//! ([`Msix::share`](crate::pci::Msix::share)).
//!
//! | command | what the engine is told |
//! | --- | --- |
//! | start | features, memory (once), then for each ring its size, place and descriptors |
//! | suspend | to stop each ring, and to say how far it was served. All chains taken were given back |
//! | resume | the rings again, from there on |
//! | stop | that the card was reset; then as for suspend |
//! | offloads | features again, without those that the driver has turned off |
//!
//! When a suspend or a stop returns and the engine has answered, it does not touch the guest's memory.
//! An engine that does not answer in [`ANSWERED_WITHIN`](engine::ANSWERED_WITHIN) is given up: it is told
//! to end by the end of its connection, and may touch the memory until it has noticed that.
//!
//! The engine says that the driver broke a ring by an eventfd; DEVICE_NEEDS_RESET follows. When the
//! engine has gone, the link is down.
use std::{
    fs::File,
    io,
    os::{
        fd::{AsRawFd as _, RawFd},
        unix::net::UnixStream,
    },
    sync::{Arc, atomic::Ordering, mpsc},
};

use virtio_queue::QueueT as _;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

mod engine;
mod tally;

use self::engine::{Engine, RingPlace};
pub(super) use self::tally::{COUNTERS_LEN, Tally};
use super::{
    config_space::ConfigSpace,
    counters::PairCounters,
    features::{Features, Offloads},
    worker::{Command, Start},
};
use crate::{
    snapshot::Progress,
    virtio::{EnabledQueue, Signals, mailbox::Inbox},
};

/// The thread of a card whose rings the engine serves.
pub(super) struct FrontEnd {
    engine: Engine,
    inbox: Inbox<Command>,
    config: Arc<ConfigSpace>,
    counters: Arc<PairCounters>,
    /// Signalled by the engine when the driver has broken a ring.
    broken: EventFd,
}

/// Settings with which the engine serves the rings, and where it goes on.
struct Serving {
    start: Start,
    /// Available index from which the engine goes on, of the queue to the guest and that from it.
    next: [u16; 2],
}

/// Events that the thread has to handle.
#[derive(Clone, Copy, Default)]
struct Seen {
    engine: bool,
    broken: bool,
}

impl FrontEnd {
    /// `counts`: the file in which the engine counts, and where.
    pub(super) fn new(
        socket: UnixStream,
        counts: (File, u64),
        inbox: Inbox<Command>,
        config: Arc<ConfigSpace>,
        counters: Arc<PairCounters>,
    ) -> io::Result<FrontEnd> {
        Ok(FrontEnd {
            engine: Engine::new(socket, counts)?,
            inbox,
            config,
            counters,
            broken: EventFd::new(EFD_NONBLOCK)?,
        })
    }

    /// Runs until the card is dropped.
    pub(super) fn run(mut self) {
        let mut serving: Option<Serving> = None;
        let mut rests = false;
        loop {
            let command = match &serving {
                Some(served) if !rests => self.await_command(served),
                _ => self.inbox.wait(),
            };
            match command {
                None => return,
                Some(Command::Exit) => {
                    self.stop(serving.take());
                    return self.inbox.answer();
                }
                Some(Command::Stop) => {
                    rests = false;
                    self.stop(serving.take());
                }
                Some(Command::Suspend(to)) => {
                    rests = true;
                    if let Some(served) = &mut serving {
                        self.suspend(served, &to);
                    }
                }
                Some(Command::Resume) => {
                    rests = false;
                    if let Some(served) = &serving {
                        self.serve(served);
                    }
                }
                Some(Command::Start(start)) => {
                    rests = false;
                    let next = [&start.rx, &start.tx].map(|queue| queue.queue.next_avail());
                    let served = Serving {
                        start: *start,
                        next,
                    };
                    // One of the driver before has no meaning.
                    let _ = self.broken.read();
                    self.serve(&served);
                    serving = Some(served);
                }
                Some(Command::Offloads(offloads)) => {
                    if let Some(served) = &mut serving {
                        served.start.offloads = offloads;
                        self.tell(served, |engine, served| {
                            engine.set_features(served.features())
                        });
                    }
                }
                Some(Command::Vector(queue)) => {
                    if let Some(served) = &serving {
                        self.tell(served, |engine, served| served.set_line(engine, queue));
                    }
                }
                // There is one pair, always active, and no filter is offered.
                Some(Command::Active(_) | Command::Filter(_)) => {}
            }
            self.inbox.answer();
        }
    }

    /// Waits for a command, and looks after the engine meanwhile.
    fn await_command(&mut self, served: &Serving) -> Option<Command> {
        loop {
            if let Some(command) = self.inbox.take() {
                return Some(command);
            }
            let Ok(seen) = self.await_event() else {
                // The host does not let it wait: a command still comes.
                return self.inbox.wait();
            };
            let signals = &served.start.signals;
            if seen.broken && self.broken.read().is_ok() {
                self.counters.broken_rings.add(1);
                signals.needs_reset();
            }
            // It says nothing that it was not asked.
            if seen.engine {
                self.lost(signals.as_ref(), &io::ErrorKind::UnexpectedEof.into());
            }
        }
    }

    fn await_event(&self) -> io::Result<Seen> {
        let watched = |fd: RawFd| libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        };
        // poll(2) ignores a negative descriptor.
        let engine = self.engine.descriptor().unwrap_or(-1);
        let mut fds = [self.inbox.descriptor(), self.broken.as_raw_fd(), engine].map(watched);
        // SAFETY: the array has as many elements, and outlives the call.
        let ready = unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, -1) };
        if ready < 0 {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::Interrupted => Ok(Seen::default()),
                _ => Err(error),
            };
        }
        self.inbox.quiet();
        Ok(Seen {
            broken: fds[1].revents != 0,
            engine: fds[2].revents != 0,
        })
    }

    /// Has the engine serve.
    fn serve(&mut self, served: &Serving) {
        let broken = self.broken.as_raw_fd();
        self.tell(served, |engine, served| {
            engine.set_features(served.features())?;
            engine.set_memory(&served.start.memory)?;
            for (nth, queue) in (0..).zip(served.queues()) {
                engine.start(nth, &served.place(queue, nth as usize, broken))?;
            }
            Ok(())
        });
    }

    fn suspend(&mut self, served: &mut Serving, to: &mpsc::Sender<Progress>) {
        let mut next = served.next;
        self.tell(served, |engine, _| {
            for (nth, next) in (0..).zip(&mut next) {
                *next = engine.stop(nth)?;
            }
            Ok(())
        });
        if self.engine.descriptor().is_none() {
            // It does not say any more: what it has given back does.
            for (next, queue) in next.iter_mut().zip(served.queues()) {
                let used = queue
                    .queue
                    .used_idx(served.start.memory.as_ref(), Ordering::Acquire);
                *next = used.map_or(*next, |used| used.0);
            }
        }
        served.next = next;
        for (queue, next) in served.queues().into_iter().zip(next) {
            // The receiver is waiting. Each chain that was taken was given back, in this order.
            let _ = to.send(Progress {
                queue: queue.index,
                next_available: next,
                next_used: next,
                taken: Vec::new(),
            });
        }
    }

    fn stop(&mut self, served: Option<Serving>) {
        let Some(served) = served else { return };
        self.tell(&served, |engine, _| {
            engine.reset()?;
            (0..2).try_for_each(|nth| engine.stop(nth).map(drop))
        });
    }

    /// Tells the engine something, if it is there. One that does not take it is gone.
    fn tell(
        &mut self,
        served: &Serving,
        what: impl FnOnce(&mut Engine, &Serving) -> io::Result<()>,
    ) {
        if self.engine.descriptor().is_none() {
            return;
        }
        if let Err(error) = what(&mut self.engine, served) {
            self.lost(served.start.signals.as_ref(), &error);
        }
    }

    /// The engine is gone: it gets no frame any more, and sends none.
    fn lost(&mut self, signals: &dyn Signals, why: &io::Error) {
        tracing::warn!("the engine does not serve the network card any more: {why}");
        self.engine.leave();
        self.counters.host_failures.add(1);
        if self.config.set_link(false) {
            signals.config();
        }
    }
}

impl Serving {
    fn queues(&self) -> [&EnabledQueue; 2] {
        [&self.start.rx, &self.start.tx]
    }

    /// Returns the features that the driver accepts of the engine, at this time.
    fn features(&self) -> u64 {
        let guest = Features::toward_guest(Offloads::all());
        let turned_off = guest & !Features::toward_guest(self.start.offloads);
        self.start.features.0 & !turned_off
    }

    /// Where a ring is; `nth`: its number for the engine.
    fn place(&self, queue: &EnabledQueue, nth: usize, broken: RawFd) -> RingPlace {
        let ring = &queue.queue;
        RingPlace {
            size: ring.size(),
            next: self.next[nth],
            parts: [ring.desc_table(), ring.used_ring(), ring.avail_ring()],
            kick: queue.kick.as_raw_fd(),
            call: self.line(queue),
            broken,
        }
    }

    fn line(&self, queue: &EnabledQueue) -> Option<RawFd> {
        let line = self.start.signals.line(queue.index);
        line.map(EventFd::as_raw_fd)
    }

    /// Tells the engine of a queue's interrupt line, which has changed.
    fn set_line(&self, engine: &mut Engine, index: u16) -> io::Result<()> {
        for (nth, queue) in (0..).zip(self.queues()) {
            if queue.index == index {
                engine.set_call(nth, self.line(queue))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "rings_test.rs"]
mod tests;
