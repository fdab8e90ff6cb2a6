//! Endpoint-independent mappings, what the world may send to them, and hairpins.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{DropReason, Handover, Ip6, Refusal, VmRow};
use slipgate_model::MappingCounts;
use slipgate_policy::{Filtering, Mapping, NatBehaviour, NatSettings};

use super::*;
use crate::{clock::SECOND_NS, datapath::Tables as _, ndp, state::Forward};

const PORTS: std::ops::RangeInclusive<u16> = 50_000..=50_009;
/// Port of a guest, of a second one, and a forward's.
const ONE: u16 = 5_001;
const OTHER: u16 = 5_003;
const FORWARDED: u16 = 8_080;

pub(super) fn mapped(filtering: Filtering) -> Setup {
    let mapped = NatBehaviour {
        mapping: Mapping::EndpointIndependent,
        filtering,
        hairpin: true,
    };
    Setup {
        nat: NatSettings {
            udp: mapped,
            tcp: mapped,
        },
        eim_ports: Some(PORTS),
        ..setup()
    }
}

impl Family {
    /// Another peer, and somebody to whom no guest has sent.
    pub(super) fn others(&self) -> [IpAddr; 2] {
        let others = match self.version {
            Version::V4 => ["198.51.100.8", "203.0.113.9"],
            Version::V6 => ["2001:db8:f::8", "2001:db8:99::9"],
        };
        others.map(|address| address.parse().unwrap())
    }
}

/// Source and destination of a packet.
fn ends(packet: &[u8]) -> (End, End) {
    let packet = read(packet);
    let (source, destination) = packet.transport.ports().unwrap();
    (
        (packet.ip.source, source),
        (packet.ip.destination, destination),
    )
}

/// Sends a datagram of a guest, which goes out. Returns the translated address.
pub(super) fn sent_by(rig: &mut Rig, family: Family, row: u16, port: u16, to: End) -> End {
    rig.at_world();
    rig.guest(row, &udp((family.guest, port), to, b"x"));
    let sent = rig.at_world().pop().expect("the datagram goes out");
    ends(&sent).0
}

/// Takes the packet that arrived at a guest, with its VM's row and its ends.
pub(super) fn got(rig: &mut Rig) -> Option<(u32, End, End)> {
    let (vm, packet) = rig.at_guest().pop()?;
    let (from, to) = ends(&packet);
    Some((vm - 100, from, to))
}

fn open_ports(rig: &Rig) -> (usize, usize) {
    let kernel = rig.kernel.borrow();
    (kernel.forwards.len(), kernel.forwards6.len())
}

#[test]
fn rfc4787_req_1_each_family_has_ports_that_every_destination_sees() {
    let mut rig = Rig::with(mapped(Filtering::AddressAndPortDependent));
    for family in families() {
        let first = sent_by(&mut rig, family, 1, ONE, family.server());
        assert_eq!(first.0, family.nat);
        assert!(PORTS.contains(&first.1), "a port of the range of its own");
        assert_eq!(first.1 % 2, ONE % 2, "the parity is kept (REQ-4)");
        let [other, stranger] = family.others();
        for to in [(other, 3_478), (family.peer, 9), (stranger, 5_000)] {
            assert_eq!(sent_by(&mut rig, family, 1, ONE, to), first);
        }
        let second = sent_by(&mut rig, family, 1, OTHER, family.server());
        assert_ne!(second, first, "another port");
        let theirs = sent_by(&mut rig, family, 2, ONE, family.server());
        assert_ne!(theirs, first, "another guest");
        assert_eq!(
            rig.world(&udp(family.server(), first, b"y")),
            Handling::Fast
        );
        assert_eq!(
            got(&mut rig),
            Some((1, family.server(), (family.guest, ONE)))
        );
    }
    rig.assert_paired();
    // The families have their ports each for themselves.
    let mappings = rig.tell(|engine| engine.inventory(0)).mappings;
    let udp = |udp| MappingCounts {
        udp,
        ..MappingCounts::default()
    };
    assert_eq!(mappings, [("vm1".into(), udp(4)), ("vm2".into(), udp(2))]);
    assert_eq!(open_ports(&rig), (0, 0));
}

