//! Events with sequence numbers, for any number of readers.
//!
//! The last [`KEPT`] events are kept. A reader names the last event that it has, or begins with the
//! next one. A reader that is too slow misses events; it gets one that says how many, and delays
//! nobody.
use std::{cell::RefCell, collections::VecDeque};

use serde_json::{Value, json};
use slipgate_ipc::api::Event;
use tokio::sync::Notify;

/// Number of events that are kept for slow readers.
pub const KEPT: usize = 4_096;

/// The events that are kept.
#[derive(Debug, Default)]
pub struct Events {
    kept: RefCell<Kept>,
    added: Notify,
}

#[derive(Debug, Default)]
struct Kept {
    /// Number of the last event.
    last: u64,
    events: VecDeque<Stored>,
}

#[derive(Debug)]
struct Stored {
    kind: String,
    vm: Option<String>,
    line: String,
}

/// Events that a reader wants.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// Name of the VM to which events are restricted; `None`: all VMs.
    pub vm: Option<String>,
    /// Kinds to which events are restricted; empty: all kinds.
    pub kinds: Vec<String>,
}

impl Filter {
    fn wants(&self, event: &Stored) -> bool {
        let vm = self.vm.is_none() || self.vm == event.vm;
        vm && (self.kinds.is_empty() || self.kinds.contains(&event.kind))
    }
}

impl Events {
    /// Adds an event.
    pub fn add(&self, event: &Event) {
        let mut kept = self.kept.borrow_mut();
        kept.last += 1;
        let mut object = serde_json::to_value(event).unwrap_or_default();
        let text = |object: &Value, key: &str| object[key].as_str().map(str::to_owned);
        let (kind, vm) = (text(&object, "event"), text(&object, "vm"));
        object["seq"] = kept.last.into();
        kept.events.push_back(Stored {
            kind: kind.unwrap_or_default(),
            vm,
            line: format!("{object}\n"),
        });
        if kept.events.len() > KEPT {
            kept.events.pop_front();
        }
        drop(kept);
        self.added.notify_waiters();
    }

    /// Number of the last event.
    pub fn last(&self) -> u64 {
        self.kept.borrow().last
    }

    /// Lines of the events after `seen` that are wanted, in one text, and the number of the last
    /// one; events that are not kept any more are counted in a line of their own.
    fn after(&self, seen: u64, filter: &Filter) -> (String, u64) {
        let kept = self.kept.borrow();
        let first = kept.last - kept.events.len() as u64;
        let lost = first.saturating_sub(seen);
        let mut text = String::new();
        if lost > 0 {
            let line = json!({ "event": "lost", "seq": first, "events": lost });
            text.push_str(&format!("{line}\n"));
        }
        let known = seen.saturating_sub(first) as usize;
        let new = kept.events.iter().skip(known);
        new.filter(|event| filter.wants(event))
            .for_each(|event| text.push_str(&event.line));
        (text, kept.last)
    }

    /// Waits for events after `seen`. Returns their lines, and the number of the last one.
    pub async fn next(&self, mut seen: u64, filter: &Filter) -> (String, u64) {
        loop {
            // Before the look, so that no event is missed in between.
            let added = self.added.notified();
            let (text, last) = self.after(seen, filter);
            seen = last;
            if !text.is_empty() {
                return (text, seen);
            }
            added.await;
        }
    }
}

#[cfg(test)]
#[path = "events_test.rs"]
mod tests;
