//! What processes of ours say to each other: the channels between broker and engine and between
//! broker and VMM, and the control socket. Engine and VMM are those that a guest might take over.
//!
//! Input: `kind (1) | bytes …`, see [`kind`]. The sources of the binary are compiled in here: its
//! parsers are no library's.
use std::{
    io::{Read, Write},
    os::{fd::AsRawFd, unix::net::UnixStream},
};

use nix::sys::socket::{MsgFlags, send};
use serde::{Serialize, de::DeserializeOwned};

use crate::{
    channel::{Channel, FromVmm, Received, ToBroker, ToEngine, ToVmm},
    control_socket::{Answer, ControlServer, Request},
};

/// What the bytes are, modulo [`kind::COUNT`].
pub(crate) mod kind {
    /// A packet of the channel to the engine.
    pub(crate) const TO_ENGINE: u8 = 0;
    /// A packet of the channel to the broker.
    pub(crate) const TO_BROKER: u8 = 1;
    /// A stream to the control socket.
    pub(crate) const CONTROL: u8 = 2;
    /// An answer of the control socket.
    pub(crate) const ANSWER: u8 = 3;
    /// A packet of the channel to the VMM.
    pub(crate) const TO_VMM: u8 = 4;
    /// A packet of the channel from the VMM.
    pub(crate) const FROM_VMM: u8 = 5;
    pub(crate) const COUNT: u8 = 6;
}

/// Hands the bytes to one of the readers.
pub fn messages(input: &[u8]) {
    let Some((kind, bytes)) = input.split_first() else {
        return;
    };
    match kind % kind::COUNT {
        kind::TO_ENGINE => over_the_channel::<ToEngine>(bytes),
        kind::TO_BROKER => over_the_channel::<ToBroker>(bytes),
        kind::TO_VMM => over_the_channel::<ToVmm>(bytes),
        kind::FROM_VMM => over_the_channel::<FromVmm>(bytes),
        kind::CONTROL => over_the_control_socket(bytes),
        _ => {
            if let Ok(answer) = serde_json::from_slice::<Answer>(bytes) {
                let json = serde_json::to_vec(&answer).expect("it was JSON before");
                assert_eq!(serde_json::from_slice::<Answer>(&json).ok(), Some(answer));
            }
        }
    }
}

/// One packet comes. What is understood comes out of the other end as it went in.
fn over_the_channel<T: Serialize + DeserializeOwned + PartialEq>(packet: &[u8]) {
    // An empty packet can't be told from the end, and our end never sends one.
    if packet.is_empty() {
        return;
    }
    let (ours, theirs) = Channel::pair().expect("a socket pair");
    if send(theirs.as_raw_fd(), packet, MsgFlags::empty()).is_err() {
        return;
    }
    let Ok(Received::Message(message, fds)) = ours.try_receive::<T>() else {
        return;
    };
    assert!(fds.is_empty());
    ours.send(&message, &[]).expect("there is room");
    let again = theirs.receive::<T>().expect("a message");
    assert!(again.is_some_and(|(again, _)| again == message));
}

/// A client writes and goes away. Every request is answered or the client is dropped.
fn over_the_control_socket(bytes: &[u8]) {
    let path = std::env::temp_dir().join(format!("slipgate-fuzz-{}.sock", std::process::id()));
    let owner = nix::unistd::geteuid().as_raw();
    let mut server = ControlServer::bind(&path, owner).expect("a free path");
    let mut client = UnixStream::connect(&path).expect("a listener");
    client.set_nonblocking(true).expect("a socket");
    let (first, second) = bytes.split_at(bytes.len() / 2);
    for part in [first, second] {
        // A full socket, or one that the server closed.
        let _ = client.write_all(part);
        for asked in server.serve() {
            let request = asked.request;
            let json = serde_json::to_vec(&request).expect("it was JSON before");
            assert_eq!(serde_json::from_slice::<Request>(&json).ok(), Some(request));
            server.answer(asked.client, &Answer::Done);
        }
    }
    assert!(server.fds().count() <= 2);
    drop(server);
    let mut answers = Vec::new();
    // A reset tells that the server did not read all of it.
    let _ = client.read_to_end(&mut answers);
    for line in answers.split_inclusive(|byte| *byte == b'\n') {
        assert!(serde_json::from_slice::<Answer>(line).is_ok());
    }
}
