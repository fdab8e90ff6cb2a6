//! Pools of source addresses: each VM is paired with one address, whatever happens.
use std::{collections::BTreeMap, net::IpAddr};

use slipgate_abi::{Protocol, Refusal, VmRow};
use slipgate_model::{NetworkView, RouteEntry, RouteKind, VmSpec};
use slipgate_policy::{
    Action, AddressPool, Destination, Filtering, Mapping, NatBehaviour, NatSettings, OnReload,
    Policy, Rule, Settings,
};

use super::{reload::instead, rig::*};
use crate::{clock::SECOND_NS, control::Reload, packet::Ip};

const POOL: &[&str] = &["192.0.2.16/30", "2001:db8:1::10/126"];
const PEERS: [At; 3] = [
    SERVER,
    (
        slipgate_abi::Ip4 {
            octets: [203, 0, 113, 9],
        },
        443,
    ),
    (
        slipgate_abi::Ip4 {
            octets: [203, 0, 113, 9],
        },
        53_000,
    ),
];

fn setup(nat_addresses: &'static [&'static str]) -> Setup {
    Setup {
        nat_addresses,
        ..Setup::default()
    }
}

fn pool(texts: &[&str]) -> AddressPool {
    AddressPool::parse(texts).unwrap()
}

/// The address that a pool gives a VM.
fn chosen(texts: &[&str], row: u16, is_ipv6: bool) -> IpAddr {
    let vm = format!("vm{row}");
    pool(texts).paired(&vm, is_ipv6, |_| true).unwrap()
}

/// The source of the last packet that went out to the world.
fn source(rig: &mut Rig) -> Option<IpAddr> {
    let sent = rig.at_world().pop()?;
    Some(Ip::parse(&sent).unwrap().source)
}

/// The source that the world sees of a datagram of a guest, if it goes out.
fn seen_of(rig: &mut Rig, row: u16, port: u16, to: At) -> Option<IpAddr> {
    rig.at_world();
    rig.guest(row, &udp((GUEST, port), to, b"x"));
    source(rig)
}

fn give_pool(rig: &mut Rig, row: u16, texts: &[&str]) {
    let vm = VmSpec {
        nat_addresses: pool(texts),
        ..spec(row, &Setup::default())
    };
    rig.tell(|engine| engine.set_vm(vm));
}

/// The host with these addresses besides its own.
fn host_with(texts: &[&str]) -> NetworkView {
    let mut network = network();
    add_addresses(&mut network, pool(texts).addresses());
    network
}

fn ends(rig: &mut Rig) -> BTreeMap<String, usize> {
    rig.pass(SECOND_NS);
    let mut ends = BTreeMap::new();
    for record in rig.records() {
        *ends
            .entry(record["end"].as_str().unwrap().to_owned())
            .or_default() += 1;
    }
    ends
}

#[test]
fn rfc4787_req_2_all_flows_of_a_vm_have_its_address() {
    let mut rig = Rig::with(Setup {
        ipv6: Some("fd00:0:0:2::/64".parse().unwrap()),
        ..setup(POOL)
    });
    let mut seen = Vec::new();
    for row in 1..=3 {
        let own = chosen(POOL, row, false);
        seen.push(own);
        for (port, to) in (5_000..).zip(PEERS) {
            assert_eq!(
                seen_of(&mut rig, row, port, to),
                Some(own),
                "UDP of vm{row}"
            );
        }
        assert_eq!(IpAddr::from(rig.connect_from(row, 40_000, 1).0), own, "TCP");
        rig.guest(row, &echo(GUEST, PEER, true, 7, b"x"));
        assert_eq!(source(&mut rig), Some(own), "ICMP");
        rig.guest(row, &udp((GUEST6, 5_000), (PEER6, 443), b"x"));
        assert_eq!(source(&mut rig), Some(chosen(POOL, row, true)), "IPv6");
    }
    seen.dedup();
    assert!(seen.len() > 1, "not one for all: {seen:?}");
    rig.assert_paired();
}

#[test]
fn mappings_that_destinations_share_have_the_vms_address() {
    let mapped = NatBehaviour {
        mapping: Mapping::EndpointIndependent,
        filtering: Filtering::EndpointIndependent,
        hairpin: false,
    };
    let mut rig = Rig::with(Setup {
        nat: NatSettings {
            udp: mapped,
            tcp: mapped,
        },
        eim_ports: Some(50_000..=50_009),
        ..setup(POOL)
    });
    for row in 1..=3 {
        for to in PEERS {
            let seen = seen_of(&mut rig, row, 5_001, to);
            assert_eq!(seen, Some(chosen(POOL, row, false)));
        }
    }
    let mappings = &rig.engine.core.nat.flows.mappings;
    assert_eq!(mappings.len(), 3, "one for each VM's port");
}

