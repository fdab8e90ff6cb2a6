//! The thread of a queue pair.
//!
//! The thread lives as long as the card and sleeps while the card is not active. While it serves,
//! it makes passes: take the frames that the guest sent and prepare reads, hand all of it to the
//! kernel in one batch, give the results to the driver, publish both used indices. While passes
//! find work, the driver is asked not to notify. After the last one the thread polls the rings and
//! the TAP for some time more, as long as that has paid off lately ([`Patience`]) and no other
//! thread wants the core, which it yields between polls. Then it asks for notifications, polls once
//! more, and sleeps.
//!
//! While frames are written, each batch also tries to read, so that one direction can't starve the
//! other.
use std::{
    io,
    os::fd::{AsRawFd, RawFd},
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use vmm_sys_util::{epoll::EventSet, eventfd::EventFd};

use super::{
    counters::PairCounters,
    features::{Features, Offloads},
    filter::Filter,
    frame_io::{FrameIo, MAX_TRANSFERS, Transfer},
    limits::{Limit, Limits},
    pieces::Translation,
    ring::{Broken, Published, Ring},
    rx::{self, Rx},
    tx::Tx,
    waits::{Source, Waits},
};
use crate::{
    GuestMemory,
    snapshot::Progress,
    virtio::{EnabledQueue, Signals, look::Patience, mailbox::Inbox},
};

/// Command to a worker.
pub(super) enum Command {
    /// Serve a queue pair: the driver activated the card.
    Start(Box<Start>),
    /// Start or stop reading from the TAP.
    Active(bool),
    /// Offloads that the guest accepts from now on; for a card whose rings the engine serves.
    Offloads(Offloads),
    /// The interrupt vector of this queue is another; for such a card.
    Vector(u16),
    /// Use this receive filter from now on; `None` passes all frames.
    Filter(Option<Arc<Filter>>),
    /// Stop serving: the driver reset the card.
    Stop,
    /// Rest, and say how far the two queues are served.
    Suspend(mpsc::Sender<Progress>),
    /// Go on after a rest.
    Resume,
    /// End the thread: the card is dropped.
    Exit,
}

/// Queue pair that [`Command::Start`] has served, and its context.
pub(super) struct Start {
    pub(super) memory: Arc<GuestMemory>,
    pub(super) features: Features,
    pub(super) rx: EnabledQueue,
    pub(super) tx: EnabledQueue,
    pub(super) signals: Arc<dyn Signals>,
    pub(super) active: bool,
    /// Receive filter; `None` passes all frames.
    pub(super) filter: Option<Arc<Filter>>,
    /// Offloads that the guest accepts.
    pub(super) offloads: Offloads,
}

/// State of a worker thread.
pub(super) struct Worker {
    pub(super) tap: RawFd,
    pub(super) io: Box<dyn FrameIo>,
    pub(super) waits: Waits,
    pub(super) inbox: Inbox<Command>,
    pub(super) counters: Arc<PairCounters>,
    pub(super) limits: Limits,
}

/// Reason why serving ended.
pub(super) enum End {
    /// The driver broke a ring.
    Broken,
    /// The host refused a call that the worker can't do without.
    Host,
}

impl From<Broken> for End {
    fn from(_: Broken) -> End {
        End::Broken
    }
}

impl From<io::Error> for End {
    fn from(_: io::Error) -> End {
        End::Host
    }
}

impl Worker {
    /// Runs until the card is dropped.
    pub(super) fn run(mut self) {
        let usable = self.io.begin().is_ok();
        self.counters
            .uring
            .set((usable && self.io.is_uring()).into());
        let mut serving: Option<Serving> = None;
        let mut rests = false;
        loop {
            let command = match &mut serving {
                None => self.inbox.wait(),
                Some(_) if rests => self.inbox.wait(),
                Some(served) => match self.serve(served) {
                    Ok(command) => Some(command),
                    Err(end) => {
                        self.fail(served.signals.as_ref(), &end);
                        self.leave(&mut serving);
                        continue;
                    }
                },
            };
            match command {
                None => return,
                Some(Command::Exit) => {
                    self.leave(&mut serving);
                    return self.inbox.answer();
                }
                Some(Command::Stop) => {
                    rests = false;
                    self.leave(&mut serving);
                }
                Some(Command::Suspend(to)) => {
                    rests = true;
                    for progress in serving.iter().flat_map(Serving::progress) {
                        // The receiver is waiting.
                        let _ = to.send(progress);
                    }
                }
                Some(Command::Resume) => rests = false,
                Some(Command::Start(start)) => {
                    rests = false;
                    let signals = Arc::clone(&start.signals);
                    match self.enter(*start, usable) {
                        Ok(served) => serving = Some(served),
                        Err(end) => self.fail(signals.as_ref(), &end),
                    }
                }
                Some(Command::Active(active)) => {
                    if let Some(served) = &mut serving {
                        served.set_active(active, &self.counters);
                    }
                }
                // The TAP has been told, and the vector is looked up when it is signalled.
                Some(Command::Offloads(_) | Command::Vector(_)) => {}
                Some(Command::Filter(filter)) => {
                    if let Some(served) = &mut serving {
                        served.rx.set_filter(filter);
                    }
                }
            }
            self.inbox.answer();
        }
    }

    pub(super) fn enter(&mut self, start: Start, usable: bool) -> Result<Serving, End> {
        if !usable {
            return Err(End::Host);
        }
        let serving = Serving::new(start)?;
        self.waits
            .add(serving.tx_kick.as_raw_fd(), Source::TxKick)?;
        self.waits
            .add(serving.rx_kick.as_raw_fd(), Source::RxKick)?;
        Ok(serving)
    }

    fn fail(&self, signals: &dyn Signals, end: &End) {
        match end {
            End::Broken => self.counters.broken_rings.add(1),
            End::Host => self.counters.host_failures.add(1),
        }
        signals.needs_reset();
    }

    /// Releases the queues. The eventfds are removed from the epoll explicitly: closing them would
    /// not do it, because the transport holds duplicates.
    pub(super) fn leave(&mut self, serving: &mut Option<Serving>) {
        if let Some(mut served) = serving.take() {
            served.rx.abandon(&self.counters);
            let _ = self.waits.watch_tap(None);
            for kick in [&served.tx_kick, &served.rx_kick] {
                let _ = self.waits.remove(kick.as_raw_fd());
            }
        }
    }

    /// Serves until a command arrives, and returns it.
    fn serve(&mut self, served: &mut Serving) -> Result<Command, End> {
        loop {
            if self.inbox.rung()
                && let Some(command) = self.inbox.take()
            {
                return Ok(command);
            }
            if self.pass(served)? {
                continue;
            }
            if self.poll(served)? {
                continue;
            }
            self.sleep(served)?;
        }
    }

    /// Makes one pass over both queues. Returns whether there was work.
    pub(super) fn pass(&mut self, served: &mut Serving) -> Result<bool, End> {
        let counters = &*self.counters;
        let gathered = served
            .tx
            .gather(&served.memory, &self.limits.tx, counters)?;
        let mut worked = gathered.any;
        let throttled = gathered.until.is_some() && served.tx_until.is_none();
        counters.tx_throttled.add(throttled.into());
        served.tx_until = gathered.until;
        if served.rx.held_since().is_some() {
            served.rx.deliver(&served.memory, counters)?;
        }
        served.transfers.clear();
        served.tx.transfers(&mut served.transfers);
        let writes = served.transfers.len();
        let reads = served.lay_out_reads(writes > 0, &self.limits.rx, counters)?;
        if !served.transfers.is_empty() {
            // SAFETY: the pieces are the guest's, kept mapped by `memory`, and the worker's in `tx`
            // and `rx`, none of which moves before the call returns.
            let calls = unsafe { self.io.transfer(&mut served.transfers) };
            counters.syscalls.add(calls?);
        }
        let (written, read) = served.transfers.split_at(writes);
        let stalled = served.tx.is_stalled();
        served.tx.complete(written, counters);
        worked |= stalled && !served.tx.is_stalled();
        if reads > 0 {
            let frames = served
                .rx
                .complete(read, &served.memory, &self.limits.rx, counters)?;
            served.depth.learn(reads, frames);
            // An empty read means that the TAP has no more frames.
            served.tap_ready = frames == reads;
            worked |= frames > 0;
        }
        served.publish(counters);
        Ok(worked)
    }

    /// Polls rings and TAP for as long as that has paid off lately, while the driver does not
    /// notify. Returns whether there is work.
    fn poll(&mut self, served: &mut Serving) -> Result<bool, End> {
        let mut look = served.patience.look();
        served.idle_since = look.since();
        loop {
            // The rings are polled after the last poll of the descriptors too, because that
            // consumes a command's event.
            if look.rings(|| Ok::<_, End>(served.ring_has_work()? || self.inbox.rung()))? {
                return Ok(true);
            }
            if !look.goes_on() {
                return Ok(false);
            }
            self.watch(served)?;
            let seen = self.waits.poll()?;
            self.counters.syscalls.add(2);
            self.counters.kicks.add(seen.kicks);
            if seen.tap {
                served.tap_ready = true;
                return Ok(true);
            }
        }
    }

    /// Updates the TAP events that are watched.
    fn watch(&mut self, served: &Serving) -> io::Result<()> {
        let stalled = served.tx.is_stalled();
        let mut events = EventSet::empty();
        let reads = served.active
            && !served.starved
            && served.rx_until.is_none()
            && served.rx.held_since().is_none();
        events.set(EventSet::IN, reads);
        events.set(EventSet::OUT, stalled);
        let wanted = (served.active || stalled).then_some((self.tap, events));
        self.counters.syscalls.add(self.waits.watch_tap(wanted)?);
        Ok(())
    }

    /// Asks for notifications, and sleeps unless work came up meanwhile.
    fn sleep(&mut self, served: &mut Serving) -> Result<(), End> {
        let held = served.rx.held_since();
        let stalled = served.tx.is_stalled();
        // Notifications of frames that wait for the limit would be for nothing.
        let listens = !stalled && served.tx_until.is_none();
        let mut more = listens && served.tx.ring.listen()?;
        if served.starved || held.is_some() {
            more |= served.rx.ring.listen()?;
        }
        if !more {
            self.watch(served)?;
            let counters = &self.counters;
            counters.syscalls.add(1);
            counters.tx_waits.add(stalled.into());
            let ends = [
                held.map(|since| since + rx::HOLD),
                served.tx_until,
                served.rx_until,
            ];
            let woken = self.waits.sleep(ends.into_iter().flatten().min())?;
            counters.wakeups.add(1);
            counters.kicks.add(woken.kicks);
            served.tap_ready |= woken.tap;
            served.patience.slept(served.idle_since.elapsed());
        }
        served.tx.ring.quiet();
        served.rx.ring.quiet();
        Ok(())
    }
}

/// State of a queue pair while it is served.
pub(super) struct Serving {
    /// Keeps mapped the memory that `tx` and `rx` hold addresses of.
    memory: Translation,
    tx: Tx,
    pub(super) rx: Rx,
    tx_index: u16,
    rx_index: u16,
    tx_kick: EventFd,
    rx_kick: EventFd,
    signals: Arc<dyn Signals>,
    active: bool,
    /// Whether the TAP may have frames.
    tap_ready: bool,
    /// Whether reading waits for buffers.
    starved: bool,
    /// Time until which frames in the ring wait for the limit; `None`: none do.
    tx_until: Option<Instant>,
    /// Time until which frames are left in the TAP because of the limit; `None`: they are not.
    rx_until: Option<Instant>,
    depth: Depth,
    patience: Patience,
    /// End of the last pass that found work.
    idle_since: Instant,
    transfers: Vec<Transfer>,
}

impl Serving {
    fn new(start: Start) -> Result<Serving, End> {
        let Start {
            rx, tx, features, ..
        } = start;
        let memory = Translation::new(start.memory);
        let rx_ring = Ring::of(&rx, features.0, &memory)?;
        let tx_ring = Ring::of(&tx, features.0, &memory)?;
        let mut receive = Rx::new(rx_ring, features);
        receive.set_filter(start.filter);
        Ok(Serving {
            memory,
            tx: Tx::new(tx_ring, features),
            rx: receive,
            tx_index: tx.index,
            rx_index: rx.index,
            tx_kick: tx.kick,
            rx_kick: rx.kick,
            signals: start.signals,
            active: start.active,
            tap_ready: true,
            starved: false,
            tx_until: None,
            rx_until: None,
            depth: Depth::default(),
            patience: Patience::new(LONGEST_LOOK),
            idle_since: Instant::now(),
            transfers: Vec::with_capacity(MAX_TRANSFERS),
        })
    }

    /// Returns how far the two queues are served. No transfer is under way.
    fn progress(&self) -> [Progress; 2] {
        [
            self.rx.ring.progress(self.rx_index, self.rx.taken()),
            self.tx.ring.progress(self.tx_index, self.tx.taken()),
        ]
    }

    pub(super) fn set_active(&mut self, active: bool, counters: &PairCounters) {
        if !active {
            self.rx.abandon(counters);
        }
        self.active = active;
        self.starved = false;
        self.tap_ready = true;
    }

    /// Acts as if the TAP had signalled that it has frames.
    #[cfg(any(test, feature = "fake"))]
    pub(super) fn wake(&mut self) {
        self.tap_ready = true;
    }

    /// Prepares as many reads as may find a frame. Returns their number.
    fn lay_out_reads(
        &mut self,
        sending: bool,
        limit: &Limit,
        counters: &PairCounters,
    ) -> Result<usize, Broken> {
        let before = self.rx_until.take();
        let wanted = match (
            self.active && self.rx.held_since().is_none(),
            self.tap_ready,
        ) {
            (true, true) => self.depth.0,
            (true, false) if sending => 1,
            _ => return Ok(0),
        };
        let room = match limit.room(self.rx.expected()) {
            Ok(room) => room,
            Err(until) => {
                self.rx_until = Some(until);
                counters.rx_throttled.add(before.is_none().into());
                // There may be frames, and the descriptor is not watched.
                self.tap_ready = true;
                self.starved = false;
                return Ok(0);
            }
        };
        let reads = self.rx.prepare(wanted.min(room), &self.memory)?;
        self.rx.transfers(&mut self.transfers);
        let starved = reads == 0;
        if starved {
            counters.rx_waits.add((!self.starved).into());
            self.tap_ready = true;
        }
        self.starved = starved;
        Ok(reads)
    }

    /// Publishes both used indices, and interrupts where the driver wants it.
    fn publish(&mut self, counters: &PairCounters) {
        for (published, index) in [
            (self.rx.ring.publish(), self.rx_index),
            (self.tx.ring.publish(), self.tx_index),
        ] {
            match published {
                Published::Nothing => {}
                Published::Quiet => counters.interrupts_suppressed.add(1),
                Published::Interrupt => {
                    self.signals.queue(index);
                    counters.interrupts.add(1);
                    counters.syscalls.add(1);
                }
            }
        }
    }

    /// Returns whether the driver has added a chain to a ring that the worker waits for.
    fn ring_has_work(&self) -> Result<bool, Broken> {
        let takes = !self.tx.is_stalled() && self.tx_until.is_none();
        let sent = takes && self.tx.ring.waiting()? > 0;
        Ok(sent || (self.starved && self.rx.ring.waiting()? > 0))
    }
}

/// Number of frames to try to read at once: an empty read costs a little, a short batch more.
struct Depth(usize);

impl Default for Depth {
    fn default() -> Depth {
        Depth(4)
    }
}

impl Depth {
    fn learn(&mut self, reads: usize, frames: usize) {
        if frames == reads {
            self.0 = (self.0 * 2).min(rx::BATCH);
        } else if frames < reads / 2 {
            self.0 = (self.0 / 2).max(2);
        }
    }
}

/// Longest look for work: a little more than a neighbour takes to answer when two idle cores have to
/// be woken for it on a virtual machine. A shorter look finds nothing then, and costs as much.
const LONGEST_LOOK: Duration = Duration::from_micros(100);
