//! What is put off until nothing else is to be done.
//!
//! # Theory of operation
//! When both sides of a connection have ended, its socket is closed, and the guest's FIN acknowledged.
//! Each takes as long as the kernel takes to carry the segment to its end, and often the guest's next
//! connection is behind them already. So they are done when the thread would wait otherwise
//! ([`crate::port::FrameIo::rest`]), or once there are [`MOST`] of a kind, or after [`LONGEST_NS`].
use std::rc::Rc;

use nix::sys::epoll::Epoll;

use super::{Sockets, ToGuest, pace::ByteRates};
use crate::host_sockets::HostSockets;

/// Sockets, or acknowledgements, from which on what is put off is done at a turn's end.
const MOST: usize = 16;
/// Longest time for which something is put off while the thread is busy, ns.
const LONGEST_NS: u64 = 1_000_000;

/// What is put off.
#[derive(Debug)]
pub(super) struct PutOff {
    /// Has the sockets to close.
    host: Rc<HostSockets>,
    /// Keys of connections whose acknowledgement is the last.
    acknowledgements: Vec<u32>,
    /// Time by which the first of these is to be done, ns; `None` until the turn's end.
    due_ns: Option<u64>,
}

impl PutOff {
    /// Nothing is put off. `host` has the sockets to close.
    pub(super) fn new(host: Rc<HostSockets>) -> Self {
        Self {
            host,
            acknowledgements: Vec::new(),
            due_ns: None,
        }
    }

    /// Puts off the last acknowledgement of a connection.
    pub(super) fn acknowledge(&mut self, key: u32) {
        // Again for a FIN that came again.
        if self.acknowledgements.last() != Some(&key) {
            self.acknowledgements.push(key);
        }
    }

    fn is_empty(&self) -> bool {
        self.host.closing().is_empty() && self.acknowledgements.is_empty()
    }

    /// Time by which it is to be done, ns; `None` if nothing is put off.
    pub(super) fn due_ns(&self) -> Option<u64> {
        self.due_ns.filter(|_| !self.is_empty())
    }

    /// At the end of a turn: whether it is time.
    pub(super) fn is_due(&mut self, now_ns: u64) -> bool {
        if self.is_empty() {
            return false;
        }
        let due_ns = *self.due_ns.get_or_insert(now_ns + LONGEST_NS);
        let are_many = self.host.closing().len() >= MOST || self.acknowledgements.len() >= MOST;
        are_many || due_ns <= now_ns
    }
}

impl Sockets {
    /// Whether something was put off.
    pub fn has_put_off(&self) -> bool {
        !self.put_off.is_empty()
    }

    /// Does what was put off.
    pub fn do_put_off(&mut self, epoll: &Epoll, guest: &mut impl ToGuest, now_ns: u64) {
        self.put_off.due_ns = None;
        self.host.close_all();
        let mut keys = std::mem::take(&mut self.put_off.acknowledgements);
        for key in keys.drain(..) {
            self.stream_sends(key, ByteRates::default(), epoll, guest, now_ns);
        }
        self.put_off.acknowledgements = keys;
    }
}

#[cfg(test)]
#[path = "put_off_test.rs"]
mod tests;