#[test]
fn rfc4787_req_8_each_filtering_holds_for_either_family() {
    for family in families() {
        let [other, stranger] = family.others();
        let strangers = [(family.peer, 9), (other, 3_478), (stranger, 5_000)];
        for (filtering, let_in) in [
            (Filtering::AddressAndPortDependent, 0),
            (Filtering::AddressDependent, 1),
            (Filtering::EndpointIndependent, 3),
        ] {
            let mut rig = Rig::with(mapped(filtering));
            let own = sent_by(&mut rig, family, 1, ONE, family.server());
            for (at, stranger) in strangers.into_iter().enumerate() {
                rig.world(&udp(stranger, own, b"y"));
                let is_in = got(&mut rig).is_some();
                assert_eq!(is_in, at < let_in, "{family:?} {filtering:?} {at}");
            }
            if let_in > 0 {
                assert_eq!(
                    rig.world(&udp(strangers[0], own, b"y")),
                    Handling::Fast,
                    "the kernel translates what follows"
                );
                assert_eq!(
                    rig.guest(1, &udp((family.guest, ONE), strangers[0], b"z")),
                    Handling::Fast
                );
            }
            rig.assert_paired();
            // Strangers do not keep the port open.
            rig.pass(700 * SECOND_NS);
            rig.assert_empty();
            assert_eq!(open_ports(&rig), (0, 0));
        }
    }
}

#[test]
fn who_sends_to_a_mapping_is_judged_by_the_rules_of_either_family() {
    for family in families() {
        let [_, stranger] = family.others();
        let mut rig = Rig::with(mapped(Filtering::EndpointIndependent));
        let own = sent_by(&mut rig, family, 1, ONE, family.server());
        rig.world(&udp((family.private, 5_000), own, b"y"));
        assert_eq!(got(&mut rig), None);
        assert_eq!(rig.refused(1, Refusal::Protected), 1, "{family:?}");
        rig.world(&udp((stranger, 5_000), own, b"y"));
        assert_eq!(
            got(&mut rig),
            Some((1, (stranger, 5_000), (family.guest, ONE)))
        );
    }
}

#[test]
fn a_successor_keeps_the_ports_of_either_family_and_who_may_send_to_them() {
    let setup = mapped(Filtering::EndpointIndependent);
    for family in families() {
        let [other, stranger] = family.others();
        for in_steps in [false, true] {
            let mut rig = Rig::with(mapped(Filtering::EndpointIndependent));
            let own = sent_by(&mut rig, family, 1, ONE, family.server());
            let resting = sent_by(&mut rig, family, 1, OTHER, family.server());
            let mut rig = match in_steps {
                true => rig.restart_in_steps(&setup),
                false => rig.restart(&setup).0,
            };
            assert_eq!(sent_by(&mut rig, family, 1, ONE, (other, 9)), own);
            rig.world(&udp((stranger, 5_000), own, b"y"));
            assert_eq!(
                got(&mut rig),
                Some((1, (stranger, 5_000), (family.guest, ONE)))
            );
            rig.world(&udp((stranger, 5_000), resting, b"y"));
            assert_eq!(
                got(&mut rig),
                Some((1, (stranger, 5_000), (family.guest, OTHER)))
            );
            rig.engine.finish_adoption().unwrap();
            rig.assert_paired();
        }
        // An entry that nobody's mapping has goes.
        let rig = Rig::with(mapped(Filtering::EndpointIndependent));
        {
            let mut kernel = rig.kernel.borrow_mut();
            kernel.forwards.insert((NAT, 50_001, 17), (1, 101));
            let six = (Ip6::from(NAT6), 50_001, 17);
            kernel.forwards6.insert(six, (1, 101));
            let routed = (Ip6::from(NAT6), 0, 58);
            kernel.forwards6.insert(routed, (1, 101));
        }
        let (rig, _) = rig.restart(&setup);
        assert_eq!(open_ports(&rig), (0, 1), "that of a routed prefix stays");
    }
}

#[test]
fn rfc4787_req_9_guests_reach_each_other_by_either_family() {
    for family in families() {
        let mut rig = Rig::with(mapped(Filtering::EndpointIndependent));
        let one = sent_by(&mut rig, family, 1, ONE, family.server());
        let other = sent_by(&mut rig, family, 2, OTHER, family.server());
        let hello = udp((family.guest, ONE), other, b"hello");
        assert_eq!(rig.guest(1, &hello), Handling::Engine(Handover::Miss));
        assert_eq!(got(&mut rig), Some((2, one, (family.guest, OTHER))));
        assert!(rig.at_world().is_empty(), "nothing leaves by the uplink");
        assert_eq!(rig.flows(), 4, "the sender's and the receiver's");
        rig.guest(2, &udp((family.guest, OTHER), one, b"answer"));
        assert_eq!(got(&mut rig), Some((1, other, (family.guest, ONE))));
        assert_eq!(rig.guest(1, &hello), Handling::Engine(Handover::Verdict));
        assert_eq!(got(&mut rig), Some((2, one, (family.guest, OTHER))));
        // To its own mapping, from the port itself: one flow is both ends.
        rig.guest(1, &udp((family.guest, ONE), one, b"loop"));
        assert_eq!(got(&mut rig), Some((1, one, (family.guest, ONE))));
        // A port of the host that leads nowhere stays the host's.
        rig.guest(1, &udp((family.guest, ONE), (family.nat, 50_100), b"x"));
        assert_eq!(rig.refused(1, Refusal::Protected), 1);
        rig.assert_paired();
        rig.pass(302 * SECOND_NS);
        rig.assert_empty();
    }
}

