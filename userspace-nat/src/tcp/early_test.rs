//! What is kept, and what is not.
use super::*;
use crate::packet::Version;

const FIRST: u32 = u32::MAX - 10;

/// A connection whose guest may send 60,000 bytes, from `FIRST` on.
fn connection() -> Connection {
    let syn = Segment {
        sequence: FIRST.wrapping_sub(1),
        flags: Flags::SYN,
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
    early.keep(&connection(), &segment, &payload, room);
}

#[test]
fn a_segment_behind_a_gap_is_kept_until_its_turn() {
    let (mut connection, room) = (connection(), EarlyRoom::default());
    let mut early = EarlySegments::default();
    keep(&mut early, &room, at(2_000, 1_000));
    keep(&mut early, &room, at(2_000, 1_000));
    keep(&mut early, &room, at(1_000, 1_000));
    assert_eq!(room.left(), BYTES_PER_VM - 2_000, "each once");
    assert!(early.next(&connection).is_none());
    let (first, _) = at(0, 1_000);
    let received = connection.receive(&first, 0);
    connection.taken(&received, 1_000, 0);
    let turn = early.next(&connection).unwrap();
    assert_eq!(turn.segment, at(1_000, 1_000).0);
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
    for n in 0..200 {
        keep(&mut early, &room, at(1_000 + n, 100));
    }
    assert_eq!(early.0.len(), MOST_SEGMENTS);
    let mut early = EarlySegments::default();
    for n in 0..10 {
        keep(&mut early, &room, at(1_000 + n, 50_000));
    }
    assert_eq!(early.0.len(), MOST_BYTES / 50_000);
    let none = EarlyRoom(Arc::new(AtomicUsize::new(99)));
    let mut early = EarlySegments::default();
    keep(&mut early, &none, at(1_000, 100));
    assert!(early.0.is_empty() && none.left() == 99);
}
