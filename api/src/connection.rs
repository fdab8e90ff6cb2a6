//! Connections of clients, which may pass a descriptor along with a request.
//!
//! It comes with the bytes of the request, by `SCM_RIGHTS`, and is taken by that request once its
//! body has been read. There is at most one at a time, so a client can't fill this process's table:
//! the kernel gives it no further one, and a request that came with several is refused. On a socket
//! for reading the kernel gives this process none at all.
use std::{
    cell::RefCell,
    io::{self, ErrorKind},
    os::fd::{AsFd as _, OwnedFd},
    pin::Pin,
    rc::Rc,
    task::{Context, Poll, ready},
};

use hyper::{
    StatusCode,
    rt::{Read, ReadBufCursor, Write},
};
use nix::sys::socket::MsgFlags;
use slipgate_ipc::rights::{Passed, receive_with_one};
use tokio::{
    io::{AsyncWrite, Interest},
    net::UnixStream,
};

use crate::problem::Problem;

/// Largest number of bytes that are read at a time.
const MOST_AT_ONCE: usize = 8 << 10;

/// Descriptors that have come on a connection since its last request.
#[derive(Debug, Default)]
pub(crate) struct Arrived(RefCell<Passed>);

impl Arrived {
    fn add(&self, new: Passed) {
        let mut held = self.0.borrow_mut();
        *held = match (std::mem::take(&mut *held), new) {
            (Passed::Nothing, new) => new,
            (held, Passed::Nothing) => held,
            _ => Passed::Refused,
        };
    }

    /// Takes the descriptor out.
    ///
    /// # Errors
    /// There were several, which are closed.
    pub(crate) fn take(&self) -> Result<Option<OwnedFd>, Problem> {
        match self.0.take() {
            Passed::Nothing => Ok(None),
            Passed::One(fd) => Ok(Some(fd)),
            Passed::Refused => Err(Problem::new(
                StatusCode::BAD_REQUEST,
                "the request came with more than one descriptor: pass that of the VM's TAP alone",
            )),
        }
    }
}

/// One client's connection, served until it closes or breaks a limit.
pub(crate) struct Connection {
    stream: UnixStream,
    /// Where descriptors are put; `None`: none are taken.
    arrived: Option<Rc<Arrived>>,
}

impl Connection {
    pub(crate) fn new(stream: UnixStream, arrived: Option<Rc<Arrived>>) -> Self {
        Self { stream, arrived }
    }

    fn read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        let Some(arrived) = &self.arrived else {
            return self.stream.try_read(bytes);
        };
        let received = self.stream.try_io(Interest::READABLE, || {
            receive_with_one(self.stream.as_fd(), bytes, MsgFlags::MSG_DONTWAIT)
        });
        let (length, passed) = received?;
        arrived.add(passed);
        Ok(length)
    }
}

impl Read for Connection {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        mut buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let mut bytes = [0; MOST_AT_ONCE];
        let room = buffer.remaining().min(MOST_AT_ONCE);
        loop {
            ready!(self.stream.poll_read_ready(cx))?;
            match self.read(&mut bytes[..room]) {
                Ok(length) => {
                    buffer.put_slice(&bytes[..length]);
                    return Poll::Ready(Ok(()));
                }
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(e) => return Poll::Ready(Err(e)),
            }
        }
    }
}

impl Write for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, parts)
    }
}
