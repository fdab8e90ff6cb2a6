//! Flows: their opening, packets and end.
use std::{
    collections::HashSet,
    net::{IpAddr, SocketAddr},
};

use slipgate_abi::{DropReason, Handover, VmRow, tcp::Flags, vm6::GUEST_ADDRESSES};
use slipgate_model::Subject;

use super::*;
use crate::{
    clock::{MILLISECOND_NS, SECOND_NS},
    ndp,
    packet::transport,
    record::Events,
};

#[test]
fn a_flow_is_opened_and_its_packets_are_translated_in_the_kernel() {
    for family in families() {
        let mut rig = Rig::with(setup());
        for opener in family.openers(40_000) {
            let way = rig.guest(1, &opener);
            assert_eq!(way, Handling::Engine(Handover::Miss), "{family:?}");
            let sent = rig.at_world().pop().expect("it goes out");
            let (before, after) = (read(&opener), read(&sent));
            assert_eq!(
                (after.ip.source, after.ip.destination),
                (family.nat, family.peer)
            );
            assert_eq!(after.ip.ttl, before.ip.ttl - 1);
            assert_eq!(rig.world(&family.answer(&sent)), Handling::Fast);
            let (vm, came) = rig.at_guest().pop().expect("the answer comes");
            let came = read(&came);
            assert_eq!(
                (vm, came.ip.source, came.ip.destination),
                (101, family.peer, family.guest)
            );
            assert_eq!(came.transport.ports().unwrap().1, 40_000);
        }
        assert_eq!(rig.flows(), 3, "{family:?}");
        rig.assert_paired();
        // Another VM's guest has the same address.
        rig.guest(2, &family.openers(40_000)[1]);
        let theirs = rig.at_world().pop().expect("it goes out");
        rig.world(&family.answer(&theirs));
        assert_eq!(rig.at_guest().pop().unwrap().0, 102);
        rig.pass(8_000 * SECOND_NS);
        rig.assert_empty();
    }
}

#[test]
fn a_repeated_opener_finds_its_flow_and_a_new_connection_takes_the_tuple() {
    for family in families() {
        let mut rig = Rig::with(setup());
        let nat = rig.connect_to(family, 40_000, 7);
        let guest = (family.guest, 40_000);
        rig.guest(1, &syn(guest, family.server(), 7));
        assert_eq!(rig.flows(), 1, "{family:?}");
        rig.guest(1, &syn(guest, family.server(), 70_000));
        rig.pass(SECOND_NS);
        assert_eq!(rig.flows(), 1);
        assert_eq!(rig.records()[0]["end"], "tuple-reused");
        // The new connection has another port: the old one rests.
        let sent = rig.at_world().pop().unwrap();
        assert_ne!(read(&sent).transport.ports().unwrap().0, nat.1);
        rig.assert_paired();
    }
}

#[test]
fn a_closed_connection_ends_and_is_recorded_with_its_addresses() {
    for family in families() {
        let mut rig = Rig::with(Setup {
            events: Events::ALL,
            ..setup()
        });
        let nat = rig.connect_to(family, 40_000, 1);
        let (guest, server) = ((family.guest, 40_000), family.server());
        rig.guest(1, &ack(guest, server, Flags::FIN, 2, 2));
        rig.world(&ack(server, nat, Flags::FIN, 2, 3));
        rig.guest(1, &ack(guest, server, 0, 3, 3));
        rig.pass(300 * SECOND_NS);
        rig.assert_empty();
        let records = rig.records();
        let [start, end] = &records[..] else {
            panic!("{records:?}");
        };
        let text = |(addr, port): End| SocketAddr::new(addr, port).to_string();
        for record in [start, end] {
            assert_eq!(record["proto"], "tcp");
            assert_eq!(record["guest"], text(guest));
            assert_eq!(record["remote"], text(server));
            assert_eq!(record["nat"], text(nat));
        }
        assert_eq!(
            (&end["end"], &end["tcp"]),
            (&"closed".into(), &"closed".into())
        );
    }
}

#[test]
fn an_order_that_fails_or_is_lost_opens_the_flow_by_system_calls() {
    for family in families() {
        let mut rig = Rig::with(setup());
        rig.kernel.borrow().faults.order_fails.set(1);
        rig.guest(1, &family.openers(1)[1]);
        assert_eq!((rig.flows(), rig.at_world().len()), (1, 1), "{family:?}");
        rig.kernel.borrow_mut().faults.orders_lost = 1;
        rig.guest(1, &family.openers(2)[1]);
        assert_eq!((rig.flows(), rig.at_world().len()), (2, 1), "{family:?}");
        rig.assert_paired();
    }
}

#[test]
fn a_syns_mss_is_clamped_to_the_path_of_its_family() {
    for family in families() {
        let mut rig = Rig::with(setup());
        rig.guest(1, &syn((family.guest, 40_000), family.server(), 7));
        let sent = rig.at_world().pop().unwrap();
        let header = read(&sent).ip.payload();
        let (_, at, _) = transport::tcp_options(header).next().unwrap();
        let mss = u16::from_be_bytes([header[at + 2], header[at + 3]]);
        assert_eq!(
            usize::from(mss),
            1_400 - family.header_len() - 20,
            "{family:?}"
        );
    }
}

