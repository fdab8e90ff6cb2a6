//! How inspected connections end: by FIN, by reset, and by a cut.
use slipgate_abi::{Handover, Refusal, Verdict, VmId, VmRow, tcp::Flags};

use slipgate_model::Subject;

use super::{super::rig::*, scene::*};
use crate::{
    clock::SECOND_NS,
    fake::hellos,
    inspection::{Refused, tcp},
};

#[test]
fn an_end_without_a_name_is_refused_and_nothing_behind_it_goes_on() {
    let evil = b"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n";
    for before in [&b""[..], &evil[..10]] {
        let mut scene = Scene::new();
        scene.guest(0, before, Flags::FIN);
        scene.settle();
        assert!(!scene.server_fin);
        // Had the server been asked, it would have acknowledged the end.
        let end = FIRST.wrapping_add(1 + before.len() as u32);
        scene
            .rig
            .world(&ack(SERVER, scene.nat, 0, scene.server_next, end));
        assert_ne!(scene.guest(1 + before.len(), evil, 0), Handling::Fast);
        assert_ne!(scene.guest(0, evil, 0), Handling::Fast);
        scene.assert_refused(match before {
            [] => Refused::NoName,
            _ => Refused::Malformed,
        });
        assert_eq!(scene.received(), b"");
    }
}

#[test]
fn what_is_behind_an_end_goes_nowhere() {
    let mut scene = Scene::new();
    let good = hello(NAME);
    scene.server_is_deaf = true;
    scene.guest(0, &good, Flags::FIN);
    scene.guest(good.len() + 1, b"behind", 0);
    scene.settle();
    scene.server_is_deaf = false;
    scene.rig.pass(SECOND_NS);
    scene.settle();
    assert!(scene.server_fin);
    assert_eq!(scene.received(), good);
    assert_eq!(scene.verdict(), Some(Verdict::Fast));
}

#[test]
fn resets_end_it() {
    let mut scene = Scene::new();
    scene.guest(0, &hello(NAME)[..20], 0);
    scene.settle();
    scene.guest(20, b"", Flags::RST);
    scene.settle();
    assert!(scene.server_reset);
    assert_eq!(scene.received(), b"");
    scene.rig.pass(400 * SECOND_NS);
    scene.rig.assert_empty();

    // A reset that is not quite right is none; nor is a flow that it seemed to end let go.
    let mut scene = Scene::new();
    let wrong = ack(SERVER, scene.nat, Flags::RST, scene.server_next + 5, FIRST);
    scene.rig.world(&wrong);
    scene.rig.at_guest();
    scene.rig.pass(240 * SECOND_NS - 1);
    let hello = hello("evil.test");
    scene.guest(0, &hello, 0);
    scene.settle();
    assert_eq!(scene.received(), b"");
}

/// Cuts all flows of the VM; the grace begins.
pub(super) fn cut_all(rig: &mut Rig) {
    let what = Subject::Vm { row: VmRow::new(1) };
    rig.tell(move |engine| engine.cut(what));
}

#[test]
fn a_session_sends_nothing_more_into_a_flow_that_is_cut() {
    let mut scene = Scene::new();
    scene.server_is_deaf = true;
    scene.guest(0, &hello(NAME), 0);
    // The last moment before it would send again.
    let due_ns = scene.rig.engine.core.inspected.next_deadline_ns().unwrap();
    let now_ns = scene.rig.kernel.borrow().now_ns;
    scene.rig.pass(due_ns - now_ns - 1);
    scene.rig.at_world();
    cut_all(&mut scene.rig);
    scene.rig.at_world();
    scene.rig.pass(1_000_000);
    assert_eq!(scene.rig.at_world(), Vec::<Vec<u8>>::new());
    assert_eq!(scene.rig.engine.core.inspected.sessions(), (0, 0, 0));
}

