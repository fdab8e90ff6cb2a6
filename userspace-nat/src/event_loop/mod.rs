//! The event loop.
//!
//! # Theory of operation
//! One thread waits for everything: the port, the broker, resolvers' sockets, relays, and the next
//! timer. A [`turn`](Engine::turn) handles what is ready and ends by writing what it led to:
//!
//! 1. frames, which are read in batches of [`BATCH`](crate::port::BATCH) and of which some are
//!    handled after each, with VMs taking turns (`fairness`); a frame that goes back to the kernel
//!    is written at once, in the buffer it came in. Each counts as the frames it leads to, a large
//!    datagram as its fragments, and one that opens a flow as [`OPENING_WORK`]. To that come a search
//!    for early fragments with what it finds, and questions to the kernel. A turn has
//!    [`WORK_PER_TURN`] of these, and the rest waits for the next turn;
//! 2. the broker's messages;
//! 3. descriptors of the services, and their timers;
//! 4. a predecessor's flows that are adopted, flows that follow the host's network, and flows that
//!    are judged by new policies, some at a time (`adopting`, `follow`, `reload`); ends of flows: graces that are over, a limited number, the
//!    scan ([`crate::flow`]), credits;
//! 5. answers, records, and only then the slots of flows whose records are written.
//!
//! Nothing in a turn waits; a user-mode engine looks for a moment before it sleeps (`looking`). While frames keep arriving, the next turn does not wait either. When
//! none do, the thread sleeps until the next timer: at most a second with live flows, without limit
//! when there is no VM.
use std::collections::VecDeque;

use slipgate_abi::{DropReason, first_packet::RING_LEN};
use slipgate_model::OnExit;

use self::{
    activity::Activity, fairness::Waiting, first_packets::FirstPackets, listening::Listening,
    looking::Looking, reload::Reloading,
};
use crate::{
    clock::{Clock, MILLISECOND_NS, SECOND_NS},
    control::{Control, EndsToken, Status},
    datapath::Datapath,
    flow::is_paused,
    observe::{Direction, Watch},
    packet_path::{Disposition, sent_to_guest},
    poll::{Context, Poller, Readiness, Subsystem},
    port::{BATCH, Batch, FrameIo},
    record::{FlowLog, Losses},
    services::Services,
    state::{
        Core, Nat,
        credits::{self, Settled},
    },
};

mod activity;
mod adopting;
mod commands;
mod cut;
mod fairness;
mod first_packets;
mod listening;
mod looking;
mod names;
mod records;
mod reload;
mod start;

pub use listening::{MOST_LISTENERS, NotListening};
pub use start::{EngineError, Parts};

