//! Changes around live flows: another engine, another prefix, other routes.
use std::collections::HashSet;

use slipgate_abi::{DropReason, Handover, VmRow, tcp::Flags, timeout::CLOSING_GRACE_NS};
use slipgate_model::NetworkView;

use super::{forwards::with_forwards, *};
use crate::{
    clock::{MILLISECOND_NS, SECOND_NS},
    event_loop::cut::MOST_PROBES,
};

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

#[test]
fn what_came_for_a_vm_that_slept_is_delivered_in_order_and_repetitions_are_dropped() {
    for family in families() {
        let mut rig = Rig::with(setup());
        let nat = rig.connect_to(family, 40_000, 7);
        rig.tell(|engine| engine.sleep(VmRow::new(1)));
        for sequence in [9_001, 9_002, 9_001, 9_003] {
            let segment = ack(family.server(), nat, 0, sequence, 8);
            let held = Handling::Engine(Handover::Asleep);
            assert_eq!(rig.world(&segment), held, "{family:?}");
        }
        let knocks = rig.broker.sleep_changes.iter().map(|(_, change)| *change);
        let knocks: Vec<_> = knocks.collect();
        let ends = |(ip, port): End| std::net::SocketAddr::new(ip, port);
        let (from, to) = (ends(family.server()), ends(nat));
        let knock = slipgate_model::Knock {
            protocol: 6,
            from,
            to,
        };
        use slipgate_model::SleepChange::{Asleep, Knock};
        assert_eq!(knocks, [Asleep, Knock(knock)], "{family:?}");
        assert_eq!(rig.dropped(1, DropReason::Held), 1);
        assert!(rig.at_guest().is_empty());
        assert!(rig.tell(|engine| engine.wake(VmRow::new(1))));
        let got = rig.at_guest();
        let sequences = got.iter().map(|(_, l3)| match read(l3).transport {
            Transport::Tcp(tcp) => tcp.sequence,
            other => panic!("{other:?}"),
        });
        let sequences: Vec<_> = sequences.collect();
        assert_eq!(sequences, [9_001, 9_002, 9_003], "{family:?}");
    }
}

impl Rig {
    /// VM 1 sends a datagram to the server from this port, which is answered.
    fn exchange(&mut self, family: Family, port: u16) {
        self.guest(1, &udp((family.guest, port), family.server(), b"x"));
        let sent = self.at_world().pop().expect("the datagram goes out");
        self.world(&family.answer(&sent));
        self.at_guest();
    }
}

/// A connected socket that waits for an answer hears of it, as if its peer had gone.
#[test]
fn datagrams_of_a_former_generation_are_told_that_their_port_is_unreachable() {
    for family in families() {
        let mut rig = with_forwards();
        rig.exchange(family, 5_000);
        // Not told: one that was not answered, a ping, and a client's exchange with the guest.
        rig.guest(1, &udp((family.guest, 5_001), family.server(), b"x"));
        rig.guest(1, &echo(family.guest, family.peer, true, 77, b"x"));
        let ping = rig.at_world().pop().expect("the ping goes out");
        rig.world(&family.answer(&ping));
        let client = (family.peer, 50_000);
        for _ in 0..2 {
            rig.world(&udp(client, (family.nat, 8_080), b"x"));
            rig.guest(1, &udp((family.guest, 80), client, b"y"));
        }
        rig.at_world();
        rig.at_guest();
        let cut = rig.tell(|engine| engine.end_generation(VmRow::new(1)));
        assert_eq!(cut.flows, 4, "{family:?}");
        let told = rig.at_guest();
        assert_eq!(told.len(), 1, "{family:?}");
        let (vm, error) = &told[0];
        let port_unreachable = match family.version {
            Version::V4 => [3, 3],
            Version::V6 => [1, 4],
        };
        assert_eq!((*vm, icmp(error)), (101, port_unreachable));
        let ip = read(error).ip;
        assert_eq!((ip.source, ip.destination), (family.peer, family.guest));
        assert_eq!(ip.payload()[4..8], [0; 4]);
        let quoted = read(&ip.payload()[8..]);
        assert_eq!(
            (quoted.ip.source, quoted.ip.destination, quoted.ip.protocol),
            (family.guest, family.peer, 17)
        );
        assert_eq!(quoted.transport.ports(), Some((5_000, 443)));
        let [length, checksum] = [4, 6].map(|at| &quoted.ip.payload()[at..at + 2]);
        assert_eq!((length, quoted.ip.payload().len()), (&[0, 8][..], 8));
        assert_ne!(checksum, [0; 2], "there is one");
        assert!(rig.at_world().is_empty(), "the peers are told nothing");
        // A datagram that comes at once has the same answer, and what has ended ends once.
        rig.guest(1, &udp((family.guest, 5_000), (family.peer, 443), b"again"));
        let again = rig.at_guest();
        assert_eq!(again.len(), 1, "{family:?}");
        assert_eq!(icmp(&again[0].1), port_unreachable, "{family:?}");
        let same = rig.tell(|engine| engine.end_generation(VmRow::new(1)));
        assert_eq!((same.flows, rig.at_guest().len()), (0, 0), "{family:?}");
        rig.pass(CLOSING_GRACE_NS + MILLISECOND_NS);
        assert_eq!(rig.ended(), [cut.ends, same.ends]);
        rig.assert_empty();
        rig.exchange(family, 5_000);
        assert_eq!(rig.flows(), 1, "its next datagram opens a flow");
    }
}

/// A guest that does not run yet has room for no more.
#[test]
fn of_more_flows_than_a_guest_is_told_of_it_is_told_of_connections_and_the_latest_datagrams() {
    const OLDER: u16 = 60;
    const CONNECTIONS: u16 = 10;
    let later = MOST_PROBES as u16 - CONNECTIONS;
    for family in families() {
        let mut rig = Rig::with(Setup {
            slots: 4_096,
            max_flows: 4_096,
            ..setup()
        });
        // By their slots the older ones are neither first nor last.
        let (begin, end) = (30_000, 30_000 + OLDER + later);
        let older = begin + 100..begin + 100 + OLDER;
        let is_older = |port: &u16| older.contains(port);
        (begin..end).for_each(|port| rig.exchange(family, port));
        for port in 40_000..40_000 + CONNECTIONS {
            rig.connect_to(family, port, 7);
        }
        rig.pass(SECOND_NS);
        let later_ports = (begin..end).filter(|port| !is_older(port));
        later_ports.for_each(|port| rig.exchange(family, port));
        let cut = rig.tell(|engine| engine.end_generation(VmRow::new(1)));
        assert_eq!(cut.flows, u64::from(OLDER + later + CONNECTIONS));
        let packets = rig.at_guest();
        assert_eq!(packets.len(), MOST_PROBES, "each is told once");
        let (mut asked, mut told) = (0, HashSet::new());
        for (_, packet) in packets {
            match read(&packet).transport {
                Transport::Tcp(_) => asked += 1,
                _ => {
                    let quoted = &read(&packet).ip.payload()[8..];
                    told.insert(read(quoted).transport.ports().unwrap().0);
                }
            }
        }
        assert_eq!((asked, told.len()), (CONNECTIONS, later.into()));
        assert!(!told.iter().any(is_older), "{family:?}");
    }
}
