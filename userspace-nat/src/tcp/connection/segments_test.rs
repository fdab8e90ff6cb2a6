//! The state machine, segment by segment.
use slipgate_abi::tcp::Flags;

use super::*;
use crate::tcp::{SynOptions, Timestamps};

const ISN: u32 = u32::MAX - 5;
const OURS: u32 = u32::MAX - 100;
const ROOM: u32 = 100_000;

fn syn() -> Segment {
    Segment {
        sequence: ISN,
        flags: Flags::SYN,
        window: 10_000,
        options: SynOptions {
            mss: Some(1_000),
            window_scale: Some(2),
            ..SynOptions::default()
        },
        ..Segment::default()
    }
}

/// A segment `at` bytes after the SYN, that acknowledges `of_ours` bytes after ours.
fn data(at: u32, len: u32, of_ours: u32) -> Segment {
    Segment {
        sequence: ISN.wrapping_add(1).wrapping_add(at),
        acknowledgement: OURS.wrapping_add(1).wrapping_add(of_ours),
        flags: Flags::ACK,
        window: 2_500,
        payload_len: len,
        ..Segment::default()
    }
}

fn with(flags: u8, segment: Segment) -> Segment {
    Segment {
        flags: segment.flags | flags,
        ..segment
    }
}

fn established() -> Connection {
    let mut connection = Connection::new(Version::V4, &syn(), OURS);
    connection.connected(ROOM, 0);
    connection.receive(&data(0, 0, 0), 0);
    assert_eq!(connection.state(), State::Established);
    // Above the 64 KiB of an unscaled window.
    connection.acknowledge(ROOM);
    connection
}

fn take_all(connection: &mut Connection, segment: &Segment) -> Received {
    let received = connection.receive(segment, 0);
    connection.taken(&received, received.deliver.len() as u32, 0);
    received
}

#[test]
fn handshake_waits_for_the_hosts_connection() {
    let mut connection = Connection::new(Version::V4, &syn(), OURS);
    assert_eq!(connection.receive(&syn(), 0), Received::default());
    let ours = connection.connected(ROOM, 0);
    assert_eq!(
        ours,
        Header {
            sequence: OURS,
            acknowledgement: ISN.wrapping_add(1),
            flags: Flags::SYN | Flags::ACK,
            window: u16::MAX,
            window_scale: Some(Some(OUR_SCALE)),
            ..Header::default()
        }
    );
    // The guest's SYN again, and our timer: the same SYN.
    assert_eq!(connection.receive(&syn(), 0).reply, Some(ours));
    assert_eq!(connection.on_time(RETRANSMISSION_NS), Due::Send(ours));
    // Another's acknowledgement of it.
    let wrong = connection.receive(&data(0, 0, 1), 0).reply;
    assert!(wrong.is_some_and(|header| header.flags == Flags::RST));
    assert_eq!(connection.state(), State::SynReceived);
    connection.receive(&data(0, 0, 0), 0);
    assert_eq!(connection.state(), State::Established);
    assert_eq!(connection.mss(), 1_000);
}

#[test]
fn a_refused_connection_is_reset_as_its_syn_was() {
    let mut connection = Connection::new(Version::V4, &syn(), OURS);
    let reset = connection.reset();
    assert_eq!(
        (reset.sequence, reset.acknowledgement),
        (0, ISN.wrapping_add(1))
    );
    assert_eq!(reset.flags, Flags::RST | Flags::ACK);
    assert_eq!(connection.state(), State::Closed);
}

#[test]
fn a_guest_without_options_gets_none_and_the_default_segment() {
    let mut plain = syn();
    plain.options = SynOptions::default();
    let mut connection = Connection::new(Version::V4, &plain, OURS);
    assert_eq!(connection.connected(ROOM, 0).window_scale, Some(None));
    assert_eq!(connection.mss(), 536);
    connection.receive(&data(0, 0, 0), 0);
    assert_eq!(connection.acknowledge(ROOM).window, u16::MAX);
    assert_eq!(connection.sendable().map(|s| s.most), Some(2_500));
}

