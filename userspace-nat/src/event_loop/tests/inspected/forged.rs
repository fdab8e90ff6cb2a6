//! Packets that somebody forges who knows the addresses and ports of a connection, and no more.
use slipgate_abi::{Verdict, tcp::Flags};

use super::{super::rig::*, scene::*};
use crate::{clock::SECOND_NS, fake::hellos, inspection::tcp};

const FAR: [u32; 4] = [1 << 20, 1 << 30, (1 << 31) - 1, u32::MAX - (1 << 20)];

fn forge(scene: &mut Scene, flags: u8, sequence: u32, acknowledgement: u32, payload: &[u8]) {
    let (from, to) = (scene.server, scene.nat);
    let packet = self::tcp(from, to, flags, sequence, acknowledgement, &[], payload);
    scene.rig.world(&packet);
}

/// It goes on as if nothing had happened.
fn assert_goes_on(scene: &mut Scene) {
    scene.rig.at_guest();
    let good = hello(NAME);
    scene.guest(0, &good, 0);
    scene.settle();
    assert_eq!(scene.received(), good);
    scene.server(&hellos::server_hello(false), 0);
    scene.settle();
    assert_eq!(scene.verdict(), Some(Verdict::Fast));
}

#[test]
fn a_forged_reset_behind_a_forged_segment_is_not_believed() {
    for far in FAR {
        let mut scene = Scene::new();
        let next = scene.server_next;
        let sequence = next.wrapping_add(far);
        forge(&mut scene, Flags::ACK, sequence, FIRST, b"");
        for at in [far, far / 2, far.wrapping_sub(1)] {
            forge(&mut scene, Flags::RST, next.wrapping_add(at), FIRST, b"");
        }
        scene.rig.at_guest();
        scene.rig.pass(tcp::DOUBT_NS + SECOND_NS);
        assert_eq!(scene.rig.flows(), 1, "{far:x}");
        assert_goes_on(&mut scene);
    }
}

#[test]
fn a_forged_segment_before_the_hello_does_not_hide_the_answer() {
    // The last is in the guest's window.
    for far in FAR.into_iter().chain([100]) {
        let mut scene = Scene::new();
        let sequence = scene.server_next.wrapping_add(far);
        forge(&mut scene, Flags::ACK, sequence, FIRST, b"x");
        assert_goes_on(&mut scene);
    }
}

#[test]
fn what_acknowledges_nothing_that_was_sent_does_not_get_to_the_guest() {
    let mut scene = Scene::new();
    for acknowledgement in [FIRST + 1, FIRST ^ 1 << 31, FIRST.wrapping_sub(1 << 20)] {
        let next = scene.server_next;
        forge(&mut scene, Flags::ACK, next, acknowledgement, b"inject");
        assert_eq!(scene.rig.at_guest(), [], "{acknowledgement}");
    }
    assert_goes_on(&mut scene);
}

/// The option, two NOPs before it.
fn time(value: u32, echo: u32) -> Vec<u8> {
    let words = [0x0101_080a, value, echo];
    words.into_iter().flat_map(u32::to_be_bytes).collect()
}

#[test]
fn a_forged_time_is_none() {
    let rig = Rig::with(setup());
    let options = [&time(700, 0)[..], &time(5_000, 700)];
    let mut scene = Scene::with_options(rig, SERVER, options);
    let poison = time(5_000 + (1 << 30), 700);
    for far in FAR {
        let sequence = scene.server_next.wrapping_add(far);
        let (from, to) = (scene.server, scene.nat);
        let packet = self::tcp(from, to, Flags::ACK, sequence, FIRST, &poison, b"");
        scene.rig.world(&packet);
    }
    scene.rig.at_guest();
    scene.guest(0, &hello(NAME)[..20], 0);
    let (_, told) = scene.rig.at_guest().pop().expect("an acknowledgement");
    assert_eq!(told[40..48], time(5_000, 700)[..8], "its first octets");
    assert_eq!(told[44..48], 5_000u32.to_be_bytes());
}
