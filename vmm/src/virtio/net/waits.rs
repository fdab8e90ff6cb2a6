//! Event sources on which a worker sleeps. All are edge-triggered, so none must be read to clear
//! it.
use std::{
    io,
    os::fd::RawFd,
    time::{Duration, Instant},
};

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

/// Kind of a source of wakeups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(super) enum Source {
    Command,
    TxKick,
    RxKick,
    Tap,
}

/// Events that ended a wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Woken {
    pub(super) kicks: u64,
    pub(super) tap: bool,
}

/// The epoll instance, and the TAP events that it watches.
pub(super) struct Waits {
    epoll: Epoll,
    tap: Option<(RawFd, EventSet)>,
}

impl Waits {
    pub(super) fn new(commands: RawFd) -> io::Result<Waits> {
        let waits = Waits {
            epoll: Epoll::new()?,
            tap: None,
        };
        waits.add(commands, Source::Command)?;
        Ok(waits)
    }

    /// Adds an eventfd as a source.
    pub(super) fn add(&self, descriptor: RawFd, source: Source) -> io::Result<()> {
        let event = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, source as u64);
        self.epoll.ctl(ControlOperation::Add, descriptor, event)
    }

    /// Removes a source from the epoll.
    pub(super) fn remove(&self, descriptor: RawFd) -> io::Result<()> {
        let none = EpollEvent::default();
        self.epoll.ctl(ControlOperation::Delete, descriptor, none)
    }

    /// Watches the TAP for the events in `wanted`; `None` removes it. Returns the number of system
    /// calls: none when nothing changes.
    pub(super) fn watch_tap(&mut self, wanted: Option<(RawFd, EventSet)>) -> io::Result<u64> {
        if wanted == self.tap {
            return Ok(0);
        }
        match (self.tap, wanted) {
            (Some((old, _)), None) => self.remove(old)?,
            (before, Some((descriptor, events))) => {
                let event = EpollEvent::new(events | EventSet::EDGE_TRIGGERED, Source::Tap as u64);
                let how = match before {
                    Some(_) => ControlOperation::Modify,
                    None => ControlOperation::Add,
                };
                self.epoll.ctl(how, descriptor, event)?;
            }
            (None, None) => {}
        }
        self.tap = wanted;
        Ok(1)
    }

    /// Sleeps until an event, or until the given time.
    pub(super) fn sleep(&self, until: Option<Instant>) -> io::Result<Woken> {
        let timeout = until.map_or(-1, |until| {
            let left = until.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
            i32::try_from(left.as_millis()).unwrap_or(i32::MAX)
        });
        self.wait(timeout)
    }

    /// Returns the events so far, without waiting.
    pub(super) fn poll(&self) -> io::Result<Woken> {
        self.wait(0)
    }

    fn wait(&self, timeout_ms: i32) -> io::Result<Woken> {
        let mut events = [EpollEvent::default(); 4];
        let count = match self.epoll.wait(timeout_ms, &mut events) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            other => other?,
        };
        let mut woken = Woken::default();
        for event in &events[..count] {
            match event.data() {
                data if data == Source::Tap as u64 => woken.tap = true,
                data if data == Source::Command as u64 => {}
                _ => woken.kicks += 1,
            }
        }
        Ok(woken)
    }
}