/// Work in one turn: frames read, or frames that these led to where that is more. It is bounded so
/// that broker and resolvers are served. The last frame may lead to more than is left.
const WORK_PER_TURN: usize = 8 * BATCH;
/// Work between two readings of the port, some 0.1 ms: for so long a VM's first packet waits
/// behind others that were read. More than this is read at once, so the port's queue is short.
const WORK_PER_READ: usize = BATCH / 2;
/// Readings of the port to leave out after one that found it empty, while first packets come by the
/// ring. What comes meanwhile waits some 0.1 ms longer, or until the next turn.
const SKIPPED_READINGS: u8 = 3;
/// Work of a frame that opens a flow: it takes about four times as long as one that is refused.
const OPENING_WORK: usize = 4;
/// Work of a question to the kernel about a route: two system calls.
const QUESTION_WORK: usize = 2;
/// Most rounds of timers in one turn, each for as much as the outbox has room for: a VM may have
/// thousands of timers due at once, and first packets wait meanwhile.
const ROUNDS_PER_TURN: usize = 4;
/// Most turns' work with which a VM that wakes keeps the others waiting, so that what was handed over
/// meanwhile is not overtaken.
const TURNS_AT_WAKE: usize = 4;
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
pub struct Engine<D, P, C> {
    core: Core<D>,
    port: P,
    clock: C,
    services: Services,
    log: FlowLog,
    losses: Losses,
    watch: Watch,
    listening: Listening,
    activity: Activity,
    reloading: Reloading,
    adopting: adopting::Walk,
    poller: Poller,
    looking: Looking,
    batch: Batch,
    ready: Vec<Readiness>,
    waiting: Waiting,
    first_packets: FirstPackets,
    /// Readings of the port to leave out: it was empty, and the ring of first packets was not.
    skipped_readings: u8,
    /// Whether the port was empty when it was last read, and the ring of first packets, too.
    is_port_read: bool,
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

impl<D: Datapath, P: FrameIo, C: Clock> Engine<D, P, C> {
    /// Runs until the broker stops the engine. Returns what was done with the live flows.
    ///
    /// # Errors
    /// When the port, the broker's channel or the epoll set fails.
    pub fn run(&mut self, control: &mut impl Control<Self>) -> Result<OnExit, EngineError> {
        start::watch(&self.poller, control.fd(), Subsystem::Control)?;
        loop {
            let timeout_ns = self.timeout_ns();
            self.turn(timeout_ns, control)?;
            // What was read from the port is nobody else's to handle.
            if let Some(exit) = self.exit
                && self.waiting.is_empty()
            {
                self.first_packets.close(&self.core.nat.datapath);
                self.end_captures();
                self.drop_all_held();
                for frame in self.core.unaddressed.take_all() {
                    self.write_as_it_is(&frame);
                }
                if exit == OnExit::Detach {
                    self.finish_adoption()?;
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
        let Core { nat, vms, .. } = &mut self.core;
        self.watch.captures.end(nat, vms, &self.poller, wall);
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
        self.services.relay.begin_turn();
        self.services.relay.set_watched(self.watch.is_on());
        // A port that was never read may hold frames of before this engine: until it is known to be
        // empty no credits are settled, and their deadline would end each wait at once.
        let mut has_frames = !self.waiting.is_empty() || self.port.has_more() || !self.is_port_read;
        let tables = &self.core.nat.datapath;
        if !has_frames {
            // Frames of the port wake the thread, packets in the ring do not.
            self.first_packets.close(tables);
        }
        has_frames |= self.first_packets.has_more(tables);
        let timeout_ns = if has_frames { Some(0) } else { timeout_ns };
        let (poller, ready) = (&mut self.poller, &mut self.ready);
        let waited = match self.port.is_looked_at() {
            true => {
                let (looking, port) = (&mut self.looking, &mut self.port);
                looking.wait(poller, &self.clock, timeout_ns, ready, || port.rest())
            }
            false => poller.wait(timeout_ns, ready),
        };
        waited.map_err(EngineError::Wait)?;
        // What was put off may have led to more.
        has_frames |= self.port.has_more();
        if self.exit.is_none() {
            self.first_packets.open(&self.core.nat.datapath);
        }
        let ready = |ready: &[Readiness], fd: bool, subsystem| {
            !fd || ready.iter().any(|r| r.token.subsystem == subsystem)
        };
        let has_events = self.port.fd().is_some() || self.port.set().is_some();
        let is_due = |at_ns| at_ns <= self.clock.now_ns();
        let is_port_ready = ready(&self.ready, has_events, Subsystem::Port)
            || self.port.next_deadline_ns().is_some_and(is_due);
        for &readiness in &self.ready {
            if readiness.token.subsystem == Subsystem::Port {
                self.port.on_ready(readiness.token.key, readiness.flags());
            }
        }
        if is_port_ready {
            self.skipped_readings = 0;
        }
        if has_frames || is_port_ready {
            self.read_port()?;
            // Recorded before a message of the broker can change the meaning of a rule's number.
            self.record_starts();
        }
        if ready(&self.ready, control.fd().is_some(), Subsystem::Control) {
            control.serve(self).map_err(EngineError::Control)?;
        }
        let now_ns = self.clock.now_ns();
        let mut ready = std::mem::take(&mut self.ready);
        for readiness in ready.drain(..) {
            if readiness.token.subsystem == Subsystem::Capture {
                let Core { nat, vms, .. } = &mut self.core;
                let captures = &mut self.watch.captures;
                captures.on_ready(nat, vms, &self.poller, readiness);
            }
            if readiness.token.subsystem == Subsystem::Listener {
                self.listener_ready(readiness, now_ns);
            }
            if matches!(readiness.token.subsystem, Subsystem::Dns | Subsystem::Relay) {
                let cx = &mut Context::new(now_ns, &mut self.core.out.queue, &self.poller);
                self.services.on_ready(readiness, cx);
                // One VM's relays must not fill the room for another's answers.
                self.write_answers();
            }
        }
        self.ready = ready;
        self.go_on_adopting()?;
        self.work_timers(now_ns);
        self.write_out();
        let changes = self.look_at_activity(now_ns);
        if !changes.is_empty() {
            control.activity(changes).map_err(EngineError::Control)?;
        }
        let changes = self.core.sleeping.take_changes();
        if !changes.is_empty() {
            control
                .sleep_changes(changes)
                .map_err(EngineError::Control)?;
        }
        while let Some(reloaded) = self.reloading.take_done() {
            control.reloaded(reloaded).map_err(EngineError::Control)?;
        }
        self.report_ended(control, now_ns)
    }

    /// Returns the engine's counters and sizes.
    pub fn status(&self) -> Status {
        let (records_written, records_lost) = self.log.counts();
        let (port_destinations, ports_resting) = self.core.nat.flows.ports.sizes();
        Status {
            flows: self.core.nat.flows.len() as u64,
            records_written,
            records_lost,
            port_destinations: port_destinations as u64,
            ports_resting: ports_resting as u64,
            ..self.frames
        }
    }

    fn timeout_ns(&self) -> Option<u64> {
        let now_ns = self.clock.now_ns();
        let has_vms = self.core.vms.len() > 0;
        let scans = has_vms || self.core.nat.flows.has_spare_chunks();
        let scan = scans.then_some(self.next_scan_ns);
        let deadlines = [
            scan,
            self.port.next_deadline_ns(),
            self.core.nat.flows.next_due_ns(),
            self.services
                .next_deadline_ns(self.core.out.queue.is_port_full()),
            self.next_credits_ns,
            self.watch.captures.next_deadline_ns(),
            self.listening.next_deadline_ns(),
            self.activity.next_deadline_ns(),
            self.core.sleeping.next_deadline_ns(),
            self.core.unaddressed.next_deadline_ns(),
            self.core.reassembly.next_deadline_ns(),
            self.core.advertisements.next_deadline_ns(),
            self.core.inspected.next_deadline_ns(),
            self.ending.front().map(|(due_ns, _)| *due_ns),
            self.core
                .nat
                .network
                .following
                .is_under_way()
                .then_some(now_ns),
            self.reloading.is_under_way().then_some(now_ns),
            self.core.forwards.is_finding_guests().then_some(now_ns),
            self.core.nat.flows.is_adopting().then_some(now_ns),
            self.core.nat.flows.is_scanning().then_some(now_ns),
            self.core.nat.flows.mappings.has_changed().then_some(now_ns),
            self.log.is_behind().then_some(now_ns + WRITTEN_INTERVAL_NS),
        ];
        let first_ns = deadlines.into_iter().flatten().min()?;
        Some(first_ns.saturating_sub(now_ns))
    }

    fn read_port(&mut self) -> Result<(), EngineError> {
        let mut work = WORK_PER_TURN;
        while work > 0 {
            if self.exit.is_none() && self.waiting.has_room() {
                self.read_frames()?;
            }
            if self.waiting.is_empty() {
                break;
            }
            let spent = self.handle_some(work.min(WORK_PER_READ));
            work = work.saturating_sub(spent);
            if self.is_port_empty() {
                break;
            }
        }
        Ok(())
    }

    /// Handles what the port has, until it is found empty or [`TURNS_AT_WAKE`] turns' work is done.
    fn read_port_until_empty(&mut self) {
        self.is_port_read = false;
        for _ in 0..TURNS_AT_WAKE {
            // A port that was left out is not known to be empty.
            self.skipped_readings = 0;
            // An error comes again in the next turn, which ends with it.
            if self.read_port().is_err() || self.is_port_empty() {
                break;
            }
        }
    }

    /// Reads frames from the port and from the ring of first packets. What the port has is put behind
    /// all that the ring has at that time: a program uses the port where a packet does not fit the ring,
    /// and then the port until this has read it.
    fn read_frames(&mut self) -> Result<(), EngineError> {
        let is_left_out = self.skipped_readings > 0;
        let mut is_port_empty = true;
        if !is_left_out {
            self.port.recv(&mut self.batch).map_err(EngineError::Port)?;
            self.core.out.queue.set_port_room(self.port.room());
            is_port_empty = !self.batch.is_full();
        }
        let by_port = self.batch.len();
        let most = match by_port {
            0 => BATCH,
            _ => RING_LEN as usize,
        };
        let tables = &self.core.nat.datapath;
        let (batch, now_ns) = (&mut self.batch, self.clock.now_ns());
        let is_ring_empty = self
            .first_packets
            .take(tables, batch, (most, by_port > 0), now_ns);
        self.is_port_read = is_port_empty && is_ring_empty;
        let by_ring = batch.len() - by_port;
        self.skipped_readings = match (is_left_out, by_port) {
            (true, _) => self.skipped_readings - 1,
            // In user mode a reading is what carries traffic, and seldom finds a frame for the engine.
            (false, 0) if by_ring > 0 => SKIPPED_READINGS,
            (false, _) => 0,
        };
        let first_packets = self.waiting.take(batch, by_port);
        FirstPackets::read_by_port(tables, first_packets);
        Ok(())
    }

    /// Whether the port was empty when it was last read, and all its frames are handled.
    fn is_port_empty(&self) -> bool {
        self.waiting.is_empty() && self.is_port_read
    }

    /// Handles the frames that wait, or as many as cost `work`. Returns how much work it was.
    fn handle_some(&mut self, work: usize) -> usize {
        let mut spent = 0;
        let now_ns = self.clock.now_ns();
        self.last_frame_ns = now_ns;
        self.next_credits_ns
            .get_or_insert(now_ns + CREDITS_INTERVAL_NS);
        // A frame that opens a flow has no VM's id, by which it is observed.
        let flows = &mut self.core.nat.flows;
        let takes_orders = flows.takes_orders;
        flows.takes_orders &= !self.watch.is_on();
        while spent < work {
            let Some(turn) = self.waiting.next() else {
                break;
            };
            credits::take_in(&self.core.nat.datapath, turn.sender, turn.credits);
            let bytes = self.batch.kept_mut(turn.frame);
            self.watch
                .passed(&self.core, &self.clock, bytes, Direction::Read);
            let queued = self.core.out.queue.len();
            let flows = self.core.nat.flows.len();
            let asked = self.core.nat.network.questions();
            let early = self.core.take_early(bytes, now_ns);
            // Each copy that is looked into counts as a frame, and so does the search for them.
            let mut more = early.as_ref().map_or(0, |early| 1 + early.looks);
            for mut early in early.into_iter().flat_map(|early| early.frames) {
                self.watch
                    .passed(&self.core, &self.clock, &early, Direction::Read);
                let (services, poller) = (&mut self.services, &self.poller);
                // Without its first fragment no datagram is whole, so it is held, or dropped and counted.
                // It is no frame of the port.
                let _ = self.core.handle(&mut early, services, poller, now_ns);
            }
            let disposition = self
                .core
                .handle(bytes, &mut self.services, &self.poller, now_ns);
            self.frames.frames_read += 1;
            let is_opened = self.core.nat.flows.len() > flows;
            let least = if is_opened { OPENING_WORK } else { 1 };
            let asked = self.core.nat.network.questions() - asked;
            more += QUESTION_WORK * asked as usize;
            let cost = (self.core.out.queue.len() - queued).max(least) + more;
            spent += cost;
            let disposition = match disposition {
                Disposition::Open(slot) => {
                    let is_accepted = self.port.send(bytes).is_ok();
                    let core = &mut self.core;
                    core.written(slot, is_accepted, bytes, &self.poller, now_ns)
                }
                other => other,
            };
            match disposition {
                Disposition::Sent => self.frames.frames_returned += 1,
                Disposition::Send | Disposition::Open(_) => {
                    self.frames.frames_returned += 1;
                    self.watch
                        .passed(&self.core, &self.clock, bytes, Direction::Written);
                    let Core {
                        nat, unaddressed, ..
                    } = &mut self.core;
                    let is_kept = unaddressed.keeps(&nat.datapath, bytes, now_ns);
                    if !is_kept && self.port.send(bytes).is_err() {
                        self.frames.frames_unsent += 1;
                        self.core.count_unsent(bytes);
                    }
                }
                Disposition::Dropped(_) => self.frames.frames_dropped += 1,
                Disposition::Consumed => self.frames.frames_consumed += 1,
            }
            self.waiting.done(turn, cost);
            self.batch.release(turn.frame);
            // One VM's relays must not fill the room for another's answers.
            if self.core.out.queue.is_half_full() {
                self.write_answers();
            }
        }
        if self.watch.is_on() {
            self.core.nat.flows.takes_orders = takes_orders;
        }
        if !self.core.out.queue.is_empty() || self.core.out.queue.has_back_in() {
            self.write_answers();
        }
        spent
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
        let datapath = &self.core.nat.datapath;
        let cx = &mut Context::new(now_ns, &mut self.core.out.queue, &self.poller);
        let is_paused = |row| is_paused(datapath, row);
        self.services.on_timer(&is_paused, cx)
    }

    fn work_timers(&mut self, now_ns: u64) {
        self.core.expire_fragments(now_ns);
        while let Some((row, frame)) = self.core.sleeping.expire(now_ns) {
            self.core.drop_held(row, &frame, DropReason::EngineBusy);
        }
        self.go_on_following(now_ns);
        self.core.follow_mappings();
        self.go_on_reloading();
        self.in_rounds(|engine| engine.work_services(now_ns));
        self.in_rounds(|engine| engine.core.work_inspections(now_ns));
        // One round: what is left is sent in the next turns.
        self.core.work_advertisements(now_ns);
        self.write_answers();
        let Nat {
            flows, datapath, ..
        } = &mut self.core.nat;
        if flows.next_due_ns().is_some_and(|at| at <= now_ns) {
            let mut ended = Vec::new();
            let judge = self.core.rules.judge.borrow();
            let timers = |vm| judge.timers(vm);
            flows.finish_due(datapath, timers, now_ns, &mut |e| ended.push(*e));
            drop(judge);
            self.record(&ended);
        }
        if now_ns >= self.next_scan_ns {
            let Nat {
                flows, datapath, ..
            } = &mut self.core.nat;
            flows.begin_scan(datapath);
            let quiet = now_ns >= self.last_frame_ns + QUIET_AFTER_NS;
            let interval_ns = if quiet {
                QUIET_SCAN_INTERVAL_NS
            } else {
                SCAN_INTERVAL_NS
            };
            self.next_scan_ns = now_ns + interval_ns;
            // A VM whose credits are all lost could never wake the port again.
            self.next_credits_ns.get_or_insert(0);
            let core = &mut self.core;
            core.forwards.begin_to_find_guests(now_ns);
            // Flows that are left are judged as at the start.
            if !core.nat.flows.are_left() {
                core.rules.judge.borrow_mut().expire(now_ns);
            }
            core.nat.release_idle_hops(now_ns);
            if now_ns >= self.next_refusals_ns {
                self.record_refusals();
            }
        }
        if !self.core.unaddressed.is_empty() {
            self.go_on_addressing(now_ns);
        }
        if self.core.forwards.is_finding_guests() {
            let core = &mut self.core;
            let (vms, datapath) = (&core.vms, &core.nat.datapath);
            core.forwards
                .find_guests(vms, datapath, &mut core.out.queue);
            self.write_answers();
        }
        let Nat {
            flows, datapath, ..
        } = &mut self.core.nat;
        let judge = self.core.rules.judge.borrow();
        flows.go_on_scanning(datapath, |vm| judge.timers(vm), now_ns);
        drop(judge);
        if self.next_credits_ns.is_some_and(|at| at <= now_ns) && self.is_port_empty() {
            let Core { vms, nat, .. } = &mut self.core;
            self.next_credits_ns = match vms.settle_credits(&nat.datapath, now_ns) {
                Settled::All => None,
                Settled::InFlight => Some(now_ns + CREDITS_INTERVAL_NS),
                Settled::Some => Some(now_ns),
            };
        }
    }

    /// Notes what the engine itself sends to VMs that sleep because something came for them.
    fn note_knocks(&mut self) {
        let now_ns = self.clock.now_ns();
        let Core { out, sleeping, .. } = &mut self.core;
        for frame in out.queue.prompted_frames() {
            if let Some((row, tuple)) = sent_to_guest(frame) {
                sleeping.knock(row, &tuple, now_ns);
            }
        }
    }

    fn write_out(&mut self) {
        let now_ns = self.clock.now_ns();
        loop {
            let core = &mut self.core;
            let cx = &mut Context::new(now_ns, &mut core.out.queue, &self.poller);
            let is_done = self.services.flush(&core.vms, &core.nat.network, cx);
            let map = &mut core.nat.datapath;
            core.rules.remember_openings(map, core.vms.len());
            self.write_answers();
            if is_done {
                break;
            }
        }
        self.record_services();
        self.flush_log();
        self.send_to_listeners(now_ns);
        if self.watch.is_on() {
            let wall = self.clock.wall();
            let Core { nat, vms, .. } = &mut self.core;
            self.watch.work(nat, vms, &self.poller, now_ns, wall);
        }
        self.free_recorded(now_ns);
    }

    /// Writes a frame that goes back to the kernel.
    fn write(&mut self, frame: &[u8]) {
        self.watch
            .passed(&self.core, &self.clock, frame, Direction::Written);
        let Core {
            nat, unaddressed, ..
        } = &mut self.core;
        if !unaddressed.keeps(&nat.datapath, frame, self.clock.now_ns()) {
            self.write_as_it_is(frame);
        }
    }

    fn write_as_it_is(&mut self, frame: &[u8]) {
        if self.port.send(frame).is_err() {
            self.frames.frames_unsent += 1;
            self.core.count_unsent(frame);
        }
    }

    /// Asks guests whose MAC is not known for it, and writes what need not wait for one any more.
    fn go_on_addressing(&mut self, now_ns: u64) {
        for frame in self.core.go_on_addressing(now_ns) {
            self.write_as_it_is(&frame);
        }
        self.write_answers();
    }

    /// Leads the engine's own packets to guests' translated addresses back in. What they lead to is
    /// queued behind the answers, and none leads to more than a few others.
    fn lead_back_in(&mut self) {
        let mut frame = Vec::new();
        while let Some(packet) = self.core.out.queue.take_back_in() {
            let now_ns = self.clock.now_ns();
            let (services, poller) = (&mut self.services, &self.poller);
            let core = &mut self.core;
            let done = core.lead_own_back_in(&packet, &mut frame, services, poller, now_ns);
            if done == Disposition::Send {
                self.write(&frame);
            }
        }
    }

    fn write_answers(&mut self) {
        self.lead_back_in();
        if !self.core.sleeping.is_empty() {
            self.note_knocks();
        }
        let now_ns = self.clock.now_ns();
        for frame in self.core.out.queue.frames() {
            self.watch
                .passed(&self.core, &self.clock, frame, Direction::Written);
            let unaddressed = &mut self.core.unaddressed;
            let is_kept = unaddressed.keeps(&self.core.nat.datapath, frame, now_ns);
            if !is_kept && self.port.send(frame).is_err() {
                self.frames.frames_unsent += 1;
                self.core.count_unsent(frame);
            }
        }
        self.core.out.queue.clear();
        self.core.out.queue.set_port_room(self.port.room());
    }
}

#[cfg(test)]
mod tests;
