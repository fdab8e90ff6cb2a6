//! What is on its way to the engine.
//!
//! The engine is never waited for: it may be waiting for the broker to hear what it says. What its
//! channel has no room for is kept until it has, in order, up to a bound.
use std::{
    collections::VecDeque,
    os::fd::{AsFd, OwnedFd},
};

use anyhow::bail;

use crate::channel::{Channel, ToEngine};

/// Messages that may wait for room in its channel: an engine that takes none of so many hangs.
const MOST_QUEUED: usize = 1_024;
/// When as many wait, nothing is asked for clients.
const MANY_QUEUED: usize = 64;

/// Messages with their descriptors, in order.
#[derive(Debug, Default)]
pub(super) struct Outgoing(VecDeque<(ToEngine, Option<OwnedFd>)>);

impl Outgoing {
    /// Sends a message behind those that wait, now or when there is room.
    pub(super) fn send(
        &mut self,
        channel: &Channel,
        message: ToEngine,
        fd: Option<OwnedFd>,
    ) -> anyhow::Result<()> {
        if self.0.len() >= MOST_QUEUED {
            bail!("the engine hangs: it has not taken {MOST_QUEUED} messages");
        }
        self.0.push_back((message, fd));
        self.flush(channel)
    }

    /// Sends what waits, as far as there is room.
    pub(super) fn flush(&mut self, channel: &Channel) -> anyhow::Result<()> {
        while let Some((message, fd)) = self.0.front() {
            let fds: Vec<_> = fd.iter().map(AsFd::as_fd).collect();
            if !channel.try_send_with(message, &fds)? {
                break;
            }
            self.0.pop_front();
        }
        Ok(())
    }

    /// Whether nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the engine is better asked nothing more for now.
    pub(super) fn is_behind(&self) -> bool {
        self.0.len() >= MANY_QUEUED
    }
}

#[cfg(test)]
#[path = "outgoing_test.rs"]
mod tests;
