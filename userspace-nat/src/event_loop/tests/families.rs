//! What holds for a flow holds for one of either family: each test runs for both.
use std::net::{IpAddr, SocketAddr};

use slipgate_abi::{DropReason, Handover, Refusal, VmId, VmRow, tcp::Flags};
use slipgate_model::{NetworkView, Subject};
use slipgate_policy::{Action, Destination, Name, Rule, wire};

use super::rig::*;
use crate::{
    clock::SECOND_NS,
    dns::{
        NamePolicy,
        chain::tests::{a, aaaa, answer},
    },
    fake::{
        hellos::{self, records},
        initials,
    },
    inspection::quic,
    name_gate::ByRules,
    packet::{Ip, Packet, Transport, Version, transport},
    port::VirtioNetHdr,
    record::{Event, Events},
};

/// Address and port of either family.
type End = (IpAddr, u16);

/// The addresses of a family.
#[derive(Clone, Copy, Debug)]
struct Family {
    version: Version,
    guest: IpAddr,
    gateway: IpAddr,
    nat: IpAddr,
    peer: IpAddr,
    /// Type and code of ICMP errors: unreachable by prohibition, and time exceeded.
    prohibited: [u8; 2],
    expired: [u8; 2],
    /// Space that is protected.
    private: IpAddr,
}

fn families() -> [Family; 2] {
    [
        Family {
            version: Version::V4,
            guest: GUEST.into(),
            gateway: GATEWAY.into(),
            nat: NAT.into(),
            peer: PEER.into(),
            prohibited: [3, 13],
            expired: [11, 0],
            private: "10.1.2.3".parse().unwrap(),
        },
        Family {
            version: Version::V6,
            guest: GUEST6.into(),
            gateway: "fd00:0:0:2::1".parse().unwrap(),
            nat: NAT6.into(),
            peer: PEER6.into(),
            prohibited: [1, 1],
            expired: [3, 0],
            private: "fd00:77::3".parse().unwrap(),
        },
    ]
}

impl Family {
    fn server(&self) -> End {
        (self.peer, 443)
    }

    fn header_len(&self) -> usize {
        self.version.header_len()
    }

    /// The kinds of packets that open flows from this port of the guest, or with this query id.
    fn openers(&self, port: u16) -> [Vec<u8>; 3] {
        [
            syn((self.guest, port), self.server(), 7),
            udp((self.guest, port), self.server(), b"x"),
            echo(self.guest, self.peer, true, port, b"x"),
        ]
    }

    /// What the peer answers to a translated opener.
    fn answer(&self, sent: &[u8]) -> Vec<u8> {
        let packet = read(sent);
        let ports = packet.transport.ports().unwrap();
        let nat = (packet.ip.source, ports.0);
        match packet.transport {
            Transport::Tcp(tcp) => syn_ack(self.server(), nat, 9_000, tcp.sequence + 1),
            Transport::Udp(_) => udp(self.server(), nat, b"y"),
            _ => echo(self.peer, packet.ip.source, false, ports.0, b"x"),
        }
    }
}

fn setup() -> Setup {
    Setup {
        ipv6: Some("fd00:0:0:2::/64".parse().unwrap()),
        ..Setup::default()
    }
}

fn read(packet: &[u8]) -> Packet<'_> {
    assert!(is_right(packet), "{packet:02x?}");
    Packet::parse(Ip::parse(packet).unwrap()).unwrap()
}

/// Type and code of the ICMP message in a packet.
fn icmp(packet: &[u8]) -> [u8; 2] {
    let payload = read(packet).ip.payload();
    [payload[0], payload[1]]
}

