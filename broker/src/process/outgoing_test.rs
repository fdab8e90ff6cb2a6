use std::{
    fs::File,
    io::{Read, Write},
    net::Ipv4Addr,
    os::fd::OwnedFd,
};

use slipgate_abi::VmRow;
use slipgate_ipc::{
    channel::Received,
    descriptors::{Outbound as _, Slot},
    engine::{EngineRequest, FlowQuestion, Subject, ToEngine},
};

use super::*;

const MOST_QUEUED: usize = 1_024;

fn request<F>(id: u64, request: EngineRequest<F>) -> ToEngine<F> {
    ToEngine::Request {
        id,
        about: Some(Subject::Vm { row: VmRow::new(1) }),
        request,
    }
}

fn thaw(id: u64) -> ToEngine {
    request(id, EngineRequest::Thaw)
}

/// Fills the channel of an engine that takes nothing; how many messages are on their way or wait.
fn fill(outgoing: &mut Outgoing, channel: &Channel, until: impl Fn(&Outgoing) -> bool) -> u64 {
    let done = (1..=100_000).find(|request| {
        outgoing.send(channel, thaw(*request)).unwrap();
        until(outgoing)
    });
    done.expect("a channel has so much room and no more")
}

#[test]
fn what_finds_no_room_waits_and_comes_in_order_with_its_descriptor() {
    let (broker, engine) = Channel::pair().unwrap();
    let mut outgoing = Outgoing::new(MOST_QUEUED);
    let (mut reader, writer) = std::io::pipe().unwrap();
    let sent = fill(&mut outgoing, &broker, |outgoing| !outgoing.is_empty());
    let to = OwnedFd::from(writer);
    let with_descriptor = request(sent + 1, EngineRequest::Record { to });
    outgoing.send(&broker, with_descriptor).unwrap();
    outgoing.send(&broker, thaw(sent + 2)).unwrap();
    for id in 1..=sent + 2 {
        let received = engine.try_receive::<ToEngine>().unwrap();
        let Received::Message(message) = received else {
            panic!("{id} is missing");
        };
        let mut fds = Vec::new();
        let message = message.take_out(&mut fds);
        let has_descriptor = id == sent + 1;
        let expected = match has_descriptor {
            true => EngineRequest::Record { to: Slot },
            false => EngineRequest::Thaw,
        };
        assert_eq!(message, request(id, expected));
        assert_eq!(fds.len(), usize::from(has_descriptor));
        for fd in fds {
            File::from(fd).write_all(b"here").unwrap();
        }
        outgoing.flush(&broker).unwrap();
    }
    assert!(outgoing.is_empty());
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    assert_eq!(text, "here", "and nobody holds another end");
}

#[test]
fn an_engine_that_takes_nothing_is_asked_no_more_and_then_given_up() {
    let (broker, _engine) = Channel::pair().unwrap();
    let mut outgoing = Outgoing::new(MOST_QUEUED);
    fill(&mut outgoing, &broker, Outgoing::is_behind);
    assert_eq!(outgoing.waiting.len(), MANY_QUEUED);
    // What the broker itself has to say still finds room.
    while outgoing.waiting.len() < MOST_QUEUED {
        outgoing.send(&broker, thaw(0)).unwrap();
    }
    assert_eq!(outgoing.failure(), None);
    outgoing.send(&broker, thaw(0)).unwrap();
    let failure = outgoing.failure().unwrap();
    assert!(failure.contains("hangs"), "{failure}");
    assert_eq!(outgoing.waiting.len(), MOST_QUEUED);
}

#[test]
fn what_an_engine_that_is_gone_was_to_be_told_is_let_go() {
    let (broker, engine) = Channel::pair().unwrap();
    let mut outgoing = Outgoing::new(MOST_QUEUED);
    fill(&mut outgoing, &broker, Outgoing::is_behind);
    drop(engine);
    outgoing.send(&broker, thaw(1)).unwrap();
    assert!(outgoing.is_empty());
}

#[test]
fn waiting_messages_are_bounded_by_their_size_too() {
    let (broker, _engine) = Channel::pair().unwrap();
    let most = 10_000;
    let mut outgoing = Outgoing::new(most);
    let size = 60_000;
    let large = |id| {
        let question = FlowQuestion {
            address: Ipv4Addr::LOCALHOST.into(),
            port: 0,
            protocol: 6,
            name: Some("n".repeat(size)),
        };
        request(id, EngineRequest::Why(question))
    };
    let failed = (1..=most as u64).find(|id| {
        outgoing.send(&broker, large(*id)).unwrap();
        outgoing.failure().is_some()
    });
    let bytes = failed.unwrap() as usize * size;
    assert!((MOST_BYTES..2 * MOST_BYTES).contains(&bytes), "{bytes}");
}

#[test]
fn what_the_peer_has_not_read_is_known() {
    let (broker, engine) = Channel::pair().unwrap();
    assert_eq!(unread_bytes(&broker), 0);
    broker.send(thaw(1)).unwrap();
    assert!(unread_bytes(&broker) > 0);
    engine.try_receive::<ToEngine>().unwrap();
    assert_eq!(unread_bytes(&broker), 0);
}
