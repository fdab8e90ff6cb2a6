//! Descriptors from a socket's control data: the only place that takes a raw number for a
//! descriptor.
use std::{
    io,
    os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd},
};

use nix::{libc, sys::socket::MsgFlags};

/// Descriptors that came with the bytes that were received.
#[derive(Debug, Default)]
pub enum Passed {
    /// The bytes came alone.
    #[default]
    Nothing,
    /// Exactly one descriptor, which the receiver owns from now on.
    One(OwnedFd),
    /// Several, which are closed; or one for which this process has no room.
    Refused,
}

/// Control data with room for one descriptor.
#[repr(C)]
struct OneDescriptor {
    header: libc::cmsghdr,
    fd: RawFd,
}

/// Length of that, without what follows to align the next.
const ONE_LENGTH: usize = size_of::<libc::cmsghdr>() + size_of::<RawFd>();

/// Receives bytes, and at most one descriptor. The kernel gives this process no
/// further one, so however many a peer sends, none is left open.
///
/// # Errors
/// Those of recvmsg(2).
pub fn receive_with_one(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    flags: MsgFlags,
) -> io::Result<(usize, Passed)> {
    // SAFETY: structs of integers and pointers, for which zero is a value.
    let (mut control, mut message) = unsafe { std::mem::zeroed::<(OneDescriptor, libc::msghdr)>() };
    let mut part = libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = (&raw mut control).cast();
    // Their types differ between C libraries.
    let mut whole = control.header;
    (message.msg_controllen, whole.cmsg_len) = (ONE_LENGTH as _, ONE_LENGTH as _);
    let room = message.msg_controllen;
    let flags = flags | MsgFlags::MSG_CMSG_CLOEXEC;
    // SAFETY: the message's parts are alive, and as long as it says.
    let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags.bits()) };
    if received < 0 {
        return Err(io::Error::last_os_error());
    }
    let libc::cmsghdr {
        cmsg_len,
        cmsg_level,
        cmsg_type,
        ..
    } = control.header;
    let has_one = message.msg_controllen == room
        && cmsg_len == whole.cmsg_len
        && (cmsg_level, cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS);
    let fd = has_one.then(|| own(control.fd));
    let passed = match fd {
        _ if message.msg_flags & libc::MSG_CTRUNC != 0 => Passed::Refused,
        Some(fd) => Passed::One(fd),
        None => Passed::Nothing,
    };
    Ok((received as usize, passed))
}

/// Takes every descriptor of control data, which was zeros before a packet was received into it: all owned,
/// so that unused ones are closed. `nix` does not look at data that was cut short, since this process had
/// no room for more descriptors, and those that the kernel gave before would stay open for good.
pub(crate) fn take(control: &[u8]) -> Vec<OwnedFd> {
    const LEN: usize = size_of::<usize>();
    const WORD: usize = size_of::<i32>();
    let word = |at: usize| {
        let bytes = control.get(at..at + WORD).unwrap_or_default();
        bytes.try_into().map_or(0, i32::from_ne_bytes)
    };
    let len = control
        .first_chunk()
        .map_or(0, |len| usize::from_ne_bytes(*len));
    if (word(LEN), word(LEN + WORD)) != (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
        return Vec::new();
    }
    let given = control.get(size_of::<libc::cmsghdr>()..len);
    let given = given.unwrap_or_default().chunks_exact(WORD);
    let given = given.filter_map(|fd| fd.try_into().ok());
    given.map(|fd| own(RawFd::from_ne_bytes(fd))).collect()
}

fn own(raw: RawFd) -> OwnedFd {
    // SAFETY: the kernel made this descriptor for this process with the packet just received; the
    // control data is read once, so nothing else owns it.
    unsafe { OwnedFd::from_raw_fd(raw) }
}

#[cfg(test)]
#[path = "rights_test.rs"]
mod tests;