#[test]
fn rfc4787_req_9_a_hole_is_punched_through_the_strictest_filtering_of_either_family() {
    for family in families() {
        let mut rig = Rig::with(mapped(Filtering::AddressAndPortDependent));
        let one = sent_by(&mut rig, family, 1, ONE, family.server());
        let other = sent_by(&mut rig, family, 2, OTHER, family.server());
        rig.guest(1, &udp((family.guest, ONE), other, b"punch"));
        assert_eq!(got(&mut rig), None, "the other has not sent yet");
        assert_eq!(rig.dropped(2, DropReason::NoFlow), 1);
        rig.guest(2, &udp((family.guest, OTHER), one, b"punch"));
        assert_eq!(got(&mut rig), Some((1, other, (family.guest, ONE))));
        rig.guest(1, &udp((family.guest, ONE), other, b"punch"));
        assert_eq!(got(&mut rig), Some((2, one, (family.guest, OTHER))));
        assert_eq!(rig.flows(), 4, "each has opened one");
        rig.assert_paired();
    }
}

#[test]
fn a_connection_and_a_forward_turn_back_in_by_either_family() {
    for family in families() {
        let any = family.version.unspecified();
        let mut rig = Rig::with(Setup {
            forwards: vec![Forward {
                protocol: slipgate_abi::Protocol::Tcp,
                host: any,
                host_port: FORWARDED,
                vm: VmId::new(102),
                vm_row: VmRow::new(2),
                guest_port: 80,
                rule: slipgate_abi::RuleIndex::new(12),
                is_own: false,
            }],
            ..mapped(Filtering::EndpointIndependent)
        });
        let (client, host) = ((family.guest, ONE), (family.nat, FORWARDED));
        rig.guest(1, &syn(client, host, 7));
        let (row, from, to) = got(&mut rig).expect("the SYN comes in");
        assert_eq!((row, from.0, to), (2, family.nat, (family.guest, 80)));
        assert!(PORTS.contains(&from.1));
        rig.guest(2, &syn_ack((family.guest, 80), from, 900, 8));
        assert_eq!(got(&mut rig), Some((1, host, client)));
        assert_eq!(rig.flows(), 2);
        rig.assert_paired();
    }
}

#[test]
fn vms_with_pools_have_their_mappings_at_their_address_of_either_family() {
    let mut rig = Rig::with(Setup {
        nat_addresses: &["192.0.2.16/30", "2001:db8:1::10/126"],
        ..mapped(Filtering::EndpointIndependent)
    });
    for family in families() {
        let [other, stranger] = family.others();
        let one = sent_by(&mut rig, family, 1, ONE, family.server());
        assert_ne!(one.0, family.nat, "an address of the pool");
        assert_eq!(sent_by(&mut rig, family, 1, ONE, (other, 9)), one);
        rig.world(&udp((stranger, 5_000), one, b"y"));
        assert_eq!(
            got(&mut rig),
            Some((1, (stranger, 5_000), (family.guest, ONE)))
        );
        let theirs = sent_by(&mut rig, family, 2, OTHER, family.server());
        rig.guest(1, &udp((family.guest, ONE), theirs, b"hello"));
        assert_eq!(got(&mut rig), Some((2, one, (family.guest, OTHER))));
    }
    rig.assert_paired();
}

#[test]
fn a_mapping_leads_to_the_guests_address_that_has_it() {
    let [_, family] = families();
    let [_, stranger] = family.others();
    let mut rig = Rig::with(mapped(Filtering::EndpointIndependent));
    let own = sent_by(&mut rig, family, 1, ONE, family.server());
    // The guest uses another of its addresses since.
    let row = rig.engine.core.nat.datapath.vm6(VmRow::new(1)).unwrap();
    let second: Ip6 = "fd00:0:0:2::99"
        .parse::<std::net::Ipv6Addr>()
        .unwrap()
        .into();
    let now_ns = rig.kernel.borrow().now_ns;
    ndp::addresses::bind(row, second.into(), now_ns + 1);
    rig.world(&udp((stranger, 5_000), own, b"y"));
    assert_eq!(
        got(&mut rig),
        Some((1, (stranger, 5_000), (family.guest, ONE)))
    );
    // The same port of that address is another one.
    let second = Family {
        guest: IpAddr::V6(second.into()),
        ..family
    };
    let theirs = sent_by(&mut rig, second, 1, ONE, family.server());
    assert_ne!(theirs, own);
    rig.world(&udp((stranger, 5_001), theirs, b"y"));
    assert_eq!(
        got(&mut rig),
        Some((1, (stranger, 5_001), (second.guest, ONE)))
    );
}

