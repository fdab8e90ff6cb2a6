//! Queue of messages to a process.
//!
//! The broker never blocks on a send to another process, because that may itself be blocked on a
//! send to the broker. Messages for which the channel has no room are kept in order, up to a bound.
//! Messages for a process that has ended are dropped: the next one gets the complete state at its
//! start.
use std::{collections::VecDeque, os::fd::OwnedFd};

use slipgate_ipc::{
    channel::{Channel, ChannelError, Packet},
    descriptors::Outbound,
};

/// Number of waiting messages from which on clients' requests wait.
const MANY_QUEUED: usize = 64;

/// Messages with their descriptors, in order.
#[derive(Debug)]
pub(crate) struct Outgoing {
    waiting: VecDeque<Packet>,
    /// How many may wait.
    most: usize,
    /// Whether more messages were queued than may wait.
    overflowed: bool,
}

impl Outgoing {
    /// An empty queue, in which `most` messages may wait.
    pub(crate) fn new(most: usize) -> Self {
        Self {
            waiting: VecDeque::new(),
            most,
            overflowed: false,
        }
    }

    /// Queues a message behind those that wait, and sends as many as there is room for.
    pub(crate) fn send(
        &mut self,
        channel: &Channel,
        message: impl Outbound<Descriptor = OwnedFd>,
    ) -> Result<(), ChannelError> {
        if self.waiting.len() >= self.most {
            self.overflowed = true;
            return Ok(());
        }
        self.waiting.push_back(Packet::new(message)?);
        self.flush(channel)
    }

    /// Sends waiting messages while there is room.
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

    /// Whether no message waits to be sent.
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Reason why the process no longer gets every message, if so.
    pub(crate) fn failure(&self) -> Option<String> {
        let most = self.most;
        self.overflowed
            .then(|| format!("hangs: it has not taken {most} messages"))
    }

    /// Whether the process is behind, so that clients' requests should wait.
    pub(crate) fn is_behind(&self) -> bool {
        self.waiting.len() >= MANY_QUEUED
    }
}

#[cfg(test)]
#[path = "outgoing_test.rs"]
mod tests;
