use std::{
    fs::File,
    io::{Read as _, Write as _},
    os::fd::AsFd,
};

use slipgate_model::{RuleIndex, VmId, VmRow};

use super::*;
use crate::{
    descriptors::{Slot, carries_descriptors, carries_none},
    engine::{EngineRequest, FlowQuestion, FromEngine, Subject, ToEngine},
};

carries_none!(String);

/// A message with two descriptors.
#[derive(serde::Serialize, serde::Deserialize)]
struct Pipe<F> {
    reader: F,
    name: String,
    writer: F,
}

impl<F> Pipe<F> {
    fn try_map<G, E>(self, f: &mut impl FnMut(F) -> Result<G, E>) -> Result<Pipe<G>, E> {
        Ok(Pipe {
            reader: f(self.reader)?,
            name: self.name,
            writer: f(self.writer)?,
        })
    }
}

carries_descriptors!(Pipe);

/// A large message with a descriptor.
#[derive(serde::Serialize, serde::Deserialize)]
struct Large<F>(String, F);

impl<F> Large<F> {
    fn try_map<G, E>(self, f: &mut impl FnMut(F) -> Result<G, E>) -> Result<Large<G>, E> {
        Ok(Large(self.0, f(self.1)?))
    }
}

carries_descriptors!(Large);

fn question<F>() -> ToEngine<F> {
    ToEngine::Request {
        id: 7,
        about: Some(Subject::Vm { row: VmRow::new(1) }),
        request: EngineRequest::Why(FlowQuestion {
            address: [192, 0, 2, 1].into(),
            port: 443,
            protocol: 6,
            name: None,
        }),
    }
}

fn wire(message: ToEngine) -> ToEngine<Slot> {
    message.take_out(&mut Vec::new())
}

#[test]
fn a_message_and_its_descriptors_arrive_where_they_belong() {
    let (broker, engine) = Channel::pair().unwrap();
    let (mut reader, writer) = std::io::pipe().unwrap();
    broker.send(question::<OwnedFd>()).unwrap();
    let pipe = Pipe {
        reader: reader.as_fd(),
        name: "a".into(),
        writer: writer.as_fd(),
    };
    broker.send(pipe).unwrap();
    drop(writer);

    let first = engine.receive::<ToEngine>().unwrap().unwrap();
    assert_eq!(wire(first), question());
    let second = engine.receive::<Pipe<OwnedFd>>().unwrap().unwrap();
    assert_eq!(second.name, "a");
    let mut passed = File::from(second.writer);
    passed.write_all(b"hello").unwrap();
    drop(passed);
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    assert_eq!(text, "hello");
}

#[test]
fn a_message_larger_than_a_packet_goes_by_memfd() {
    let (broker, engine) = Channel::pair().unwrap();
    let (mut reader, writer) = std::io::pipe().unwrap();
    let text = "192.0.2.0/24\n".repeat(100_000);
    broker.send(Large(text.clone(), writer.as_fd())).unwrap();
    drop(writer);
    let Large(received, writer) = engine.receive::<Large<OwnedFd>>().unwrap().unwrap();
    assert_eq!(received, text);
    // The memfd is not handed on in its place.
    File::from(writer).write_all(b"here").unwrap();
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    assert_eq!(text, "here");
}

/// The broker reads no file of another process's choice: one without an end would hold it up.
#[test]
fn the_broker_takes_no_file() {
    let (broker, engine) = Channel::pair().unwrap();
    let text = "x".repeat(MAX_PACKET);
    let error = engine.send(text.clone()).unwrap_err().to_string();
    assert!(error.contains("longer than"), "{error}");
    let forged = Channel {
        is_brokers: true,
        ..engine
    };
    forged.send(text).unwrap();
    let error = broker.receive::<String>().unwrap_err().to_string();
    assert!(error.contains("malformed"), "{error}");
}

/// However many an engine sends, none of them stays open in the broker.
#[test]
fn the_broker_takes_no_descriptor() {
    let (broker, engine) = Channel::pair().unwrap();
    let (mut reader, writer) = std::io::pipe().unwrap();
    let raw = [writer.as_raw_fd(); MAX_FDS_OF_PACKET];
    let head = [VERSION, INLINE];
    let json = br#""NextHopsWanted""#;
    let parts = [IoSlice::new(&head), IoSlice::new(json)];
    let rights = [ControlMessage::ScmRights(&raw)];
    let socket = engine.as_raw_fd();
    sendmsg::<()>(socket, &parts, &rights, MsgFlags::empty(), None).unwrap();
    drop(writer);
    let message = broker.receive::<FromEngine>().unwrap().unwrap();
    assert_eq!(message, FromEngine::NextHopsWanted);
    let mut rest = Vec::new();
    assert_eq!(reader.read_to_end(&mut rest).unwrap(), 0);
}

