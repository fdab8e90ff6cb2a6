//! A guest that asks whether its connection lives, and the socket's own questions then.
use std::{
    net::{Ipv4Addr, TcpListener, TcpStream},
    os::fd::OwnedFd,
};

use nix::sys::socket::{getsockopt, sockopt};
use slipgate_abi::tcp::Flags;

use super::*;
use crate::{clock::SECOND_NS, packet::Version};

const ISN: u32 = 1_000;

fn segment(sequence: u32, acknowledgement: u32) -> Segment {
    Segment {
        sequence,
        acknowledgement,
        flags: Flags::ACK,
        window: 60_000,
        ..Segment::default()
    }
}

fn receive(stream: &mut Stream, segment: &Segment, now_ns: u64) {
    let workspace = Workspace {
        scratch: &mut [0; 4_096],
        early: &EarlyRoom::default(),
        closed: None,
    };
    stream.receive(segment, &[][..], workspace, now_ns).unwrap();
}

/// Whether the socket asks, and after which silence, between which times and how often, seconds.
fn asks(stream: &Stream) -> (bool, [u32; 3]) {
    let socket = stream.socket().unwrap();
    let rhythm = [
        getsockopt(socket, sockopt::TcpKeepIdle).unwrap(),
        getsockopt(socket, sockopt::TcpKeepInterval).unwrap(),
        getsockopt(socket, sockopt::TcpKeepCount).unwrap(),
    ];
    (getsockopt(socket, sockopt::KeepAlive).unwrap(), rhythm)
}

#[test]
fn the_socket_asks_its_peer_in_the_rhythm_of_a_guest_that_asks_and_of_no_other() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let server = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (socket, _) = listener.accept().unwrap();
    socket.set_nonblocking(true).unwrap();
    let syn = Segment {
        flags: Flags::SYN,
        ..segment(ISN, 0)
    };
    let connection = Connection::new(Version::V4, &syn, 77);
    let mut stream = Stream::new(connection, OwnedFd::from(socket));
    stream.connected(0).unwrap();
    receive(&mut stream, &segment(ISN + 1, 78), 0);
    receive(&mut stream, &segment(ISN + 1, 78), 60 * SECOND_NS);
    assert!(!asks(&stream).0, "the guest has not asked");
    let (keepalive, mut now_ns) = (segment(ISN, 78), 60 * SECOND_NS);
    let mut ask = |stream: &mut Stream, segment: &Segment, silent_ns: u64| {
        now_ns += silent_ns;
        receive(stream, segment, now_ns);
    };
    // What another segment overtook, the last byte sent again, and a question about a window.
    let repeated = Segment {
        payload_len: 1,
        ..keepalive
    };
    for (segment, silent_ns) in [
        (&keepalive, 1),
        (&repeated, SECOND_NS),
        (&repeated, SECOND_NS),
    ] {
        ask(&mut stream, segment, silent_ns);
    }
    ask(&mut stream, &keepalive, 3 * SECOND_NS);
    ask(&mut stream, &segment(ISN + 1, 78), 3 * SECOND_NS);
    ask(&mut stream, &keepalive, 3 * SECOND_NS);
    assert!(!asks(&stream).0, "the guest has not asked twice in a row");
    ask(&mut stream, &segment(ISN + 1, 78), SECOND_NS);
    ask(&mut stream, &keepalive, 64 * SECOND_NS);
    assert_eq!(asks(&stream), (true, [64, 8, 8]));
    // A rarer question, and ones that come sooner.
    ask(&mut stream, &keepalive, 300 * SECOND_NS);
    assert_eq!(asks(&stream), (true, [64, 8, 8]));
    ask(&mut stream, &segment(ISN + 1, 78), 1);
    ask(&mut stream, &keepalive, 2 * SECOND_NS);
    assert_eq!(asks(&stream), (true, [64, 8, 8]));
    ask(&mut stream, &keepalive, SECOND_NS);
    assert_eq!(asks(&stream), (true, [2, 1, 3]));
    drop(server);
}
