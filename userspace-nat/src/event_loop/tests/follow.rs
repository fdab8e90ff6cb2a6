//! Flows follow the host's network: all of them, some in each turn, and none that it does not concern.
use std::{collections::HashSet, sync::atomic::Ordering::Relaxed};

use serde_json::{Value, json};
use slipgate_abi::{IfIndex, Ip4, Refusal, VmId};
use slipgate_model::{
    HostAddress, Link, NetworkView, RouteEntry, RouteKind, RouteSnapshot, VmSpec,
    route::{FurtherRoutes, RouteDomain, RouteStep, StepAction},
};
use slipgate_policy::EgressRoutes;

use super::rig::*;
use crate::{
    clock::SECOND_NS,
    control::Reload,
    datapath::{Hop, Tables as _},
    flow::STEPS_PER_TURN,
    state::follow::LOOKS_PER_TURN,
};

/// More than a walk over that many flows takes.
const TURNS: usize = 64;

fn crowded() -> Rig {
    Rig::crowded(|_| PEER)
}

fn changed(change: impl FnOnce(&mut RouteSnapshot, &mut Vec<Link>)) -> NetworkView {
    let mut network = network();
    change(&mut network.routes, &mut network.links);
    network
}

fn default_by(gateway: u8) -> NetworkView {
    changed(|routes, _| routes.routes[0].gateway = Some([192, 0, 2, gateway].into()))
}

fn looks(rig: &Rig) -> u64 {
    rig.kernel.borrow().slots_looked_at.get()
}

/// The elements that flows of the crowd name.
fn hops(rig: &Rig) -> HashSet<u32> {
    let kernel = rig.kernel.borrow();
    let slots = kernel.slots_in_use().into_iter();
    slots
        .map(|slot| kernel.slot(slot).next_hop().load(Relaxed))
        .collect()
}

fn hop_by(rig: &mut Rig, gateway: u8) -> u32 {
    let hop = Hop {
        ifindex: UPLINK,
        neighbour: [192, 0, 2, gateway].into(),
        route_mtu: 0,
    };
    rig.engine.core.nat.next_hop(hop, PEER.into())
}

#[test]
fn a_change_has_some_flows_looked_at_in_a_turn_and_in_the_end_all() {
    let mut rig = crowded();
    let mut before = looks(&rig);
    rig.follow(default_by(253));
    let mut turns = 0;
    while rig.engine.core.nat.network.following.is_under_way() {
        let looked = looks(&rig) - before;
        assert!(
            looked <= u64::from(LOOKS_PER_TURN),
            "{looked} in turn {turns}"
        );
        assert_eq!(rig.engine.timeout_ns(), Some(0), "the rest is due");
        before = looks(&rig);
        turns += 1;
        assert!(turns < TURNS);
        rig.turn();
    }
    assert!(turns > 3, "{turns}");
    let now = hop_by(&mut rig, 253);
    assert_eq!(hops(&rig), HashSet::from([now]));
    assert_ne!(rig.engine.timeout_ns(), Some(0));
}

#[test]
fn another_vms_first_packet_goes_out_in_its_turn_meanwhile() {
    let mut rig = crowded();
    rig.follow(default_by(253));
    let mut opened = 0;
    while rig.engine.core.nat.network.following.is_under_way() {
        opened += 1;
        rig.guest(2, &syn((GUEST, 40_000 + opened), SERVER, 7));
        assert_eq!(rig.at_world().len(), 1, "in the turn it came in");
    }
    assert!(opened > 3);
    assert_eq!(hops(&rig).len(), 1);
}

