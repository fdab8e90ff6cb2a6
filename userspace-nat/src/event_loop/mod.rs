//! The event loop.
//!
//! # Theory of operation
//! One thread waits for everything: the port, the broker, resolvers' sockets, relays, and the next
//! timer. A [`turn`](Engine::turn) handles what is ready and ends by writing what it led to:
//!
//! 1. frames, in batches of [`BATCH`](crate::port::BATCH), with VMs taking turns (`fairness`); a
//!    frame that goes back to the kernel is written at once, in the buffer it came in. Each counts
//!    as the frames it leads to, a large datagram as its fragments: a turn has [`WORK_PER_TURN`] of
//!    these, and the rest of the batch waits for the next turn;
//! 2. the broker's messages;
//! 3. descriptors of the services, and their timers;
//! 4. flows that follow the host's network, some at a time (`follow`); ends of flows: graces that
//!    are over, the scan ([`crate::flow`]), credits;
//! 5. answers, records, and only then the slots of flows whose records are written.
//!
//! Nothing in a turn waits. While frames keep arriving, the next turn does not wait either. When
//! none do, the thread sleeps until the next timer: at most a second with live flows, without limit
//! when there is no VM.
use std::{collections::VecDeque, os::fd::BorrowedFd};

use slipgate_model::OnExit;

use self::listening::Listening;
use crate::{
    clock::{Clock, MILLISECOND_NS, SECOND_NS},
    context::Context,
    control::{Control, EndsToken, Status},
    datapath::Datapath,
    flow::{Flows, is_frozen},
    nat_ports::PortPool,
    observe::watch::Watch,
    packet_path::Disposition,
    poll::{Interest, Poller, Readiness, Subsystem, Token},
    port::{BATCH, Batch, FrameIo},
    record::{FlowLog, Losses},
    services::Services,
    state::Core,
};

mod adopt;
mod commands;
mod cut;
mod fairness;
mod listening;
mod names;
mod parts;
mod records;
mod reload;

pub use listening::{MOST_LISTENERS, NotListening};
pub use parts::{EngineError, Parts};

/// Work in one turn: frames read, or frames that these led to where that is more. It is bounded so
/// that broker and resolvers are served. The last frame may lead to more than is left.
const WORK_PER_TURN: usize = 8 * BATCH;
/// Most rounds of timers in one turn, each for as much as the outbox has room for: a VM may have
/// thousands of timers due at once, and first packets wait meanwhile.
const ROUNDS_PER_TURN: usize = 4;
/// Interval between two scans while frames arrive, ns.
const SCAN_INTERVAL_NS: u64 = 100 * MILLISECOND_NS;
/// Interval between two scans while none arrive, ns.
const QUIET_SCAN_INTERVAL_NS: u64 = SECOND_NS;
/// Time after the last frame for which the scan keeps its faster pace, ns.
const QUIET_AFTER_NS: u64 = SECOND_NS;
/// Interval between two checks for lost credits while frames are in flight, ns.
const CREDITS_INTERVAL_NS: u64 = 25 * MILLISECOND_NS;
/// Interval between two checks whether the flow log's file has taken the batches handed over, ns.
const WRITTEN_INTERVAL_NS: u64 = 50 * MILLISECOND_NS;

/// The engine, over its datapath, port, clock and services.
#[derive(Debug)]
pub struct Engine<D, P, C, S> {
    core: Core<D>,
    port: P,
    clock: C,
    services: S,
    log: FlowLog,
    losses: Losses,
    watch: Watch,
    listening: Listening,
    poller: Poller,
    batch: Batch,
    ready: Vec<Readiness>,
    order: fairness::Order,
    last_frame_ns: u64,
    next_scan_ns: u64,
    next_refusals_ns: u64,
    next_credits_ns: Option<u64>,
    exit: Option<OnExit>,
    /// Tokens that wait until flows have ended, each with the time at which it is due, ns.
    ending: VecDeque<(u64, EndsToken)>,
    next_token: u64,
    /// Counters: only the `frames_*` fields are kept here; [`Engine::status`] fills in the others.
    frames: Status,
}

