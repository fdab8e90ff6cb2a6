//! SYNs on ports that their server may have in TIME-WAIT.
use slipgate_abi::{DropReason, Handover, tcp::Flags};

use super::*;
use crate::clock::SECOND_NS;

/// Timestamps, and nothing else.
const TIMESTAMPS: [u8; 12] = [1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 0];
/// Sequence numbers of the former connection that the server's challenge has.
const OLD: (u32, u32) = (500, 777);

/// A rig whose one port toward the peer rests: VM 1's connection was closed by its server first.
fn rested(family: Family) -> Rig {
    let mut rig = Rig::with(Setup {
        nat_ports: 61_000..=61_000,
        ..setup()
    });
    let (guest, server) = ((family.guest, 40_000), family.server());
    let nat = rig.connect_to(family, 40_000, 1);
    rig.world(&ack(server, nat, Flags::FIN, 2, 2));
    rig.guest(1, &ack(guest, server, Flags::FIN, 2, 3));
    rig.world(&ack(server, nat, 0, 3, 3));
    rig.pass(SECOND_NS);
    rig.at_world();
    rig.at_guest();
    rig
}

/// Sends a SYN of VM 1. Returns what the world gets, and the translated end.
fn ask(rig: &mut Rig, family: Family, port: u16) -> (Vec<u8>, End) {
    let guest = (family.guest, port);
    let syn = tcp(guest, family.server(), Flags::SYN, 7, 0, &TIMESTAMPS, &[]);
    rig.guest(1, &syn);
    let sent = rig.at_world().pop().expect("the SYN goes out");
    let nat = (family.nat, read(&sent).transport.ports().unwrap().0);
    (sent, nat)
}

#[test]
fn a_server_that_has_the_port_in_time_wait_is_reset_and_asked_again_at_once() {
    for family in families() {
        let mut rig = rested(family);
        let (sent, nat) = ask(&mut rig, family, 40_001);
        let server = family.server();
        assert_eq!(nat.1, 61_000, "the port that rests");

        let dropped = rig.dropped(1, DropReason::NoFlow);
        let challenge = ack(server, nat, 0, OLD.0, OLD.1);
        let handled = rig.world(&challenge);
        assert_eq!(handled, Handling::Engine(Handover::Challenge), "{family:?}");
        assert_eq!(rig.at_guest(), [], "it is the engine's to answer");
        assert_eq!(rig.dropped(1, DropReason::NoFlow), dropped + 1);
        let [reset, again] = &rig.at_world()[..] else {
            panic!("a reset and the SYN are due");
        };
        let Transport::Tcp(tcp) = read(reset).transport else {
            panic!("{reset:02x?}");
        };
        assert_eq!((tcp.flags, tcp.sequence), (Flags::RST, OLD.1));
        assert_eq!(again, &sent, "the same SYN, with its options");

        let guest = (family.guest, 40_001);
        assert_eq!(rig.world(&syn_ack(server, nat, 9_000, 8)), Handling::Fast);
        let opened = rig.guest(1, &ack(guest, server, 0, 8, 9_001));
        assert_eq!(opened, Handling::Fast);
        assert_eq!(rig.world(&ack(server, nat, 0, 9_001, 8)), Handling::Fast);
        assert_eq!(rig.at_guest().len(), 2, "an open connection");
        rig.assert_paired();
    }
}

#[test]
fn a_second_challenge_is_the_guests_to_answer() {
    for family in families() {
        let mut rig = rested(family);
        let (_, nat) = ask(&mut rig, family, 40_001);
        let challenge = ack(family.server(), nat, 0, OLD.0, OLD.1);
        rig.world(&challenge);
        assert_eq!((rig.at_world().len(), rig.at_guest().len()), (2, 0));
        rig.world(&challenge);
        assert_eq!((rig.at_world().len(), rig.at_guest().len()), (0, 1));
        // Its reset goes the way that it always went, and so does its next SYN.
        let guest = (family.guest, 40_001);
        let reset = tcp(guest, family.server(), Flags::RST, OLD.1, 0, &[], &[]);
        assert_eq!(rig.guest(1, &reset), Handling::Fast);
        assert_eq!(rig.at_world().len(), 1);
    }
}

#[test]
fn a_challenge_on_a_port_that_did_not_rest_is_the_guests_to_answer() {
    for family in families() {
        let mut rig = Rig::with(setup());
        let (_, nat) = ask(&mut rig, family, 40_001);
        rig.world(&ack(family.server(), nat, 0, OLD.0, OLD.1));
        let got = rig.at_guest();
        assert_eq!((rig.at_world().len(), got.len()), (0, 1));
        let Transport::Tcp(tcp) = read(&got[0].1).transport else {
            panic!("{got:02x?}");
        };
        assert_eq!((tcp.flags, tcp.acknowledgement), (Flags::ACK, OLD.1));
    }
}
