//! Descriptors that come with the bytes of a Unix socket, in its control data: the only place where a
//! number that the kernel gave there becomes a descriptor. Broker, engine and the others receive
//! descriptors by it.
//!
//! Where the control data was cut short (`MSG_CTRUNC`), because there was no room for more or this process
//! may have no more descriptors, the kernel has given some and closed the rest for good: the bytes are taken,
//! and nothing brings the rest again. `nix` does not look at such data, so those that were given would stay
//! open until the process ends. Here they are returned like others, and closed if nobody keeps them.
use std::{
    io::IoSliceMut,
    os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd},
};

use nix::{
    errno::Errno,
    libc,
    sys::socket::{MsgFlags, recvmsg},
};

/// Length of the header of a control message, bytes.
const HEADER_LEN: usize = size_of::<libc::cmsghdr>();

/// What was received at once.
#[derive(Debug)]
pub struct Received {
    /// Number of bytes; 0 is the end of a stream.
    pub len: usize,
    /// Descriptors that came with them.
    pub fds: Vec<OwnedFd>,
    /// Whether there were more, which the kernel has closed: they can't be received again.
    pub was_cut: bool,
}

/// Receives bytes, and at most so many descriptors: the kernel gives this process no further one.
///
/// # Errors
/// Those of recvmsg(2). Nothing was taken then.
pub fn receive(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    most_fds: usize,
    flags: MsgFlags,
) -> Result<Received, Errno> {
    // Not padded to a whole word, or there were room for one more.
    let room = HEADER_LEN + most_fds * size_of::<RawFd>();
    let mut control = vec![0; if most_fds == 0 { 0 } else { room }];
    let space = (most_fds > 0).then_some(&mut control[..]);
    let mut parts = [IoSliceMut::new(bytes)];
    let flags = flags | MsgFlags::MSG_CMSG_CLOEXEC;
    let received = recvmsg::<()>(socket.as_raw_fd(), &mut parts, space, flags)?;
    let (len, flags) = (received.bytes, received.flags);
    Ok(Received {
        len,
        fds: descriptors(&control),
        was_cut: flags.contains(MsgFlags::MSG_CTRUNC),
    })
}

/// Owns the descriptors of control data that was received into zeros: there, a message of no length is the
/// end.
fn descriptors(mut control: &[u8]) -> Vec<OwnedFd> {
    const LEN: usize = size_of::<usize>();
    const WORD: usize = size_of::<i32>();
    let mut fds = Vec::new();
    while let Some((header, _)) = control.split_at_checked(HEADER_LEN) {
        let word = |at: usize| {
            let bytes = header[at..at + WORD].try_into();
            bytes.map_or(0, i32::from_ne_bytes)
        };
        let len = header
            .first_chunk()
            .map_or(0, |len| usize::from_ne_bytes(*len));
        let Some(given) = control.get(HEADER_LEN..len) else {
            break;
        };
        if (word(LEN), word(LEN + WORD)) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            let numbers = given.chunks_exact(WORD);
            let numbers = numbers.filter_map(|number| number.try_into().ok());
            fds.extend(numbers.map(|number| own(RawFd::from_ne_bytes(number))));
        }
        let next = len.next_multiple_of(LEN);
        control = control.get(next..).unwrap_or_default();
    }
    fds
}

#[expect(unsafe_code, reason = "the kernel gives descriptors as numbers")]
fn own(raw: RawFd) -> OwnedFd {
    // SAFETY: the kernel made this descriptor for this process with what was just received; the control
    // data is read once, so nothing else owns it.
    unsafe { OwnedFd::from_raw_fd(raw) }
}

#[cfg(test)]
#[path = "rights_test.rs"]
mod tests;
