//! Records: one JSON line per start and end of a flow, DNS question, and batch of refusals.
//!
//! ```json
//! {"event":"flow_end","id":"5f3a91c2-17-3","vm":"a","proto":"tcp","guest":"10.0.2.15:40000",
//!  "remote":"198.51.100.1:443","nat":"192.0.2.1:61234","rule":2,
//!  "rule_text":"allow 198.51.100.0/24","verdict":"fast","started":"2026-01-31T12:00:00.000Z",
//!  "duration_ms":1500,"connect_us":480,"tx_packets":10,"tx_bytes":1200,"rx_packets":9,
//!  "rx_bytes":40000,"end":"closed","tcp":"closed","direction":"outbound","path":"kernel"}
//! ```
//! docs/observability.md lists every field of every [`Event`]. `id` consists of the number that the
//! maps were given when they were made, slot and generation. It is unique, so that a log may
//! outlive the maps, and an adopter can tell which flows were recorded ([`recorded_ids`]). Relayed
//! flows have no slot; their id is `r`, a random number of the engine, and the number of the
//! relayed flow. Packets and bytes are L3, counted as if segmented.
//!
//! Lines are buffered and handed over once per turn of the loop, or when a mebibyte is waiting.
//! Only whole lines are handed over, so a file opened for appending can be rotated at any time and
//! then replaced ([`FlowLog::set_file`]). A writer that is killed may leave a part of a line, which its
//! successor ends ([`Background::continue_log`]). A thread writes them, which a slow disk may block
//! ([`Output`]). Lines that can't be written or find no room are counted and lost: memory stays
//! bounded. An event that no log wants costs nothing. Beside the file there may be listeners
//! ([`Listener`]), each of which receives the records of one VM, or some events of all VMs.
use std::{
    collections::VecDeque,
    io::{self, Read, Seek, Write},
    time::{Duration, SystemTime},
};

use slipgate_abi::VmId;
use slipgate_model::RelayedId;

use serde::Serialize;

mod dns;
mod flow;
mod listener;
mod losses;
mod output;
mod refused;
pub(crate) mod rule_texts;
mod time;

pub use slipgate_model::{FlowLogEvent as Event, FlowLogEvents as Events};

pub use dns::{MOST_ANSWERS, MOST_CHAIN, Question, Source};
pub use flow::{Names, RelayedEnd, RelayedFlow, VmText, recorded_ids};
pub use listener::Listener;
pub use losses::Losses;
pub use output::{Background, MOST_QUEUED, Output, Unwritten, WriteResults};
pub use refused::Refusals;
pub use time::Rfc3339;

/// Size at which the buffer is written without waiting for the end of the turn, bytes.
const WRITE_AT: usize = 1 << 20;

/// The flow log: its file, its listeners, and the records that are being written.
#[derive(Default)]
pub struct FlowLog {
    output: Option<Output>,
    events: Events,
    /// Listeners, each with the events that it receives.
    listeners: Vec<Listener>,
    /// Events that any listener receives.
    heard: Events,
    /// Key of the only listener that receives the present records; `None`: all do.
    only: Option<u32>,
    buffer: Vec<u8>,
    lines: u64,
    /// Number of the batch that is being filled, counted from 1.
    batch: u64,
    /// Batches that were handed over, oldest first, up to those that are known to be done.
    under_way: VecDeque<UnderWay>,
    written: u64,
    failed: u64,
    /// Number of lost records that [`FlowLog::take_failed`] has returned.
    reported: u64,
    /// Cause of the last failure to write.
    error: Option<io::Error>,
    instance: u32,
    run: u32,
    /// Whether sockets of the engine carry what the kernel's programs would.
    by_sockets: bool,
}

/// Batch that was handed over to the output.
struct UnderWay {
    batch: u64,
    /// Number that the output gave the batch.
    number: u64,
    lines: u64,
}

impl std::fmt::Debug for FlowLog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FlowLog")
            .field("open", &self.output.is_some())
            .field("written", &self.written)
            .field("failed", &self.failed)
            .finish_non_exhaustive()
    }
}

impl FlowLog {
    /// Creates a log of flow ends to a writer that never blocks. Without a writer records are
    /// dropped uncounted.
    pub fn new(writer: Option<Box<dyn Write + Send>>) -> Self {
        Self::to(writer.map(Output::direct))
    }

    /// Creates a log of flow ends. Without an output records are dropped uncounted.
    pub fn to(output: Option<Output>) -> Self {
        Self {
            output,
            events: Events::from_iter([Event::FlowEnd]),
            batch: 1,
            run: RelayedId::run_of(rand::random(), 0),
            ..Self::default()
        }
    }

    /// Sets the row of `OWNERS` of the engine whose log it is, which ids of relayed flows show.
    pub fn set_owner(&mut self, owner_row: u32) {
        self.run = RelayedId::run_of(self.run, owner_row);
    }

    /// Has the records say that sockets of the engine carry the flows, not the kernel's programs.
    pub fn set_by_sockets(&mut self) {
        self.by_sockets = true;
    }

    /// Replaces the set of events that the log writes.
    pub fn of(self, events: Events) -> Self {
        Self { events, ..self }
    }

    /// Whether records of this event are written or received by a listener. Others need not be
    /// made.
    pub fn wants(&self, event: Event) -> bool {
        self.writes(event) || self.heard.has(event)
    }

    /// Whether a listener receives records of this event.
    pub fn is_heard(&self, event: Event) -> bool {
        self.heard.has(event)
    }

    fn writes(&self, event: Event) -> bool {
        self.output.is_some() && self.events.has(event)
    }