#[test]
fn what_concerns_no_flow_has_none_looked_at() {
    let mut rig = crowded();
    let before = looks(&rig);
    // A container comes: its link, its address, its route.
    rig.follow(changed(|routes, links| {
        links.push(Link {
            ifindex: IfIndex::new(9),
            name: "docker0".into(),
            mtu: 1_500,
            has_l2: true,
        });
        routes.addresses.push(HostAddress {
            ifindex: IfIndex::new(9),
            addr: "172.17.0.1/16".parse().unwrap(),
            broadcast: None,
            source: Default::default(),
        });
        routes.routes.push(RouteEntry {
            prefix: "172.17.0.0/16".parse().unwrap(),
            kind: RouteKind::Unicast,
            ifindex: IfIndex::new(9),
            gateway: None,
            prefsrc: None,
            metric: 0,
            mtu: None,
            share: Default::default(),
        });
    }));
    for _ in 0..TURNS {
        rig.turn();
    }
    // And goes; and the same once more.
    rig.follow(network());
    rig.follow(network());
    for _ in 0..TURNS {
        rig.turn();
    }
    assert_eq!(looks(&rig), before);
}

#[test]
fn changes_without_end_neither_stop_a_walk_nor_hurry_it() {
    let mut rig = crowded();
    rig.follow(changed(|routes, _| {
        routes.addresses[0].addr = "192.0.2.99/24".parse().unwrap();
    }));
    let mut turns = 0;
    while !rig.kernel.borrow().flows.is_empty() {
        let before = looks(&rig);
        rig.follow(changed(|routes, _| {
            routes.addresses[0].addr = "192.0.2.99/24".parse().unwrap();
            routes.routes[0].gateway = Some([192, 0, 2, 100 + turns % 2].into());
        }));
        let looked = looks(&rig) - before;
        assert!(looked <= u64::from(LOOKS_PER_TURN), "{looked}");
        turns += 1;
        assert!(turns < 200, "they do not end");
    }
    rig.pass(SECOND_NS);
    rig.assert_empty();
}

#[test]
fn all_flows_of_an_address_that_goes_end_and_each_is_recorded_once() {
    let mut rig = crowded();
    rig.follow(changed(|routes, _| {
        routes.addresses[0].addr = "192.0.2.99/24".parse().unwrap();
    }));
    rig.pass(SECOND_NS);
    rig.assert_empty();
    let records = rig.records();
    let ids: HashSet<&str> = records.iter().filter_map(|r| r["id"].as_str()).collect();
    assert_eq!((records.len(), ids.len()), (CROWD.into(), CROWD.into()));
    assert!(records.iter().all(|record| record["end"] == "address-gone"));
}

#[test]
fn a_route_s_own_mtu_counts_for_new_connections_and_for_old_ones_when_it_changes() {
    let with_mtu = |mtu: Option<u32>| changed(move |routes, _| routes.routes[0].mtu = mtu);
    let mss = |rig: &mut Rig, port| {
        rig.guest(1, &syn((GUEST, port), SERVER, 7));
        let sent = rig.at_world().pop().unwrap();
        u16::from_be_bytes([sent[42], sent[43]])
    };
    let mut rig = Rig::new();
    rig.follow(with_mtu(Some(1_300)));
    assert_eq!(mss(&mut rig, 40_000), 1_260);
    // Larger than the link's is none.
    rig.follow(with_mtu(Some(9_000)));
    assert_eq!(mss(&mut rig, 40_001), 1_360);
    rig.follow(with_mtu(None));
    assert_eq!(mss(&mut rig, 40_002), 1_360);

    // What every flow leaves by says so, whenever it was opened.
    rig.follow(with_mtu(Some(1_200)));
    rig.turn();
    let named = hops(&rig);
    assert_eq!(named.len(), 1);
    let datapath = &rig.engine.core.nat.datapath;
    let mtus = named
        .iter()
        .map(|hop| datapath.next_hop(*hop).unwrap().route_mtu());
    assert_eq!(mtus.collect::<Vec<_>>(), [1_200]);
}

/// A second link with a default route that only VMs use whose own uplink it is. Its address.
fn with_second_uplink(address: &str) -> NetworkView {
    changed(|routes, links| {
        routes.vm_uplinks = vec![SECOND];
        links.push(Link {
            ifindex: SECOND,
            name: "up1".into(),
            mtu: 1_420,
            has_l2: false,
        });
        routes.addresses.push(HostAddress {
            ifindex: SECOND,
            addr: address.parse().unwrap(),
            broadcast: None,
            source: Default::default(),
        });
        let default = routes.routes[0];
        routes.routes.push(RouteEntry {
            ifindex: SECOND,
            gateway: None,
            metric: 9_000,
            ..default
        });
    })
}

