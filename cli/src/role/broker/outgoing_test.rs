use std::{fs::File, io::Read, io::Write, os::fd::OwnedFd};

use super::*;
use crate::channel::Received;

fn thaw(request: u64) -> ToEngine {
    ToEngine::Thaw { request, row: 1 }
}

/// Fills the channel of an engine that takes nothing; how many messages are on their way or wait.
fn fill(outgoing: &mut Outgoing, channel: &Channel, until: impl Fn(&Outgoing) -> bool) -> u64 {
    let done = (1..=100_000).find(|request| {
        outgoing.send(channel, thaw(*request), None).unwrap();
        until(outgoing)
    });
    done.expect("a channel has so much room and no more")
}

#[test]
fn what_finds_no_room_waits_and_comes_in_order_with_its_descriptor() {
    let (broker, engine) = Channel::pair().unwrap();
    let mut outgoing = Outgoing::default();
    let (mut reader, writer) = std::io::pipe().unwrap();
    let sent = fill(&mut outgoing, &broker, |outgoing| !outgoing.is_empty());
    let last = Some(OwnedFd::from(writer));
    outgoing.send(&broker, thaw(sent + 1), last).unwrap();
    outgoing.send(&broker, thaw(sent + 2), None).unwrap();
    for request in 1..=sent + 2 {
        let received = engine.try_receive::<ToEngine>().unwrap();
        let Received::Message(message, fds) = received else {
            panic!("{request} is missing");
        };
        assert_eq!(message, thaw(request));
        assert_eq!(fds.len(), usize::from(request == sent + 1));
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
    let mut outgoing = Outgoing::default();
    fill(&mut outgoing, &broker, Outgoing::is_behind);
    assert_eq!(outgoing.waiting.len(), MANY_QUEUED);
    // What the broker itself has to say still finds room.
    while outgoing.waiting.len() < MOST_QUEUED {
        outgoing.send(&broker, thaw(0), None).unwrap();
    }
    assert_eq!(outgoing.failure(), None);
    outgoing.send(&broker, thaw(0), None).unwrap();
    let failure = outgoing.failure().unwrap();
    assert!(failure.contains("hangs"), "{failure}");
    assert_eq!(outgoing.waiting.len(), MOST_QUEUED);
}

#[test]
fn what_an_engine_that_is_gone_was_to_be_told_is_let_go() {
    let (broker, engine) = Channel::pair().unwrap();
    let mut outgoing = Outgoing::default();
    fill(&mut outgoing, &broker, Outgoing::is_behind);
    drop(engine);
    outgoing.send(&broker, thaw(1), None).unwrap();
    assert!(outgoing.is_empty());
}