impl Rig {
    /// Opens a connection of VM 1. Returns its end on the uplink.
    fn connect_to(&mut self, family: Family, port: u16, isn: u32) -> End {
        let guest = (family.guest, port);
        self.guest(1, &syn(guest, family.server(), isn));
        let sent = self.at_world().pop().expect("the SYN goes out");
        let nat = (family.nat, read(&sent).transport.ports().unwrap().0);
        let back = syn_ack(family.server(), nat, 9_000, isn + 1);
        assert_eq!(self.world(&back), Handling::Fast);
        let answer = ack(guest, family.server(), 0, isn + 1, 9_001);
        assert_eq!(self.guest(1, &answer), Handling::Fast);
        self.at_world();
        self.at_guest();
        nat
    }
}

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
fn an_error_from_the_world_is_translated_inward() {
    for family in families() {
        let mut rig = Rig::with(setup());
        let router: IpAddr = match family.version {
            Version::V4 => "203.0.113.9".parse().unwrap(),
            Version::V6 => "2001:db8:99::9".parse().unwrap(),
        };
        for opener in family.openers(5_000) {
            rig.guest(1, &opener);
            let sent = rig.at_world().pop().unwrap();
            let [kind, code] = family.expired;
            let error = icmp_error(router, family.nat, kind, code, &sent);
            assert_eq!(
                rig.world(&error),
                Handling::Engine(Handover::Icmp),
                "{family:?}"
            );
            let (vm, got) = rig.at_guest().pop().expect("the error arrives");
            assert_eq!((vm, icmp(&got)), (101, family.expired));
            let outer = read(&got);
            assert_eq!(
                (outer.ip.source, outer.ip.destination),
                (router, family.guest)
            );
            // What is quoted is what the guest sent, but for the TTL that it had on its way, and a
            // SYN's clamped MSS.
            let quoted = with_ttl(outer.ip.payload()[8..].to_vec(), read(&opener).ip.ttl);
            match read(&quoted).transport {
                Transport::Tcp(tcp) => assert_eq!((tcp.source, tcp.sequence), (5_000, 7)),
                _ => assert_eq!(quoted, opener),
            }
        }
    }
}

#[test]
fn an_error_of_the_guest_is_translated_outward() {
    for family in families() {
        let mut rig = Rig::with(setup());
        rig.guest(1, &family.openers(5_000)[1]);
        let sent = rig.at_world().pop().unwrap();
        rig.world(&family.answer(&sent));
        let (_, delivered) = rig.at_guest().pop().unwrap();
        let [kind, code] = family.prohibited;
        let error = icmp_error(family.guest, family.peer, kind, code, &delivered);
        assert_eq!(rig.guest(1, &error), Handling::Engine(Handover::Icmp));
        let out = rig.at_world().pop().expect("the error goes out");
        assert_eq!(icmp(&out), family.prohibited);
        let outer = read(&out);
        assert_eq!(
            (outer.ip.source, outer.ip.destination),
            (family.nat, family.peer)
        );
        let quoted = read(&outer.ip.payload()[8..]);
        assert_eq!(quoted.ip.destination, family.nat);
        assert_eq!(
            quoted.transport.ports().unwrap().1,
            read(&sent).transport.ports().unwrap().0
        );
        // To another than the sender of the packet that it is about; and about no flow.
        let elsewhere: IpAddr = "2001:db8:99::9".parse().unwrap();
        if family.version == Version::V6 {
            rig.guest(
                1,
                &icmp_error(family.guest, elsewhere, kind, code, &delivered),
            );
        }
        let never = udp(family.server(), (family.guest, 5_001), b"y");
        rig.guest(
            1,
            &icmp_error(family.guest, family.peer, kind, code, &never),
        );
        assert!(rig.at_world().is_empty());
    }
}

#[test]
fn what_is_too_large_for_the_uplink_has_its_sender_told_the_mtu() {
    for family in families() {
        let mut rig = Rig::with(setup());
        rig.guest(1, &udp((family.guest, 5_000), family.server(), &[7; 1_400]));
        let (_, error) = rig.at_guest().pop().expect("an error");
        let parsed = read(&error);
        assert_eq!(parsed.ip.source, family.gateway);
        let payload = parsed.ip.payload();
        let (expected, mtu) = match family.version {
            Version::V4 => ([3, 4], &payload[6..8]),
            Version::V6 => ([2, 0], &payload[6..8]),
        };
        assert_eq!(icmp(&error), expected, "{family:?}");
        assert_eq!(mtu, 1_400u16.to_be_bytes());
        assert!(error.len() <= family.version.least_mtu() as usize);
        assert_eq!(rig.dropped(1, DropReason::TooBig), 1);
        assert!(rig.at_world().is_empty());
        // From the world, of a flow, for the guest's link.
        rig.guest(1, &udp((family.guest, 5_000), family.server(), b"x"));
        let sent = rig.at_world().pop().unwrap();
        let nat = (family.nat, read(&sent).transport.ports().unwrap().0);
        let large = udp(family.server(), nat, &[1; 1_500]);
        assert_eq!(rig.world(&large), Handling::Engine(Handover::TooBig));
        let error = rig.at_world().pop().expect("an error goes out");
        assert_eq!(icmp(&error), expected);
        let parsed = read(&error);
        assert_eq!(
            (parsed.ip.source, parsed.ip.destination),
            (family.nat, family.peer)
        );
        assert_eq!(parsed.ip.payload()[6..8], 1_500u16.to_be_bytes());
    }
}

