//! Listeners, which receive the records of one VM as they are made.
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

/// Receiver of one VM's records.
#[derive(Debug)]
pub struct Listener {
    key: u32,
    vm: VmId,
    waiting: Vec<u8>,
    /// Number of bytes at the start of `waiting` that were fetched.
    fetched: usize,
    /// Lost lines that were not reported yet.
    lost: u64,
}

impl Listener {
    /// Events that a listener receives, whichever the file receives.
    pub(super) const HEARS: Events = Events::of(&[Event::FlowStart, Event::FlowEnd, Event::Dns]);

    /// Creates a listener for the VM with this id. `key` identifies the listener.
    pub fn new(key: u32, vm: VmId) -> Self {
        Self {
            key,
            vm,
            waiting: Vec::new(),
            fetched: 0,
            lost: 0,
        }
    }

    pub(super) fn key(&self) -> u32 {
        self.key
    }

    pub(super) fn hears(&self, event: Event, vm: VmId) -> bool {
        self.vm == vm && Self::HEARS.has(event)
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
