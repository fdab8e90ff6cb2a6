//! Rules, names, inspection, and what `why` says of them.
use slipgate_abi::{Refusal, VmRow, tcp::Flags};
use slipgate_policy::{Action, Destination, Rule};

use super::*;
use crate::{
    clock::SECOND_NS,
    fake::{
        hellos::{self, records},
        initials,
    },
    inspection::quic,
    record::{Event, Events},
};

#[test]
fn the_rules_refuse_by_prefix_and_protect_what_is_not_the_worlds() {
    for family in families() {
        let denied = format!(
            "{}/{}",
            family.peer,
            if family.peer.is_ipv4() { 24 } else { 64 }
        );
        let denied: ipnet::IpNet = denied.parse().unwrap();
        let rule = Rule::parse(Action::Deny, &denied.trunc().to_string()).unwrap();
        let mut rig = Rig::with(Setup {
            rules: vec![rule],
            ..setup()
        });
        for opener in family.openers(5_000) {
            rig.guest(1, &opener);
        }
        assert_eq!(rig.refused(1, Refusal::Rule), 3, "{family:?}");
        let answers = rig.at_guest();
        assert_eq!(answers.len(), 3);
        let tcp = answers.iter().filter(|(_, answer)| {
            matches!(read(answer).transport, Transport::Tcp(tcp) if tcp.has(Flags::RST))
        });
        assert_eq!(tcp.count(), 1);
        assert_eq!(icmp(&answers[1].1), family.prohibited);
        rig.guest(1, &udp((family.guest, 5_000), (family.private, 9), b"x"));
        rig.guest(1, &udp((family.guest, 5_000), (family.nat, 9), b"x"));
        assert_eq!(rig.refused(1, Refusal::Protected), 2, "{family:?}");
        assert_eq!((rig.flows(), rig.at_world().len()), (0, 0));
    }
}

#[test]
fn an_answer_opens_its_address_to_the_vm_that_asked() {
    for family in families() {
        let mut rig = Rig::with(Setup {
            default: Action::Deny,
            rules: vec![Rule::parse(Action::Allow, "ok.test:443").unwrap()],
            ..setup()
        });
        let opener = &family.openers(5_000)[0];
        rig.guest(1, opener);
        assert_eq!((rig.flows(), rig.at_world().len()), (0, 0), "{family:?}");
        tell(&rig, family, "ok.test");
        rig.guest(2, opener);
        assert_eq!(rig.flows(), 0, "another VM did not ask");
        rig.guest(1, opener);
        assert_eq!((rig.flows(), rig.at_world().len()), (1, 1), "{family:?}");
    }
}

#[test]
fn a_connection_is_inspected_and_then_translated_in_the_kernel() {
    for family in families() {
        for (said, passes) in [("ok.test", true), ("evil.test", false)] {
            let mut rig = Rig::with(Setup {
                default: Action::Deny,
                rules: vec![Rule::parse(Action::Inspect, "ok.test").unwrap()],
                ..setup()
            });
            tell(&rig, family, "ok.test");
            let (guest, server) = ((family.guest, 40_000), family.server());
            rig.guest(
                1,
                &tcp(guest, server, Flags::SYN, 7, 0, &[2, 4, 5, 0xb4], b""),
            );
            let sent = rig.at_world().pop().expect("the SYN goes out");
            let nat = (family.nat, read(&sent).transport.ports().unwrap().0);
            rig.world(&tcp(
                server,
                nat,
                Flags::SYN | Flags::ACK,
                9_000,
                8,
                &[2, 4, 5, 0xb4],
                b"",
            ));
            rig.guest(1, &ack(guest, server, 0, 8, 9_001));
            let hello = records(&hellos::client_hello(said), 1_000);
            rig.at_world();
            rig.at_guest();
            rig.guest(1, &tcp(guest, server, Flags::ACK, 8, 9_001, &[], &hello));
            let reached = rig.at_world();
            let bytes: Vec<u8> = reached
                .iter()
                .flat_map(|packet| {
                    let packet = read(packet);
                    let Transport::Tcp(tcp) = packet.transport else {
                        panic!("{packet:?}");
                    };
                    packet.ip.payload()[tcp.header_len..].to_vec()
                })
                .collect();
            assert_eq!(bytes == hello, passes, "{family:?} {said}");
            if !passes {
                rig.pass(SECOND_NS);
                rig.assert_empty();
                assert_eq!(rig.records()[0]["end"], "inspection");
                continue;
            }
            let (end, heard) = (8 + hello.len() as u32, hellos::server_hello(false));
            let answer = tcp(server, nat, Flags::ACK, 9_001, end, &[], &heard);
            rig.world(&answer);
            let heard_end = 9_001 + heard.len() as u32;
            let more = tcp(guest, server, Flags::ACK, end, heard_end, &[], b"more");
            let way = rig.guest(1, &more);
            assert_eq!(way, Handling::Fast, "{family:?}");
        }
    }
}

