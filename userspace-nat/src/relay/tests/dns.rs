use std::net::{Ipv4Addr, SocketAddrV4};

use super::{
    super::*,
    guest::{Close, End},
    world::{Impairment, VM, World},
};
use crate::port::single;
use slipgate_policy::DNS_PORT;

fn framed(messages: &[&[u8]]) -> Vec<u8> {
    messages.iter().fold(Vec::new(), |mut bytes, message| {
        bytes.extend((message.len() as u16).to_be_bytes());
        bytes.extend(*message);
        bytes
    })
}

fn resolver() -> SocketAddrV4 {
    "8.8.8.8:53".parse().unwrap()
}

/// Steps for some time and gathers the questions.
fn questions(world: &mut World, ms: u64) -> Vec<Question> {
    world.idle(&mut [], ms);
    std::iter::from_fn(|| world.relay.next_question()).collect()
}

fn perfect() -> World {
    World::new(Limits::default(), Impairment::default())
}

#[test]
fn several_messages_in_one_segment_are_answered_in_any_order() {
    let mut world = perfect();
    let send = framed(&[b"first question", b"second", b"third"]);
    world
        .guest
        .connect(resolver(), 40_000, End::new(send, Close::Never));
    let asked = questions(&mut world, 50);
    let messages: Vec<&[u8]> = asked.iter().map(|q| q.message.as_slice()).collect();
    assert_eq!(
        messages,
        [b"first question".as_slice(), b"second", b"third"]
    );
    for index in [2, 0, 1] {
        let answer = [b"re: ", asked[index].message.as_slice()].concat();
        world.with(|relay, cx| relay.answer(asked[index].connection, &answer, cx));
    }
    world.idle(&mut [], 50);
    let expected = framed(&[b"re: third", b"re: first question", b"re: second"]);
    assert_eq!(world.guest.ends[0].1.received, expected);
}

#[test]
fn a_message_may_come_in_pieces() {
    let mut world = perfect();
    let whole = framed(&[b"a question in pieces", b"and another"]);
    world
        .guest
        .connect(resolver(), 40_000, End::new(Vec::new(), Close::Never));
    let mut asked = Vec::new();
    for byte in &whole {
        world.guest.ends[0].1.send.push(*byte);
        asked.extend(questions(&mut world, 3));
    }
    asked.extend(questions(&mut world, 100));
    let messages: Vec<&[u8]> = asked.iter().map(|q| q.message.as_slice()).collect();
    assert_eq!(
        messages,
        [b"a question in pieces".as_slice(), b"and another"]
    );
}

#[test]
fn many_questions_and_long_answers_cross_a_bad_link() {
    let impairment = Impairment {
        loss: 10,
        duplicates: 5,
        jitter_ms: 8,
        garbled: 0,
    };
    let mut world = World::new(Limits::default(), impairment);
    let messages: Vec<Vec<u8>> = (0..60_u8)
        .map(|i| vec![i; 40 + usize::from(i) * 9])
        .collect();
    let slices: Vec<&[u8]> = messages.iter().map(Vec::as_slice).collect();
    world.guest.connect(
        resolver(),
        40_000,
        End::new(framed(&slices), Close::WhenSent),
    );
    let mut expected = Vec::new();
    world.run(&mut [], 300_000, |world, _| {
        while let Some(question) = world.relay.next_question() {
            let answer = vec![question.message[0]; 10_000 + question.message.len()];
            expected.extend(framed(&[&answer]));
            world.with(|relay, cx| relay.answer(question.connection, &answer, cx));
        }
        world.guest.ends[0].1.eof
    });
    assert_eq!(
        expected.len(),
        messages.iter().map(|m| m.len() + 10_002).sum::<usize>()
    );
    assert!(world.guest.ends[0].1.received == expected);
    world.run(&mut [], 30_000, |world, _| {
        world.relay.counts(VM).dns_connections == 0
    });
    world.assert_empty();
}

#[test]
fn a_guest_that_has_asked_all_still_gets_its_answers() {
    let mut world = perfect();
    let send = framed(&[b"only question"]);
    world
        .guest
        .connect(resolver(), 40_000, End::new(send, Close::WhenSent));
    let asked = questions(&mut world, 200);
    assert!(!world.guest.ends[0].1.eof);
    world.with(|relay, cx| relay.answer(asked[0].connection, b"answer", cx));
    world.run(&mut [], 1_000, |world, _| world.guest.ends[0].1.eof);
    assert_eq!(world.guest.ends[0].1.received, framed(&[b"answer"]));
    world.idle(&mut [], 100);
    world.assert_empty();
    world.with(|relay, cx| relay.answer(asked[0].connection, b"late", cx));
}

#[test]
fn no_more_is_read_than_is_being_answered() {
    let mut world = perfect();
    let messages = vec![vec![7; 4_000]; 40];
    let slices: Vec<&[u8]> = messages.iter().map(Vec::as_slice).collect();
    world
        .guest
        .connect(resolver(), 40_000, End::new(framed(&slices), Close::Never));
    let asked = questions(&mut world, 1_000);
    assert_eq!(asked.len(), 8);
    for question in &asked {
        world.with(|relay, cx| relay.answer(question.connection, b"x", cx));
    }
    assert_eq!(
        questions(&mut world, 1_000).len(),
        8,
        "answers make room for more"
    );
}

