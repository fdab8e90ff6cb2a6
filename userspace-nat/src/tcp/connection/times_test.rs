//! Timestamps, segment by segment.
use slipgate_abi::tcp::Flags;

use super::*;
use crate::{
    packet::Version,
    tcp::{Due, Header, State, SynOptions},
};

const ISN: u32 = 5_000;
const OURS: u32 = 900;
const THEIRS: u32 = u32::MAX - 3;
const BEGAN_NS: u64 = 77 * 3_600 * 1_000 * MILLISECOND_NS;

fn after(milliseconds: u64) -> u64 {
    BEGAN_NS + milliseconds * MILLISECOND_NS
}

fn syn(value: Option<u32>) -> Segment {
    Segment {
        sequence: ISN,
        flags: Flags::SYN,
        window: 60_000,
        options: SynOptions {
            mss: Some(1_000),
            ..SynOptions::default()
        },
        timestamps: value.map(|value| Timestamps { value, echo: 0 }),
        ..Segment::default()
    }
}

fn data(at: u32, len: u32, of_ours: u32, times: Option<(u32, u32)>) -> Segment {
    Segment {
        sequence: ISN + 1 + at,
        acknowledgement: OURS + 1 + of_ours,
        flags: Flags::ACK,
        window: 60_000,
        payload_len: len,
        timestamps: times.map(|(value, echo)| Timestamps { value, echo }),
        ..Segment::default()
    }
}

fn take(connection: &mut Connection, segment: &Segment, now_ns: u64) -> u32 {
    let received = connection.receive(segment, now_ns);
    let len = received.deliver.len() as u32;
    connection.taken(&received, len, now_ns);
    len
}

fn echoed(connection: &mut Connection) -> Option<u32> {
    connection.acknowledge(50_000).timestamps.map(|it| it.echo)
}

/// An established connection with timestamps, and the value of our SYN.
fn established() -> (Connection, u32) {
    let mut connection = Connection::new(Version::V4, &syn(Some(THEIRS)), OURS);
    let ours = connection.connected(50_000, BEGAN_NS).timestamps.unwrap();
    assert_eq!(ours.echo, THEIRS);
    let opened = data(0, 0, 0, Some((THEIRS, ours.value)));
    connection.receive(&opened, BEGAN_NS);
    assert_eq!(connection.state(), State::Established);
    (connection, ours.value)
}

#[test]
fn rfc7323_2_timestamps_are_used_only_if_the_guests_syn_has_them() {
    let mut plain = Connection::new(Version::V4, &syn(None), OURS);
    assert_eq!(plain.connected(50_000, BEGAN_NS).timestamps, None);
    plain.receive(&data(0, 0, 0, None), BEGAN_NS);
    let segment = data(0, 10, 0, Some((3, 4)));
    assert_eq!(take(&mut plain, &segment, BEGAN_NS), 10);
    assert_eq!(echoed(&mut plain), None);
    assert_eq!(
        (plain.mss(), plain.sendable().unwrap().options_len),
        (1_000, 0)
    );
    let (connection, _) = established();
    let place = connection.sendable().unwrap();
    assert_eq!((connection.mss(), place.options_len), (988, 12));
}

#[test]
fn our_values_tell_only_how_long_the_connection_stands() {
    let (mut connection, first) = established();
    let header = connection.send(10, None, after(1_234));
    let value = header.timestamps.unwrap().value;
    assert_eq!(value.wrapping_sub(first), 1_234);
    // The engine's clock is in none of them, and another sequence number gives another beginning.
    let first_of = |initial, now_ns| {
        let mut connection = Connection::new(Version::V4, &syn(Some(1)), initial);
        let syn = connection.connected(50_000, now_ns);
        syn.timestamps.unwrap().value
    };
    assert_eq!(first_of(OURS, 5), first);
    assert_ne!(first_of(OURS + 1, BEGAN_NS), first);
    assert_eq!(connection.reset().timestamps, None);
}

#[test]
fn rfc7323_4_3_the_time_of_the_segment_that_moved_the_edge_is_echoed() {
    let (mut connection, _) = established();
    let at = |ticks: u32| Some((THEIRS.wrapping_add(ticks), 0));
    take(&mut connection, &data(0, 100, 0, at(5)), after(5));
    // A second one before the acknowledgement: the wait is part of the guest's round trip.
    take(&mut connection, &data(100, 100, 0, at(6)), after(6));
    assert_eq!(echoed(&mut connection), at(5).map(|it| it.0));
    // Behind a gap.
    take(&mut connection, &data(300, 100, 0, at(9)), after(9));
    assert_eq!(echoed(&mut connection), at(5).map(|it| it.0));
    take(&mut connection, &data(200, 100, 0, at(11)), after(11));
    assert_eq!(echoed(&mut connection), at(11).map(|it| it.0));
}