#[test]
fn quic_is_read_in_either_family() {
    for family in families() {
        let mut rig = Rig::with(Setup {
            default: Action::Deny,
            rules: vec![Rule::parse(Action::Inspect, "ok.test").unwrap()],
            ..setup()
        });
        tell(&rig, family, "ok.test");
        for (port, said) in [(40_000, "ok.test"), (40_001, "evil.test")] {
            let hello = hellos::client_hello(said);
            let payload = initials::crypto(0, &hello);
            let initial = initials::initial(quic::Version::One, b"one", b"one", 0, &payload);
            rig.guest(1, &udp((family.guest, port), family.server(), &initial));
        }
        assert_eq!(rig.at_world().len(), 1, "{family:?}");
        let answers = rig.at_guest();
        assert_eq!(icmp(&answers[0].1), family.prohibited);
    }
}

#[test]
fn why_says_what_admission_would_do() {
    for family in families() {
        let mut rig = Rig::with(setup());
        let to = Destination {
            addr: family.peer,
            port: 443,
            protocol: slipgate_abi::Protocol::Tcp,
        };
        let why = rig.tell(move |engine| engine.why(VmRow::new(1), to, None));
        assert!(why.admitted, "{why:?}");
        let by = why.via.expect("a route");
        assert!(by.starts_with(&family.nat.to_string()), "{by}");
        let own = Destination {
            addr: family.gateway,
            ..to
        };
        let why = rig.tell(move |engine| engine.why(VmRow::new(1), own, None));
        assert!(
            !why.admitted && why.outcome.contains("own network"),
            "{why:?}"
        );
    }
    let mut rig = Rig::new();
    let to = Destination {
        addr: PEER6.into(),
        port: 443,
        protocol: slipgate_abi::Protocol::Tcp,
    };
    let why = rig.tell(move |engine| engine.why(VmRow::new(1), to, None));
    assert!(!why.admitted && why.outcome.contains("no IPv6"), "{why:?}");
}

#[test]
fn a_question_is_answered_in_the_family_in_which_it_was_asked() {
    for family in families() {
        let mut rig = Rig::with(Setup {
            events: Events::from_iter([Event::Dns]),
            ..setup()
        });
        // There is no resolver: the answer is SERVFAIL.
        let mut question = vec![0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        question.extend(wire("www.test").unwrap());
        question.extend([0, 28, 0, 1]);
        for server in [family.gateway, family.peer] {
            rig.guest(1, &udp((family.guest, 4_000), (server, 53), &question));
            let (vm, answer) = rig.at_guest().pop().expect("an answer");
            let packet = read(&answer);
            assert_eq!(
                (vm, packet.ip.source, packet.ip.destination),
                (101, server, family.guest)
            );
            assert_eq!(packet.transport.ports(), Some((53, 4_000)));
            assert_eq!(
                packet.ip.payload()[8 + 3] & 0xf,
                2,
                "{family:?}: it is looked up"
            );
        }
        // The route goes: AAAA is empty at once.
        rig.follow(network());
        rig.guest(
            1,
            &udp((family.guest, 4_000), (family.gateway, 53), &question),
        );
        let (_, answer) = rig.at_guest().pop().expect("an answer");
        assert_eq!(
            read(&answer).ip.payload()[8 + 3] & 0xf,
            0,
            "{family:?}: no data"
        );
    }
}
