//! Errors of the testbed: the operation that failed, its object, and the cause.

use std::{fmt::Display, io, process::ExitStatus};

/// Result type of the testbed.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Failure to set up a part of the testbed, or an unexpected observation of a client.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call failed.
    #[error("{tried}: {source}")]
    Io {
        /// Operation that failed, and its object.
        tried: String,
        /// Error that the kernel returned.
        #[source]
        source: io::Error,
    },
    /// A command ended with a failure.
    #[error("`{command}` ended with {status}: {output}")]
    Command {
        /// Command line that failed.
        command: String,
        /// Exit status of the command.
        status: ExitStatus,
        /// Text of stderr, or of stdout if stderr is empty.
        output: String,
    },
    /// The far end, or a program under test, behaved otherwise than it should.
    #[error("{0}")]
    Unexpected(String),
    /// Something the testbed needs is not on this machine.
    #[error("{0}")]
    Missing(String),
}

impl Error {
    /// An [`Error::Unexpected`] of this text.
    pub fn unexpected(what: impl Display) -> Self {
        Error::Unexpected(what.to_string())
    }

    /// The error number behind it, if it came from a system call.
    pub fn os_error(&self) -> Option<i32> {
        match self {
            Error::Io { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }
}

/// Adds the operation to the error of a failed system call.
pub trait Tried<T> {
    /// Attaches `what` ("open /dev/net/tun") to the error.
    fn tried(self, what: impl Display) -> Result<T>;
}

impl<T> Tried<T> for io::Result<T> {
    fn tried(self, what: impl Display) -> Result<T> {
        self.map_err(|source| Error::Io {
            tried: what.to_string(),
            source,
        })
    }
}

/// Turns the C convention (negative: look at errno) into a result.
pub(crate) fn checked(value: libc::c_int) -> io::Result<libc::c_int> {
    if value < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(value)
    }
}

/// [`checked`] for calls that return a length.
pub(crate) fn checked_len(value: isize) -> io::Result<usize> {
    usize::try_from(value).map_err(|_| io::Error::last_os_error())
}
