//! Limit on the packets that relayed connections send in one turn of the engine.
//!
//! # Theory of operation
//! While packets of relayed connections are written, all other work waits, including first packets
//! of other VMs. A guest that opens the windows of hundreds of connections together would cause all
//! their buffers to be sent at once. So in each turn of the engine a VM's connections send at most
//! [`PACKETS_PER_TURN`]. A connection with more to send joins its VM's queue, behind those that
//! wait already, and continues in this turn of the engine or the next. So a VM with many
//! connections does not delay the others, and a busy connection does not delay those of the same
//! VM.
//!
//! One that has more for the guest than the port of the engine has room for waits in the same way: in
//! user mode, where a guest that reads slowly fills its link. Its next turn is when the port tells that
//! there is room.
//!
//! There are two exceptions. For each packet of the guest its connection may send one, so that its
//! acknowledgements are not held up by others. And an answer to a SYN, and a reset, are always sent, of
//! which there is one per connection.
use std::collections::VecDeque;

use slipgate_abi::VmRow;

use super::{Entry, Event, Relay};
use crate::poll::Context;

/// Most packets that a VM's connections send in one turn of the engine, in addition to one for each
/// packet of the guest.
pub(super) const PACKETS_PER_TURN: usize = 256;

/// State of a VM in the engine's turn.
#[derive(Debug, Default)]
pub(super) struct Turn {
    /// Turn of the engine to which `sent` refers.
    number: u64,
    sent: usize,
    /// Connections that have more to send; some may have ended meanwhile. While there are any, the
    /// VM is in the relay's queue.
    waiting: VecDeque<u32>,
}

impl Turn {
    pub(super) fn left(&self, number: u64) -> usize {
        match self.number == number {
            true => PACKETS_PER_TURN.saturating_sub(self.sent),
            false => PACKETS_PER_TURN,
        }
    }

    /// Number of packets that a connection may send for an event in this turn.
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
    /// Begins a turn of the engine, in which each VM's connections may send their full number
    /// again.
    pub fn begin_turn(&mut self) {
        self.turn += 1;
    }

    /// Adds a connection that has more to send than it may to the queue.
    pub(super) fn join(&mut self, key: u32) {
        let (vm, is_waiting) = match self.entries.get_mut(&key) {
            Some(Entry::Connection(it)) => (it.name.vm, &mut it.is_waiting),
            Some(Entry::Spliced(it)) => (it.flow.vm, &mut it.is_waiting),
            _ => return,
        };
        let Some(served) = self.vms.get_mut(&vm) else {
            return;
        };
        if std::mem::replace(is_waiting, true) {
            return;
        }
        if served.turn.waiting.is_empty() {
            self.queue.push_back(vm);
        }
        served.turn.waiting.push_back(key);
    }

    /// Continues waiting connections, one VM after another, while they may send and there is room.
    /// Returns whether all were served in this turn of the engine.
    pub(super) fn take_turns(
        &mut self,
        is_paused: &dyn Fn(VmRow) -> bool,
        cx: &mut Context<'_>,
    ) -> bool {
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
            if cx.out.is_half_full() || cx.out.is_port_full() {
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
            match self.entries.get_mut(&key) {
                Some(Entry::Connection(connection)) => {
                    connection.is_waiting = false;
                    self.drive(key, Event::Turn, cx);
                }
                Some(Entry::Spliced(spliced)) => {
                    spliced.is_waiting = false;
                    match is_paused(served.net.row) {
                        true => self.pause_spliced(key, cx.now_ns),
                        false => self.drive_spliced(key, cx),
                    }
                }
                _ => {}
            }
        }
        self.queue.append(&mut spent);
        is_all
    }
}
