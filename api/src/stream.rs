//! Stream sockets that came with a message of the broker's.
use std::{
    io::{self, ErrorKind},
    os::fd::{AsRawFd as _, OwnedFd},
};

use nix::sys::socket::{MsgFlags, recv, send};
use tokio::io::{Interest, unix::AsyncFd};

/// A connected stream socket. It is non-blocking already, which the process can't change.
#[derive(Debug)]
pub(crate) struct Stream(AsyncFd<OwnedFd>);

impl Stream {
    /// Waits for the socket from now on.
    ///
    /// # Errors
    /// The kernel does not watch that descriptor.
    pub(crate) fn new(socket: OwnedFd) -> io::Result<Self> {
        #[expect(
            deprecated,
            reason = "the descriptor is owned by what is registered, as long as that lives"
        )]
        let socket = AsyncFd::new(socket)?;
        Ok(Self(socket))
    }

    /// Receives what there is, at least one byte, or 0 at the end of the stream. Nothing is lost
    /// when the future is dropped.
    ///
    /// # Errors
    /// Those of recv(2).
    pub(crate) async fn recv(&self, bytes: &mut [u8]) -> io::Result<usize> {
        let flags = MsgFlags::MSG_DONTWAIT;
        self.when(Interest::READABLE, |fd| recv(fd, bytes, flags))
            .await
    }

    /// Sends as many of the bytes as there is room for, and returns their number.
    ///
    /// # Errors
    /// Those of send(2).
    pub(crate) async fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        self.when(Interest::WRITABLE, |fd| send(fd, bytes, flags))
            .await
    }

    async fn when(
        &self,
        interest: Interest,
        mut call: impl FnMut(i32) -> nix::Result<usize>,
    ) -> io::Result<usize> {
        loop {
            let done = self.0.async_io(interest, |socket| {
                call(socket.as_raw_fd()).map_err(io::Error::from)
            });
            match done.await {
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                done => return done,
            }
        }
    }
}
