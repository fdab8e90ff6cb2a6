//! What RFC 4787 and its companions ask of a NAT beside the translation of flows.
use slipgate_abi::{Refusal, tcp::Flags};
use slipgate_model::MappingCounts;
use slipgate_policy::Filtering;

use super::{mappings::*, *};

/// A port of the guest's.
const PORT: u16 = 5_001;

/// RFC 5382 REQ-6 asks for the same.
#[test]
fn rfc4787_req_10_what_protocols_say_about_addresses_is_left_as_it_is() {
    for family in families() {
        let mut rig = Rig::with(setup());
        let said = format!(
            "REGISTER sip:{} Contact: {}:{PORT}",
            family.peer, family.guest
        );
        let sip = (family.peer, 5_060);
        rig.guest(1, &udp((family.guest, 5_060), sip, said.as_bytes()));
        let sent = rig.at_world().pop().expect("it goes out");
        assert!(read(&sent).ip.payload().ends_with(said.as_bytes()));
        // FTP: what follows the handshake is the kernel's to translate.
        let (guest, ftp) = ((family.guest, 40_000), (family.peer, 21));
        rig.guest(1, &syn(guest, ftp, 7));
        let sent = rig.at_world().pop().expect("it goes out");
        let nat = (family.nat, read(&sent).transport.ports().unwrap().0);
        rig.world(&syn_ack(ftp, nat, 9_000, 8));
        let told = format!("EPRT |1|{}|{PORT}|\r\n", family.guest);
        let data = tcp(guest, ftp, Flags::ACK, 8, 9_001, &[], told.as_bytes());
        assert_eq!(rig.guest(1, &data), Handling::Fast);
        let sent = rig.at_world().pop().expect("it goes out");
        assert!(read(&sent).ip.payload().ends_with(told.as_bytes()));
        // Nobody is let in by what was said.
        for port in [PORT, 5_060] {
            rig.world(&udp((family.peer, 9), (family.nat, port), b"x"));
            rig.world(&syn((family.peer, 20), (family.nat, port), 1));
        }
        assert_eq!(rig.flows(), 2, "{family:?}");
    }
}

#[test]
fn rfc4787_req_11_mapping_and_filtering_are_the_same_under_load() {
    for family in families() {
        let [other, stranger] = family.others();
        let mut rig = Rig::with(mapped(Filtering::AddressDependent));
        let own = sent_by(&mut rig, family, 1, PORT, family.server());
        // Until no port is left to it, or to the others.
        for row in [1, 2, 3] {
            for port in 6_000..6_020 {
                rig.guest(row, &udp((family.guest, port), family.server(), b"x"));
            }
        }
        assert!(rig.refused(1, Refusal::PortsExhausted) > 0);
        assert_eq!(sent_by(&mut rig, family, 1, PORT, (other, 9)), own);
        rig.at_guest();
        for (from, is_let_in) in [(family.peer, true), (other, true), (stranger, false)] {
            rig.world(&udp((from, 7_777), own, b"y"));
            assert_eq!(got(&mut rig).is_some(), is_let_in, "{family:?} {from}");
        }
    }
}

#[test]
fn rfc7857_section_6_each_protocol_has_mappings_of_its_own() {
    for family in families() {
        let mut rig = Rig::with(mapped(Filtering::EndpointIndependent));
        let by_udp = sent_by(&mut rig, family, 1, PORT, family.server());
        rig.guest(1, &syn((family.guest, PORT), family.server(), 7));
        rig.at_world();
        let mappings = rig.tell(|engine| engine.inventory(0)).mappings;
        let counts = MappingCounts {
            udp: 1,
            tcp: 1,
            open: 2,
        };
        assert_eq!(mappings, [("vm1".into(), counts)], "{family:?}");
        // All ports serve each protocol: ten guests' ports have one of ten by both.
        let [_, stranger] = family.others();
        rig.at_guest();
        rig.world(&udp((stranger, 5_000), by_udp, b"y"));
        let to = Some((1, (stranger, 5_000), (family.guest, PORT)));
        assert_eq!(got(&mut rig), to);
    }
}