#[test]
fn payload_is_delivered_in_order_once() {
    let mut connection = established();
    assert_eq!(take_all(&mut connection, &data(0, 100, 0)).deliver, 0..100);
    // Again, overlapping, behind a gap, and beyond the window.
    assert!(
        take_all(&mut connection, &data(0, 100, 0))
            .deliver
            .is_empty()
    );
    assert_eq!(
        take_all(&mut connection, &data(50, 100, 0)).deliver,
        50..100
    );
    connection.acknowledge(1_000);
    assert!(
        take_all(&mut connection, &data(151, 100, 0))
            .deliver
            .is_empty()
    );
    assert!(connection.owes_acknowledgement());
    let header = connection.acknowledge(1_000);
    assert_eq!(header.acknowledgement, data(150, 0, 0).sequence);
    let room = ROOM - 150;
    let long = connection.receive(&data(150, room + 10, 0), 0);
    assert_eq!(
        long.deliver,
        0..room,
        "the window that was announced stands"
    );
}

#[test]
fn what_a_full_socket_turned_away_is_asked_for_again() {
    let mut connection = established();
    let received = connection.receive(&data(0, 1_000, 0), 0);
    assert!(!connection.taken(&received, 300, 0));
    let before = connection.acknowledge(ROOM);
    assert_eq!(before.acknowledgement, data(300, 0, 0).sequence);
    assert!(connection.is_short_of_room());
    let (again, times) = connection.reopen(2 * ROOM);
    assert_eq!((again.acknowledgement, times), (before.acknowledgement, 4));
    assert!(again.window > before.window);
    assert_eq!(connection.reopen(2 * ROOM).1, 1, "once is enough");
    assert_eq!(
        take_all(&mut connection, &data(300, 700, 0)).deliver,
        0..700
    );
}

#[test]
fn data_is_sent_within_the_window_and_taken_out_when_acknowledged() {
    let mut connection = established();
    assert_eq!(
        connection.sendable(),
        Some(Sendable {
            offset: 0,
            most: 10_000,
            options_len: 0,
        })
    );
    let header = connection.send(9_500, None, 0);
    assert_eq!(header.sequence, OURS.wrapping_add(1));
    assert_eq!(
        connection.sendable(),
        None,
        "no small piece while much is under way"
    );
    let received = connection.receive(&data(0, 0, 4_000), 0);
    assert_eq!(received.acknowledged, 4_000);
    assert_eq!(
        connection.sendable(),
        Some(Sendable {
            offset: 5_500,
            most: 4_500,
            options_len: 0,
        })
    );
    // Of what was never sent: told, and without effect.
    let received = connection.receive(&data(0, 0, 9_501), 0);
    assert_eq!(
        (received.acknowledged, connection.owes_acknowledgement()),
        (0, true)
    );
}

#[test]
fn three_duplicates_repair_a_loss_once() {
    let mut connection = established();
    connection.send(5_000, None, 0);
    connection.receive(&data(0, 0, 1_000), 0);
    for _ in 0..2 {
        connection.receive(&data(0, 0, 1_000), 0);
    }
    assert_eq!(connection.sendable().map(|s| s.offset), Some(4_000));
    connection.receive(&data(0, 0, 1_000), 0);
    assert_eq!(connection.sendable().map(|s| s.offset), Some(0));
    connection.send(4_000, None, 0);
    for _ in 0..6 {
        connection.receive(&data(0, 0, 1_000), 0);
    }
    assert_eq!(
        connection.sendable().map(|s| s.offset),
        Some(4_000),
        "the same loss"
    );
    assert_eq!(
        connection.receive(&data(0, 0, 5_000), 0).acknowledged,
        4_000
    );
}

