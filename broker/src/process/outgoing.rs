//! What is on its way to the engine.
//!
//! The engine is never waited for: it may be waiting for the broker to hear what it says. What its
//! channel has no room for is kept until it has, in order, up to a bound. What one that is gone was
//! to be told is nothing any more: the next one is told how everything stands when it is started.
use std::collections::VecDeque;

use slipgate_ipc::{
    channel::{Channel, ChannelError, Packet},
    engine::ToEngine,
};

/// Messages that may wait for room in its channel: an engine that takes none of so many hangs.
const MOST_QUEUED: usize = 1_024;
/// When as many wait, nothing is asked for clients.
const MANY_QUEUED: usize = 64;

/// Messages with their descriptors, in order.
#[derive(Debug, Default)]
pub(crate) struct Outgoing {
    waiting: VecDeque<Packet>,
    /// More was to be said than may wait.
    overflowed: bool,
}

impl Outgoing {
    /// Sends a message behind those that wait, now or when there is room.
    pub(crate) fn send(
        &mut self,
        channel: &Channel,
        message: ToEngine,
    ) -> Result<(), ChannelError> {
        if self.waiting.len() >= MOST_QUEUED {
            self.overflowed = true;
            return Ok(());
        }
        self.waiting.push_back(Packet::new(message)?);
        self.flush(channel)
    }

    /// Sends what waits, as far as there is room.
    pub(crate) fn flush(&mut self, channel: &Channel) -> Result<(), ChannelError> {
        while let Some(packet) = self.waiting.front() {
            match channel.try_send_packet(packet) {
                Ok(true) => drop(self.waiting.pop_front()),
                Ok(false) => break,
                Err(error) if error.is_peer_gone() => self.waiting.clear(),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Whether nothing waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Why the engine is not told everything any more.
    pub(crate) fn failure(&self) -> Option<String> {
        self.overflowed
            .then(|| format!("hangs: it has not taken {MOST_QUEUED} messages"))
    }

    /// Whether the engine is better asked nothing more for now.
    pub(crate) fn is_behind(&self) -> bool {
        self.waiting.len() >= MANY_QUEUED
    }
}

#[cfg(test)]
#[path = "outgoing_test.rs"]
mod tests;
