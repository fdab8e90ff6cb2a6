//! Events with sequence numbers, for any number of readers.
//!
//! There are two sources. The broker tells of VMs, policies and engines; the last [`KEPT`] of these
//! events are kept for readers that come later. The engine tells of flows, as records in the form
//! of the flow log, and only those that a reader wants ([`Events::wanted`]); these are not kept.
//!
//! Each reader has a queue of its own, which is bounded. A reader that is too slow misses events;
//! it gets one that says how many, and delays nobody.
use std::{borrow::Cow, cell::RefCell, collections::VecDeque, rc::Rc};

use serde::Deserialize;
use serde_json::json;
use slipgate_ipc::{
    api::Event,
    engine::{FlowLogEvent, FlowLogEvents},
};
use tokio::sync::{Notify, watch};

/// Number of the broker's events that are kept for readers that come later.
pub const KEPT: usize = 4_096;
/// Most text that waits for a reader, bytes; as much again may be on its way to its socket.
pub const MOST_WAITING: usize = 256 << 10;
/// Name of a reader's event that says how many it has missed.
const LOST: &str = "lost";
/// Name that stands for all kinds.
const ALL: &str = "all";

/// The events, and those who read them.
#[derive(Debug)]
pub struct Events {
    state: RefCell<State>,
    /// Kinds of records that the readers want.
    wanted: watch::Sender<FlowLogEvents>,
}

#[derive(Debug, Default)]
struct State {
    /// Number of the last event.
    last: u64,
    kept: VecDeque<Stored>,
    /// Number of the last of the broker's events that is not kept any more, and how many such there
    /// are.
    forgotten: (u64, u64),
    queues: Vec<Rc<Queue>>,
}

#[derive(Debug)]
struct Stored {
    seq: u64,
    kind: &'static str,
    vm: Option<String>,
    line: String,
}

/// Kinds of events that a reader wants.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Kinds {
    /// Of the broker's events.
    events: Vec<&'static str>,
    /// Of the engine's records.
    records: FlowLogEvents,
}

/// Error: there is no such kind of events.
#[derive(thiserror::Error, Clone, PartialEq, Eq, Debug)]
#[error("there is no kind {name:?} of events: give {ALL}, or some of {}", Kinds::names().join(", "))]
pub struct UnknownKind {
    name: String,
}

impl Default for Kinds {
    /// All of the broker's events, and no records: a host may have thousands of flows a second.
    fn default() -> Self {
        Self {
            events: Event::KINDS.to_vec(),
            records: FlowLogEvents::default(),
        }
    }
}

impl Kinds {
    /// Reads names that are separated by commas; none: the default.
    ///
    /// # Errors
    /// One of them is no kind of events.
    pub fn parse(names: &str) -> Result<Self, UnknownKind> {
        let mut kinds = Self {
            events: Vec::new(),
            records: FlowLogEvents::default(),
        };
        let mut named = names.split(',').filter(|name| !name.is_empty()).peekable();
        if named.peek().is_none() {
            return Ok(Self::default());
        }
        for name in named {
            let event = Event::KINDS.into_iter().find(|kind| *kind == name);
            match (event, record_named(name)) {
                (Some(kind), _) => kinds.events.push(kind),
                (_, Some(record)) => kinds.records = kinds.records.or(FlowLogEvents::of(&[record])),
                _ if name == ALL => {
                    kinds = Self {
                        records: FlowLogEvents::ALL,
                        ..Self::default()
                    };
                }
                _ => {
                    let name = name.to_owned();
                    return Err(UnknownKind { name });
                }
            }
        }
        Ok(kinds)
    }

    /// Names of all kinds.
    pub fn names() -> Vec<&'static str> {
        let records = FlowLogEvent::ALL.map(FlowLogEvent::name);
        Event::KINDS.into_iter().chain(records).collect()
    }
}

fn record_named(name: &str) -> Option<FlowLogEvent> {
    let mut all = FlowLogEvent::ALL.into_iter();
    all.find(|record| record.name() == name)
}

/// Events that a reader wants.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// Name of the VM to which events are restricted; `None`: all VMs.
    pub vm: Option<String>,
    /// Only those of these kinds.
    pub kinds: Kinds,
}

impl Filter {
    fn wants_vm(&self, vm: Option<&str>) -> bool {
        self.vm.is_none() || self.vm.as_deref() == vm
    }

    fn wants(&self, kind: &str, vm: Option<&str>) -> bool {
        self.wants_vm(vm) && self.kinds.events.contains(&kind)
    }

    fn wants_record(&self, kind: FlowLogEvent, vm: &str) -> bool {
        self.kinds.records.has(kind) && self.wants_vm(Some(vm))
    }
}

/// Parts of a record that filters look at. The rest need only be JSON.
#[derive(Deserialize)]
struct Record<'r> {
    #[serde(borrow)]
    event: Cow<'r, str>,
    #[serde(borrow, default)]
    vm: Cow<'r, str>,
    /// Of a line that says how many records the engine has lost.
    count: Option<u64>,
}

/// Error: a line of the engine is none of its records.
#[derive(thiserror::Error, Debug)]
#[error("the engine sent a line that is no record")]
pub struct NoRecord;

impl Default for Events {
    fn default() -> Self {
        Self {
            state: RefCell::default(),
            wanted: watch::Sender::new(FlowLogEvents::default()),
        }
    }
}