#[test]
fn each_destination_has_all_ports_of_the_range() {
    for family in families() {
        let mut rig = Rig::with(Setup {
            nat_ports: 61_000..=61_003,
            max_flows: 100,
            ..setup()
        });
        for port in 1..=8 {
            for to in [443, 444] {
                rig.guest(1, &udp((family.guest, port), (family.peer, to), b"x"));
            }
        }
        // Flows that nobody answered may give way.
        let sent = rig.at_world();
        let of = |to: u16| {
            let ports = sent
                .iter()
                .map(|packet| read(packet).transport.ports().unwrap());
            let mut own: Vec<u16> = ports
                .filter(|(_, t)| *t == to)
                .map(|(own, _)| own)
                .collect();
            own.sort_unstable();
            own.dedup();
            own
        };
        assert_eq!(of(443), [61_000, 61_001, 61_002, 61_003], "{family:?}");
        assert_eq!(of(444), of(443), "a port serves each destination");
        rig.assert_paired();
    }
}

#[test]
fn both_ends_of_a_flow_that_is_cut_are_reset() {
    for family in families() {
        let mut rig = Rig::with(setup());
        let nat = rig.connect_to(family, 40_000, 7);
        let vm = Subject::Vm { row: VmRow::new(1) };
        let cut = rig.tell(move |engine| engine.cut(vm)).expect("it is here");
        assert_eq!(cut.flows, 1, "{family:?}");
        let probes = rig.at_guest();
        assert_eq!(probes.len(), 1, "the guest is asked for a segment");
        assert!(matches!(read(&probes[0].1).transport, Transport::Tcp(_)));
        rig.guest(
            1,
            &ack((family.guest, 40_000), family.server(), 0, 8, 9_001),
        );
        let is_reset = |packet: &[u8], to: End| {
            let packet = read(packet);
            let Transport::Tcp(tcp) = packet.transport else {
                return false;
            };
            tcp.has(Flags::RST) && (packet.ip.destination, tcp.destination) == to
        };
        let (to_guest, to_world) = (rig.at_guest(), rig.at_world());
        assert!(
            is_reset(&to_guest[0].1, (family.guest, 40_000)),
            "{family:?}"
        );
        assert!(is_reset(&to_world[0], family.server()));
        assert_eq!(read(&to_world[0]).ip.source, nat.0);
        rig.pass(SECOND_NS);
        rig.assert_empty();
        assert_eq!(rig.records()[0]["end"], "cut");
    }
}

/// An address of the guest that made room for others keeps its flows, also those of which the engine
/// carries each packet.
#[test]
fn an_address_that_made_room_keeps_its_flows() {
    let [_, family] = families();
    let mut rig = Rig::with(setup());
    rig.connect_to(family, 5_000, 7);
    let beyond = |n: u16| -> IpAddr { format!("fd00:0:0:2::1:{n:x}").parse().unwrap() };
    rig.pass(ndp::addresses::MIN_SILENCE_NS);
    for n in 1..GUEST_ADDRESSES as u16 {
        rig.guest(1, &udp((beyond(n), 5_000), (family.gateway, 9), b"x"));
    }
    let row = rig.kernel.borrow().vm6(1);
    let IpAddr::V6(guest) = family.guest else {
        unreachable!("a family of IPv6");
    };
    assert_eq!(row.place_of(guest.into()), None, "it made room");
    // A hop limit that ends here: the engine answers it, as it does for any flow.
    let mut last = ack((family.guest, 5_000), family.server(), 1, 8, 9_001);
    last[7] = 1;
    rig.guest(1, &last);
    assert_eq!(rig.dropped(1, DropReason::Spoofed), 0);
    assert_eq!(rig.dropped(1, DropReason::TtlExpired), 1);
}

#[test]
fn all_clients_of_many_connections_that_are_cut_are_told_at_their_first_repetition() {
    // More than a burst of refusals, and than the probes of a cut.
    const CONNECTIONS: u16 = 3_000;
    for family in families() {
        let mut rig = Rig::with(Setup {
            slots: 16_384,
            max_flows: 4_000,
            ..setup()
        });
        let ports = 40_000..40_000 + CONNECTIONS;
        for port in ports.clone() {
            rig.connect_to(family, port, 7);
        }
        let vm = Subject::Vm { row: VmRow::new(1) };
        let cut = rig.tell(move |engine| engine.cut(vm)).expect("it is here");
        assert_eq!(cut.flows, u64::from(CONNECTIONS), "{family:?}");
        // None answered its probe in time. All were cut in one moment, so all repeat in one.
        rig.pass(200 * MILLISECOND_NS);
        rig.at_guest();
        let mut told = HashSet::new();
        for port in ports {
            let client = (family.guest, port);
            rig.guest(
                1,
                &tcp(client, family.server(), Flags::ACK, 8, 9_001, &[], b"again"),
            );
            let answers = rig.at_guest();
            told.extend(answers.iter().filter_map(|(_, answer)| {
                let packet = read(answer);
                let Transport::Tcp(tcp) = packet.transport else {
                    return None;
                };
                let is_accepted = tcp.has(Flags::RST) && tcp.sequence == 9_001;
                is_accepted.then_some(tcp.destination)
            }));
        }
        assert_eq!(told.len(), usize::from(CONNECTIONS), "{family:?}");
    }
}
