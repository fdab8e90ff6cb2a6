//! One level-triggered epoll set for all descriptors on which the engine waits.
use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    rc::Rc,
};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use crate::port::Outbox;

/// Part of the engine that owns a descriptor.
#[repr(u8)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Subsystem {
    /// The engine port: its TAP; in user mode, the guest's link and the sockets of its flows.
    Port = 0,
    /// The channel to the broker.
    Control = 1,
    /// Sockets toward DNS resolvers.
    Dns = 2,
    /// Relay listeners and connections.
    Relay = 3,
    /// Sockets to which captures are written.
    Capture = 4,
    /// Sockets to which records are written.
    Listener = 5,
}

/// Identifier of a descriptor: its subsystem, and a number that the subsystem chose.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Token {
    /// The subsystem that owns the descriptor.
    pub subsystem: Subsystem,
    /// The subsystem's own number for the descriptor.
    pub key: u32,
}

impl Token {
    fn to_u64(self) -> u64 {
        u64::from(self.subsystem as u8) << 32 | u64::from(self.key)
    }

    fn from_u64(word: u64) -> Option<Self> {
        let subsystem = match word >> 32 {
            0 => Subsystem::Port,
            1 => Subsystem::Control,
            2 => Subsystem::Dns,
            3 => Subsystem::Relay,
            4 => Subsystem::Capture,
            5 => Subsystem::Listener,
            _ => return None,
        };
        Some(Self {
            subsystem,
            key: word as u32,
        })
    }
}

/// Events for which a descriptor is waited on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Interest {
    /// Nothing but errors and hang-ups.
    None,
    /// The descriptor is readable.
    Read,
    /// The descriptor is writable.
    Write,
    /// The descriptor is readable or writable.
    Both,
    /// It became readable or writable, or is at the time of the call: what is left in its queue is
    /// not reported again.
    Edges,
}

impl Interest {
    fn flags(self) -> EpollFlags {
        match self {
            Self::None => EpollFlags::empty(),
            Self::Read => EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP,
            Self::Write => EpollFlags::EPOLLOUT,
            Self::Both => EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP | EpollFlags::EPOLLOUT,
            Self::Edges => Self::Both.flags() | EpollFlags::EPOLLET,
        }
    }
}

/// Events of one ready descriptor. But for [`Interest::Edges`], epoll is level-triggered: unread data
/// is reported again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Readiness {
    /// Identifier of the descriptor.
    pub token: Token,
    /// Whether it is readable, or the peer has shut down its side.
    pub readable: bool,
    /// Whether the peer has shut down its side.
    pub hung_up: bool,
    /// Whether it is writable.
    pub writable: bool,
    /// Whether it is in error or hung up: a read or write returns the cause.
    pub failed: bool,
}

impl Readiness {
    /// Returns the events, in which an error stands for a hang-up too.
    pub fn flags(&self) -> EpollFlags {
        let mut flags = EpollFlags::empty();
        flags.set(EpollFlags::EPOLLIN, self.readable);
        flags.set(EpollFlags::EPOLLRDHUP, self.hung_up);
        flags.set(EpollFlags::EPOLLOUT, self.writable);
        flags.set(EpollFlags::EPOLLERR, self.failed);
        flags
    }
}

/// The epoll set of the engine.
#[derive(Debug)]
pub struct Poller {
    epoll: Rc<Epoll>,
    buffer: Vec<EpollEvent>,
}

impl Poller {
    /// Creates an empty set.
    ///
    /// # Errors
    /// When the kernel gives no epoll descriptor.
    pub fn new() -> io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        Ok(Self::over(Rc::new(epoll)))
    }

    /// A set in which a port has its descriptors, with its keys as the events' data: these are tokens of
    /// [`Subsystem::Port`].
    pub fn over(epoll: Rc<Epoll>) -> Self {
        Self {
            epoll,
            buffer: vec![EpollEvent::empty(); 256],
        }
    }

    /// Adds a descriptor. It leaves the set when it is closed, or by [`Poller::remove`].
    ///
    /// # Errors
    /// When the kernel refuses, for example because the descriptor is in the set already.
    pub fn add(&self, fd: impl AsFd, token: Token, interest: Interest) -> io::Result<()> {
        Ok(self
            .epoll
            .add(fd, EpollEvent::new(interest.flags(), token.to_u64()))?)
    }

    /// Changes the events for which a descriptor is waited on.
    ///
    /// # Errors
    /// When the descriptor is not in the set.
    pub fn modify(&self, fd: BorrowedFd<'_>, token: Token, interest: Interest) -> io::Result<()> {
        let mut event = EpollEvent::new(interest.flags(), token.to_u64());
        Ok(self.epoll.modify(fd, &mut event)?)
    }

    /// Removes a descriptor.
    ///
    /// # Errors
    /// When the descriptor is not in the set.
    pub fn remove(&self, fd: impl AsFd) -> io::Result<()> {
        Ok(self.epoll.delete(fd)?)
    }

    /// Waits until a descriptor is ready and appends what is ready to `ready`. The wait lasts at
    /// most `timeout_ns`, rounded up to a millisecond and bounded by a minute; 0 returns at once,
    /// `None` waits without limit. A signal ends the wait early.
    ///
    /// # Errors
    /// When the kernel refuses the wait.
    pub fn wait(&mut self, timeout_ns: Option<u64>, ready: &mut Vec<Readiness>) -> io::Result<()> {
        let timeout = match timeout_ns {
            None => EpollTimeout::NONE,
            Some(ns) => {
                let ms = ns.div_ceil(1_000_000).min(60_000);
                EpollTimeout::from(u16::try_from(ms).unwrap_or(u16::MAX))
            }
        };
        let n = match self.epoll.wait(&mut self.buffer, timeout) {
            Ok(n) => n,
            Err(nix::Error::EINTR) => 0,
            Err(e) => return Err(e.into()),
        };
        for event in &self.buffer[..n] {
            let Some(token) = Token::from_u64(event.data()) else {
                continue;
            };
            let flags = event.events();
            ready.push(Readiness {
                token,
                readable: flags.intersects(EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP),
                hung_up: flags.contains(EpollFlags::EPOLLRDHUP),
                writable: flags.contains(EpollFlags::EPOLLOUT),
                failed: flags.intersects(EpollFlags::EPOLLERR | EpollFlags::EPOLLHUP),
            });
        }
        Ok(())
    }
}

/// Time, outbox and epoll set, lent by the event loop to a service for one call.
#[derive(Debug)]
pub struct Context<'a> {
    /// Present time, `CLOCK_MONOTONIC` ns.
    pub now_ns: u64,
    /// Queue for the frames that the service sends.
    pub out: &'a mut Outbox,
    /// Epoll set for the descriptors of the service.
    pub poller: &'a Poller,
}

impl<'a> Context<'a> {
    /// Lends these for one call.
    pub fn new(now_ns: u64, out: &'a mut Outbox, poller: &'a Poller) -> Self {
        Self {
            now_ns,
            out,
            poller,
        }
    }
}
