//! Tests of which segments are kept behind a gap, and which are dropped.
use proptest::prelude::*;

use super::*;
use crate::{
    packet::Version,
    tcp::{Received, SynOptions},
};

const FIRST: u32 = u32::MAX - 10;

/// A connection whose guest may send 60,000 bytes, from `FIRST` on.
fn connection() -> Connection {
    opened_with(SynOptions::default())
}

fn opened_with(options: SynOptions) -> Connection {
    let syn = Segment {
        sequence: FIRST.wrapping_sub(1),
        flags: Flags::SYN,
        options,
        ..Segment::default()
    };
    let mut connection = Connection::new(Version::V4, &syn, 7);
    connection.connected(60_000, 0);
    let acknowledgement = Segment {
        sequence: FIRST,
        acknowledgement: 8,
        flags: Flags::ACK,
        ..Segment::default()
    };
    connection.receive(&acknowledgement, 0);
    connection
}

fn at(offset: u32, len: u32) -> (Segment, Vec<u8>) {
    let segment = Segment {
        sequence: FIRST.wrapping_add(offset),
        acknowledgement: 8,
        flags: Flags::ACK,
        payload_len: len,
        ..Segment::default()
    };
    (segment, vec![offset as u8; len as usize])
}

fn keep(early: &mut EarlySegments, room: &EarlyRoom, (segment, payload): (Segment, Vec<u8>)) {
    early.keep(
        &mut connection(),
        &segment,
        &Payload::from(&payload[..]),
        room,
    );
}

#[test]
fn a_segment_behind_a_gap_is_kept_until_its_turn() {
    let (mut connection, room) = (connection(), EarlyRoom::default());
    let mut early = EarlySegments::default();
    keep(&mut early, &room, at(2_000, 1_000));
    keep(&mut early, &room, at(2_000, 1_000));
    keep(&mut early, &room, at(2_100, 800));
    keep(&mut early, &room, at(1_000, 1_000));
    assert_eq!(room.left(), BYTES_PER_VM - 2 * cost(1_000), "each once");
    assert!(early.next(&connection).is_none());
    let (first, _) = at(0, 1_000);
    let received = connection.receive(&first, 0);
    connection.taken(&received, 1_000, 0);
    let turn = early.next(&connection).unwrap();
    assert_eq!(turn.segment().sequence, at(1_000, 1_000).0.sequence);
    early.put_back(turn);
    let turn = early.next(&connection).unwrap();
    assert_eq!(turn.segment().sequence, at(1_000, 1_000).0.sequence);
    drop(turn);
    assert!(early.next(&connection).is_none());
    drop(early);
    assert_eq!(room.left(), BYTES_PER_VM, "and given back");
}

#[test]
fn nothing_is_kept_beyond_the_window_the_bounds_or_the_vms_room() {
    let room = EarlyRoom::default();
    let mut early = EarlySegments::default();
    keep(&mut early, &room, at(59_500, 1_000));
    keep(&mut early, &room, at(0, 1_000));
    assert_eq!(room.left(), BYTES_PER_VM, "beyond the window, or next");
    assert_eq!(room.counts(), GuestTcpCounts::default(), "and not for room");
    for n in 0..2_000 {
        keep(&mut early, &room, at(1_000 + 2 * n, 1));
    }
    assert_eq!(early.segments.len(), MOST_BYTES / LEAST_BYTES);
    let counts = room.counts();
    assert_eq!(counts.kept_bytes, MOST_BYTES as u64);
    assert_eq!(counts.not_kept, 2_000 - (MOST_BYTES / LEAST_BYTES) as u64);
    // What is kept already is not kept twice, which is no lack of room.
    keep(&mut early, &room, at(1_000, 1));
    assert_eq!(room.counts(), counts);
    let mut early = EarlySegments::default();
    for n in 0..30 {
        keep(&mut early, &room, at(1_000 + n, 50_000));
    }
    assert_eq!(early.segments.len(), MOST_BYTES / cost(50_000));
    let none = EarlyRoom::of(99);
    let mut early = EarlySegments::default();
    keep(&mut early, &none, at(1_000, 100));
    assert!(early.segments.is_empty() && none.left() == 99);
    assert_eq!(none.counts().not_kept, 1, "the VM has no room");
}

#[test]
fn a_longer_segment_takes_the_place_of_a_shorter_one() {
    let room = EarlyRoom::default();
    let mut early = EarlySegments::default();
    keep(&mut early, &room, at(1_000, 1_000));
    keep(&mut early, &room, at(1_000, 3_000));
    assert_eq!(early.segments.len(), 1);
    assert_eq!(early.bytes, cost(3_000));
    assert_eq!(room.left(), BYTES_PER_VM - cost(3_000));
}