const SECOND: IfIndex = IfIndex::new(77);

fn give_uplink(rig: &mut Rig, uplink: Option<IfIndex>) {
    let vm = VmSpec {
        uplink,
        ..spec(1, &Setup::default())
    };
    rig.tell(|engine| engine.set_vm(vm));
}

fn uplinks(rig: &Rig) -> Vec<IfIndex> {
    let nat = &rig.engine.core.nat;
    let slots = nat.flows.all();
    let live = slots.into_iter().filter(|slot| !nat.flows.is_cut(*slot));
    live.map(|slot| nat.datapath.slot(slot).uplink()).collect()
}

const TABLE: EgressRoutes = EgressRoutes::Table(100);

/// A second link by which only the table 100 leads to the world.
pub(super) fn with_table() -> NetworkView {
    let mut network = with_second_uplink("10.8.0.2/32");
    let by_second = network.routes.routes.pop().unwrap();
    network.routes.further = FurtherRoutes {
        domains: vec![RouteDomain {
            routes: TABLE,
            ipv4: vec![RouteStep::all(StepAction::Table(100))],
            ipv6: Vec::new(),
        }],
        tables: vec![(100, vec![by_second])],
    };
    network
}

/// VM `row`, whose policy names that table, and maybe an uplink.
pub(super) fn by_table(row: u16, uplink: Option<IfIndex>) -> VmSpec {
    VmSpec {
        routes: Some(TABLE),
        uplink,
        ..spec(row, &Setup::default())
    }
}

#[test]
fn flows_by_a_table_wait_for_the_vms_own_uplink() {
    let mut rig = Rig::new();
    rig.follow(with_table());
    rig.tell(|engine| engine.set_vm(by_table(1, Some(SECOND))));
    rig.kernel.borrow_mut().uplink = SECOND.get();
    rig.connect_from(1, 40_001, 1);
    assert_eq!(uplinks(&rig), [SECOND]);
    rig.tell(|engine| engine.set_vm(by_table(1, Some(IfIndex::NONE))));
    assert_eq!(uplinks(&rig), [SECOND], "it waits");
    rig.guest(1, &syn((GUEST, 40_002), (PEER, 443), 1));
    assert_eq!(rig.refused(1, Refusal::NoRoute), 1);
    // Without the uplink, but with the table, the same device is the way.
    rig.tell(|engine| engine.set_vm(by_table(1, None)));
    assert_eq!(uplinks(&rig), [SECOND]);
}

#[test]
fn a_successor_ends_flows_that_a_tables_routes_do_not_carry() {
    let mut rig = Rig::new();
    rig.connect_from(1, 40_001, 1);
    rig.connect_from(2, 40_002, 1);
    let mut rig = rig.restart_in_steps(&Setup::default());
    rig.engine.set_network(&with_table());
    // As if its description had come before the flows are adopted.
    let network = &mut rig.engine.core.nat.network;
    network.set_routes_of(VmId::new(101), Some(&TABLE));
    rig.engine.finish_adoption().unwrap();
    rig.pass(SECOND_NS);
    assert_eq!(uplinks(&rig), [UPLINK], "that of the other VM");
    let [record] = &rig.records()[..] else {
        panic!("one record: {:?}", rig.records());
    };
    assert_eq!(record["end"], "uplink");
    assert_eq!(ways(record), [eth0(), up1()]);

    // Where the table leads nowhere, they go on.
    let mut rig = rig.restart_in_steps(&Setup::default());
    let mut network = with_table();
    network.routes.further.tables[0].1.clear();
    rig.engine.set_network(&network);
    let network = &mut rig.engine.core.nat.network;
    network.set_routes_of(VmId::new(102), Some(&TABLE));
    rig.engine.finish_adoption().unwrap();
    assert_eq!(uplinks(&rig), [UPLINK]);
}

