//! Tests of filtering: which tuples are let in from the world, and how that prolongs a flow's life.
use super::rig::*;
use crate::clock::SECOND_NS;

#[test]
fn rfc4787_req_8_only_the_peers_own_tuple_gets_in() {
    let mut rig = Rig::new();
    rig.guest(1, &udp((GUEST, 5_000), SERVER, b"x"));
    let sent = rig.at_world().pop().unwrap();
    let nat = (NAT, u16::from_be_bytes([sent[20], sent[21]]));
    let other_port = (SERVER.0, SERVER.1 + 1);
    let mut elsewhere = SERVER;
    elsewhere.0.octets[3] ^= 1;
    for stranger in [other_port, elsewhere] {
        assert_eq!(rig.world(&udp(stranger, nat, b"y")), Handling::Passed);
    }
    assert!(rig.at_guest().is_empty());
    assert_eq!(rig.world(&udp(SERVER, nat, b"y")), Handling::Fast);
    assert_eq!(rig.at_guest().len(), 1);
}

#[test]
fn rfc4787_req_6_what_comes_in_refreshes_too() {
    let mut rig = Rig::new();
    rig.guest(1, &udp((GUEST, 5_000), SERVER, b"x"));
    let sent = rig.at_world().pop().unwrap();
    let nat = (NAT, u16::from_be_bytes([sent[20], sent[21]]));
    rig.pass(299 * SECOND_NS);
    assert_eq!(rig.world(&udp(SERVER, nat, b"y")), Handling::Fast);
    rig.pass(299 * SECOND_NS);
    assert_eq!(rig.flows(), 1);
    rig.pass(3 * SECOND_NS);
    rig.assert_empty();
}
