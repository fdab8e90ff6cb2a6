//! Input of the guest's console: keys that the user types.
//!
//! Input goes through the broker, so that a terminal's descriptor stays here and the escape works
//! whatever the guest does. Output does not: the VMM writes it to stdout itself, and the broker
//! never sees a byte of it.
use std::{
    io::{ErrorKind, Write as _},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use anyhow::Context as _;
use nix::{
    fcntl::{FcntlArg, OFlag, fcntl},
    poll::PollFlags,
};

use super::terminal::{self, Raw};

/// Most that waits for the guest to read it, bytes.
const WAITING: usize = 4_096;
/// ^A, which begins the escape.
const PREFIX: u8 = 0x01;

/// The way from stdin to the guest's console.
#[derive(Debug)]
pub(crate) struct Console {
    way: Option<ConsoleInput>,
}

#[derive(Debug)]
struct ConsoleInput {
    to: std::io::PipeWriter,
    waiting: Vec<u8>,
    /// When stdin is a terminal.
    keys: Option<Keys>,
}

#[derive(Debug)]
struct Keys {
    escape: Escape,
    _raw: Raw,
}

/// Result of a round of console input.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Typed {
    /// Ordinary text, or nothing.
    Text,
    /// The escape, or the terminal is gone: the user wants out.
    Quit,
}

impl Console {
    /// Opens the way, and returns the guest's end of it. `listens`: whether the guest reads its
    /// console at all; else stdin is left alone.
    pub(crate) fn open(listens: bool) -> anyhow::Result<(Self, OwnedFd)> {
        let what = "making a pipe for the console";
        let (from, to) = std::io::pipe().context(what)?;
        let in_the_background =
            nix::unistd::isatty(std::io::stdin()).unwrap_or(false) && !terminal::is_ours();
        if !listens || in_the_background {
            return Ok((Self { way: None }, from.into()));
        }
        fcntl(&to, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).context(what)?;
        let way = ConsoleInput {
            to,
            waiting: Vec::new(),
            keys: None,
        };
        Ok((Self { way: Some(way) }, from.into()))
    }

    /// Makes the terminal the guest's, if stdin is one.
    pub(crate) fn begin(&mut self) {
        let Some(way) = self.way.as_mut().filter(|_| terminal::is_ours()) else {
            return;
        };
        match Raw::enter() {
            Ok(raw) => {
                tracing::info!("the terminal is the guest's console: Ctrl-A x quits");
                way.keys = Some(Keys {
                    escape: Escape::default(),
                    _raw: raw,
                });
            }
            Err(e) => tracing::warn!("the terminal can't be made raw ({e}): lines, not keys"),
        }
    }

    /// Descriptor and events to poll for.
    pub(crate) fn wants(&self) -> Option<(BorrowedFd<'_>, PollFlags)> {
        let way = self.way.as_ref()?;
        if way.waiting.is_empty() {
            // SAFETY: stdin stays open as long as the process.
            let stdin = unsafe { BorrowedFd::borrow_raw(libc::STDIN_FILENO) };
            Some((stdin, PollFlags::POLLIN))
        } else {
            Some((way.to.as_fd(), PollFlags::POLLOUT))
        }
    }

    /// Handles the event that was polled for.
    pub(crate) fn turn(&mut self) -> Typed {
        let Some(way) = &mut self.way else {
            return Typed::Text;
        };
        let (typed, open) = if way.waiting.is_empty() {
            way.read()
        } else {
            (Typed::Text, true)
        };
        if !open || !way.write() {
            // A terminal is put back with it.
            self.way = None;
        }
        typed
    }
}

impl ConsoleInput {
    /// Reads input; returns its kind and whether there may be more.
    fn read(&mut self) -> (Typed, bool) {
        let mut bytes = [0; WAITING];
        match nix::unistd::read(std::io::stdin(), &mut bytes) {
            Err(nix::Error::EINTR | nix::Error::EAGAIN) => (Typed::Text, true),
            Ok(0) | Err(_) => match self.keys {
                // Hung up.
                Some(_) => (Typed::Quit, false),
                None => (Typed::Text, false),
            },
            Ok(length) => match &mut self.keys {
                Some(keys) => (keys.escape.read(&bytes[..length], &mut self.waiting), true),
                None => {
                    self.waiting.extend_from_slice(&bytes[..length]);
                    (Typed::Text, true)
                }
            },
        }
    }

    /// Writes waiting input; returns whether the guest's end is still open.
    fn write(&mut self) -> bool {
        match self.to.write(&self.waiting) {
            Ok(length) => {
                self.waiting.drain(..length);
                true
            }
            Err(e) => matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
        }
    }
}

/// Finds the escape among keys, as QEMU has it: ^A x, and ^A ^A for a ^A.
#[derive(Debug, Default)]
struct Escape {
    /// The last key was ^A.
    begun: bool,
}

impl Escape {
    fn read(&mut self, keys: &[u8], text: &mut Vec<u8>) -> Typed {
        for &key in keys {
            match (std::mem::take(&mut self.begun), key) {
                (true, b'x' | b'X') => return Typed::Quit,
                (false, PREFIX) => self.begun = true,
                (true, PREFIX) | (false, _) => text.push(key),
                (true, _) => text.extend([PREFIX, key]),
            }
        }
        Typed::Text
    }
}

#[cfg(test)]
#[path = "console_test.rs"]
mod tests;
