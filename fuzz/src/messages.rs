//! Messages between slipgate's processes: the channels between broker and engine, broker and VMM,
//! broker and metrics process, broker and API, and the control socket; and requests of the API's
//! clients. An attacker might control any of these processes except the broker.
//!
//! Input: `kind (1) | bytes …`, see [`kind`].
use std::{
    fmt::Debug,
    io::{Read, Write},
    os::{fd::OwnedFd, unix::net::UnixStream},
};

use serde::{Serialize, de::DeserializeOwned};
use slipgate_ipc::{
    api::{FromApi, ToApi},
    channel::{Packet, decode},
    client::{ClientAnswer, ControlServer, MAX_NOTICE, MachineNotice, NoticeLines},
    descriptors::{Inbound, Outbound},
    engine::{FromEngine, ToEngine},
    metrics::{FromMetrics, ToMetrics},
    vmm::{FromVmm, ToVmm},
};

/// Kinds of messages, modulo [`kind::COUNT`].
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
    /// A packet of the channel to the metrics process.
    pub(crate) const TO_METRICS: u8 = 6;
    /// A packet of the channel from the metrics process.
    pub(crate) const FROM_METRICS: u8 = 7;
    /// A packet of the channel to a process that answers the API.
    pub(crate) const TO_API: u8 = 8;
    /// A packet of the channel from such a process.
    pub(crate) const FROM_API: u8 = 9;
    /// A request of a client of the API: its first line, and a body.
    pub(crate) const HTTP: u8 = 10;
    /// Notice of a machine on the socket that ties its VM to the daemon.
    pub(crate) const NOTICE: u8 = 11;
    pub(crate) const COUNT: u8 = 12;
}

/// Passes the bytes to the reader of their kind.
pub fn messages(input: &[u8]) {
    let Some((kind, bytes)) = input.split_first() else {
        return;
    };
    match kind % kind::COUNT {
        kind::TO_ENGINE => packet::<ToEngine>(bytes),
        kind::TO_BROKER => packet::<FromEngine>(bytes),
        kind::TO_VMM => packet::<ToVmm>(bytes),
        kind::FROM_VMM => packet::<FromVmm>(bytes),
        kind::TO_METRICS => packet::<ToMetrics>(bytes),
        kind::FROM_METRICS => packet::<FromMetrics>(bytes),
        kind::TO_API => packet::<ToApi>(bytes),
        kind::FROM_API => packet::<FromApi>(bytes),
        kind::HTTP => http(bytes),
        kind::NOTICE => notices(bytes),
        kind::CONTROL => over_the_control_socket(bytes),
        _ => json_again::<ClientAnswer>(bytes),
    }
}

/// Checks that what was read from JSON is read back from the JSON that is made of it.
fn json_again<M: Serialize + DeserializeOwned + PartialEq + Debug>(bytes: &[u8]) {
    if let Ok(message) = serde_json::from_slice::<M>(bytes) {
        let json = serde_json::to_vec(&message).expect("it was JSON before");
        assert_eq!(serde_json::from_slice::<M>(&json).ok(), Some(message));
    }
}

/// Checks that what a machine says is read alike however it is divided, and that little is kept of it.
fn notices(bytes: &[u8]) {
    let read = |length: usize| {
        let mut lines = NoticeLines::default();
        let mut notices = Vec::new();
        for piece in bytes.chunks(length) {
            notices.extend(lines.take(piece));
            assert!(lines.kept_bytes() <= 2 * MAX_NOTICE);
        }
        (notices, lines.is_over())
    };
    let whole = read(bytes.len().max(1));
    for length in [1, 5, 4096] {
        assert_eq!(read(length), whole);
    }
    json_again::<MachineNotice>(bytes);
}

/// Checks that a request either becomes one message to the broker, which the broker decodes as it
/// was sent, or is answered with a problem.
fn http(bytes: &[u8]) {
    let mut lines = bytes.splitn(2, |byte| *byte == b'\n');
    let (Some(first), body) = (lines.next(), lines.next().unwrap_or_default()) else {
        return;
    };
    let Some((method, path)) = std::str::from_utf8(first)
        .ok()
        .and_then(|l| l.split_once(' '))
    else {
        return;
    };
    let conditions = slipgate_api::Conditions {
        if_match: Some("\"0123456789abcdef\", W/\"1\""),
        if_none_match: None,
    };
    match slipgate_api::change_of(method, path, conditions, body) {
        Ok(Some(request)) => {
            let message = FromApi { id: 1, request }.take_out(&mut Vec::new());
            let json = serde_json::to_vec(&message).expect("a message is JSON");
            assert_eq!(serde_json::from_slice(&json).ok(), Some(message));
        }
        Ok(None) => {}
        Err(problem) => assert!((400..500).contains(&problem.status), "{problem:?}"),
    }
}

/// Receives a packet with more descriptors than any message of its length has, and with none. A
/// message that is decoded must be encoded to the same bytes.
fn packet<M>(packet: &[u8])
where
    M: Inbound<Wire = <M as Outbound>::Wire> + Outbound<Descriptor = OwnedFd>,
    <M as Outbound>::Wire: Serialize + PartialEq + Debug,
{
    let null = || OwnedFd::from(std::fs::File::open("/dev/null").expect("a null device"));
    for descriptors in [0, 1, 2] {
        let fds = (0..descriptors).map(|_| null()).collect();
        let Ok(message) = decode::<M>(packet, fds) else {
            continue;
        };
        let mut taken = Vec::new();
        let wire = message.take_out(&mut taken);
        assert_eq!(taken.len(), descriptors);
        let json = serde_json::to_vec(&wire).expect("it was JSON before");
        let packet = [&[1, 0][..], &json].concat();
        let again = decode::<M>(&packet, taken).expect("it was a message before");
        let mut taken = Vec::new();
        assert_eq!(again.take_out(&mut taken), wire);
        // It can be sent.
        let fds = &mut taken.into_iter();
        let again = M::put_back(wire, fds).expect("as many as before");
        assert!(Packet::new(again).is_ok());
    }
}

/// Plays a client that writes and disconnects. Every request must be answered, or the client
/// dropped.
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
            let wire = asked.request.take_out(&mut Vec::new());
            let json = serde_json::to_vec(&wire).expect("it was JSON before");
            assert_eq!(serde_json::from_slice(&json).ok(), Some(wire));
            server.answer(asked.client, &ClientAnswer::Done);
        }
    }
    assert!(server.fds().count() <= 2);
    drop(server);
    let mut answers = Vec::new();
    // A reset tells that the server did not read all of it.
    let _ = client.read_to_end(&mut answers);
    for line in answers.split_inclusive(|byte| *byte == b'\n') {
        assert!(serde_json::from_slice::<ClientAnswer>(line).is_ok());
    }
}
