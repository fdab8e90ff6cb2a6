//! Who hears what is recorded of one VM, as it is recorded.
//!
//! Lines wait in a bounded buffer until they are fetched; what finds no room is lost, and a line says
//! so as soon as there is room again: `{"event":"lost","count":3}`.
use super::{Event, Events};

/// Most that waits, bytes.
const MOST_WAITING: usize = 1 << 20;
/// Room that is kept for the line about what was lost.
const LOST_LINE: usize = 64;
const _: () = assert!(LOST_LINE >= "{'event':'lost','count':18446744073709551615}\n".len());

/// One of them.
#[derive(Debug)]
pub struct Listener {
    key: u32,
    vm: u32,
    waiting: Vec<u8>,
    /// Of the first of these, so much was fetched.
    fetched: usize,
    /// Lines lost, of which nothing was said yet.
    lost: u64,
}

impl Listener {
    /// What is heard, whatever the file is told.
    pub(super) const HEARS: Events = Events::of(&[Event::FlowStart, Event::FlowEnd, Event::Dns]);

    /// One who hears of the VM with that id; `key`: what it is called here.
    pub fn new(key: u32, vm: u32) -> Self {
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

    pub(super) fn hears(&self, event: Event, vm: u32) -> bool {
        self.vm == vm && Self::HEARS.has(event)
    }

    /// Adds a line.
    pub(super) fn take(&mut self, line: &[u8]) {
        if self.waiting() + line.len() + LOST_LINE > MOST_WAITING {
            self.lost += 1;
            return;
        }
        self.tell_lost();
        self.make_room();
        self.waiting.extend_from_slice(line);
    }

    /// Says what was lost: for that there is room when a line has, or when nothing waits.
    pub fn tell_lost(&mut self) {
        if self.lost == 0 {
            return;
        }
        self.make_room();
        let line = format!("{{\"event\":\"lost\",\"count\":{}}}\n", self.lost);
        self.waiting.extend_from_slice(line.as_bytes());
        self.lost = 0;
    }

    /// Bytes that wait to be fetched.
    pub fn waiting(&self) -> usize {
        self.waiting.len() - self.fetched
    }

    /// Hands out what waits, to whoever says how much of it he took.
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

    /// Moves what waits to the front when most of the buffer was fetched.
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
