//! A connection with its socket, whose queue has nothing left to send when a loss is noticed.
use std::{
    io::Write as _,
    net::{Ipv4Addr, TcpListener, TcpStream},
    os::fd::OwnedFd,
};

use slipgate_abi::tcp::Flags;

use super::*;
use crate::packet::Version;

const GUEST_ISN: u32 = 1_000;
const MSS: u16 = 1_000;

/// The host's end, and the guest's connection to it, which is established. Its SYN is `ours`.
fn pair() -> (TcpStream, Stream, u32) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let server = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (socket, _) = listener.accept().unwrap();
    socket.set_nonblocking(true).unwrap();
    let syn = Segment {
        sequence: GUEST_ISN,
        flags: Flags::SYN,
        window: 60_000,
        options: SynOptions {
            mss: Some(MSS),
            ..SynOptions::default()
        },
        ..Segment::default()
    };
    let ours = 77;
    let connection = Connection::new(Version::V4, &syn, ours);
    let mut stream = Stream::new(connection, OwnedFd::from(socket));
    stream.connected(0).unwrap();
    acknowledge(&mut stream, ours + 1);
    assert_eq!(stream.connection().state(), State::Established);
    (server, stream, ours)
}

/// The guest's acknowledgement of all before this.
fn acknowledge(stream: &mut Stream, acknowledgement: u32) {
    let segment = Segment {
        sequence: GUEST_ISN + 1,
        acknowledgement,
        flags: Flags::ACK,
        window: 60_000,
        ..Segment::default()
    };
    let workspace = Workspace {
        scratch: &mut [0; 4_096],
        early: &EarlyRoom::default(),
        closed: None,
    };
    stream.receive(&segment, &[][..], workspace, 0).unwrap();
}

/// Takes what the stream sends at present: sequence numbers and payload.
fn sent(stream: &mut Stream) -> Vec<(u32, Vec<u8>)> {
    let mut sent = Vec::new();
    while let Some(place) = stream.sendable(0) {
        let mut into = vec![0; place.most.min(MSS.into()) as usize];
        match stream
            .next(place.offset, &mut into[..], &mut [0; 4_096], 0)
            .unwrap()
        {
            Next::Frame(header, len) => {
                into.truncate(len as usize);
                sent.push((header.sequence, into));
            }
            Next::End(_) => panic!("no end"),
            Next::Nothing => break,
        }
    }
    sent
}

#[test]
fn three_duplicates_send_again_what_a_drained_queue_had() {
    let (mut server, mut stream, ours) = pair();
    assert!(sent(&mut stream).is_empty());
    server.write_all(&[7; 5 * MSS as usize]).unwrap();
    stream.readable(false);
    let mut first = sent(&mut stream);
    // Loopback may deliver it in parts.
    while first.iter().map(|(_, bytes)| bytes.len()).sum::<usize>() < 5 * MSS as usize {
        stream.readable(false);
        first.extend(sent(&mut stream));
    }
    assert!(!stream.has_more(), "all of it was sent");
    // The first is lost: each of the others has the guest ask for it.
    for _ in 0..3 {
        assert!(sent(&mut stream).is_empty());
        acknowledge(&mut stream, ours + 1);
    }
    assert!(stream.has_more());
    let again = sent(&mut stream);
    assert_eq!(again.first(), Some(&(ours + 1, vec![7; MSS.into()])));
}
