use std::{
    io::{IoSlice, IoSliceMut, Read as _},
    os::unix::net::UnixStream,
};

use nix::{
    cmsg_space,
    sys::socket::{ControlMessage, recvmsg, sendmsg},
};

use super::*;

/// Sends so many descriptors, receives them into room for `room`, and returns those that are taken. Fails
/// unless none stays open once these are closed.
fn taken(sent: usize, room: usize) -> usize {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (mut reader, writer) = UnixStream::pair().unwrap();
    let raw = vec![writer.as_raw_fd(); sent];
    let rights = [ControlMessage::ScmRights(&raw)];
    let (parts, flags) = ([IoSlice::new(b"x")], MsgFlags::empty());
    sendmsg::<()>(
        theirs.as_raw_fd(),
        &parts,
        &rights[..sent.min(1)],
        flags,
        None,
    )
    .unwrap();
    drop(writer);
    let mut space = vec![0; room * cmsg_space!([RawFd; 2]).len()];
    let mut byte = [0];
    let mut parts = [IoSliceMut::new(&mut byte)];
    let received = recvmsg::<()>(ours.as_raw_fd(), &mut parts, Some(&mut space), flags).unwrap();
    let was_cut = received.flags.contains(MsgFlags::MSG_CTRUNC);
    let fds = take(&space);
    assert_eq!(was_cut, fds.len() < sent);
    let count = fds.len();
    drop(fds);
    // The end, if nobody has the other side.
    reader.set_nonblocking(true).unwrap();
    assert_eq!(reader.read(&mut [0]).unwrap(), 0);
    count
}

#[test]
fn all_that_the_kernel_gave_is_taken_however_much_was_cut_off() {
    assert_eq!([taken(0, 1), taken(1, 1), taken(2, 1)], [0, 1, 2]);
    assert_eq!(taken(3, 1), 2);
    assert!((2..9).contains(&taken(9, 2)));
}
