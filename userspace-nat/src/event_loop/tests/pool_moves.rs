//! Pools of source addresses where flows are not simply to the world: hairpins, flows that the world
//! opens, and addresses that come to a pool or leave it.
use std::{net::IpAddr, sync::atomic::Ordering::Relaxed};

use slipgate_abi::{IfIndex, Ip4, Refusal, SlotIndex, VmRow};
use slipgate_model::{NetworkView, VmSpec};
use slipgate_policy::{
    Action, AddressPool, Filtering, Mapping, NatBehaviour, NatSettings, OnReload, Policy, Rule,
    Settings,
};

use super::{
    forwards::{HTTP, with_forwards},
    reload::instead,
    rig::*,
};
use crate::{control::Reload, packet::Ip};

const POOL: &[&str] = &["192.0.2.16/30"];
const LATER: &[&str] = &["192.0.2.32"];
/// Ports of the guests.
const ONE: u16 = 5_001;
const OTHER: u16 = 5_003;

fn nat_settings() -> NatSettings {
    let mapped = NatBehaviour {
        mapping: Mapping::EndpointIndependent,
        filtering: Filtering::EndpointIndependent,
        hairpin: true,
    };
    NatSettings {
        udp: mapped,
        tcp: mapped,
    }
}

fn setup(nat_addresses: &'static [&'static str]) -> Setup {
    Setup {
        nat: nat_settings(),
        eim_ports: Some(50_000..=50_099),
        nat_addresses,
        ..Setup::default()
    }
}

fn pool(texts: &[&str]) -> AddressPool {
    AddressPool::parse(texts).unwrap()
}

fn host_with(texts: &[&str]) -> NetworkView {
    let mut network = network();
    add_addresses(&mut network, pool(texts).addresses());
    network
}

fn with_pool(row: u16, texts: &[&str]) -> VmSpec {
    VmSpec {
        nat_addresses: pool(texts),
        ..spec(row, &Setup::default())
    }
}

fn source_of(packet: &[u8]) -> At {
    let IpAddr::V4(source) = Ip::parse(packet).unwrap().source else {
        panic!("IPv4");
    };
    let octets = source.octets();
    (Ip4 { octets }, u16::from_be_bytes([packet[20], packet[21]]))
}

/// Sends a datagram to a server. Returns the translated address.
fn learn(rig: &mut Rig, row: u16, port: u16) -> At {
    rig.guest(row, &udp((GUEST, port), SERVER, b"x"));
    let sent = rig.at_world().pop().expect("the datagram goes out");
    source_of(&sent)
}

/// Takes the VM at which a packet arrived, and the packet's source.
fn got(rig: &mut Rig) -> Option<(u32, At)> {
    let (vm, packet) = rig.at_guest().pop()?;
    Some((vm - 100, source_of(&packet)))
}

/// Gives VM 1 another pool by a new policy.
fn reload_first(rig: &mut Rig, texts: &[&str], on_reload: OnReload) {
    let settings = Settings {
        on_reload,
        nat: nat_settings(),
        ..Settings::default()
    };
    let policy = Policy::new(Action::Allow, Vec::<Rule>::new()).with(settings);
    let others = (2..=3).map(|row| with_pool(row, POOL));
    let reload = Reload {
        id: 1,
        policies: instead(vec![policy], 10),
        local: network().local,
        vms: std::iter::once(with_pool(1, texts)).chain(others).collect(),
        strictly: Vec::new(),
    };
    rig.tell(|engine| engine.reload(reload));
    rig.applied();
}

#[test]
fn a_hairpin_has_the_address_of_the_present_pool_whatever_mapping_is_left() {
    for on_reload in [OnReload::Cut, OnReload::Keep] {
        let mut rig = Rig::with(setup(POOL));
        rig.follow(host_with(&[POOL[0], LATER[0]]));
        let (one, other) = (learn(&mut rig, 1, ONE), learn(&mut rig, 2, OTHER));
        // It has a mapping at each address that others have, too.
        reload_first(&mut rig, LATER, on_reload);
        rig.guest(1, &udp((GUEST, ONE), other, b"hello"));
        let (row, from) = got(&mut rig).expect("it arrives");
        assert_eq!(row, 2);
        assert_eq!(from.0.octets, [192, 0, 2, 32], "not {one:?}");
    }
}

#[test]
fn a_hairpin_has_the_pools_address_while_the_uplink_is_absent() {
    let mut rig = Rig::with(setup(POOL));
    let (one, other) = (learn(&mut rig, 1, ONE), learn(&mut rig, 2, OTHER));
    let absent = |nat_addresses: &[&str]| VmSpec {
        uplink: Some(IfIndex::NONE),
        ..with_pool(1, nat_addresses)
    };
    rig.tell(move |engine| engine.set_vm(absent(POOL)));
    rig.guest(1, &udp((GUEST, ONE + 1), other, b"hello"));
    assert_eq!(
        got(&mut rig).map(|(row, from)| (row, from.0)),
        Some((2, one.0))
    );
    // Without a pool no address of its own is known: the receiver's is none.
    rig.tell(move |engine| engine.set_vm(absent(&[])));
    rig.guest(1, &udp((GUEST, ONE + 2), other, b"hello"));
    assert_eq!(rig.refused(1, Refusal::NoRoute), 1);
    assert!(rig.at_guest().iter().all(|(vm, _)| *vm == 101));
}

