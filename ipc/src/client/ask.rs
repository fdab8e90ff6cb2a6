//! The asking side of the control socket.
use std::{
    io::{self, BufRead as _, BufReader, IoSlice, Write as _},
    mem,
    net::Shutdown,
    os::{
        fd::{AsFd as _, AsRawFd as _, BorrowedFd, RawFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};

use super::{ClientAnswer, ClientRequest};
use crate::descriptors::Outbound as _;

/// Failure to get an answer from a broker.
#[derive(thiserror::Error, Debug)]
pub enum ClientError {
    /// The socket can't be reached, or no answer comes in time.
    #[error("asking the broker at {}", .path.display())]
    Io {
        /// Path of the control socket.
        path: PathBuf,
        /// Error that the kernel returned.
        #[source]
        source: io::Error,
    },
    /// The broker closed the connection without an answer.
    #[error("asking the broker at {}: it closed the connection without an answer", .path.display())]
    NoAnswer {
        /// Path of the control socket.
        path: PathBuf,
    },
    /// The answer can't be decoded: it is of another version.
    #[error("asking the broker at {}: it speaks another version", .path.display())]
    Foreign {
        /// Path of the control socket.
        path: PathBuf,
        /// Error of the decoder.
        #[source]
        source: serde_json::Error,
    },
}

impl ClientError {
    /// Whether no process listens at the socket, as when a killed broker has left it behind.
    pub fn is_nobodys(&self) -> bool {
        use io::ErrorKind::{ConnectionRefused, NotFound};
        matches!(self, Self::Io { source, .. }
            if matches!(source.kind(), ConnectionRefused | NotFound))
    }
}

/// Sends a request to the broker behind `path`, and waits for its answer.
///
/// # Errors
/// No process listens there, it does not answer in time, or the answer is not valid.
pub fn ask(
    path: &Path,
    request: ClientRequest<BorrowedFd<'_>>,
) -> Result<ClientAnswer, ClientError> {
    let within = request.within();
    ask_within(path, request, within)
}

/// As [`ask`], for an answer that may take so long, above zero.
///
/// # Errors
/// As of [`ask`].
pub fn ask_within(
    path: &Path,
    request: ClientRequest<BorrowedFd<'_>>,
    within: Duration,
) -> Result<ClientAnswer, ClientError> {
    let stream = connect(path)?;
    ask_by(stream, path, request, within)
}

fn connect(path: &Path) -> Result<UnixStream, ClientError> {
    UnixStream::connect(path).map_err(|source| ClientError::Io {
        path: path.to_owned(),
        source,
    })
}

fn ask_by(
    mut stream: UnixStream,
    path: &Path,
    request: ClientRequest<BorrowedFd<'_>>,
    within: Duration,
) -> Result<ClientAnswer, ClientError> {
    let failed = |source| ClientError::Io {
        path: path.to_owned(),
        source,
    };
    stream.set_read_timeout(Some(within)).map_err(failed)?;
    let mut fds = Vec::new();
    let wire = request.take_out(&mut fds);
    let mut line = serde_json::to_vec(&wire).map_err(|e| failed(e.into()))?;
    line.push(b'\n');
    let raw: Vec<RawFd> = fds.iter().map(|fd| fd.as_raw_fd()).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let rights = if raw.is_empty() { &[][..] } else { &rights };
    let parts = [IoSlice::new(&line)];
    let socket = stream.as_fd().as_raw_fd();
    // A request is a few hundred bytes; a stream may take them in parts all the same.
    let sent = sendmsg::<()>(socket, &parts, rights, MsgFlags::MSG_NOSIGNAL, None)
        .map_err(|e| failed(e.into()))?;
    stream.write_all(&line[sent..]).map_err(failed)?;
    let mut answer = String::new();
    BufReader::new(stream)
        .read_line(&mut answer)
        .map_err(failed)?;
    let path = path.to_owned();
    match answer.as_str() {
        "" => Err(ClientError::NoAnswer { path }),
        answer => {
            serde_json::from_str(answer).map_err(|source| ClientError::Foreign { path, source })
        }
    }
}

/// Gives up a request from another thread than the one that waits for its answer. Who was asked finds
/// the connection closed.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<Mutex<Connection>>);

#[derive(Debug, Default)]
enum Connection {
    #[default]
    None,
    Open(UnixStream),
    GivenUp,
}

impl Interrupt {
    /// As [`ask`], until this is interrupted. A request after that is not sent.
    ///
    /// # Errors
    /// As of [`ask`]; [`ClientError::NoAnswer`] where it is interrupted.
    pub fn ask(
        &self,
        path: &Path,
        request: ClientRequest<BorrowedFd<'_>>,
    ) -> Result<ClientAnswer, ClientError> {
        let within = request.within();
        let stream = connect(path)?;
        let copy = stream.try_clone().map_err(|source| ClientError::Io {
            path: path.to_owned(),
            source,
        })?;
        {
            let mut connection = self.connection();
            if matches!(*connection, Connection::GivenUp) {
                let path = path.to_owned();
                return Err(ClientError::NoAnswer { path });
            }
            *connection = Connection::Open(copy);
        }
        let answer = ask_by(stream, path, request, within);
        let mut connection = self.connection();
        if let Connection::Open(_) = *connection {
            *connection = Connection::None;
        }
        answer
    }

    /// Gives up the request that is under way, and those to come.
    pub fn interrupt(&self) {
        let before = mem::replace(&mut *self.connection(), Connection::GivenUp);
        if let Connection::Open(stream) = before {
            // It may be closed already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Whether it was interrupted.
    pub fn is_interrupted(&self) -> bool {
        matches!(*self.connection(), Connection::GivenUp)
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
#[path = "ask_test.rs"]
mod tests;