#[test]
fn an_engine_that_is_gone_leaves_nothing_that_was_not_decided() {
    let mut scene = Scene::new();
    scene.guest(0, &hello(NAME)[..20], 0);
    scene.settle();
    let (rig, adoption) = scene.rig.restart(&setup());
    let ended = (adoption.refused, adoption.uninspected);
    assert_eq!((adoption.live, ended), (0, (0, 1)), "by no rule");
    scene.rig = rig;
    scene.guest(0, &hello("evil.test"), 0);
    scene.settle();
    assert_eq!(scene.received(), b"");

    let mut scene = Scene::new();
    let good = hello(NAME);
    scene.guest(0, &good, 0);
    scene.settle();
    scene.server(&hellos::server_hello(false), 0);
    scene.settle();
    let (rig, adoption) = scene.rig.restart(&setup());
    assert_eq!((adoption.live, adoption.uninspected), (1, 0));
    scene.rig = rig;
    assert_eq!(scene.guest(good.len(), b"more", 0), Handling::Fast);

    // What a capture has the engine carry was let go before, or was not.
    let slot = scene.rig.kernel.borrow().slots_in_use()[0];
    for held in [false, true] {
        let core = &mut scene.rig.engine.core;
        core.nat.flows.capture(&mut core.nat.datapath, slot, true);
        if held {
            core.nat.flows.hold(&mut core.nat.datapath, slot);
        }
        assert_eq!(scene.verdict(), Some(Verdict::Engine));
        let (rig, adoption) = scene.rig.restart(&setup());
        assert_eq!(adoption.uninspected, usize::from(held));
        assert_eq!(adoption.live, usize::from(!held));
        scene.rig = rig;
        if !held {
            assert_eq!(scene.guest(good.len(), b"more", 0), Handling::Fast);
        }
    }
}

#[test]
fn a_connection_that_was_reset_makes_room_for_another() {
    fn assert_gone(rig: &mut Rig) {
        assert_eq!(rig.engine.core.inspected.sessions(), (0, 0, 0));
        rig.pass(SECOND_NS);
        rig.assert_empty();
        assert_eq!(rig.records()[0]["end"], "reset");
    }
    // The server refuses.
    let mut rig = Rig::with(setup());
    tell(&rig, NAME);
    rig.guest(1, &syn((GUEST, GUEST_PORT), SERVER, ISN));
    let sent = rig.at_world().pop().expect("the SYN goes out");
    let nat = (NAT, u16::from_be_bytes([sent[20], sent[21]]));
    let other = ack(SERVER, nat, Flags::RST, 0, FIRST.wrapping_add(1));
    rig.world(&other);
    assert_eq!(rig.engine.core.inspected.sessions().0, 1);
    rig.at_guest();
    rig.world(&ack(SERVER, nat, Flags::RST, 0, FIRST));
    assert_eq!(rig.at_guest().len(), 1, "the guest is told");
    assert_gone(&mut rig);

    // The guest resets.
    let mut scene = Scene::new();
    scene.guest(0, &hello(NAME)[..20], 0);
    scene.guest(20, b"", Flags::RST);
    scene.settle();
    assert!(scene.server_reset);
    assert_gone(&mut scene.rig);

    // The server resets, exactly where the guest is.
    let mut scene = Scene::new();
    scene.guest(0, &hello(NAME)[..20], 0);
    scene.settle();
    scene.server(b"", Flags::RST);
    scene.settle();
    assert!(scene.guest_reset.is_some());
    // Whoever goes on is told once more.
    scene.guest_reset = None;
    scene.guest(20, b"x", 0);
    scene.settle();
    assert!(scene.guest_reset.is_some());
    assert_eq!(scene.received(), b"");
    assert_gone(&mut scene.rig);
}