#[test]
fn nobody_gets_in_by_an_address_that_has_left_the_pool() {
    const CALLER: At = (PEER, 7_000);
    for on_reload in [OnReload::Cut, OnReload::Keep] {
        let mut rig = Rig::with(setup(POOL));
        rig.follow(host_with(&[POOL[0], LATER[0]]));
        let one = learn(&mut rig, 1, ONE);
        rig.world(&udp(CALLER, one, b"call"));
        rig.guest(1, &udp((GUEST, ONE), CALLER, b"answer"));
        assert_eq!(rig.flows(), 2);
        rig.at_guest();
        reload_first(&mut rig, LATER, on_reload);
        let kept = if on_reload == OnReload::Keep { 2 } else { 0 };
        let live = |rig: &Rig| {
            let flows = &rig.engine.core.nat.flows;
            let slots: Vec<SlotIndex> = flows.slots_of(VmRow::new(1)).to_vec();
            let is_live = |slot: &&SlotIndex| {
                let entry = flows.entry(**slot);
                entry.is_some_and(|it| it.state.is_linked()) && !flows.is_cut(**slot)
            };
            slots.iter().filter(is_live).count()
        };
        assert_eq!(live(&rig), kept);
        assert!(
            rig.kernel.borrow().forwards.is_empty(),
            "the port is closed"
        );
        rig.at_guest();
        rig.world(&udp((PEER, 7_001), one, b"call"));
        assert!(rig.at_guest().is_empty());
        // Nor by a packet that the programs handed over before.
        let key = (one.0, one.1, 17);
        rig.kernel.borrow_mut().forwards.insert(key, (1, 101));
        rig.world(&udp((PEER, 7_001), one, b"call"));
        assert!(rig.at_guest().is_empty());
        assert_eq!(live(&rig), kept);
    }
}

#[test]
fn a_vms_definition_ends_what_the_world_opened_at_an_address_that_left() {
    let mut rig = Rig::with(setup(POOL));
    rig.follow(host_with(&[POOL[0], LATER[0]]));
    let one = learn(&mut rig, 1, ONE);
    rig.world(&udp((PEER, 7_000), one, b"call"));
    rig.guest(1, &udp((GUEST, ONE), (PEER, 7_000), b"answer"));
    rig.tell(|engine| engine.set_vm(with_pool(1, LATER)));
    rig.pass(crate::clock::SECOND_NS);
    rig.assert_empty();
}

#[test]
fn another_uplink_cuts_no_hairpin() {
    let mut rig = Rig::with(setup(POOL));
    let (_, other) = (learn(&mut rig, 1, ONE), learn(&mut rig, 2, OTHER));
    let hello = udp((GUEST, ONE), other, b"hello");
    rig.guest(1, &hello);
    assert_eq!(rig.flows(), 4);
    rig.tell(|engine| {
        engine.set_vm(VmSpec {
            uplink: Some(UPLINK),
            ..with_pool(1, POOL)
        });
    });
    rig.pass(crate::clock::SECOND_NS);
    assert_eq!(rig.flows(), 4);
    rig.at_guest();
    rig.guest(1, &hello);
    assert!(got(&mut rig).is_some());
}

#[test]
fn flows_by_a_forward_follow_the_routes_whatever_the_pool() {
    let mut rig = with_forwards(Setup {
        nat_addresses: POOL,
        ..Setup::default()
    });
    rig.world(&syn(SERVER, HTTP, 5));
    assert_eq!((rig.flows(), rig.at_guest().len()), (1, 1));
    let next_hop = |rig: &Rig| {
        let flows = &rig.engine.core.nat.flows;
        let slot = *flows.all().first().expect("the flow");
        let kernel = rig.kernel.borrow();
        kernel.slot(slot).next_hop().load(Relaxed)
    };
    let before = next_hop(&rig);
    let mut by_another = host_with(POOL);
    by_another.routes.routes[0].gateway = Some([192, 0, 2, 253].into());
    rig.follow(by_another);
    rig.pass(crate::clock::SECOND_NS);
    assert_eq!(rig.flows(), 1);
    assert_ne!(next_hop(&rig), before, "by the other gateway");
    // The host has none of the pool: the forward's address is the host's still.
    rig.follow(network());
    rig.world(&syn((PEER, 444), HTTP, 5));
    assert_eq!(rig.flows(), 2);
    assert_eq!(rig.refused(1, Refusal::NoRoute), 0);
}

#[test]
fn a_first_pool_leaves_a_vm_the_address_that_its_flows_have() {
    const FIRST: &[&str] = &["192.0.2.1", "192.0.2.16/30"];
    let chosen = |row: u16| pool(FIRST).paired(&format!("vm{row}"), false, |_| true);
    let row = (1..=3).find(|row| chosen(*row) != Some(NAT.into()));
    let row = row.expect("a VM whose choice would be another");
    let mut rig = Rig::new();
    rig.follow(host_with(&["192.0.2.16/30"]));
    assert_eq!(learn(&mut rig, row, ONE).0, NAT);
    rig.tell(move |engine| engine.set_vm(with_pool(row, FIRST)));
    assert_eq!(learn(&mut rig, row, OTHER).0, NAT);
    assert_eq!(rig.flows(), 2, "the first one goes on");
}
