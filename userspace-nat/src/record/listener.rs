//! Listeners, which receive the records of one VM, or some events of all VMs, as they are made.
//!
//! Lines wait in a bounded buffer until they are fetched. Lines that find no room are lost, and a
//! line reports it as soon as there is room again: `{"event":"lost","count":3}`.
use super::{Event, Events};
use slipgate_abi::VmId;

/// Most bytes that wait to be fetched.
const MOST_WAITING: usize = 1 << 20;
/// Room that is kept for the line that reports lost lines, bytes.
const LOST_LINE: usize = 64;
const _: () = assert!(LOST_LINE >= "{'event':'lost','count':18446744073709551615}\n".len());

/// Receiver of records, on a socket of its own.
#[derive(Debug)]
pub struct Listener {
    key: u32,
    of: Selection,
    waiting: Vec<u8>,
    /// Number of bytes at the start of `waiting` that were fetched.
    fetched: usize,
    /// Lost lines that were not reported yet.
    lost: u64,
}

/// Records that a listener receives, whichever the file receives.
#[derive(Clone, Copy, Debug)]
enum Selection {
    /// Flows and questions of a VM.
    Vm(VmId),
    /// These events, of all VMs.
    All(Events),
}

/// Events that the listener of one VM receives.
const OF_A_VM: Events = Events::of(&[Event::FlowStart, Event::FlowEnd, Event::Dns]);

impl Listener {
    /// Creates a listener for the VM with this id. `key` identifies the listener.
    pub fn new(key: u32, vm: VmId) -> Self {
        Self::of(key, Selection::Vm(vm))
    }

    /// Creates a listener for all VMs, which receives nothing until it is told what to.
    pub fn of_all(key: u32) -> Self {
        Self::of(key, Selection::All(Events::default()))
    }

    fn of(key: u32, of: Selection) -> Self {
        Self {
            key,
            of,
            waiting: Vec::new(),
            fetched: 0,
            lost: 0,
        }
    }

    pub(super) fn key(&self) -> u32 {
        self.key
    }

    pub(super) fn hears(&self, event: Event, vm: VmId) -> bool {
        let is_of = match self.of {
            Selection::Vm(id) => id == vm,
            Selection::All(_) => true,
        };
        is_of && self.heard().has(event)
    }

    /// Events that it receives.
    pub(super) fn heard(&self) -> Events {
        match self.of {
            Selection::Vm(_) => OF_A_VM,
            Selection::All(events) => events,
        }
    }

    /// Has it receive these events from now on, if it is one of all VMs.
    pub(super) fn hear(&mut self, events: Events) {
        if let Selection::All(heard) = &mut self.of {
            *heard = events;
        }
    }

    /// Adds a line, or counts it as lost when there is no room.
    pub(super) fn take(&mut self, line: &[u8]) {
        if self.waiting() + line.len() + LOST_LINE > MOST_WAITING {
            self.lost += 1;
            return;
        }
        self.report_lost();
        self.make_room();
        self.waiting.extend_from_slice(line);
    }

    /// Adds a line that reports lost lines. There is room for it when a line fits, or when nothing
    /// waits.
    pub fn report_lost(&mut self) {
        if self.lost == 0 {
            return;
        }
        self.make_room();
        let line = format!("{{\"event\":\"lost\",\"count\":{}}}\n", self.lost);
        self.waiting.extend_from_slice(line.as_bytes());
        self.lost = 0;
    }

    /// Returns the number of bytes that wait to be fetched.
    pub fn waiting(&self) -> usize {
        self.waiting.len() - self.fetched
    }

    /// Hands the waiting bytes to `take`, which returns how many it has taken; 0 ends the call.
    ///
    /// # Errors
    /// Returns the error of `take`.
    pub fn fetch<E>(&mut self, mut take: impl FnMut(&[u8]) -> Result<usize, E>) -> Result<(), E> {
        while self.waiting() > 0 {
            match take(&self.waiting[self.fetched..])? {
                0 => break,
                taken => self.fetched += taken,
            }
        }
        if self.waiting() == 0 {
            self.waiting.clear();
            self.fetched = 0;
        }
        Ok(())
    }

    /// Moves the waiting bytes to the front when most of the buffer was fetched.
    fn make_room(&mut self) {
        if self.fetched > MOST_WAITING / 2 {
            self.waiting.drain(..self.fetched);
            self.fetched = 0;
        }
    }
}

#[cfg(test)]
#[path = "listener_test.rs"]
mod tests;