#[test]
fn rfc7323_5_3_an_old_segment_is_answered_and_dropped() {
    let (mut connection, _) = established();
    let at = |ticks: u32| Some((THEIRS.wrapping_add(ticks), 0));
    take(&mut connection, &data(0, 100, 0, at(10)), after(10));
    connection.acknowledge(50_000);
    let old = data(100, 100, 0, at(9));
    assert_eq!(take(&mut connection, &old, after(11)), 0);
    assert!(connection.owes_acknowledgement());
    assert_eq!(
        take(&mut connection, &data(100, 100, 0, at(10)), after(11)),
        100
    );
    // An RST is not held to it, and neither is anything after a long silence.
    let late_ns = after(11) + OUTDATED_NS;
    assert_eq!(take(&mut connection, &data(200, 7, 0, at(1)), late_ns), 7);
    let reset = Segment {
        flags: Flags::RST,
        ..data(207, 0, 0, at(0))
    };
    connection.receive(&reset, late_ns);
    assert_eq!(connection.state(), State::Closed);
}

#[test]
fn rfc7323_5_3_a_time_half_of_the_space_away_is_not_older() {
    for (away, is_taken) in [(1 << 31, true), ((1 << 31) + 1, false)] {
        let mut connection = Connection::new(Version::V4, &syn(Some(THEIRS)), OURS);
        let ours = connection.connected(50_000, BEGAN_NS).timestamps.unwrap();
        let segment = data(0, 0, 0, Some((THEIRS.wrapping_add(away), ours.value)));
        connection.receive(&segment, after(1));
        assert_eq!(connection.state() == State::Established, is_taken, "{away}");
    }
}

#[test]
fn a_guest_that_stops_sending_timestamps_is_still_heard() {
    let (mut connection, _) = established();
    let segment = data(0, 100, 0, None);
    assert_eq!(take(&mut connection, &segment, after(5)), 100);
    assert_eq!(echoed(&mut connection), Some(THEIRS));
    connection.send(500, None, after(6));
    let received = connection.receive(&data(100, 0, 500, None), after(9));
    assert_eq!(received.acknowledged, 500);
}

#[test]
fn rfc7323_4_a_guest_that_answers_late_is_waited_for() {
    let (mut connection, _) = established();
    let (mut at, mut ms) = (0, 0);
    let mut guests = THEIRS;
    for _ in 0..60 {
        let header: Header = connection.send(100, None, after(ms));
        at += 100;
        ms += 900;
        guests = guests.wrapping_add(900);
        let echo = header.timestamps.unwrap().value;
        // The first waits are too short for such a guest.
        while connection
            .due_ns()
            .is_some_and(|due_ns| due_ns <= after(ms))
        {
            let due_ns = connection.due_ns().unwrap();
            assert_eq!(connection.on_time(due_ns), Due::Resend);
        }
        connection.receive(&data(0, 0, at, Some((guests, echo))), after(ms));
    }
    connection.send(100, None, after(ms));
    let wait_ns = connection.due_ns().unwrap() - after(ms);
    assert!(
        (900..1_000).contains(&(wait_ns / MILLISECOND_NS)),
        "{wait_ns}"
    );
    // An echo of what was never sent measures nothing.
    let forged = data(0, 0, at + 100, Some((guests, u32::MAX / 2)));
    connection.receive(&forged, after(ms));
    connection.send(100, None, after(ms));
    assert_eq!(connection.due_ns().unwrap() - after(ms), wait_ns);
}

#[test]
fn a_pause_of_the_vm_is_no_round_trip() {
    let (mut connection, _) = established();
    let header = connection.send(100, None, after(0));
    let echo = header.timestamps.unwrap().value;
    let answer = data(0, 0, 100, Some((THEIRS.wrapping_add(1), echo)));
    connection.receive(&answer, after(40_000));
    connection.send(100, None, after(40_000));
    let wait_ns = connection.due_ns().unwrap() - after(40_000);
    assert!(wait_ns <= 9_000 * MILLISECOND_NS, "{wait_ns}");
}

#[test]
fn rfc6191_in_time_wait_a_syn_with_a_later_time_opens_the_next_connection() {
    let (mut connection, _) = established();
    connection.state = State::TimeWait;
    let old_number = Segment {
        sequence: ISN - 100,
        ..syn(Some(THEIRS.wrapping_add(1)))
    };
    assert!(connection.may_be_followed_by(&old_number));
    let old = Segment {
        timestamps: Some(Timestamps {
            value: THEIRS,
            echo: 0,
        }),
        ..old_number
    };
    assert!(!connection.may_be_followed_by(&old));
}