impl<D: Datapath, P: FrameIo, C: Clock, S: Services> Engine<D, P, C, S> {
    /// Creates an engine that knows no VM, and has yet to [`adopt`](Self::adopt) the flows in the
    /// kernel.
    ///
    /// # Errors
    /// When the epoll set can't be made.
    pub fn new(parts: Parts<D, P, C, S>) -> Result<Self, EngineError> {
        let poller = Poller::new().map_err(EngineError::Wait)?;
        watch(&poller, parts.port.fd(), Subsystem::Port)?;
        let slots = parts.datapath.slots();
        let flows = Flows::new(slots, PortPool::new(parts.nat_ports));
        let mut log = parts.log;
        log.set_instance(parts.datapath.instance());
        let mut engine = Self {
            core: Core::new(parts.datapath, flows, parts.judge, parts.rule_base),
            port: parts.port,
            clock: parts.clock,
            services: parts.services,
            log,
            losses: Losses::default(),
            watch: Watch::default(),
            listening: Listening::default(),
            poller,
            batch: Batch::new(),
            ready: Vec::new(),
            order: fairness::Order::default(),
            last_frame_ns: 0,
            next_scan_ns: 0,
            next_refusals_ns: 0,
            next_credits_ns: None,
            exit: None,
            ending: VecDeque::new(),
            next_token: 0,
            frames: Status::default(),
        };
        engine.keep_records();
        engine.set_forward_texts(Vec::new());
        Ok(engine)
    }

    /// Runs until the broker stops the engine. Returns what was done with the live flows.
    ///
    /// # Errors
    /// When the port, the broker's channel or the epoll set fails.
    pub fn run(&mut self, control: &mut impl Control<Self>) -> Result<OnExit, EngineError> {
        watch(&self.poller, control.fd(), Subsystem::Control)?;
        loop {
            let timeout_ns = self.timeout_ns();
            self.turn(timeout_ns, control)?;
            if let Some(exit) = self.exit {
                self.end_captures();
                if exit == OnExit::Detach {
                    self.end_all();
                }
                self.end_records();
                self.end_dump();
                self.end_listening();
                return Ok(exit);
            }
        }
    }

    /// Returns to the kernel the flows that are carried for captures: they may live on without the
    /// engine.
    fn end_captures(&mut self) {
        let wall = self.clock.wall();
        self.watch.captures.end(&mut self.core, &self.poller, wall);
    }

    /// Runs one turn: waits for at most `timeout_ns` and handles what is ready.
    ///
    /// # Errors
    /// When the port, the broker's channel or the epoll set fails.
    pub fn turn(
        &mut self,
        timeout_ns: Option<u64>,
        control: &mut impl Control<Self>,
    ) -> Result<(), EngineError> {
        self.ready.clear();
        self.services.begin_turn();
        let has_frames = !self.order.is_done();
        let timeout_ns = if has_frames { Some(0) } else { timeout_ns };
        self.poller
            .wait(timeout_ns, &mut self.ready)
            .map_err(EngineError::Wait)?;
        let ready = |ready: &[Readiness], fd: bool, subsystem| {
            !fd || ready.iter().any(|r| r.token.subsystem == subsystem)
        };
        if has_frames || ready(&self.ready, self.port.fd().is_some(), Subsystem::Port) {
            self.read_port()?;
            // Recorded before a message of the broker can change the meaning of a rule's number.
            self.record_starts();
        }
        if ready(&self.ready, control.fd().is_some(), Subsystem::Control) {
            control.serve(self).map_err(EngineError::Control)?;
        }
        let now_ns = self.clock.now_ns();
        for readiness in std::mem::take(&mut self.ready) {
            if readiness.token.subsystem == Subsystem::Capture {
                self.watch
                    .captures
                    .on_ready(&mut self.core, &self.poller, readiness);
            }
            if readiness.token.subsystem == Subsystem::Listener {
                self.listener_ready(readiness, now_ns);
            }
            if matches!(readiness.token.subsystem, Subsystem::Dns | Subsystem::Relay) {
                let cx = &mut Context {
                    now_ns,
                    out: &mut self.core.out,
                    poller: &self.poller,
                };
                self.services.on_ready(readiness, cx);
                // One VM's relays must not fill the room for another's answers.
                self.write_answers();
            }
        }
        self.work_timers(now_ns);
        self.write_out();
        self.report_ended(control, now_ns)
    }

