//! Early segments with a socket that is full when their turn comes: what the guest was told of is not
//! forgotten.
use std::{
    io::Read as _,
    net::{Ipv4Addr, Shutdown, TcpListener, TcpStream},
    os::fd::OwnedFd,
    time::Duration,
};

use nix::sys::socket::{setsockopt, sockopt};
use slipgate_abi::tcp::Flags;

use super::*;
use crate::packet::Version;

const GUEST_ISN: u32 = 1_000;
const OURS: u32 = 77;
const PIECE: usize = 15_000;
const PIECES: usize = 4;
const GAP: usize = 500;
const ALL: usize = GAP + PIECES * PIECE;

fn byte(at: usize) -> u8 {
    (at * 7 / 3) as u8
}

fn send(stream: &mut Stream, at: usize, len: usize, early: &EarlyRoom) -> u32 {
    send_with(stream, at, len, (Flags::ACK, OURS + 1), early)
}

/// Sends with these flags and this acknowledgement.
fn send_with(
    stream: &mut Stream,
    at: usize,
    len: usize,
    (flags, acknowledgement): (u8, u32),
    early: &EarlyRoom,
) -> u32 {
    let segment = Segment {
        sequence: GUEST_ISN + 1 + at as u32,
        acknowledgement,
        flags,
        window: 60_000,
        payload_len: len as u32,
        ..Segment::default()
    };
    let payload: Vec<u8> = (at..at + len).map(byte).collect();
    let workspace = Workspace {
        scratch: &mut [0; 4_096],
        early,
        closed: None,
    };
    let taken = stream.receive(&segment, &payload[..], workspace, 0);
    taken.unwrap().delivered
}

/// A connection that has announced its window, and whose socket's queue has become small since; and its
/// server.
fn small(early: &EarlyRoom) -> (Stream, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    setsockopt(&listener, sockopt::RcvBuf, &4_096).unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    client.set_nonblocking(true).unwrap();
    let (server, _) = listener.accept().unwrap();
    let patience = Some(Duration::from_secs(20));
    server.set_read_timeout(patience).unwrap();
    let syn = Segment {
        sequence: GUEST_ISN,
        flags: Flags::SYN,
        window: 60_000,
        options: SynOptions {
            sack_permitted: true,
            ..SynOptions::default()
        },
        ..Segment::default()
    };
    let socket = OwnedFd::from(client);
    let mut stream = Stream::new(Connection::new(Version::V4, &syn, OURS), socket);
    stream.connected(0).unwrap();
    send(&mut stream, 0, 0, early);
    setsockopt(stream.socket().unwrap(), sockopt::SndBuf, &4_096).unwrap();
    (stream, server)
}

#[test]
fn what_a_full_socket_does_not_take_of_them_is_kept_until_it_does() {
    let early = EarlyRoom::default();
    let (mut stream, mut server) = small(&early);
    for nth in 0..PIECES {
        send(&mut stream, GAP + nth * PIECE, PIECE, &early);
    }
    let told = stream.acknowledgement().unwrap();
    let first = GUEST_ISN + 1 + GAP as u32;
    let block = (first, first + (PIECES * PIECE) as u32);
    assert!(told.sack.iter().eq([block]), "{told:?}");
    let delivered = send(&mut stream, 0, GAP, &early) as usize;
    assert!((GAP..ALL).contains(&delivered), "a part: {delivered}");
    assert!(stream.wants_room());
    let (mut got, mut buffer) = (Vec::new(), [0; 8_192]);
    while got.len() < ALL {
        let some = server.read(&mut buffer).expect("the rest comes");
        got.extend_from_slice(&buffer[..some]);
        stream.waits_for_room();
        stream.writable(0);
    }
    assert!(got.iter().enumerate().all(|(at, got)| *got == byte(at)));
    let next = stream.connection().next_from_guest();
    assert_eq!(next, GUEST_ISN + 1 + ALL as u32);
    // The bytes count when the guest is heard the next time.
    assert_eq!(send(&mut stream, ALL, 0, &early) as usize, ALL - delivered);
}