#[test]
fn two_addresses_have_twice_the_ports_toward_a_destination() {
    const ONE: &[&str] = &["192.0.2.16"];
    let flows = |nat_addresses| {
        let mut rig = Rig::with(Setup {
            nat_ports: 61_000..=61_007,
            ..setup(nat_addresses)
        });
        for port in 5_000..5_020 {
            for row in 1..=3 {
                rig.guest(row, &udp((GUEST, port), SERVER, b"x"));
            }
        }
        rig.assert_paired();
        let refused: u64 = (1..=3)
            .map(|row| rig.refused(row, Refusal::PortsExhausted))
            .sum();
        assert_eq!(rig.flows() + refused as usize, 60, "each one is counted");
        rig.flows()
    };
    let two: &[&str] = &["192.0.2.16/31"];
    let own: std::collections::BTreeSet<_> = (1..=3).map(|row| chosen(two, row, false)).collect();
    assert_eq!(own.len(), 2, "both addresses have VMs");
    assert_eq!(flows(ONE), 8);
    assert_eq!(flows(&["192.0.2.16/31"]), 16);
}

#[test]
fn an_address_without_ports_refuses_flows_and_no_other_steps_in() {
    let mut rig = Rig::with(Setup {
        nat_ports: 61_000..=61_003,
        ..setup(POOL)
    });
    let own = chosen(POOL, 1, false);
    for port in 5_000..5_010 {
        if let Some(seen) = seen_of(&mut rig, 1, port, SERVER) {
            assert_eq!(seen, own);
        }
    }
    assert!(rig.refused(1, Refusal::PortsExhausted) >= 6);
    // Elsewhere there are ports.
    assert_eq!(seen_of(&mut rig, 1, 6_000, PEERS[1]), Some(own));
}

#[test]
fn an_address_that_comes_to_the_pool_takes_no_vm_from_its_own() {
    let before = &["192.0.2.16/31"][..];
    let after = &["192.0.2.16/28"][..];
    let moved = (1..=3).find(|row| chosen(before, *row, false) != chosen(after, *row, false));
    let row = moved.expect("a VM whose choice would be another");
    let own = chosen(before, row, false);
    let mut rig = Rig::with(setup(before));
    rig.follow(host_with(after));
    assert_eq!(seen_of(&mut rig, row, 5_000, SERVER), Some(own));
    give_pool(&mut rig, row, after);
    assert_eq!(seen_of(&mut rig, row, 5_001, SERVER), Some(own));
    assert_eq!(rig.flows(), 2, "the first one goes on");
    // Nor does another engine, which finds the flows.
    let (mut rig, _) = rig.restart(&setup(&["192.0.2.16/28"]));
    assert_eq!(rig.flows(), 2);
    assert_eq!(seen_of(&mut rig, row, 5_002, SERVER), Some(own));
    // Without a flow that says so, it chooses.
    rig.pass(400 * SECOND_NS);
    rig.assert_empty();
    let (mut rig, _) = rig.restart(&setup(&["192.0.2.16/28"]));
    let own = chosen(after, row, false);
    assert_eq!(seen_of(&mut rig, row, 5_002, SERVER), Some(own));
}

#[test]
fn a_successor_pairs_vms_before_it_adopts_their_flows() {
    let mut rig = Rig::with(setup(POOL));
    let own = chosen(POOL, 1, false);
    assert_eq!(seen_of(&mut rig, 1, 5_000, SERVER), Some(own));
    const LARGER: &[&str] = &["192.0.2.16/28"];
    assert_ne!(chosen(LARGER, 1, false), own, "the choice would be another");
    let mut rig = rig.restart_in_steps(&setup(LARGER));
    rig.kernel.borrow_mut().at_world.clear();
    rig.kernel
        .borrow_mut()
        .guest_sends(1, Default::default(), &udp((GUEST, 5_001), SERVER, b"x"));
    rig.turn();
    assert_eq!(source(&mut rig), Some(own));
    rig.engine.finish_adoption().unwrap();
    assert_eq!(rig.flows(), 2);
    rig.assert_paired();
}

fn reload_with_pool(rig: &mut Rig, texts: &[&str], on_reload: OnReload) {
    let settings = Settings {
        on_reload,
        ..Settings::default()
    };
    let policy = Policy::new(Action::Allow, Vec::<Rule>::new()).with(settings);
    let vms = (1..=3).map(|row| VmSpec {
        nat_addresses: pool(texts),
        ..spec(row, &Setup::default())
    });
    let reload = Reload {
        id: 1,
        policies: instead(vec![policy], 10),
        local: network().local,
        vms: vms.collect(),
        strictly: Vec::new(),
    };
    rig.tell(|engine| engine.reload(reload));
}

