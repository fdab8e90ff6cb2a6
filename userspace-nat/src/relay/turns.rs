//! How much relayed connections send at once.
//!
//! # Theory of operation
//! Everything else waits while packets of relayed connections are written, first packets of other
//! VMs too; and a guest that opens the windows of hundreds of connections together would have what
//! their buffers hold sent in one go. So in each turn of the engine's a VM's connections are sent
//! [`PACKETS_PER_TURN`] at most. One that has more joins its VM's queue and goes on when it is its
//! turn, in this turn of the engine's or in the next, behind those that wait already. So neither does
//! a VM with many connections hold up the others, nor a busy connection of a VM its neighbours.
//!
//! Two things do not wait. For each packet of the guest's its connection may send one: smoltcp
//! acknowledges by what it sends, and forgets a fast retransmission that it can't send at once. And a
//! reset is sent, of which there is one a connection.
use std::collections::VecDeque;

use super::{Entry, Event, Relay};
use crate::context::Context;

/// Packets that a VM's connections are sent in one turn of the engine's, besides one for each of the
/// guest's.
pub(super) const PACKETS_PER_TURN: usize = 256;

/// A VM's part.
#[derive(Debug, Default)]
pub(super) struct Turn {
    /// The turn of the engine's that `sent` is about.
    number: u64,
    sent: usize,
    /// Connections that have more to send; some may have ended meanwhile.
    /// While there are any, the VM is in the relay's queue.
    waiting: VecDeque<u32>,
}

impl Turn {
    fn left(&self, number: u64) -> usize {
        match self.number == number {
            true => PACKETS_PER_TURN.saturating_sub(self.sent),
            false => PACKETS_PER_TURN,
        }
    }

    /// How many packets a connection may send for an event, in this turn of the engine's.
    pub(super) fn may_send(&self, event: Event<'_>, number: u64) -> usize {
        let at_least = usize::from(matches!(event, Event::Packet(..)));
        match event {
            Event::Turn => self.left(number),
            _ if self.waiting.is_empty() => self.left(number).max(at_least),
            _ => at_least,
        }
    }

    pub(super) fn spend(&mut self, packets: usize, number: u64) {
        self.sent = PACKETS_PER_TURN - self.left(number) + packets;
        self.number = number;
    }
}

impl Relay {
    /// Begins a turn of the engine's, in which each VM's connections may send as much as in the last.
    pub fn begin_turn(&mut self) {
        self.turn += 1;
    }

    /// A connection has more to send than it may.
    pub(super) fn join(&mut self, key: u32) {
        let Some(Entry::Connection(connection)) = self.entries.get_mut(&key) else {
            return;
        };
        let Some(served) = self.vms.get_mut(&connection.name.vm) else {
            return;
        };
        if std::mem::replace(&mut connection.is_waiting, true) {
            return;
        }
        if served.turn.waiting.is_empty() {
            self.queue.push_back(connection.name.vm);
        }
        served.turn.waiting.push_back(key);
    }

    /// Goes on with who waits, a VM's connection about, as far as they may send and there is room.
    /// Whether that was all for this turn of the engine's.
    pub(super) fn take_turns(&mut self, cx: &mut Context<'_>) -> bool {
        let mut spent = VecDeque::new();
        let mut is_all = true;
        while let Some(vm) = self.queue.pop_front() {
            let Some(served) = self.vms.get_mut(&vm) else {
                continue;
            };
            if served.turn.left(self.turn) == 0 {
                spent.push_back(vm);
                continue;
            }
            if cx.out.is_half_full() {
                self.queue.push_front(vm);
                is_all = false;
                break;
            }
            let Some(key) = served.turn.waiting.pop_front() else {
                continue;
            };
            if !served.turn.waiting.is_empty() {
                self.queue.push_back(vm);
            }
            if let Some(Entry::Connection(connection)) = self.entries.get_mut(&key) {
                connection.is_waiting = false;
                self.drive(key, Event::Turn, cx);
            }
        }
        self.queue.append(&mut spent);
        is_all
    }
}
