//! Limits of inspected connections: their deadline, and bounds on memory.
use slipgate_abi::{Protocol, Refusal, VmId, VmRow, tcp::Flags};

use super::{super::rig::*, scene::*};
use crate::{
    clock::SECOND_NS,
    fake,
    inspection::{Refused, tcp},
};

#[test]
fn patience_ends() {
    let mut scene = Scene::new();
    scene.rig.pass(tcp::SILENT_NS - SECOND_NS);
    scene.settle();
    assert_eq!(scene.guest_reset, None);
    scene.rig.pass(SECOND_NS);
    scene.assert_refused(Refused::Silent);

    let mut scene = Scene::new();
    let hello = hello(NAME);
    for at in 0..20 {
        scene.guest(at, &hello[at..=at], 0);
        scene.rig.pass(SECOND_NS / 2 - 1);
    }
    scene.settle();
    assert_eq!(scene.guest_reset, None);
    scene.rig.pass(SECOND_NS);
    scene.assert_refused(Refused::Slow);
}

#[test]
fn a_frozen_guest_is_waited_for() {
    let mut scene = Scene::new();
    scene.guest(0, &hello(NAME)[..20], 0);
    scene.settle();
    scene.rig.pass(tcp::SLOW_NS - SECOND_NS);
    scene.rig.kernel.borrow().set_frozen(1, true);
    scene.rig.pass(30 * SECOND_NS);
    scene.rig.tell(|engine| engine.thaw(VmRow::new(1)));
    scene.rig.kernel.borrow().set_frozen(1, false);
    scene.rig.pass(tcp::SLOW_NS - SECOND_NS);
    let good = hello(NAME);
    scene.guest(20, &good[20..], 0);
    scene.settle();
    assert_eq!(scene.received(), good);
}

#[test]
fn sessions_and_what_they_hold_have_bounds() {
    use crate::inspection::sessions::MAX_SESSIONS;
    let mut rig = Rig::with(Setup {
        slots: 8_192,
        max_flows: 8_000,
        ..setup()
    });
    tell(&rig, NAME);
    for n in 0..=MAX_SESSIONS {
        let to = (PEER, 443 + (n % 2) as u16);
        rig.guest(1, &syn((GUEST, 1_024 + n as u16), to, 1));
    }
    assert_eq!(rig.flows(), MAX_SESSIONS);
    assert_eq!(rig.refused(1, Refusal::Inspection), 1);
    assert_eq!(rig.engine.core.inspected.counts(VmId::new(101)).limit, 1);
    let to = slipgate_policy::Destination {
        addr: PEER.into(),
        port: 443,
        protocol: Protocol::Tcp,
    };
    assert!(
        rig.engine
            .core
            .rules
            .judge
            .borrow()
            .decide(VmId::new(101), to, rig.kernel.borrow().now_ns)
            .inspect
    );
}

#[test]
fn timers_that_are_due_at_once_do_not_take_one_turn() {
    use crate::inspection::sessions::MAX_SESSIONS;
    let mut rig = Rig::with(Setup {
        slots: 8_192,
        max_flows: 8_000,
        ..setup()
    });
    tell(&rig, NAME);
    for n in 0..MAX_SESSIONS {
        let to = (PEER, 443 + (n % 2) as u16);
        rig.guest(1, &syn((GUEST, 1_024 + n as u16), to, 1));
        let sent = rig.at_world().pop().expect("the SYN goes out");
        let nat = (NAT, u16::from_be_bytes([sent[20], sent[21]]));
        rig.world(&syn_ack((PEER, to.1), nat, 9_000, 2));
    }
    rig.at_guest();
    rig.kernel.borrow_mut().now_ns += tcp::SILENT_NS;
    let (mut all, mut turns) = (0, 0);
    while rig.engine.core.inspected.sessions().0 > 0 {
        rig.turn();
        turns += 1;
        let written = rig.at_world().len() + rig.at_guest().len();
        assert!(written <= 3_000, "{written}");
        // The rest is due at once.
        let left = rig.engine.core.inspected.sessions().0;
        assert!(left == 0 || rig.engine.timeout_ns() == Some(0));
        all += written;
    }
    assert!(turns > 1 && all >= MAX_SESSIONS, "{all} in {turns} turns");
}

#[test]
fn a_server_that_gives_up_before_an_answer_is_not_waited_for() {
    let alert = fake::hellos::record(21, &[2, 40]);
    for (said, flags) in [(&alert[..], 0), (b"", Flags::FIN)] {
        let mut scene = Scene::new();
        let good = hello(NAME);
        scene.guest(0, &good, 0);
        scene.settle();
        scene.server(said, flags);
        scene.settle();
        assert_eq!(scene.heard, said);
        // What comes behind the hello goes nowhere.
        scene.guest(good.len(), b"more", 0);
        scene.rig.pass(tcp::SLOW_NS + SECOND_NS);
        scene.settle();
        assert_eq!(scene.received(), good);
        assert_eq!(
            scene
                .rig
                .engine
                .core
                .inspected
                .counts(VmId::new(101))
                .unanswered,
            1
        );
        assert_eq!(scene.rig.engine.core.inspected.sessions().0, 0);
    }
}
