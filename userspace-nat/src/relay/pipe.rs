//! Bytes from one socket to another by splice(2): they stay in the kernel, which passes their pages on.
//!
//! # Theory of operation
//! splice(2) needs a pipe between two sockets. A direction has one only while it holds bytes that the
//! other socket had no room for: otherwise the pipe that carries all is empty between two calls, and is
//! used for the next direction. So an idle connection has no pipe, and one whose receiver does not read
//! holds a pipe's content and reads no more.
//!
//! splice(2) does not pass urgent data, which is passed on by a read of its own, as data in its place
//! ([`crate::tcp`]).
use std::{
    io,
    os::fd::{AsFd, AsRawFd as _, OwnedFd},
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, OFlag, SpliceFFlags, fcntl, splice},
    sys::socket::{MsgFlags, recv},
    unistd::{pipe2, write},
};

/// Capacity that is asked for, bytes. A user's pipes together have a limit (`pipe-user-pages-soft`, 64 MiB
/// where pages have 4 KiB); beyond it all further pipes of that user are small ones.
const CAPACITY: usize = 256 << 10;
/// Empty pipes that are kept.
const SPARE: usize = 8;

#[derive(Debug)]
struct Pipe {
    into: OwnedFd,
    out: OwnedFd,
}

/// Empty pipes.
#[derive(Debug, Default)]
pub(super) struct Pipes {
    spare: Vec<Pipe>,
    /// For tests: the host has none.
    #[cfg(test)]
    pub(super) are_none: bool,
}

impl Pipes {
    fn take(&mut self) -> io::Result<Pipe> {
        #[cfg(test)]
        if self.are_none {
            return Err(Errno::EMFILE.into());
        }
        if let Some(pipe) = self.spare.pop() {
            return Ok(pipe);
        }
        let (out, into) = pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)?;
        // A smaller one serves as well.
        let _ = fcntl(&into, FcntlArg::F_SETPIPE_SZ(CAPACITY as i32));
        Ok(Pipe { into, out })
    }

    fn give_back(&mut self, pipe: Pipe) {
        if self.spare.len() < SPARE {
            self.spare.push(pipe);
        }
    }
}

/// What became of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Moved {
    Bytes(u64),
    /// No pipe was to be had: nothing was read, and there may be as much to do as before.
    NoPipe,
}

/// One direction between two sockets.
#[derive(Debug)]
pub(super) struct Direction {
    /// Whether its source may have something, and its sink room.
    pub(super) is_readable: bool,
    pub(super) is_writable: bool,
    /// Whether the source has ended.
    has_ended: bool,
    /// A pipe with so many bytes for which the sink had no room.
    held: Option<(Pipe, usize)>,
}

impl Direction {
    /// Between sockets that are connected. `is_readable`: whether the source may have something by now.
    pub(super) const fn new(is_readable: bool) -> Self {
        Self {
            is_readable,
            is_writable: true,
            has_ended: false,
            held: None,
        }
    }

    /// Whether all has been passed on, up to the source's end.
    pub(super) const fn is_over(&self) -> bool {
        self.has_ended && self.held.is_none()
    }

    /// Whether there may be something to do.
    pub(super) const fn has_more(&self) -> bool {
        match self.held {
            Some(_) => self.is_writable,
            None => self.is_readable && self.is_writable && !self.has_ended,
        }
    }

    /// Passes on what one call of the kernel moves.
    ///
    /// # Errors
    /// One of the sockets has failed.
    pub(super) fn carry(
        &mut self,
        from: impl AsFd,
        to: impl AsFd,
        pipes: &mut Pipes,
    ) -> io::Result<Moved> {
        let (pipe, held) = match self.held.take() {
            Some(held) => held,
            None => {
                let Ok(pipe) = pipes.take() else {
                    return Ok(Moved::NoPipe);
                };
                let read = match move_bytes(&from, &pipe.into, CAPACITY) {
                    // In front of the mark there is nothing, and the end, if the source has ended.
                    Ok(None | Some(0)) => pass_mark(from, &pipe.into),
                    read => read,
                };
                if let Ok(Some(len @ 1..)) = read {
                    (pipe, len)
                } else {
                    pipes.give_back(pipe);
                    self.has_ended = read? == Some(0);
                    self.is_readable = self.has_ended;
                    return Ok(Moved::Bytes(0));
                }
            }
        };
        let mut left = held;
        while left > 0 {
            match move_bytes(&pipe.out, &to, left)? {
                Some(len) => left -= len,
                None => {
                    self.is_writable = false;
                    self.held = Some((pipe, left));
                    return Ok(Moved::Bytes((held - left) as u64));
                }
            }
        }
        pipes.give_back(pipe);
        Ok(Moved::Bytes(held as u64))
    }
}

/// Moves one byte by recv(2). In front of urgent data splice(2) finds nothing, however much there is, or
/// the end, if the source's FIN has come; recv passes the mark, and the next splice goes on behind it.
/// `None` if there is nothing indeed, and 0 at the end.
fn pass_mark(from: impl AsFd, into: &OwnedFd) -> io::Result<Option<usize>> {
    let mut byte = [0];
    loop {
        match recv(from.as_fd().as_raw_fd(), &mut byte, MsgFlags::MSG_DONTWAIT) {
            Ok(0) => return Ok(Some(0)),
            // The pipe is empty.
            Ok(_) => return Ok(Some(write(into, &byte)?)),
            Err(Errno::EAGAIN) => return Ok(None),
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Returns the number of bytes; `None` if the source has nothing now, or the sink no room.
fn move_bytes(from: impl AsFd, to: impl AsFd, most: usize) -> io::Result<Option<usize>> {
    let flags = SpliceFFlags::SPLICE_F_MOVE | SpliceFFlags::SPLICE_F_NONBLOCK;
    loop {
        match splice(&from, None, &to, None, most, flags) {
            Ok(len) => return Ok(Some(len)),
            Err(Errno::EAGAIN) => return Ok(None),
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