    /// Returns the engine's counters and sizes.
    pub fn status(&self) -> Status {
        let (records_written, records_lost) = self.log.counts();
        let (port_destinations, ports_resting) = self.core.flows.ports.sizes();
        Status {
            flows: self.core.flows.len() as u64,
            records_written,
            records_lost,
            port_destinations: port_destinations as u64,
            ports_resting: ports_resting as u64,
            ..self.frames
        }
    }

    fn timeout_ns(&self) -> Option<u64> {
        let now_ns = self.clock.now_ns();
        let has_vms = self.core.vms().next().is_some();
        let scans = has_vms || self.core.flows.has_spare_chunks();
        let scan = scans.then_some(self.next_scan_ns);
        let deadlines = [
            scan,
            self.core.flows.next_due_ns(),
            self.services.next_deadline_ns(),
            self.next_credits_ns,
            self.watch.captures.next_deadline_ns(),
            self.listening.next_deadline_ns(),
            self.core.inspected.next_deadline_ns(),
            self.ending.front().map(|(due_ns, _)| *due_ns),
            self.core.following.is_under_way().then_some(now_ns),
            self.log.is_behind().then_some(now_ns + WRITTEN_INTERVAL_NS),
        ];
        let first_ns = deadlines.into_iter().flatten().min()?;
        Some(first_ns.saturating_sub(now_ns))
    }

    fn read_port(&mut self) -> Result<(), EngineError> {
        let mut work = WORK_PER_TURN;
        while work > 0 {
            if self.order.is_done() {
                self.batch.clear();
                self.port.recv(&mut self.batch).map_err(EngineError::Port)?;
                self.order.arrange(&self.batch);
                if self.batch.is_empty() {
                    break;
                }
            }
            work = self.handle_batch(work);
            if self.is_port_empty() {
                break;
            }
        }
        Ok(())
    }

    /// Whether the port was empty when it was last read, and all its frames are handled.
    fn is_port_empty(&self) -> bool {
        self.order.is_done() && !self.batch.is_full()
    }

    /// Handles the batch, or the part of it that costs `work`. Returns how much work is left.
    fn handle_batch(&mut self, mut work: usize) -> usize {
        let now_ns = self.clock.now_ns();
        self.last_frame_ns = now_ns;
        self.next_credits_ns
            .get_or_insert(now_ns + CREDITS_INTERVAL_NS);
        while work > 0 {
            let Some(index) = self.order.next() else {
                break;
            };
            let bytes = self.batch.frame_mut(index);
            if self.watch.is_on() {
                self.watch.read(&self.core, bytes, self.clock.wall());
            }
            let queued = self.core.out.len();
            let disposition = self
                .core
                .handle(bytes, &mut self.services, &self.poller, now_ns);
            self.frames.frames_read += 1;
            let cost = (self.core.out.len() - queued).max(1);
            self.order.charge(cost);
            work = work.saturating_sub(cost);
            match disposition {
                Disposition::Send => {
                    self.frames.frames_returned += 1;
                    if self.watch.is_on() {
                        self.watch.written(&self.core, bytes, self.clock.wall());
                    }
                    if self.port.send(bytes).is_err() {
                        self.frames.frames_unsent += 1;
                        self.core.count_unsent(bytes);
                    }
                }
                Disposition::Dropped(_) => self.frames.frames_dropped += 1,
                Disposition::Consumed => self.frames.frames_consumed += 1,
            }
            // One VM's relays must not fill the room for another's answers.
            if self.core.out.is_half_full() {
                self.write_answers();
            }
        }
        if !self.core.out.is_empty() {
            self.write_answers();
        }
        work
    }