    /// Adds a listener, which receives the records made from now on.
    pub fn listen(&mut self, listener: Listener) {
        self.listeners.push(listener);
        self.sum_up_heard();
    }

    /// Returns the listener of this key.
    pub fn listener(&mut self, key: u32) -> Option<&mut Listener> {
        self.listeners.iter_mut().find(|l| l.key() == key)
    }

    /// Removes the listener of this key.
    pub fn unlisten(&mut self, key: u32) {
        self.listeners.retain(|listener| listener.key() != key);
        self.sum_up_heard();
    }

    /// Has a listener of all VMs receive these events from now on.
    pub fn hear(&mut self, key: u32, events: Events) {
        if let Some(listener) = self.listener(key) {
            listener.hear(events);
        }
        self.sum_up_heard();
    }

    fn sum_up_heard(&mut self) {
        let all = self.listeners.iter().map(Listener::heard);
        self.heard = all.fold(Events::default(), Events::or);
    }

    /// Sends the records that `record` makes to one listener only: the file and the other listeners
    /// have them already.
    pub fn only_for(&mut self, key: u32, record: impl FnOnce(&mut Self)) {
        self.only = Some(key);
        record(self);
        self.only = None;
    }

    /// Sets the number within which slots of recorded flows are unique.
    pub fn set_instance(&mut self, instance: u32) {
        self.instance = instance;
    }

    /// Replaces the file (rotation). Buffered lines go to the old one.
    pub fn set_file(&mut self, file: impl Read + Write + Seek + Send + 'static) {
        self.flush();
        match &mut self.output {
            Some(output) => output.set_log(file),
            none => *none = Some(Output::direct(Box::new(file))),
        }
    }

    /// Hands over the buffered lines, and collects the results of earlier batches.
    pub fn flush(&mut self) {
        let Some(output) = &mut self.output else {
            return;
        };
        if !self.buffer.is_empty() {
            match output.give(&self.buffer, self.lines) {
                Some(number) => self.under_way.push_back(UnderWay {
                    batch: self.batch,
                    number,
                    lines: self.lines,
                }),
                None => {
                    self.failed += self.lines;
                    self.error = Some(io::Error::other("it does not keep up"));
                }
            }
            self.batch += 1;
            self.lines = 0;
            self.buffer.clear();
        }
        while let Some(first) = self.under_way.front()
            && output.is_done(first.number)
        {
            self.under_way.pop_front();
        }
        let outcome = output.take_outcome();
        self.written += outcome.written;
        self.failed += outcome.lost;
        if outcome.error.is_some() {
            self.error = outcome.error;
        }
    }

    /// Hands over the buffered lines and waits, at most `within`, until all are written. Lines that
    /// are not written by then are counted as lost.
    pub fn finish(&mut self, within: Duration) {
        self.flush();
        if let Some(output) = &self.output
            && !output.finish(within)
        {
            self.failed += self.under_way.drain(..).map(|left| left.lines).sum::<u64>();
            self.error = Some(io::ErrorKind::TimedOut.into());
            self.output = None;
        }
        self.flush();
    }

    /// Returns the number of the batch that is being filled.
    pub fn batch(&self) -> u64 {
        self.batch
    }

    /// Whether a complete batch is on its way to the file, neither written nor lost.
    pub fn is_under_way(&self, batch: u64) -> bool {
        self.under_way
            .binary_search_by_key(&batch, |under_way| under_way.batch)
            .is_ok()
    }

    /// Whether any batch is on its way to the file.
    pub fn is_behind(&self) -> bool {
        !self.under_way.is_empty()
    }

    /// Returns the number of records written, and of records lost because writing failed.
    pub fn counts(&self) -> (u64, u64) {
        (self.written, self.failed)
    }

    /// Returns the number of records lost since the last call.
    pub fn take_failed(&mut self) -> u64 {
        self.failed - std::mem::replace(&mut self.reported, self.failed)
    }

    /// Returns the cause of the last failure to write, if there was one.
    pub fn last_error(&self) -> Option<&io::Error> {
        self.error.as_ref()
    }

    /// Buffers a line about a VM, if the file or a listener wants it.
    fn push(&mut self, event: Event, vm: VmId, line: &impl Serialize) {
        let writes = self.writes(event) && self.only.is_none();
        let hears = |listener: &Listener, only: Option<u32>| {
            listener.hears(event, vm) && only.is_none_or(|only| only == listener.key())
        };
        let is_heard = self.listeners.iter().any(|l| hears(l, self.only));
        if !writes && !is_heard {
            return;
        }
        let begin = self.buffer.len();
        if serde_json::to_writer(&mut self.buffer, line).is_err() {
            self.buffer.truncate(begin);
            self.failed += 1;
            return;
        }
        self.buffer.push(b'\n');
        for listener in &mut self.listeners {
            if hears(listener, self.only) {
                listener.take(&self.buffer[begin..]);
            }
        }
        if !writes {
            self.buffer.truncate(begin);
            return;
        }
        self.lines += 1;
        if self.buffer.len() >= WRITE_AT {
            self.flush();
        }
    }
}

/// Returns the wall-clock time at `then_ns`, given that it is `now` at `now_ns`.
fn wall_at(then_ns: u64, now_ns: u64, now: SystemTime) -> SystemTime {
    let ago = std::time::Duration::from_nanos(now_ns.saturating_sub(then_ns));
    now.checked_sub(ago).unwrap_or(SystemTime::UNIX_EPOCH)
}

#[cfg(test)]
mod tests;
