//! Queue of messages to a process.
//!
//! The broker never blocks on a send to another process, because that may itself be blocked on a
//! send to the broker. Messages for which the channel has no room are kept in order, up to a bound.
//! Messages for a process that has ended are dropped: the next one gets the complete state at its
//! start.
use std::{
    collections::VecDeque,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
};

use slipgate_ipc::{
    channel::{Channel, ChannelError, Packet},
    descriptors::Outbound,
};

/// Number of waiting messages from which on clients' requests wait.
const MANY_QUEUED: usize = 64;
/// Total size of waiting messages from which on clients' requests wait, bytes.
const LARGE: usize = 4 << 20;
/// Largest total size of waiting messages, bytes.
const MOST_BYTES: usize = 64 << 20;

/// Messages with their descriptors, in order.
#[derive(Debug)]
pub(crate) struct Outgoing {
    waiting: VecDeque<Packet>,
    /// Total size of the waiting messages.
    bytes: usize,
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
            bytes: 0,
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
        // A single message may be as large as it is: the list of all VMs, or a policy.
        if self.waiting.len() >= self.most || self.bytes >= MOST_BYTES {
            self.overflowed = true;
            return Ok(());
        }
        let packet = Packet::new(message)?;
        self.bytes += packet.size();
        self.waiting.push_back(packet);
        self.flush(channel)
    }

    /// Sends waiting messages while there is room.
    pub(crate) fn flush(&mut self, channel: &Channel) -> Result<(), ChannelError> {
        while let Some(packet) = self.waiting.front() {
            match channel.try_send_packet(packet) {
                Ok(true) => {
                    self.bytes -= packet.size();
                    self.waiting.pop_front();
                }
                Ok(false) => break,
                Err(error) if error.is_peer_gone() => {
                    self.bytes = 0;
                    self.waiting.clear();
                }
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
        let waiting = self.waiting.len();
        self.overflowed
            .then(|| format!("hangs: it has not taken {waiting} messages"))
    }

    /// Whether the process is behind, so that clients' requests should wait.
    pub(crate) fn is_behind(&self) -> bool {
        self.waiting.len() >= MANY_QUEUED || self.bytes >= LARGE
    }
}

/// Memory of the messages that the peer has not read yet, bytes, with the kernel's overhead; the
/// content of a large message, which is in a memfd, does not count.
pub(super) fn unread_bytes(channel: &Channel) -> usize {
    let mut bytes: libc::c_int = 0;
    let fd = channel.as_fd().as_raw_fd();
    // SAFETY: SIOCOUTQ (unix(7)) writes one int, which is alive during the call.
    let done = unsafe { libc::ioctl(fd, libc::TIOCOUTQ, &raw mut bytes) };
    match done {
        0 => usize::try_from(bytes).unwrap_or(0),
        _ => 0,
    }
}

#[cfg(test)]
#[path = "outgoing_test.rs"]
mod tests;