#[test]
fn a_socket_that_takes_the_last_of_them_when_it_has_room_is_closed_at_once() {
    let early = EarlyRoom::default();
    let (mut stream, mut server) = small(&early);
    server.shutdown(Shutdown::Write).unwrap();
    stream.readable(true);
    let end = stream.next(0, &mut [0; 64][..], &mut [0; 64], 0).unwrap();
    assert!(matches!(end, Next::End(_)));
    send_with(&mut stream, 0, 0, (Flags::ACK, OURS + 2), &early);
    assert_eq!(stream.connection().state(), State::FinWait2);
    for nth in 0..PIECES {
        let fin = if nth + 1 == PIECES { Flags::FIN } else { 0 };
        let how = (Flags::ACK | fin, OURS + 2);
        send_with(&mut stream, GAP + nth * PIECE, PIECE, how, &early);
    }
    let delivered = send_with(&mut stream, 0, GAP, (Flags::ACK, OURS + 2), &early);
    assert!((delivered as usize) < ALL, "a part: {delivered}");
    let (mut got, mut buffer) = (0, [0; 8_192]);
    loop {
        match server
            .read(&mut buffer)
            .expect("the rest comes, and the end")
        {
            0 => break,
            some => got += some,
        }
        stream.waits_for_room();
        stream.writable(0);
    }
    assert_eq!(got, ALL);
    assert_eq!(stream.connection().state(), State::TimeWait);
}

/// Has a socket take a part of one segment, of which the rest has this room.
fn taken_in_part(early: &EarlyRoom) -> (Stream, TcpStream, usize) {
    let (mut stream, server) = small(early);
    let how = (Flags::ACK | Flags::FIN, OURS + 1);
    let taken = send_with(&mut stream, 0, ALL, how, early) as usize;
    assert!((1..ALL).contains(&taken), "a part: {taken}");
    assert_eq!(stream.connection().state(), State::Established);
    assert!(stream.wants_room());
    (stream, server, taken)
}

#[test]
fn the_rest_of_a_segment_that_a_socket_took_in_part_is_not_sent_again() {
    let early = EarlyRoom::default();
    let (mut stream, mut server, taken) = taken_in_part(&early);
    assert!(!stream.connection().has_turned_away());
    let told = stream.acknowledgement().unwrap();
    assert_eq!(told.acknowledgement, GUEST_ISN + 1 + taken as u32);
    assert!(told.sack.is_empty(), "it is behind no gap: {told:?}");
    let (mut got, mut buffer) = (Vec::new(), [0; 8_192]);
    loop {
        match server
            .read(&mut buffer)
            .expect("the rest comes, and the end")
        {
            0 => break,
            some => got.extend_from_slice(&buffer[..some]),
        }
        stream.waits_for_room();
        if let Some((_, times)) = stream.writable(0) {
            assert_eq!(times, 1, "the guest is asked for nothing");
        }
    }
    assert!(got.len() == ALL && got.iter().enumerate().all(|(at, got)| *got == byte(at)));
    assert_eq!(stream.connection().state(), State::CloseWait);
}

#[test]
fn without_room_for_the_rest_the_guest_is_asked_for_it_again() {
    let early = EarlyRoom::none();
    let (mut stream, mut server, taken) = taken_in_part(&early);
    assert!(stream.connection().has_turned_away());
    let mut buffer = [0; 8_192];
    server.read_exact(&mut buffer[..taken.min(8_192)]).unwrap();
    stream.waits_for_room();
    let (header, times) = stream.writable(0).unwrap();
    assert_eq!(header.acknowledgement, GUEST_ISN + 1 + taken as u32);
    assert_eq!(times, 4);
}

#[test]
fn urgent_data_is_counted_and_delivered_as_data() {
    let early = EarlyRoom::default();
    let (mut stream, mut server) = small(&early);
    let acknowledgement = OURS + 1;
    let urgent = Flags::ACK | wire::URG;
    // A mark without data is none of it.
    for (at, len, flags) in [(0, 5, urgent), (5, 0, urgent), (5, 5, Flags::ACK)] {
        send_with(&mut stream, at, len, (flags, acknowledgement), &early);
    }
    let mut got = [0; 10];
    server.read_exact(&mut got).unwrap();
    assert_eq!(got, std::array::from_fn(byte));
    assert_eq!(early.counts().urgent, 1);
}
