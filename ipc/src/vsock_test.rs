use std::{
    io::{Read as _, Write as _},
    os::unix::net::UnixStream,
};

use nix::sys::socket::{MsgFlags, sendmsg};

use super::*;

fn ends() -> (RequestReader, RequestWriter) {
    let (reader, writer) = pair().unwrap();
    (reader, RequestWriter::new(writer))
}

#[test]
fn a_request_is_answered_by_a_socket_or_by_none() {
    let (reader, writer) = ends();
    assert!(writer.next().unwrap().is_none(), "it does not wait");
    writer.ask(7, 52).unwrap();
    writer.ask(u32::MAX, u32::MAX).unwrap();
    assert_eq!(reader.next().unwrap(), Some((7, 52)));
    assert_eq!(reader.next().unwrap(), Some((u32::MAX, u32::MAX)));
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    reader.answer(7, Some(ours.as_fd())).unwrap();
    drop(ours);
    reader.answer(u32::MAX, None).unwrap();
    let (id, socket) = writer.next().unwrap().unwrap();
    assert_eq!(id, 7);
    let mut socket = UnixStream::from(socket.unwrap());
    socket.write_all(b"well").unwrap();
    drop(socket);
    let mut got = String::new();
    theirs.read_to_string(&mut got).unwrap();
    assert_eq!(got, "well");
    let (id, socket) = writer.next().unwrap().unwrap();
    assert_eq!((id, socket.is_none()), (u32::MAX, true));
    assert!(writer.next().unwrap().is_none());
}

#[test]
fn an_end_that_is_gone_is_told_to_the_other() {
    let (reader, writer) = ends();
    writer.ask(1, 52).unwrap();
    drop(writer);
    assert_eq!(reader.next().unwrap(), Some((1, 52)), "what was asked");
    assert_eq!(reader.next().unwrap(), None);
    assert!(reader.answer(1, None).is_err());

    let (reader, writer) = ends();
    reader.answer(1, None).unwrap();
    drop(reader);
    assert!(writer.next().unwrap().is_some(), "what was answered");
    assert!(writer.next().is_err());
    assert!(writer.ask(1, 52).is_err());
}

#[test]
fn a_broker_that_reads_nothing_is_not_waited_for() {
    let (_reader, writer) = ends();
    let full = (0..1_000_000).find_map(|id| writer.ask(id, 52).err());
    assert_eq!(full.unwrap().kind(), ErrorKind::WouldBlock);
}

#[test]
fn nonsense_is_an_error_and_no_descriptor_of_the_vmms_is_taken() {
    for bytes in [&[1; 7][..], &[1; 9], &[1; 100]] {
        let (reader, writer) = ends();
        write(&writer, bytes).unwrap();
        assert_eq!(reader.next().unwrap_err().kind(), ErrorKind::InvalidData);
        let (reader, writer) = ends();
        write(&reader.0, bytes).unwrap();
        assert_eq!(writer.next().unwrap_err().kind(), ErrorKind::InvalidData);
    }
    // A descriptor with a request is closed unseen: its other end has nobody then.
    let (reader, writer) = ends();
    let (passed, mut kept) = UnixStream::pair().unwrap();
    let raw = [passed.as_raw_fd()];
    let rights = [ControlMessage::ScmRights(&raw)];
    let part = [IoSlice::new(&[2; 8])];
    let to = writer.as_fd().as_raw_fd();
    sendmsg::<()>(to, &part, &rights, MsgFlags::empty(), None).unwrap();
    drop(passed);
    assert_eq!(reader.next().unwrap(), Some((0x0202_0202, 0x0202_0202)));
    assert_eq!(kept.read(&mut [0]).unwrap(), 0);
}
