//! Frames for guests that have sent nothing yet.
use slipgate_abi::VmRef;
use slipgate_model::OnExit;

use super::{
    changes::tcp_of,
    forwards::{HTTP, with_forwards},
    rig::*,
};
use crate::{clock::SECOND_NS, port::VirtioNetHdr};

const MAC: [u8; 6] = [0x02, 0, 0, 0, 7, 7];
/// Length of an ARP message, bytes.
const ARP_LEN: usize = 28;

/// A rig with forwards to a guest that has sent nothing, and that was not asked yet.
fn with_silent_guest() -> Rig {
    let mut rig = with_forwards(Setup::default());
    rig.turn();
    let vm = rig.kernel.borrow().vm(1);
    // SAFETY: a live row; one thread.
    unsafe { (*vm.as_ptr()).guest_mac = VmRef::UNKNOWN_MAC };
    rig.at_guest();
    rig
}

/// What the guest received: ARP requests for its MAC, and sequence numbers of segments.
fn received(rig: &mut Rig) -> (usize, Vec<u32>) {
    let all = rig.at_guest();
    let (asked, others): (Vec<_>, Vec<_>) = all.iter().partition(|(_, l3)| l3.len() == ARP_LEN);
    let sequences = others.iter().map(|(_, l3)| tcp_of(l3).sequence);
    (asked.len(), sequences.collect())
}

/// The guest's answer to who has its address.
fn answer(rig: &mut Rig) {
    let gateway = [0x02, 0, 0, 0, 2, 2];
    let ethernet = [&gateway[..], &MAC, &[0x08, 0x06]].concat();
    let of_ipv4 = [0, 1, 8, 0, 6, 4, 0, 2];
    let (sender, target) = (
        [&MAC[..], &GUEST.octets].concat(),
        [&gateway[..], &GATEWAY.octets],
    );
    let frame = [&ethernet[..], &of_ipv4, &sender, &target.concat()].concat();
    let vnet = VirtioNetHdr::default();
    rig.kernel.borrow_mut().guest_sends_frame(1, vnet, &frame);
    rig.turn();
}

#[test]
fn a_connection_waits_for_the_guests_answer_to_arp_and_not_for_its_clients_second_syn() {
    let mut rig = with_silent_guest();
    rig.world(&syn(SERVER, HTTP, 5_000));
    assert_eq!(received(&mut rig), (1, vec![]), "asked at once");
    rig.world(&syn((PEER, 444), HTTP, 6_000));
    assert_eq!((rig.flows(), received(&mut rig)), (2, (0, vec![])));
    answer(&mut rig);
    assert_eq!(received(&mut rig), (0, vec![5_000, 6_000]));
    rig.world(&syn((PEER, 445), HTTP, 7_000));
    assert_eq!(received(&mut rig), (0, vec![7_000]));
    rig.assert_paired();
}

#[test]
fn a_guest_that_does_not_answer_is_asked_again_and_then_sent_what_waited() {
    let mut rig = with_silent_guest();
    rig.world(&syn(SERVER, HTTP, 5_000));
    rig.pass(2 * SECOND_NS - 1);
    let (asked, sequences) = received(&mut rig);
    assert!((8..=10).contains(&asked), "{asked}");
    assert!(sequences.is_empty());
    rig.pass(1);
    assert_eq!(received(&mut rig).1, [5_000]);
    assert!(rig.engine.core.unaddressed.is_empty());
}

#[test]
fn what_waits_when_the_engine_stops_is_sent() {
    let mut rig = with_silent_guest();
    rig.world(&syn(SERVER, HTTP, 5_000));
    rig.send(|engine| engine.stop(OnExit::Keep));
    assert_eq!(rig.run().unwrap(), OnExit::Keep);
    assert_eq!(received(&mut rig).1, [5_000]);
}