/// However many are sent, the kernel makes one at most, and none of a file in place of the message.
#[test]
fn where_the_broker_takes_one_it_takes_one() {
    let (mut ours, theirs) = Channel::pair().unwrap();
    ours.take_descriptors();
    let file = || File::open("/dev/null").unwrap();
    let sent = Large("of a VM".to_owned(), OwnedFd::from(file()));
    theirs.send(sent).unwrap();
    let Large(text, _) = ours.receive::<Large<OwnedFd>>().unwrap().unwrap();
    assert_eq!(text, "of a VM");
    theirs.send("none".to_owned()).unwrap();
    assert_eq!(ours.receive::<String>().unwrap().unwrap(), "none");
    let fd = file();
    let refused = |head: &[u8], count: usize| {
        let fds = vec![fd.as_raw_fd(); count];
        let parts = [IoSlice::new(head)];
        let rights = [ControlMessage::ScmRights(&fds)];
        let socket = theirs.as_raw_fd();
        sendmsg::<()>(socket, &parts, &rights, MsgFlags::empty(), None).unwrap();
        ours.receive::<Large<OwnedFd>>()
            .map(drop)
            .unwrap_err()
            .to_string()
    };
    let json = [&[VERSION, INLINE][..], br#"["a","descriptor"]"#].concat();
    for count in [2, 250] {
        let why = refused(&json, count);
        assert!(why.contains("more than one descriptor"), "{why}");
    }
    let why = refused(&[VERSION, IN_MEMFD], 1);
    assert!(why.contains("malformed"), "{why}");
}

#[test]
fn another_number_of_descriptors_than_the_message_has_is_an_error() {
    let null = || OwnedFd::from(File::open("/dev/null").unwrap());
    let json = br#"{"reader":"descriptor","name":"a","writer":"descriptor"}"#;
    let packet = [&[VERSION, INLINE][..], json].concat();
    let decoded = |fds: usize| {
        let fds = (0..fds).map(|_| null()).collect();
        decode::<Pipe<OwnedFd>>(&packet, fds).map(drop)
    };
    assert!(decoded(2).is_ok());
    let few = decoded(1).unwrap_err().to_string();
    assert!(few.contains("no descriptor came with it"), "{few}");
    let many = decoded(3).unwrap_err().to_string();
    assert!(many.contains("1 descriptors more"), "{many}");
    // No number says how many there are but that of the slots.
    let forged = br#"{"reader":0,"name":"a","writer":1}"#;
    let packet = [&[VERSION, INLINE][..], forged].concat();
    assert!(decode::<Pipe<OwnedFd>>(&packet, vec![null(), null()]).is_err());
}

#[test]
fn a_message_with_too_many_descriptors_is_not_sent() {
    let null = File::open("/dev/null").unwrap();
    let error = Packet::new(ToEngine::Forwards(
        (0..=MAX_FDS)
            .map(|_| crate::engine::ForwardSocket {
                socket: Some(null.as_fd()),
                vm: VmId::new(1),
                vm_row: VmRow::new(0),
                protocol: 6,
                host: "192.0.2.1:80".parse().unwrap(),
                guest_port: 80,
                rule: RuleIndex::new(0),
            })
            .collect(),
    ))
    .unwrap_err();
    assert!(matches!(
        error,
        ChannelError::TooManyDescriptors { count } if count == MAX_FDS + 1
    ));
}

#[test]
fn a_dead_peer_is_the_end() {
    let (broker, engine) = Channel::pair().unwrap();
    drop(broker);
    assert!(engine.receive::<ToEngine>().unwrap().is_none());
    assert!(engine.send(FromEngine::NextHopsWanted).is_err());
}

#[test]
fn what_is_not_ours_is_an_error_that_says_so() {
    let (broker, engine) = Channel::pair().unwrap();
    for bytes in [
        &[2u8, INLINE, b'{', b'}'][..],
        &[VERSION, 9, b'{'],
        &[VERSION, IN_MEMFD],
        &[VERSION],
        &[VERSION, INLINE, b'{'],
    ] {
        nix::unistd::write(&broker, bytes).unwrap();
        let error = engine.receive::<ToEngine>().unwrap_err().to_string();
        assert!(error.contains("restart slipgate"), "{bytes:?}: {error}");
    }
}

#[test]
fn a_full_channel_is_no_error_for_try_send() {
    let (broker, _engine) = Channel::pair().unwrap();
    let mut sent = 0;
    while broker.try_send(ToEngine::<OwnedFd>::Begin).unwrap() {
        sent += 1;
        assert!(sent < 1_000_000);
    }
    assert!(sent > 0);
}