#[test]
fn a_reset_behind_what_the_guest_has_not_acknowledged_may_be_contradicted() {
    for contradicted in [false, true] {
        let mut scene = Scene::new();
        scene.server(b"bye", 0);
        scene.server(b"", Flags::RST);
        scene.settle();
        assert_eq!(scene.rig.engine.core.inspected.sessions().0, 1);
        if contradicted {
            scene.guest(0, b"", 0);
        }
        scene.rig.pass(tcp::DOUBT_NS + SECOND_NS);
        let sessions = scene.rig.engine.core.inspected.sessions().0;
        assert_eq!(sessions, usize::from(contradicted));
        assert_eq!(scene.rig.flows(), usize::from(contradicted));
    }
}

#[test]
fn a_syn_of_a_connection_that_was_let_go_is_anothers() {
    let mut scene = Scene::new();
    let hello = hello(NAME);
    scene.guest(0, &hello, 0);
    scene.settle();
    scene.server(&hellos::server_hello(false), 0);
    scene.settle();
    assert_eq!(scene.verdict(), Some(Verdict::Fast));
    // So that the server knows nothing of it, and that we do not know that.
    assert_eq!(scene.guest(hello.len(), b"", Flags::RST), Handling::Fast);
    assert_eq!(scene.guest(hello.len(), b"", 0), Handling::Fast);
    scene.rig.at_world();
    let again = syn((GUEST, GUEST_PORT), SERVER, ISN);
    assert_eq!(scene.rig.guest(1, &again), Handling::Engine(Handover::Syn));
    assert_eq!(scene.rig.engine.core.inspected.sessions().0, 1);
    let sent = scene.rig.at_world().pop().expect("the SYN goes out");
    let nat = (NAT, u16::from_be_bytes([sent[20], sent[21]]));
    assert_ne!(nat, scene.nat);
    scene.rig.world(&syn_ack(SERVER, nat, 5_000, FIRST));
    let evil = self::hello("evil.test");
    let said = tcp(
        (GUEST, GUEST_PORT),
        SERVER,
        Flags::ACK,
        FIRST,
        5_001,
        &[],
        &evil,
    );
    scene.rig.guest(1, &said);
    for packet in scene.rig.at_world() {
        assert!(packet.len() < 60, "none of it goes on");
    }
    assert_eq!(
        scene.rig.engine.core.inspected.counts(VmId::new(101)).name,
        1
    );
}

/// For as long as a server's cookie of the last connection may be good, nobody has its port.
#[test]
fn the_port_of_an_inspected_connection_rests_to_the_end() {
    for is_refused in [true, false] {
        let mut rig = Rig::with(Setup {
            nat_ports: 61_000..=61_000,
            ..setup()
        });
        let (guest, mut sequence) = ((GUEST, GUEST_PORT), 7);
        let mut open = |rig: &mut Rig| {
            tell(rig, NAME);
            rig.at_world();
            sequence += 1_000_000;
            // With timestamps, which a server knows an old connection by.
            let options = [2, 4, 5, 0xb4, 8, 10, 0, 0, 1, 0, 0, 0, 0, 0, 1, 1];
            rig.guest(
                1,
                &tcp(guest, SERVER, Flags::SYN, sequence, 0, &options, b""),
            );
            let sent = rig.at_world().pop()?;
            Some(((NAT, u16::from_be_bytes([sent[20], sent[21]])), sequence))
        };
        let (nat, isn) = open(&mut rig).expect("the port is free");
        if is_refused {
            rig.world(&ack(SERVER, nat, Flags::RST, 0, isn + 1));
        } else {
            rig.world(&syn_ack(SERVER, nat, 9_000, isn + 1));
            rig.guest(1, &ack(guest, SERVER, Flags::RST, isn + 1, 9_001));
        }
        // It ends within the grace, or because another connection wants its name.
        rig.pass(SECOND_NS);
        for _ in 0..118 {
            assert_eq!(open(&mut rig), None);
            rig.pass(SECOND_NS);
        }
        assert_eq!(rig.refused(1, Refusal::PortsExhausted), 118);
        rig.pass(3 * SECOND_NS);
        assert!(open(&mut rig).is_some(), "it has rested");
    }
}
