use std::{
    io::{IoSlice, Read as _},
    os::{fd::AsFd as _, unix::net::UnixStream},
};

use nix::sys::socket::{ControlMessage, sendmsg, setsockopt, sockopt::PassCred};

use super::*;

/// Sends so many descriptors, receives them with room for `most`, and returns how many came and whether
/// there were more. Fails unless none stays open once these are closed.
fn taken(sent: usize, most: usize, prepare: fn(&UnixStream)) -> (usize, bool) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    prepare(&ours);
    let (mut reader, writer) = UnixStream::pair().unwrap();
    let raw = vec![writer.as_raw_fd(); sent];
    let rights = [ControlMessage::ScmRights(&raw)];
    let rights = &rights[..sent.min(1)];
    let (parts, flags) = ([IoSlice::new(b"x")], MsgFlags::empty());
    sendmsg::<()>(theirs.as_raw_fd(), &parts, rights, flags, None).unwrap();
    drop(writer);
    let mut bytes = [0; 2];
    let received = receive(ours.as_fd(), &mut bytes, most, flags).unwrap();
    assert_eq!((received.len, bytes), (1, *b"x\0"));
    let count = received.fds.len();
    drop(received.fds);
    // The end, if nobody has the other side.
    reader.set_nonblocking(true).unwrap();
    assert_eq!(reader.read(&mut [0]).unwrap(), 0);
    (count, received.was_cut)
}

#[test]
fn all_that_the_kernel_gave_is_taken_however_much_was_cut_off() {
    for (sent, most) in [(0, 0), (0, 1), (1, 1), (2, 1), (3, 1), (9, 8), (253, 253)] {
        assert_eq!(taken(sent, most, |_| ()), (sent.min(most), sent > most));
    }
    // Without room, none.
    assert_eq!(taken(3, 0, |_| ()), (0, true));
}

#[test]
fn descriptors_behind_another_control_message_are_taken_as_well() {
    let with_credentials: fn(&UnixStream) = |ours| setsockopt(ours, PassCred, &true).unwrap();
    assert_eq!(taken(3, 30, with_credentials), (3, false));
    let (count, was_cut) = taken(30, 30, with_credentials);
    assert!(was_cut && (1..30).contains(&count), "{count}");
}

#[test]
fn descriptors_are_closed_when_another_program_starts() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let fds = [theirs.as_raw_fd()];
    let rights = [ControlMessage::ScmRights(&fds)];
    let parts = [IoSlice::new(b"x")];
    sendmsg::<()>(fds[0], &parts, &rights, MsgFlags::empty(), None).unwrap();
    let received = receive(ours.as_fd(), &mut [0], 1, MsgFlags::empty()).unwrap();
    let flags = nix::fcntl::fcntl(&received.fds[0], nix::fcntl::FcntlArg::F_GETFD).unwrap();
    assert_eq!(flags, libc::FD_CLOEXEC);
}