#[test]
fn flows_of_a_vm_with_another_uplink_end_and_new_ones_leave_by_it() {
    let mut rig = Rig::new();
    rig.follow(with_second_uplink("10.8.0.2/32"));
    rig.connect_from(1, 40_001, 1);
    rig.connect_from(2, 40_002, 1);
    give_uplink(&mut rig, Some(SECOND));
    assert_eq!(uplinks(&rig), [UPLINK], "that of the other VM");
    rig.kernel.borrow_mut().uplink = SECOND.get();
    let nat = rig.connect_from(1, 40_003, 1);
    assert_eq!(nat.0, Ip4::from(std::net::Ipv4Addr::new(10, 8, 0, 2)));
    assert_eq!(uplinks(&rig).len(), 2);
    // Its device goes: flows wait, new ones are refused.
    give_uplink(&mut rig, Some(IfIndex::NONE));
    assert_eq!(uplinks(&rig).len(), 2);
    rig.guest(1, &syn((GUEST, 40_004), (PEER, 443), 1));
    assert_eq!(rig.refused(1, Refusal::NoRoute), 1);
    // No own uplink any more.
    give_uplink(&mut rig, None);
    assert_eq!(uplinks(&rig), [UPLINK]);
    rig.pass(SECOND_NS);
    let records = rig.records();
    let ends: Vec<_> = records.iter().map(|r| r["end"].clone()).collect();
    assert_eq!(ends, ["uplink", "uplink"]);
    assert_eq!(ways(&records[0]), [eth0(), up1()]);
    assert_eq!(ways(&records[1]), [up1(), eth0()]);
}

/// The ways by the uplink and by the second one, as records show them.
fn eth0() -> Value {
    json!({ "name": "eth0", "index": UPLINK, "next_hop": "192.0.2.254" })
}

fn up1() -> Value {
    json!({ "name": "up1", "index": SECOND })
}

/// The way by which a flow left, and the one that it would have left by since, in its record.
fn ways(record: &Value) -> [Value; 2] {
    ["uplink", "moved_to"].map(|key| record[key].clone())
}

#[test]
fn adopted_flows_that_leave_by_another_link_afterwards_are_recorded_with_both() {
    // The second link, by a route that is for VMs whose own uplink it is, and by the table.
    let mut network = with_second_uplink("10.8.0.2/32");
    network.routes.further = with_table().routes.further;
    let mut rig = Rig::new();
    rig.follow(network.clone());
    rig.connect_from(1, 40_001, 1);
    rig.connect_from(2, 40_002, 1);
    let (mut rig, _) = rig.restart(&Setup::default());
    rig.follow(network);
    assert_eq!(uplinks(&rig), [UPLINK; 2], "both are adopted");
    // One by its VM's own uplink, one by its policy's routes.
    give_uplink(&mut rig, Some(SECOND));
    rig.tell(|engine| engine.set_vm(by_table(2, None)));
    rig.pass(SECOND_NS);
    let records = rig.records();
    assert_eq!(records.len(), 2, "{records:?}");
    for record in &records {
        assert_eq!(record["end"], "uplink");
        assert_eq!(ways(record), [eth0(), up1()], "{record}");
    }
}

#[test]
fn flows_that_a_policys_uplink_does_not_carry_are_among_those_that_its_change_cuts() {
    let mut rig = Rig::new();
    rig.follow(with_second_uplink("10.8.0.2/32"));
    rig.connect_from(1, 40_001, 1);
    rig.connect_from(1, 40_002, 1);
    rig.connect_from(2, 40_003, 1);
    let vms = [Some(SECOND), None]
        .into_iter()
        .zip(1..)
        .map(|(uplink, row)| VmSpec {
            uplink,
            ..spec(row, &Setup::default())
        });
    let reload = Reload {
        id: 1,
        policies: Vec::new(),
        local: network().local,
        vms: vms.collect(),
        strictly: Vec::new(),
    };
    rig.tell(|engine| engine.reload(reload));
    assert_eq!(rig.applied(), (2, 1, 0));
    let ends: Vec<_> = rig.records().iter().map(|r| r["end"].clone()).collect();
    assert_eq!(ends, ["uplink", "uplink"]);
}