    /// Repeats `work`, each time as far as the outbox has room, until it returns that all is done
    /// or [`ROUNDS_PER_TURN`] is reached.
    fn in_rounds(&mut self, mut work: impl FnMut(&mut Self) -> bool) {
        for _ in 0..ROUNDS_PER_TURN {
            let is_all = work(self);
            self.write_answers();
            if is_all {
                break;
            }
        }
    }

    fn work_services(&mut self, now_ns: u64) -> bool {
        let Core { out, datapath, .. } = &mut self.core;
        let cx = &mut Context {
            now_ns,
            out,
            poller: &self.poller,
        };
        let is_frozen = |row| is_frozen(datapath, row);
        self.services.on_timer(&is_frozen, cx)
    }

    fn work_timers(&mut self, now_ns: u64) {
        self.core.go_on_following(now_ns);
        self.in_rounds(|engine| engine.work_services(now_ns));
        self.in_rounds(|engine| engine.core.work_inspections(now_ns));
        let Core {
            flows, datapath, ..
        } = &mut self.core;
        if flows.next_due_ns().is_some_and(|at| at <= now_ns) {
            let mut ended = Vec::new();
            flows.finish_due(datapath, now_ns, &mut |e| ended.push(*e));
            self.record(&ended);
        }
        if now_ns >= self.next_scan_ns {
            let Core {
                flows, datapath, ..
            } = &mut self.core;
            flows.collect(datapath, now_ns);
            let quiet = now_ns >= self.last_frame_ns + QUIET_AFTER_NS;
            let interval_ns = if quiet {
                QUIET_SCAN_INTERVAL_NS
            } else {
                SCAN_INTERVAL_NS
            };
            self.next_scan_ns = now_ns + interval_ns;
            // A VM whose credits are all lost could never wake the port again.
            self.next_credits_ns.get_or_insert(0);
            self.core.find_guests(now_ns);
            self.core.judge.borrow_mut().expire(now_ns);
            self.core.release_idle_hops(now_ns);
            if now_ns >= self.next_refusals_ns {
                self.record_refusals();
            }
        }
        if self.next_credits_ns.is_some_and(|at| at <= now_ns) && self.is_port_empty() {
            let out = self.core.settle_credits(now_ns);
            self.next_credits_ns = out.then_some(now_ns + CREDITS_INTERVAL_NS);
        }
    }

    fn write_out(&mut self) {
        let now_ns = self.clock.now_ns();
        loop {
            let core = &mut self.core;
            let mut out = std::mem::replace(&mut core.out, crate::port::Outbox::new(0));
            let cx = &mut Context {
                now_ns,
                out: &mut out,
                poller: &self.poller,
            };
            let is_done = self.services.flush(core, cx);
            core.out = out;
            core.remember_openings();
            self.write_answers();
            if is_done {
                break;
            }
        }
        self.record_services();
        self.flush_log();
        self.tell_listeners(now_ns);
        if self.watch.is_on() {
            let wall = self.clock.wall();
            self.watch.work(&mut self.core, &self.poller, now_ns, wall);
        }
        self.free_recorded(now_ns);
    }

    fn write_answers(&mut self) {
        for frame in self.core.out.frames() {
            if self.watch.is_on() {
                self.watch.written(&self.core, frame, self.clock.wall());
            }
            if self.port.send(frame).is_err() {
                self.frames.frames_unsent += 1;
                self.core.count_unsent(frame);
            }
        }
        self.core.out.clear();
    }
}

/// Adds a descriptor, if there is one, to those that a turn waits for.
fn watch(
    poller: &Poller,
    fd: Option<BorrowedFd<'_>>,
    subsystem: Subsystem,
) -> Result<(), EngineError> {
    let Some(fd) = fd else { return Ok(()) };
    let token = Token { subsystem, key: 0 };
    let added = poller.add(fd, token, Interest::Read);
    added.map_err(EngineError::Wait)
}

#[cfg(test)]
mod tests;
