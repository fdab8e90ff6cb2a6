//! The asking side of the control socket.
use std::{
    io::{self, BufRead as _, BufReader, IoSlice, Write as _},
    os::{
        fd::{AsFd as _, AsRawFd as _, BorrowedFd, RawFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
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
    let failed = |source| ClientError::Io {
        path: path.to_owned(),
        source,
    };
    let mut stream = UnixStream::connect(path).map_err(failed)?;
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