/// Numbers behind `FIRST` of the blocks that the next acknowledgement tells of.
fn told(connection: &mut Connection) -> Vec<(u32, u32)> {
    let header = connection.acknowledge(60_000);
    let behind = |(first, end): (u32, u32)| (first.wrapping_sub(FIRST), end.wrapping_sub(FIRST));
    header.sack.iter().map(behind).collect()
}

#[test]
fn rfc2018_4_the_newest_block_is_told_first_and_what_touches_is_one() {
    let (mut guest, room) = (sack_connection(), EarlyRoom::default());
    let mut early = EarlySegments::default();
    let mut comes = |guest: &mut Connection, offset| {
        let (segment, payload) = at(offset, 1_000);
        early.keep(guest, &segment, &Payload::from(&payload[..]), &room);
        told(guest)
    };
    assert_eq!(comes(&mut guest, 2_000), [(2_000, 3_000)]);
    let two = [(5_000, 6_000), (2_000, 3_000)];
    assert_eq!(comes(&mut guest, 5_000), two);
    let first_again = [(2_000, 4_000), (5_000, 6_000)];
    assert_eq!(comes(&mut guest, 3_000), first_again);
    assert_eq!(comes(&mut guest, 4_000), [(2_000, 6_000)], "one");
    for offset in [8_000, 10_000, 12_000] {
        comes(&mut guest, offset);
    }
    let four = [
        (14_000, 15_000),
        (12_000, 13_000),
        (10_000, 11_000),
        (8_000, 9_000),
    ];
    assert_eq!(comes(&mut guest, 14_000), four, "the oldest gives way");
    // What comes again is told of again.
    assert_eq!(comes(&mut guest, 5_000)[0].0, 5_000);
    // A guest that has not permitted it is told nothing.
    assert!(comes(&mut connection(), 2_000).is_empty());
}

fn sack_connection() -> Connection {
    opened_with(SynOptions {
        sack_permitted: true,
        ..SynOptions::default()
    })
}

proptest! {
    /// Segments of a stream in any order, some of them twice or cut otherwise: what is due is the
    /// stream, each block was kept and is behind what is acknowledged, and the last is told first.
    #[test]
    fn any_order_gives_the_stream_and_no_block_is_untrue(
        all in prop::collection::vec((0_u32..40, 1_u32..4), 1..200),
        permitted: bool,
    ) {
        let byte = |at: u32| (at.wrapping_mul(31) >> 3) as u8;
        let mut guest = if permitted { sack_connection() } else { connection() };
        let (mut early, room) = (EarlySegments::default(), EarlyRoom::default());
        let mut has = [false; 50_000];
        let mut got: Vec<u8> = Vec::new();
        let in_order = (0..43).map(|nth| (nth, 1));
        for (nth, pieces) in all.into_iter().chain(in_order) {
            let (offset, len) = (nth * 1_000, pieces * 1_000);
            let (segment, _) = at(offset, len);
            let payload: Vec<u8> = (offset..offset + len).map(byte).collect();
            early.keep(&mut guest, &segment, &Payload::from(&payload[..]), &room);
            let is_early = offset as usize > got.len();
            if is_early {
                has[offset as usize..(offset + len) as usize].fill(true);
            }
            let mut take = |guest: &mut Connection, received: &Received, payload: &[u8]| {
                let part = received.deliver.start as usize..received.deliver.end as usize;
                got.extend_from_slice(&payload[part]);
                guest.taken(received, received.deliver.len() as u32, 0);
            };
            let received = guest.receive(&segment, 0);
            take(&mut guest, &received, &payload);
            while let Some(due) = early.next(&guest) {
                let received = guest.receive_early(&due.segment());
                take(&mut guest, &received, &due.payload);
            }
            let blocks = told(&mut guest);
            for (first, end) in &blocks {
                prop_assert!(got.len() < *first as usize && first < end);
                prop_assert!(has[*first as usize..*end as usize].iter().all(|has| *has));
            }
            if permitted && is_early && offset as usize > got.len() {
                let (first, end) = blocks[0];
                prop_assert!(first <= offset && offset + len <= end);
            }
            prop_assert!(permitted || blocks.is_empty());
        }
        prop_assert_eq!(got, (0..43_000).map(byte).collect::<Vec<_>>());
        prop_assert_eq!(room.left(), BYTES_PER_VM);
    }
}