#[test]
fn a_guest_that_is_silent_is_sent_to_again_and_given_up() {
    let mut connection = established();
    connection.send(100, None, 0);
    let mut times = 0;
    let (now_ns, given_up) = loop {
        let now_ns = connection.due_ns().expect("it waits");
        match connection.on_time(now_ns) {
            Due::Resend => {
                assert_eq!(connection.sendable().map(|s| s.offset), Some(0));
                connection.send(100, None, now_ns);
                times += 1;
            }
            Due::GiveUp(header) => break (now_ns, header),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(times, GIVE_UP_AFTER);
    assert!(now_ns > 500 * SECOND_NS, "{now_ns}");
    assert_eq!(given_up.flags, Flags::RST | Flags::ACK);
    assert_eq!(given_up.sequence, data(0, 0, 100).acknowledgement);
}

#[test]
fn a_closed_window_is_probed_as_long_as_the_guest_answers() {
    let mut connection = established();
    connection.send(100, None, 0);
    let closed = Segment {
        window: 0,
        ..data(0, 0, 100)
    };
    connection.receive(&closed, 0);
    assert_eq!(connection.sendable(), None);
    connection.blocked(0);
    for _ in 0..3 * GIVE_UP_AFTER {
        let now_ns = connection.due_ns().expect("it is probed");
        let Due::Send(probe) = connection.on_time(now_ns) else {
            panic!("no probe");
        };
        assert_eq!(probe.sequence, data(0, 0, 99).acknowledgement);
        connection.receive(&closed, now_ns);
    }
    connection.receive(&data(0, 0, 100), 0);
    assert_eq!(connection.sendable().map(|s| s.most), Some(10_000));
    assert_eq!(connection.due_ns(), None);
    // The waits for the probes grew to a minute. They are none of the next loss's.
    connection.send(100, None, 0);
    assert_eq!(connection.due_ns(), Some(RETRANSMISSION_NS));
}

#[test]
fn waits_for_the_handshake_are_none_of_the_streams() {
    let mut connection = Connection::new(Version::V4, &syn(), OURS);
    connection.connected(ROOM, 0);
    for _ in 0..4 {
        let now_ns = connection.due_ns().unwrap();
        assert!(matches!(connection.on_time(now_ns), Due::Send(_)));
    }
    connection.receive(&data(0, 0, 0), 0);
    connection.send(100, None, 0);
    assert_eq!(connection.due_ns(), Some(RETRANSMISSION_NS));
}

#[test]
fn a_last_acknowledgement_that_never_comes_is_given_up() {
    let mut connection = established();
    let received = connection.receive(&with(Flags::FIN, data(0, 0, 0)), 0);
    connection.taken(&received, 0, 0);
    let fin = connection.send_fin(0).expect("a FIN");
    assert_eq!(connection.state(), State::LastAck);
    let mut times = 0;
    let given_up = loop {
        let now_ns = connection.due_ns().expect("it waits");
        match connection.on_time(now_ns) {
            Due::Resend => {
                let again = connection.send_fin(now_ns).expect("the FIN again");
                assert_eq!((again.sequence, again.flags), (fin.sequence, fin.flags));
                times += 1;
            }
            Due::GiveUp(header) => break header,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(times, GIVE_UP_AFTER);
    assert_eq!(given_up.flags, Flags::RST | Flags::ACK);
    assert_eq!(connection.state(), State::Closed);
}

#[test]
fn the_guest_ends_first() {
    let mut connection = established();
    let segment = with(Flags::FIN, data(0, 10, 0));
    let received = connection.receive(&segment, 0);
    assert_eq!((received.deliver.clone(), received.fin), (0..10, true));
    assert!(connection.taken(&received, 10, 0), "no more is written");
    assert_eq!(connection.state(), State::CloseWait);
    assert_eq!(
        connection.acknowledge(ROOM).acknowledgement,
        data(11, 0, 0).sequence
    );
    // The server goes on, then ends.
    assert!(connection.sendable().is_some());
    connection.send(20, None, 0);
    let fin = connection.send_fin(0).expect("a FIN");
    assert_eq!(fin.sequence, data(0, 0, 20).acknowledgement);
    assert_eq!(connection.state(), State::LastAck);
    let received = connection.receive(&data(11, 0, 21), 0);
    assert_eq!((received.acknowledged, received.host), (20, Host::Closes));
    assert_eq!(connection.state(), State::Closed);
}

#[test]
fn the_server_ends_first() {
    let mut connection = established();
    let fin = connection.send_fin(0);
    assert_eq!(connection.state(), State::FinWait1);
    // It is lost.
    assert_eq!(connection.on_time(RETRANSMISSION_NS), Due::Resend);
    assert_eq!(connection.sendable().map(|s| s.offset), Some(0));
    let again = connection.send_fin(RETRANSMISSION_NS);
    assert_eq!(again.map(|f| f.sequence), fin.map(|f| f.sequence));
    connection.receive(&data(0, 0, 1), 0);
    assert_eq!(connection.state(), State::FinWait2);
    // Half-closed: the guest still sends.
    assert_eq!(take_all(&mut connection, &data(0, 30, 1)).deliver, 0..30);
    let received = connection.receive(&with(Flags::FIN, data(30, 0, 1)), 0);
    assert!(connection.taken(&received, 0, 0));
    assert_eq!(connection.state(), State::TimeWait);
    // Its FIN again is answered.
    connection.acknowledge(ROOM);
    connection.receive(&with(Flags::FIN, data(30, 0, 1)), 1);
    assert!(connection.owes_acknowledgement());
    let due_ns = connection.due_ns().expect("it is forgotten");
    assert!(due_ns >= TIME_WAIT_NS);
    assert_eq!(connection.on_time(due_ns), Due::Forget);
}

#[test]
fn both_end_at_once() {
    let mut connection = established();
    connection.send_fin(0);
    let received = connection.receive(&with(Flags::FIN, data(0, 0, 0)), 0);
    assert!(connection.taken(&received, 0, 0));
    assert_eq!(connection.state(), State::Closing);
    let received = connection.receive(&data(1, 0, 1), 0);
    assert_eq!(
        (connection.state(), received.host),
        (State::TimeWait, Host::Closes)
    );
}

#[test]
fn a_guest_that_forgot_all_but_our_fin_ends_without_a_reset() {
    let reset = Segment {
        flags: Flags::RST,
        ..data(11, 0, 0)
    };
    for (acknowledged, host) in [(20, Host::Closes), (19, Host::Reset)] {
        // The guest ends first: LAST-ACK.
        let mut connection = established();
        take_all(&mut connection, &with(Flags::FIN, data(0, 10, 0)));
        connection.send(20, None, 0);
        connection.send_fin(0);
        connection.receive(&data(11, 0, acknowledged), 0);
        assert_eq!(connection.state(), State::LastAck);
        assert_eq!(connection.receive(&reset, 0).host, host);
        // Both at once: CLOSING.
        let mut connection = established();
        connection.send(20, None, 0);
        connection.send_fin(0);
        take_all(
            &mut connection,
            &with(Flags::FIN, data(0, 10, acknowledged)),
        );
        assert_eq!(connection.state(), State::Closing);
        assert_eq!(connection.receive(&reset, 0).host, host);
        assert_eq!(connection.state(), State::Closed);
    }
}

#[test]
fn only_a_reset_with_the_right_number_ends_a_connection() {
    let reset = |at| Segment {
        flags: Flags::RST,
        ..data(at, 0, 0)
    };
    let mut connection = established();
    let guessed = connection.receive(&reset(5), 0);
    assert!(
        guessed
            .reply
            .is_some_and(|header| header.flags == Flags::ACK)
    );
    let outside = connection.receive(&reset(3 * ROOM), 0);
    assert_eq!(outside, Received::default());
    assert_eq!(connection.state(), State::Established);
    assert_eq!(connection.receive(&reset(0), 0).host, Host::Reset);
    assert_eq!(connection.state(), State::Closed);
    // A SYN in the middle is challenged.
    let mut connection = established();
    let challenged = connection.receive(&syn(), 0).reply;
    assert!(challenged.is_some_and(|header| header.flags == Flags::ACK));
}

#[test]
fn an_old_acknowledgement_opens_no_window() {
    let mut connection = established();
    connection.send(2_000, None, 0);
    connection.receive(&data(0, 0, 2_000), 0);
    // Behind it in sequence, but of before: its window began 2,000 bytes earlier.
    let old = Segment {
        window: u16::MAX,
        ..data(1, 0, 0)
    };
    connection.receive(&old, 0);
    assert_eq!(connection.sendable().map(|place| place.most), Some(10_000));
}

/// A segment of the guest is lost, so it is behind another's number when it comes, but its
/// acknowledgement is newer.
#[test]
fn a_segment_that_is_sent_again_and_acknowledges_more_says_what_the_window_is() {
    let mut connection = established();
    connection.send(4_000, None, 0);
    connection.receive(&data(1_000, 1_000, 0), 0);
    let mut again = data(0, 1_000, 4_000);
    again.window = 500;
    take_all(&mut connection, &again);
    assert_eq!(connection.sendable().map(|s| s.most), Some(2_000));
}

#[test]
fn rfc9293_a_guest_that_announces_no_mss_gets_that_of_its_family() {
    let plain = Segment {
        options: SynOptions::default(),
        ..syn()
    };
    for (version, mss) in [(Version::V4, 536), (Version::V6, 1_220)] {
        let connection = Connection::new(version, &plain, OURS);
        assert_eq!(connection.mss(), mss, "{version:?}");
    }
}

/// Two acknowledgements of the same bytes, of which the older one comes last and says that the window
/// is closed.
#[test]
fn a_window_that_a_late_acknowledgement_closes_is_probed_and_what_was_sent_is_sent_again() {
    let mut connection = established();
    let place = connection.sendable().unwrap();
    connection.send(place.most, None, 0);
    let closed = Segment {
        window: 0,
        ..data(0, 0, 0)
    };
    connection.receive(&closed, 0);
    assert_eq!(connection.sendable(), None);
    let due_ns = connection.due_ns().unwrap();
    let Due::Send(probe) = connection.on_time(due_ns) else {
        panic!("no probe");
    };
    assert_eq!((probe.sequence, probe.flags), (OURS, Flags::ACK));
    assert_eq!(connection.sendable(), None);
    // Its answer.
    connection.receive(&data(0, 0, 0), due_ns);
    let again = connection.sendable().unwrap();
    assert_eq!((again.offset, again.most), (0, place.most));
}

fn answer(flags: u8) -> Segment {
    Segment {
        acknowledgement: OURS.wrapping_add(1),
        flags,
        ..syn()
    }
}

/// A connection that opens to the guest, with its SYN.
fn opening() -> (Connection, Header) {
    let mut connection = Connection::open(Version::V4, OURS, ROOM, 7);
    assert_eq!(connection.due_ns(), Some(7), "at once");
    let Due::Send(syn) = connection.on_time(7) else {
        panic!("no SYN");
    };
    (connection, syn)
}

#[test]
fn our_syn_is_sent_until_the_guest_answers_it() {
    let (mut connection, syn) = opening();
    let expected = Header {
        sequence: OURS,
        acknowledgement: 0,
        flags: Flags::SYN,
        window: u16::MAX,
        window_scale: Some(Some(OUR_SCALE)),
        sack_permitted: true,
        timestamps: syn.timestamps,
        ..Header::default()
    };
    assert_eq!(syn, expected);
    assert_eq!(syn.timestamps.map(|it| it.echo), Some(0), "offered");
    let mut due_ns = 7;
    for nth in 0..4 {
        let wait_ns = connection.due_ns().unwrap() - due_ns;
        assert_eq!(wait_ns, RETRANSMISSION_NS << nth);
        due_ns += wait_ns;
        let value = syn.timestamps.unwrap().value;
        let later = Timestamps {
            value: value.wrapping_add(((due_ns - 7) / MILLISECOND_NS) as u32),
            echo: 0,
        };
        let again = Header {
            timestamps: Some(later),
            ..syn
        };
        assert_eq!(connection.on_time(due_ns), Due::Send(again));
    }
    assert_eq!(connection.sendable(), None, "nothing before its answer");
    let received = connection.receive(&answer(Flags::SYN | Flags::ACK), due_ns);
    assert_eq!(received, Received::default());
    assert_eq!(connection.state(), State::Established);
    assert_eq!((connection.mss(), connection.due_ns()), (1_000, None));
    assert!(connection.owes_acknowledgement());
    let acknowledgement = connection.acknowledge(ROOM);
    assert_eq!(acknowledgement.acknowledgement, ISN.wrapping_add(1));
    assert_eq!(acknowledgement.sequence, OURS.wrapping_add(1));
    // The window of its SYN is not scaled, later ones are.
    assert_eq!(connection.sendable().unwrap().most, 10_000);
    assert_eq!(take_all(&mut connection, &data(0, 5, 0)).deliver, 0..5);
    // Its answer again, because our acknowledgement was lost.
    let again = connection.receive(&answer(Flags::SYN | Flags::ACK), due_ns);
    assert!(again.reply.is_some_and(|header| header.flags == Flags::ACK));
}

#[test]
fn a_guest_that_refuses_ends_it_and_a_guess_does_not() {
    let (mut connection, _) = opening();
    for guess in [
        Segment {
            acknowledgement: OURS,
            ..answer(Flags::RST | Flags::ACK)
        },
        answer(Flags::RST),
    ] {
        assert_eq!(connection.receive(&guess, 8), Received::default());
        assert_eq!(connection.state(), State::SynSent);
    }
    let refusal = connection.receive(&answer(Flags::RST | Flags::ACK), 8);
    assert_eq!(refusal.host, Host::Reset);
    assert_eq!(
        (connection.state(), connection.due_ns()),
        (State::Closed, None)
    );
}

#[test]
fn an_older_connection_of_the_ports_is_reset_and_our_syn_heard_then() {
    let (mut connection, _) = opening();
    let old = Segment {
        acknowledgement: 77,
        ..answer(Flags::ACK)
    };
    let reset = connection.receive(&old, 8).reply.unwrap();
    assert_eq!((reset.sequence, reset.flags), (77, Flags::RST));
    assert_eq!(connection.state(), State::SynSent);
    assert!(matches!(
        connection.on_time(connection.due_ns().unwrap()),
        Due::Send(_)
    ));
}

#[test]
fn a_syn_that_crosses_ours_is_answered_and_its_acknowledgement_opens() {
    let (mut connection, _) = opening();
    let reply = connection.receive(&answer(Flags::SYN), 8).reply.unwrap();
    assert_eq!(reply.flags, Flags::SYN | Flags::ACK);
    assert_eq!(reply.acknowledgement, ISN.wrapping_add(1));
    assert_eq!(connection.state(), State::SynReceived);
    connection.receive(&data(0, 0, 0), 9);
    assert_eq!(connection.state(), State::Established);
}

#[test]
fn a_syn_that_comes_before_ours_was_sent_is_answered_by_it() {
    let mut connection = Connection::open(Version::V4, OURS, ROOM, 7);
    let reply = connection.receive(&answer(Flags::SYN), 7).reply.unwrap();
    assert_eq!(
        (reply.sequence, reply.flags),
        (OURS, Flags::SYN | Flags::ACK)
    );
    connection.receive(&data(0, 0, 0), 9);
    assert_eq!(connection.state(), State::Established);
    assert_eq!(connection.send(1, None, 9).sequence, OURS.wrapping_add(1));
}

#[test]
fn a_reset_before_the_answer_is_one_that_the_guest_accepts() {
    let (mut connection, _) = opening();
    let reset = connection.reset();
    assert_eq!(
        (reset.sequence, reset.flags),
        (OURS.wrapping_add(1), Flags::RST)
    );
    assert_eq!(connection.state(), State::Closed);
}

#[test]
fn no_packet_is_longer_than_the_link_or_a_frame_of_too_many() {
    let mut connection = established();
    connection.limit_mss(600);
    assert_eq!(connection.mss(), 600);
    let tiny = Segment {
        options: SynOptions {
            mss: Some(1),
            window_scale: Some(14),
            ..SynOptions::default()
        },
        ..syn()
    };
    let mut connection = Connection::new(Version::V4, &tiny, OURS);
    connection.connected(ROOM, 0);
    connection.receive(&data(0, 0, 0), 0);
    assert_eq!(connection.sendable().unwrap().most, MOST_SEGMENTS);
}

#[test]
fn rfc9293_3_10_7_4_in_time_wait_a_newer_syn_opens_the_next_one_and_an_old_one_is_challenged() {
    let mut connection = established();
    assert!(!connection.may_be_followed_by(&syn()), "it stands");
    connection.state = State::TimeWait;
    let from = |sequence| Segment { sequence, ..syn() };
    let last = connection.next_from_guest;
    // The first one's, come late; behind all that the guest has sent; and before it, by a wrap.
    for (sequence, may) in [
        (ISN, false),
        (last.wrapping_sub(1), false),
        (last, true),
        (last.wrapping_add(1 << 30), true),
        (last.wrapping_sub(1 << 30), false),
    ] {
        assert_eq!(connection.may_be_followed_by(&from(sequence)), may);
    }
    let challenge = connection.receive(&from(ISN), 0).reply.expect("a reply");
    assert_eq!(
        (challenge.flags, challenge.acknowledgement),
        (Flags::ACK, last)
    );
    connection.state = State::Closed;
    assert!(connection.may_be_followed_by(&from(ISN)));
}

#[test]
fn a_scaled_window_is_filled_beyond_64_kib() {
    let mut connection = established();
    // Scaled by 2.
    let wide = Segment {
        window: 50_000,
        ..data(0, 0, 0)
    };
    connection.receive(&wide, 0);
    while let Some(place) = connection.sendable() {
        assert_eq!(place.offset, connection.under_way());
        connection.send(place.most, None, 0);
    }
    assert_eq!(connection.under_way(), 200_000);
}

#[test]
fn a_keepalive_is_answered_and_told_with_the_silence_before_it_and_a_window_probe_is_none() {
    let mut connection = established();
    const BEFORE: u32 = u32::MAX;
    let minute_ns = 60 * SECOND_NS;
    for (nth, len) in [(1, 0), (2, 1), (3, 0)] {
        let now_ns = nth * minute_ns;
        let received = connection.receive(&data(BEFORE, len, 0), now_ns);
        assert_eq!(received.keepalive_ns, Some(minute_ns), "{nth}");
        assert!(received.deliver.is_empty() && !received.fin);
        assert!(connection.owes_acknowledgement());
        let answer = connection.acknowledge(ROOM);
        assert_eq!(answer.acknowledgement, ISN.wrapping_add(1));
        assert!(!connection.owes_acknowledgement());
    }
    // What is older, newer or longer is none.
    for (at, len) in [(BEFORE.wrapping_sub(1), 0), (0, 0), (BEFORE, 2)] {
        let received = connection.receive(&data(at, len, 0), 4 * minute_ns);
        assert_eq!(received.keepalive_ns, None, "{at} {len}");
    }
    // A guest whose window is closed probes it by the same segment.
    let room = connection.window_left();
    take_all(&mut connection, &data(0, room, 0));
    assert_eq!(connection.window_left(), 0);
    let probe = data(room.wrapping_sub(1), 0, 0);
    assert_eq!(connection.receive(&probe, 5 * minute_ns).keepalive_ns, None);
}