#[test]
fn without_translation_every_destination_sees_the_guests_port_and_only_peers_may_answer() {
    let [_, six] = families();
    let family = Family {
        nat: six.guest,
        ..six
    };
    let mut rig = Rig::with(Setup {
        is_routed: true,
        ..mapped(Filtering::EndpointIndependent)
    });
    let prefix: std::net::Ipv6Addr = "fd00:0:0:2::".parse().unwrap();
    let key = (Ip6::from(prefix), 0, 58);
    rig.kernel.borrow_mut().forwards6.insert(key, (1, 101));
    let [other, stranger] = family.others();
    // A port of the range, too.
    for port in [ONE, *PORTS.start()] {
        let own = (family.guest, port);
        for to in [family.server(), (other, 3_478)] {
            assert_eq!(sent_by(&mut rig, family, 1, port, to), own);
        }
        let from = (stranger, 5_000);
        let way = rig.world(&udp(from, own, b"y"));
        assert_eq!(way, Handling::Dropped(DropReason::NoFlow));
    }
    assert_eq!(rig.engine.core.nat.flows.mappings.len(), 0);
    // It has no translated address, so the host's are the host's.
    rig.guest(1, &udp((family.guest, ONE), (six.nat, 50_000), b"x"));
    assert_eq!(rig.refused(1, Refusal::Protected), 1);
    assert_eq!(open_ports(&rig), (0, 1));
    rig.pass(302 * SECOND_NS);
    rig.assert_empty();
}

#[test]
fn a_guest_with_the_hosts_own_address_has_no_mapping_by_it() {
    let [_, family] = families();
    // The prefix of the guests is that of the uplink.
    let mut rig = Rig::with(Setup {
        ipv6: Some("2001:db8:1::/64".parse().unwrap()),
        ..mapped(Filtering::EndpointIndependent)
    });
    let row = rig.engine.core.nat.datapath.vm6(VmRow::new(1)).unwrap();
    let now_ns = rig.kernel.borrow().now_ns;
    ndp::addresses::bind(row, NAT6, now_ns);
    rig.guest(1, &udp((family.nat, ONE), family.server(), b"x"));
    assert_eq!(rig.engine.core.nat.flows.mappings.len(), 0);
    rig.pass(302 * SECOND_NS);
    rig.assert_empty();
}

#[test]
fn rfc4787_req_1_a_host_with_two_prefixes_shows_one_address_for_a_guests_port() {
    // A pool of the other family does not choose.
    for nat_addresses in [&[][..], &["192.0.2.1"]] {
        a_host_with_two_prefixes(nat_addresses);
    }
}

fn a_host_with_two_prefixes(nat_addresses: &'static [&'static str]) {
    let [_, family] = families();
    let [_, stranger] = family.others();
    let mut rig = Rig::with(Setup {
        nat_addresses,
        ..mapped(Filtering::EndpointIndependent)
    });
    let near: IpAddr = "2001:db8:99::1".parse().unwrap();
    let mut network = network_of_both();
    add_addresses(
        &mut network,
        [near, "fd00:1::1".parse().unwrap()].into_iter(),
    );
    rig.follow(network.clone());
    let first = sent_by(&mut rig, family, 1, ONE, family.server());
    assert_eq!(first.0, family.nat);
    // RFC 6724 rule 8 would choose the address with the longer common prefix.
    let fresh = sent_by(&mut rig, family, 1, OTHER, (stranger, 9));
    assert_eq!(fresh.0, near);
    assert_eq!(sent_by(&mut rig, family, 1, ONE, (stranger, 9)), first);
    assert_eq!(sent_by(&mut rig, family, 1, OTHER, family.server()), fresh);
    // A flow that has not the source that its route gives follows the routes as the others do.
    let next_hops = |rig: &Rig| {
        let kernel = rig.kernel.borrow();
        let slots = kernel.slots_in_use().into_iter();
        slots
            .map(|slot| kernel.slot(slot).next_hop().load(Relaxed))
            .collect::<Vec<_>>()
    };
    let before = next_hops(&rig);
    assert_eq!(before, [before[0]; 4]);
    let mut moved = network.clone();
    moved.routes.routes.last_mut().unwrap().gateway = Some("fe80::2".parse().unwrap());
    rig.follow(moved);
    rig.pass(SECOND_NS);
    let after = next_hops(&rig);
    assert_eq!(after, [after[0]; 4]);
    assert_ne!(after, before);
    assert_eq!(rig.flows(), 4);
    // An address that the host loses is nobody's.
    rig.follow(network_of_both());
    rig.pass(SECOND_NS);
    let second = sent_by(&mut rig, family, 1, OTHER, family.server());
    assert_eq!(second.0, family.nat);
    rig.assert_paired();
}