impl Events {
    /// Adds an event of the broker's.
    pub fn add(&self, event: &Event) {
        let state = &mut *self.state.borrow_mut();
        state.last += 1;
        let seq = state.last;
        let mut object = serde_json::to_value(event).unwrap_or_default();
        object["seq"] = seq.into();
        let stored = Stored {
            seq,
            kind: event.kind(),
            vm: event.vm().map(str::to_owned),
            line: format!("{object}\n"),
        };
        let vm = stored.vm.as_deref();
        for queue in &state.queues {
            if queue.filter.wants(stored.kind, vm) {
                queue.put(&stored.line, seq);
            }
        }
        state.kept.push_back(stored);
        if state.kept.len() > KEPT
            && let Some(oldest) = state.kept.pop_front()
        {
            state.forgotten = (oldest.seq, state.forgotten.1 + 1);
        }
    }

    /// Adds a line of the engine's, without the line's end.
    ///
    /// # Errors
    /// It is none of its records.
    pub fn add_record(&self, line: &str) -> Result<(), NoRecord> {
        let record: Record<'_> = serde_json::from_str(line).map_err(|_| NoRecord)?;
        let state = &mut *self.state.borrow_mut();
        if record.event == LOST {
            // Which ones, nobody knows any more.
            let count = record.count.ok_or(NoRecord)?;
            state.last = state.last.saturating_add(count);
            for queue in &state.queues {
                if queue.filter.kinds.records != FlowLogEvents::default() {
                    queue.lose(count, state.last);
                }
            }
            return Ok(());
        }
        let kind = record_named(&record.event).ok_or(NoRecord)?;
        state.last += 1;
        let begin = line.trim_end().strip_suffix('}').ok_or(NoRecord)?;
        let line = format!("{begin},\"seq\":{}}}\n", state.last);
        for queue in &state.queues {
            if queue.filter.wants_record(kind, &record.vm) {
                queue.put(&line, state.last);
            }
        }
        Ok(())
    }

    /// Kinds of records that readers want, now and whenever this changes.
    pub fn wanted(&self) -> watch::Receiver<FlowLogEvents> {
        self.wanted.subscribe()
    }

    /// Begins to read: events from now on, and before those the kept ones after number `after`,
    /// where it is given.
    pub fn read(self: &Rc<Self>, filter: Filter, after: Option<u64>) -> Reader {
        let queue = Rc::new(Queue {
            filter,
            waiting: RefCell::default(),
            added: Notify::new(),
        });
        let state = &mut *self.state.borrow_mut();
        if let Some(after) = after {
            let (last, count) = state.forgotten;
            let missed = last.saturating_sub(after).min(count);
            queue.lose(missed, last);
            queue.report_lost();
            let kept = state.kept.iter().filter(|stored| stored.seq > after);
            for stored in kept {
                if queue.filter.wants(stored.kind, stored.vm.as_deref()) {
                    queue.waiting.borrow_mut().text.push_str(&stored.line);
                }
            }
            queue.added.notify_one();
        }
        state.queues.push(queue.clone());
        self.sum_up_wanted(state);
        Reader {
            events: self.clone(),
            queue,
        }
    }

    fn sum_up_wanted(&self, state: &State) {
        let wanted = state
            .queues
            .iter()
            .map(|queue| queue.filter.kinds.records)
            .fold(FlowLogEvents::default(), FlowLogEvents::or);
        self.wanted.send_if_modified(|before| {
            let changed = *before != wanted;
            *before = wanted;
            changed
        });
    }
}

/// Reader of the event stream: an open request for `/v1/events`.
#[derive(Debug)]
pub struct Reader {
    events: Rc<Events>,
    queue: Rc<Queue>,
}

#[derive(Debug)]
struct Queue {
    filter: Filter,
    waiting: RefCell<Waiting>,
    added: Notify,
}

#[derive(Debug, Default)]
struct Waiting {
    text: String,
    /// Number of events that were missed after the text.
    lost: u64,
    /// Number of the last of these.
    last_lost: u64,
}

impl Queue {
    /// Adds an event's line, or counts it as lost when there is no room.
    fn put(&self, line: &str, seq: u64) {
        let mut waiting = self.waiting.borrow_mut();
        if waiting.text.len() + line.len() > MOST_WAITING {
            drop(waiting);
            return self.lose(1, seq);
        }
        waiting.text.push_str(line);
        self.added.notify_one();
    }

    fn lose(&self, count: u64, seq: u64) {
        let mut waiting = self.waiting.borrow_mut();
        waiting.lost = waiting.lost.saturating_add(count);
        waiting.last_lost = seq;
        self.added.notify_one();
    }

    fn report_lost(&self) {
        let mut waiting = self.waiting.borrow_mut();
        if waiting.lost > 0 {
            let (seq, lost) = (waiting.last_lost, waiting.lost);
            let line = json!({ "event": LOST, "seq": seq, "events": lost });
            waiting.text.push_str(&format!("{line}\n"));
            waiting.lost = 0;
        }
    }
}

impl Reader {
    /// Waits for events. Returns their lines, and behind them the one that says how many were
    /// missed, if any were.
    pub async fn next(&self) -> String {
        loop {
            self.queue.report_lost();
            let text = std::mem::take(&mut self.queue.waiting.borrow_mut().text);
            if !text.is_empty() {
                return text;
            }
            self.queue.added.notified().await;
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let state = &mut *self.events.state.borrow_mut();
        state.queues.retain(|other| !Rc::ptr_eq(other, &self.queue));
        self.events.sum_up_wanted(state);
    }
}

#[cfg(test)]
#[path = "events_test.rs"]
mod tests;
