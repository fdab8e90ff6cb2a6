//! Sockets in the guest's network namespace, for connections of forwards that need no TAP.
//!
//! # Theory of operation
//! A socket stays in the network namespace that it was made in, whoever uses it. The guest of
//! `slipgate exec` is a namespace of this host, so a connection to it can be one of the host's kernel,
//! from end to end. The engine may not enter that namespace: a process that was left there makes the
//! sockets, when it is asked by a byte, and passes them. That process does nothing else, and looks at
//! nothing but that byte, the family.
//!
//! Each socket comes in a message of its own. While this process has no descriptor for it, the kernel
//! closes it, and the message without it still counts as an answer; of a message with several sockets
//! some would get descriptors that nobody is told of.
//!
//! Some sockets are kept ready, so that no client waits for that process: those of IPv4 from the start, for
//! which the engine waits a while, and those of IPv6 from the first client by IPv6 on. If there is none, because
//! the process is behind or has ended, or because nearly all descriptors are used, the connection goes by
//! the TAP.
use std::{
    io::IoSlice,
    net::TcpStream,
    os::fd::{AsFd as _, AsRawFd, OwnedFd},
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{MsgFlags, sendmsg},
};
use slipgate_model::{NAMESPACE_SOCKETS, rights};

use crate::{host_sockets::KEPT, inet::keep_urgent_in_place, packet::Version};

/// Number of sockets ready at which more are asked for.
const FEW: usize = 32;

/// Sockets of one family.
#[derive(Debug, Default)]
struct Ready {
    sockets: Vec<TcpStream>,
    /// Number of answers that are still to come.
    awaited: usize,
}

/// Error: the first sockets have not come.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NoneReady {
    /// It is stopped, or has had no CPU.
    #[error("has not made the first sockets within {} ms", .0.as_millis())]
    Late(Duration),
    /// It was killed, or could not begin.
    #[error("has ended")]
    Ended,
}

/// TCP sockets in the guest's namespace that are not connected yet.
#[derive(Debug)]
pub struct NamespaceSockets {
    /// A socket of sequenced packets, whose other end the process in the namespace has.
    channel: OwnedFd,
    /// Descriptors that this process may have.
    most_files: u64,
    v4: Ready,
    v6: Ready,
}

impl NamespaceSockets {
    /// Asks for the first sockets of IPv4. `channel`: to the process in the namespace. `most_files`:
    /// descriptors that this process may have (`RLIMIT_NOFILE`).
    pub fn new(channel: OwnedFd, most_files: u64) -> Self {
        let mut sockets = Self {
            channel,
            most_files,
            v4: Ready::default(),
            v6: Ready::default(),
        };
        sockets.ask(Version::V4);
        sockets
    }

    /// Waits until the first sockets have come, so that the first clients do not go by the TAP because that
    /// process has had no CPU yet.
    ///
    /// # Errors
    /// It has ended, or has not made them within this time. Sockets that come later are used as well.
    pub fn await_first(&mut self, within: Duration) -> Result<(), NoneReady> {
        let until = Instant::now() + within;
        // It could not be asked.
        if self.v4.awaited == 0 && self.v4.sockets.is_empty() {
            return Err(NoneReady::Ended);
        }
        while self.v4.awaited > 0 {
            let left = until.saturating_duration_since(Instant::now());
            let left = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            match poll(
                &mut [PollFd::new(self.channel.as_fd(), PollFlags::POLLIN)],
                left,
            ) {
                Err(Errno::EINTR) => continue,
                Ok(0) | Err(_) => return Err(NoneReady::Late(within)),
                Ok(_) => {}
            }
            let before = self.v4.awaited;
            self.receive();
            // There was no message, but an end.
            if self.v4.awaited == before {
                return Err(NoneReady::Ended);
            }
        }
        Ok(())
    }

    /// Returns a socket, non-blocking and without delay (`TCP_NODELAY`); `None` if none is ready.
    pub(super) fn take(&mut self, version: Version) -> Option<TcpStream> {
        if self.of(version).sockets.len() <= FEW {
            self.receive();
            if self.of(version).sockets.len() <= FEW {
                self.ask(version);
            }
        }
        self.of(version).sockets.pop()
    }

    fn of(&mut self, version: Version) -> &mut Ready {
        match version {
            Version::V4 => &mut self.v4,
            Version::V6 => &mut self.v6,
        }
    }

    fn ask(&mut self, version: Version) {
        if self.of(version).awaited > 0 {
            return;
        }
        let byte = [word_of(version)];
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        let channel = self.channel.as_raw_fd();
        let asked = sendmsg::<()>(channel, &[IoSlice::new(&byte)], &[], flags, None);
        // If it has ended, nothing comes any more.
        if asked.is_ok() {
            self.of(version).awaited = NAMESPACE_SOCKETS;
        }
    }

    /// Takes what that process has sent meanwhile: no more than it was asked for.
    fn receive(&mut self) {
        let most = self.most_files.saturating_sub(KEPT);
        while self.v4.awaited + self.v6.awaited > 0 {
            let mut word = [0];
            let (channel, flags) = (self.channel.as_fd(), MsgFlags::MSG_DONTWAIT);
            let Ok(received) = rights::receive(channel, &mut word, 1, flags) else {
                return;
            };
            // The process has ended.
            if received.len == 0 {
                return;
            }
            // An answer that was cut has more than the one that it may have, or there was no descriptor for
            // it: none of it is used.
            let fds = received.fds.into_iter().filter(|_| !received.was_cut);
            // The last descriptors are for others. And no call may wait, whoever made the socket.
            let mut sockets: Vec<_> = fds
                .map(TcpStream::from)
                .inspect(keep_urgent_in_place)
                .filter(|socket| {
                    (socket.as_raw_fd() as u64) < most && socket.set_nonblocking(true).is_ok()
                })
                .collect();
            let ready = match word {
                [4] => &mut self.v4,
                [6] => &mut self.v6,
                _ => continue,
            };
            if ready.awaited > 0 {
                ready.awaited -= 1;
                ready.sockets.append(&mut sockets);
            }
        }
    }
}

/// The byte by which sockets of a family are asked for, and answered.
const fn word_of(version: Version) -> u8 {
    match version {
        Version::V4 => 4,
        Version::V6 => 6,
    }
}