#[test]
fn flows_on_an_address_that_leaves_the_pool_end_unless_the_policy_keeps_them() {
    const OTHER: &[&str] = &["192.0.2.32/30"];
    for on_reload in [OnReload::Cut, OnReload::Keep] {
        let mut rig = Rig::with(setup(POOL));
        rig.follow(host_with(&["192.0.2.16/30", "192.0.2.32/30"]));
        let before = seen_of(&mut rig, 1, 5_000, SERVER);
        reload_with_pool(&mut rig, OTHER, on_reload);
        let (cut, kept, left) = rig.applied();
        let expected = match on_reload {
            OnReload::Cut => (1, 0, 0),
            OnReload::Keep => (0, 1, 1),
        };
        assert_eq!((cut, kept, left), expected);
        let old = seen_of(&mut rig, 1, 5_000, SERVER);
        let new = Some(chosen(OTHER, 1, false));
        match on_reload {
            OnReload::Cut => {
                assert_eq!(old, new, "a new flow");
                assert_eq!(
                    ends(&mut rig),
                    BTreeMap::from([("nat-addresses".to_owned(), 1)])
                );
            }
            OnReload::Keep => assert_eq!(old, before, "the flow goes on"),
        }
        assert_eq!(seen_of(&mut rig, 1, 5_001, SERVER), new);
        rig.assert_paired();
    }
}

#[test]
fn a_vms_own_definition_moves_it_to_another_pool_as_a_policy_does() {
    let mut rig = Rig::new();
    rig.follow(host_with(&["192.0.2.16/30", "192.0.2.32"]));
    assert_eq!(seen_of(&mut rig, 1, 5_000, SERVER), Some(NAT.into()));
    assert_eq!(seen_of(&mut rig, 2, 5_000, SERVER), Some(NAT.into()));
    give_pool(&mut rig, 1, &["192.0.2.32"]);
    let own: IpAddr = "192.0.2.32".parse().unwrap();
    assert_eq!(
        ends(&mut rig),
        BTreeMap::from([("nat-addresses".to_owned(), 1)])
    );
    assert_eq!(seen_of(&mut rig, 1, 5_000, SERVER), Some(own));
    assert_eq!(rig.flows(), 2, "the other VM's goes on");
    // Without a pool any address of the host will do: the flow goes on.
    give_pool(&mut rig, 1, &[]);
    assert_eq!(seen_of(&mut rig, 1, 5_000, SERVER), Some(own));
    assert_eq!(seen_of(&mut rig, 1, 5_001, SERVER), Some(NAT.into()));
}

#[test]
fn a_vm_whose_address_the_host_loses_is_paired_anew() {
    let mut rig = Rig::with(setup(POOL));
    let own = chosen(POOL, 1, false);
    assert_eq!(seen_of(&mut rig, 1, 5_000, SERVER), Some(own));
    let left: Vec<String> = pool(POOL)
        .of_family(false)
        .filter(|a| *a != own)
        .map(|a| a.to_string())
        .collect();
    let left: Vec<&str> = left.iter().map(String::as_str).collect();
    rig.follow(host_with(&left));
    assert_eq!(
        ends(&mut rig),
        BTreeMap::from([("address-gone".to_owned(), 1)])
    );
    assert_eq!(
        seen_of(&mut rig, 1, 5_001, SERVER),
        Some(chosen(&left, 1, false))
    );
    // The host has none of them.
    rig.follow(network());
    assert_eq!(
        seen_of(&mut rig, 1, 5_002, SERVER),
        None,
        "not by another address"
    );
    assert_eq!(rig.refused(1, Refusal::NoAddress), 1);
    let to = Destination {
        addr: SERVER.0.into(),
        port: SERVER.1,
        protocol: Protocol::Udp,
    };
    let why = rig.tell(move |engine| engine.why(VmRow::new(1), to, None));
    assert_eq!(why.refusal.as_deref(), Some("no_address"));
    assert!(
        why.outcome.contains("none of the VM's nat_addresses"),
        "{why:?}"
    );
    // They come back.
    rig.follow(host_with(&["192.0.2.16/30"]));
    assert_eq!(seen_of(&mut rig, 1, 5_002, SERVER), Some(own));
    let why = rig.tell(move |engine| engine.why(VmRow::new(1), to, None));
    assert!(
        why.explanation.contains(&format!("{own}, the one of 4")),
        "{why:?}"
    );
}

#[test]
fn a_prefix_that_is_delivered_to_the_host_is_as_good_as_its_addresses() {
    let local = RouteEntry {
        prefix: "198.18.7.0/30".parse().unwrap(),
        kind: RouteKind::Local,
        ifindex: slipgate_abi::IfIndex::new(1),
        gateway: None,
        prefsrc: None,
        metric: 0,
        mtu: None,
        share: Default::default(),
    };
    let mut network = network();
    network.routes.routes.push(local);
    let mut rig = Rig::new();
    rig.follow(network.clone());
    let texts = &["198.18.7.0/30"][..];
    give_pool(&mut rig, 1, texts);
    let own = chosen(texts, 1, false);
    assert_eq!(seen_of(&mut rig, 1, 5_000, SERVER), Some(own));
    // Other changes do not concern the flow.
    let mut by_another = network.clone();
    by_another.routes.routes[0].gateway = Some([192, 0, 2, 253].into());
    rig.follow(by_another);
    rig.pass(SECOND_NS);
    assert_eq!(rig.flows(), 1);
    rig.follow(super::rig::network());
    assert_eq!(
        ends(&mut rig),
        BTreeMap::from([("address-gone".to_owned(), 1)])
    );
    assert_eq!(seen_of(&mut rig, 1, 5_001, SERVER), None);
}