#[test]
fn a_used_up_ttl_is_told_by_the_gateway() {
    for family in families() {
        let mut rig = Rig::with(setup());
        for opener in family.openers(5_000) {
            rig.guest(1, &with_ttl(opener, 1));
            let (_, error) = rig.at_guest().pop().expect("an error");
            assert_eq!(
                (icmp(&error), read(&error).ip.source),
                (family.expired, family.gateway)
            );
        }
        assert_eq!(rig.dropped(1, DropReason::TtlExpired), 3, "{family:?}");
        assert_eq!(rig.flows(), 0);
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
fn a_successor_adopts_the_flow_and_its_packets_never_stop() {
    for family in families() {
        let setup = setup();
        let mut rig = Rig::with(setup);
        let nat = rig.connect_to(family, 40_000, 7);
        let setup = self::setup();
        let mut rig = rig.restart_in_steps(&setup);
        let data = ack((family.guest, 40_000), family.server(), 0, 8, 9_001);
        assert_eq!(rig.guest(1, &data), Handling::Fast, "{family:?}");
        let adoption = rig.engine.finish_adoption().unwrap();
        assert_eq!((adoption.live, adoption.dangling), (1, 0));
        rig.assert_paired();
        assert_eq!(
            rig.world(&ack(family.server(), nat, 0, 9_001, 8)),
            Handling::Fast
        );
        // Its port is busy, and its end is as before.
        rig.guest(
            1,
            &ack(
                (family.guest, 40_000),
                family.server(),
                Flags::RST,
                8,
                9_001,
            ),
        );
        rig.pass(600 * SECOND_NS);
        rig.assert_empty();
    }
}

#[test]
fn a_tuple_without_its_flow_is_swept_and_half_a_pair_completed() {
    for family in families() {
        let mut rig = Rig::with(setup());
        rig.connect_to(family, 40_000, 7);
        rig.connect_to(family, 40_001, 7);
        let slots = rig.kernel.borrow().slots_in_use();
        {
            let kernel = &mut *rig.kernel.borrow_mut();
            // One lacks its guest's tuple; the other's slot is free.
            let lost = kernel.guest_tuple(slots[0]);
            kernel.flows.retain(|tuple, _| lost != (*tuple).into());
            kernel.flows6.retain(|tuple, _| lost != (*tuple).into());
            kernel
                .slot(slots[1])
                .set_verdict(slipgate_abi::Verdict::Free);
        }
        let (rig, adoption) = rig.restart(&setup());
        assert_eq!((adoption.live, adoption.dangling), (1, 2), "{family:?}");
        rig.assert_paired();
    }
}

#[test]
fn no_flow_outlives_its_prefix() {
    for other in [None, Some("fd00:0:0:3::/64".parse().unwrap())] {
        // By a start, and by a change while the engine runs.
        let mut rig = Rig::with(setup());
        let [four, six] = families();
        rig.connect_to(four, 40_000, 7);
        rig.connect_to(six, 40_000, 7);
        let now = Setup {
            ipv6: other,
            ..setup()
        };
        let (mut rig, _) = rig.restart(&now);
        rig.pass(SECOND_NS);
        assert_eq!(
            (rig.flows(), rig.kernel.borrow().flows6.len()),
            (1, 0),
            "{other:?}"
        );
        assert_eq!(rig.records()[0]["end"], "prefix");
        rig.assert_paired();

        let mut rig = Rig::with(setup());
        let four_ends = rig.connect_to(four, 40_000, 7);
        rig.connect_to(six, 40_000, 7);
        rig.send(move |engine| engine.set_vm(spec(1, &now)));
        rig.turn();
        rig.pass(SECOND_NS);
        assert_eq!(
            (rig.flows(), rig.kernel.borrow().flows6.len()),
            (1, 0),
            "{other:?}"
        );
        assert_eq!(rig.records()[0]["end"], "prefix");
        assert_eq!(
            rig.world(&ack(four.server(), four_ends, 0, 9_001, 8)),
            Handling::Fast
        );
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

#[test]
fn flows_follow_the_hosts_routes_and_end_with_its_address() {
    let without = |gone: IpAddr, network: NetworkView| {
        let mut network = network;
        let is_gone = |addr: &IpAddr| *addr == gone;
        network
            .routes
            .addresses
            .retain(|of| !is_gone(&of.addr.addr()));
        network.local.host.retain(|addr| !is_gone(addr));
        network
    };
    for (family, other) in families().into_iter().zip(families().into_iter().rev()) {
        let mut rig = Rig::with(setup());
        rig.connect_to(family, 40_000, 7);
        rig.connect_to(other, 40_000, 7);
        let mut moved = network_of_both();
        for route in &mut moved.routes.routes {
            route.gateway = Some(match route.gateway {
                Some(IpAddr::V4(_)) => "192.0.2.253".parse().unwrap(),
                _ => "fe80::2".parse().unwrap(),
            });
        }
        let hops = |rig: &Rig| {
            let kernel = rig.kernel.borrow();
            let slots = kernel.slots_in_use();
            slots
                .into_iter()
                .map(|slot| {
                    let live = kernel.slot(slot);
                    live.next_hop().load(std::sync::atomic::Ordering::Relaxed)
                })
                .collect::<Vec<_>>()
        };
        let before = hops(&rig);
        rig.follow(moved.clone());
        rig.pass(SECOND_NS);
        let after = hops(&rig);
        assert!(
            before.iter().all(|hop| *hop != 0 && !after.contains(hop)),
            "{before:?} {after:?}"
        );
        rig.follow(without(family.nat, moved));
        rig.pass(SECOND_NS);
        assert_eq!(rig.flows(), 1, "{family:?}");
        assert_eq!(rig.records()[0]["end"], "address-gone");
        assert!(
            rig.records()[0]["guest"]
                .as_str()
                .unwrap()
                .contains(&family.guest.to_string())
        );
        rig.assert_paired();
    }
}

/// DNS tells VM 1 that a name has the peer's address.
fn tell(rig: &Rig, family: Family, name: &'static str) {
    let mut dns = ByRules(rig.engine.core.rules.judge.clone());
    let now_ns = rig.kernel.borrow().now_ns;
    let wire = wire(name).unwrap();
    let record = match family.peer {
        IpAddr::V4(addr) => a(name, 60, addr.octets()),
        IpAddr::V6(addr) => aaaa(name, 60, addr),
    };
    let told = answer(name, &[record]);
    let verdict = dns.answer(VmId::new(101), Name(&wire), &told, 0, now_ns);
    assert_eq!(verdict, Ok(()));
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
fn what_the_engine_must_not_pass_is_counted_by_its_reason() {
    let six = families()[1];
    let mut rig = Rig::with(setup());
    let packet = udp((six.guest, 5_000), six.server(), b"x");
    // Handed over as if the programs had missed it.
    let with = |next: u8| {
        let mut packet = packet.clone();
        packet[6] = next;
        packet
    };
    let mut spoofed = packet.clone();
    spoofed[8..24].copy_from_slice(&PEER6.octets());
    let cases = [
        (with(44), DropReason::Fragment),
        (with(0), DropReason::ExtensionHeader),
        (with(43), DropReason::ExtensionHeader),
        (with(60), DropReason::ExtensionHeader),
        (with(1), DropReason::IpProtocol),
        (with(132), DropReason::IpProtocol),
        (packet[..30].to_vec(), DropReason::Malformed),
        (spoofed, DropReason::Spoofed),
    ];
    for (packet, reason) in cases {
        let before = rig.dropped(1, reason);
        let vnet = VirtioNetHdr::default();
        rig.kernel
            .borrow_mut()
            .hand_over(1, Handover::Miss, 0, vnet, &packet);
        rig.turn();
        assert_eq!(rig.dropped(1, reason), before + 1, "{reason:?}");
    }
    let four = families()[0];
    let mut echo = echo(four.guest, four.peer, true, 9, b"x");
    echo[9] = 58;
    crate::packet::ipv4::fill_checksum(&mut echo, 20);
    let before = rig.dropped(1, DropReason::IpProtocol);
    rig.kernel
        .borrow_mut()
        .hand_over(1, Handover::Miss, 0, VirtioNetHdr::default(), &echo);
    rig.turn();
    assert_eq!(rig.dropped(1, DropReason::IpProtocol), before + 1);
    assert_eq!((rig.flows(), rig.at_world().len()), (0, 0));
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

#[test]
fn the_gateway_answers_a_ping_and_refuses_the_rest_of_its_network() {
    for family in families() {
        let mut rig = Rig::with(setup());
        rig.guest(1, &echo(family.guest, family.gateway, true, 9, b"data"));
        let (_, answer) = rig.at_guest().pop().expect("an answer");
        let packet = read(&answer);
        assert_eq!(
            (packet.ip.source, packet.ip.destination),
            (family.gateway, family.guest)
        );
        assert!(
            matches!(packet.transport, Transport::Icmp(icmp) if icmp.is_echo() && !icmp.is_echo_request())
        );
        assert_eq!(packet.ip.payload()[8..], *b"data");
        rig.guest(1, &syn((family.guest, 4_000), (family.gateway, 80), 7));
        let (_, reset) = rig.at_guest().pop().expect("an answer");
        assert!(matches!(read(&reset).transport, Transport::Tcp(tcp) if tcp.has(Flags::RST)));
        assert_eq!(rig.flows(), 0, "{family:?}");
    }
}