#[test]
fn flows_that_keep_their_address_move_to_another_uplink() {
    let mut rig = Rig::new();
    let mut network = with_second_uplink("10.8.0.2/32");
    network.routes.routes[1].prefsrc = Some(network.routes.addresses[0].addr.addr());
    rig.follow(network);
    rig.connect_from(1, 40_001, 1);
    for uplink in [Some(SECOND), None] {
        give_uplink(&mut rig, uplink);
        assert_eq!(uplinks(&rig), [uplink.unwrap_or(UPLINK)]);
    }
}

/// The table 100 leads by the first link from now on. `source`: address that its route prefers.
fn by_first(source: Option<&str>) -> NetworkView {
    let mut network = with_table();
    let route = &mut network.routes.further.tables[0].1[0];
    (route.ifindex, route.gateway) = (UPLINK, Some([192, 0, 2, 254].into()));
    route.prefsrc = source.map(|source| source.parse().unwrap());
    network
}

fn connected_by_table() -> Rig {
    let mut rig = Rig::new();
    rig.follow(with_table());
    rig.tell(|engine| engine.set_vm(by_table(1, None)));
    rig.kernel.borrow_mut().uplink = SECOND.get();
    rig.connect_from(1, 40_001, 1);
    assert_eq!(uplinks(&rig), [SECOND]);
    rig
}

#[test]
fn a_flow_moves_to_another_link_with_its_address_or_ends() {
    let mut rig = connected_by_table();
    rig.follow(by_first(Some("10.8.0.2")));
    rig.turn();
    assert_eq!(uplinks(&rig), [UPLINK]);
    rig.follow(with_table());
    rig.turn();
    assert_eq!(uplinks(&rig), [SECOND]);
    rig.follow(by_first(None));
    rig.pass(SECOND_NS);
    rig.assert_empty();
    assert_eq!(rig.records()[0]["end"], "route");
}

#[test]
fn flows_wait_for_an_uplink_that_does_not_exist_whatever_the_routes() {
    let mut rig = connected_by_table();
    rig.tell(|engine| engine.set_vm(by_table(1, Some(IfIndex::NONE))));
    rig.follow(by_first(None));
    rig.pass(SECOND_NS);
    assert_eq!(uplinks(&rig), [SECOND]);
}

#[test]
fn flows_that_go_astray_are_cut_some_in_each_turn_and_only_they() {
    let mut rig = crowded();
    rig.guest(
        2,
        &syn(
            (GUEST, 40_000),
            (Ip4::from(std::net::Ipv4Addr::new(198, 51, 100, 77)), 443),
            7,
        ),
    );
    assert_eq!(rig.flows(), usize::from(CROWD) + 1);
    let cut = |rig: &Rig| {
        let flows = &rig.engine.core.nat.flows;
        flows
            .all()
            .into_iter()
            .filter(|slot| flows.is_cut(*slot))
            .count()
    };
    rig.follow(changed(|routes, _| {
        routes.routes.push(RouteEntry {
            prefix: std::net::IpAddr::from(PEER).into(),
            kind: RouteKind::Blackhole,
            ..routes.routes[0]
        });
    }));
    let mut before = 0;
    while rig.engine.core.nat.network.following.is_under_way() {
        let now = cut(&rig);
        assert!(
            now - before <= STEPS_PER_TURN as usize / 64 + 1,
            "{now} {before}"
        );
        before = now;
        rig.turn();
    }
    assert_eq!(cut(&rig), usize::from(CROWD));
    rig.pass(SECOND_NS);
    assert_eq!(rig.flows(), 1);
    assert!(rig.records().iter().all(|record| record["end"] == "route"));
}