/// A guest that asks without end and takes no answer does not have them kept for it.
#[test]
fn who_does_not_take_answers_is_not_asked_for_more_questions() {
    let mut world = perfect();
    let messages = vec![vec![7; 20]; 4_000];
    let slices: Vec<&[u8]> = messages.iter().map(Vec::as_slice).collect();
    let mut end = End::new(framed(&slices), Close::Never);
    end.reads = false;
    world.guest.connect(resolver(), 40_000, end);
    let (mut asked, answer) = (0, vec![9; 10_000]);
    for _ in 0..2_000 {
        world.step(&mut []);
        while let Some(question) = world.relay.next_question() {
            asked += 1;
            world.with(|relay, cx| relay.answer(question.connection, &answer, cx));
        }
    }
    // The guest's window, our buffer, and the answers to what was asked at once.
    let room = 32_768 + 16_384 + 8 * 10_002;
    assert!(
        (8..=room / 10_002 + 8).contains(&asked),
        "{asked} questions"
    );
    // Nothing moves: it is over.
    world.idle(&mut [], 15_000);
    world.assert_empty();
}

#[test]
fn what_waited_for_room_is_asked_when_answers_were_taken() {
    let mut world = perfect();
    let messages: Vec<Vec<u8>> = (0..40_u8).map(|i| vec![i; 20]).collect();
    let slices: Vec<&[u8]> = messages.iter().map(Vec::as_slice).collect();
    let mut end = End::new(framed(&slices), Close::WhenSent);
    end.reads = false;
    world.guest.connect(resolver(), 40_000, end);
    let mut received = 0;
    world.run(&mut [], 60_000, |world, _| {
        // It takes what is there now and then only.
        let now_ms = world.now_ns / 1_000_000;
        world.guest.ends[0].1.reads = now_ms % 500 < 5;
        while let Some(question) = world.relay.next_question() {
            let answer = vec![question.message[0]; 10_000];
            received += answer.len() + 2;
            world.with(|relay, cx| relay.answer(question.connection, &answer, cx));
        }
        world.guest.ends[0].1.eof
    });
    assert_eq!(received, 40 * 10_002);
    assert_eq!(world.guest.ends[0].1.received.len(), received);
}

#[test]
fn what_is_no_dns_is_reset() {
    for start in [[0_u8, 0], [0xff, 0xff]] {
        let mut world = perfect();
        let send = [start.as_slice(), b"GET / HTTP/1.1\r\n"].concat();
        world
            .guest
            .connect(resolver(), 40_000, End::new(send, Close::Never));
        world.run(&mut [], 1_000, |world, _| world.guest.ends[0].1.reset);
        world.assert_empty();
    }
}

#[test]
fn an_idle_connection_is_closed() {
    let mut world = perfect();
    world
        .guest
        .connect(resolver(), 40_000, End::new(Vec::new(), Close::AfterPeer));
    world.idle(&mut [], 9_900);
    assert!(!world.guest.ends[0].1.eof);
    world.run(&mut [], 300, |world, _| world.guest.ends[0].1.eof);
    world.idle(&mut [], 100);
    world.assert_empty();
}

#[test]
fn a_question_that_crosses_a_lost_end_is_not_asked() {
    let mut world = perfect();
    world
        .guest
        .connect(resolver(), 40_000, End::new(Vec::new(), Close::AfterPeer));
    assert!(questions(&mut world, 100).is_empty());
    world.lose(100);
    // Idle for 10 s since the handshake: the relay's FIN is lost.
    world.idle(&mut [], 9_950);
    world.lose(0);
    world.guest.ends[0].1.send = framed(&[b"late"]);
    assert!(questions(&mut world, 100).is_empty());
    world.run(&mut [], 1_000, |world, _| {
        assert!(world.relay.next_question().is_none());
        world.guest.ends[0].1.eof
    });
    assert!(world.guest.ends[0].1.received.is_empty());
}

#[test]
fn the_limit_holds_per_vm_and_room_is_made_by_closing() {
    let limits = Limits {
        dns_connections_per_vm: 3,
        ..Limits::default()
    };
    let mut world = World::new(limits, Impairment::default());
    for port in 0..4 {
        world.guest.connect(
            resolver(),
            40_000 + port,
            End::new(framed(&[b"q"]), Close::Never),
        );
    }
    assert_eq!(questions(&mut world, 50).len(), 3);
    assert!(world.over_limit >= 1);
    let counts = world.relay.counts(VM);
    assert_eq!(counts.dns_connections, 3);
    assert!(counts.dns_refused >= 1);
    world.guest.abort(0);
    // The fourth one's SYN comes again.
    assert_eq!(questions(&mut world, 5_000).len(), 1);
}

#[test]
fn only_port_53_is_served() {
    let mut world = perfect();
    world.guest.connect(
        "10.0.2.2:80".parse::<SocketAddr>().unwrap(),
        40_000,
        End::new(Vec::new(), Close::Never),
    );
    world.idle(&mut [], 50);
    assert!(world.to_guest.is_empty(), "it is the engine's to refuse");
    world.assert_empty();
}

/// One segment of a guest, with the gateway's MAC and a group's address, must not end the engine.
#[test]
fn an_address_that_is_no_hosts_is_not_served() {
    use slipgate_abi::tcp::Flags;

    use crate::{
        packet::build::{self, Segment},
        test_vm,
    };

    let mut world = perfect();
    let guest = test_vm::vm(VM.get()).guest;
    for to in [
        [224, 0, 0, 1],
        [239, 1, 2, 3],
        [255; 4],
        [0; 4],
        [0, 1, 2, 3],
    ] {
        let mut packet = Vec::new();
        let syn = Segment {
            source: 40_000,
            destination: DNS_PORT,
            sequence: 1,
            acknowledgement: 0,
            flags: Flags::SYN,
        };
        build::tcp(&mut packet, guest, Ipv4Addr::from(to), syn);
        let taken = world.with(|relay, cx| relay.packet(VM, &packet, single(packet.len()), cx));
        assert_eq!(taken, Taken::No, "{to:?}");
    }
    world.assert_empty();
}
