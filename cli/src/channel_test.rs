use std::{
    io::{Read, Write},
    os::fd::AsFd,
};

use super::*;

#[test]
fn a_message_and_its_descriptors_arrive_in_order() {
    let (broker, engine) = Channel::pair().unwrap();
    let (mut reader, writer) = std::io::pipe().unwrap();
    let question = ToEngine::Why {
        request: 7,
        row: 1,
        address: [192, 0, 2, 1].into(),
        port: 443,
        protocol: 6,
        name: None,
    };
    broker.send(&question, &[]).unwrap();
    broker
        .send(&ToEngine::Begin, &[reader.as_fd(), writer.as_fd()])
        .unwrap();
    drop(writer);

    let (first, fds) = engine.receive::<ToEngine>().unwrap().unwrap();
    assert_eq!(first, question);
    assert!(fds.is_empty());
    let (second, fds) = engine.receive::<ToEngine>().unwrap().unwrap();
    assert_eq!(second, ToEngine::Begin);
    assert_eq!(fds.len(), 2);
    let mut passed = File::from(fds.into_iter().nth(1).unwrap());
    passed.write_all(b"hello").unwrap();
    drop(passed);
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    assert_eq!(text, "hello");
}

#[test]
fn a_message_larger_than_a_packet_goes_by_memfd() {
    let (broker, engine) = Channel::pair().unwrap();
    let (reader, _writer) = std::io::pipe().unwrap();
    let text = "192.0.2.0/24\n".repeat(100_000);
    broker.send(&text, &[reader.as_fd()]).unwrap();
    let (received, fds) = engine.receive::<String>().unwrap().unwrap();
    assert_eq!(received, text);
    assert_eq!(fds.len(), 1, "the memfd itself is not handed on");
}

/// The broker reads no file of another process's choice: one without an end would hold it up.
#[test]
fn the_broker_takes_no_file() {
    let (broker, engine) = Channel::pair().unwrap();
    let text = "x".repeat(MAX_PACKET);
    let error = engine.send(&text, &[]).unwrap_err().to_string();
    assert!(error.contains("longer than"), "{error}");
    let forged = Channel {
        is_brokers: true,
        ..engine
    };
    forged.send(&text, &[]).unwrap();
    let error = broker.receive::<String>().unwrap_err().to_string();
    assert!(error.contains("malformed"), "{error}");
}

#[test]
fn a_dead_peer_is_the_end() {
    let (broker, engine) = Channel::pair().unwrap();
    drop(broker);
    assert!(engine.receive::<ToEngine>().unwrap().is_none());
    assert!(engine.send(&ToBroker::NextHopsWanted, &[]).is_err());
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
    while broker.try_send(&ToEngine::Begin).unwrap() {
        sent += 1;
        assert!(sent < 1_000_000);
    }
    assert!(sent > 0);
}
