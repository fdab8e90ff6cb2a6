//! Guests whose prefixes are routed reach each other by their own addresses, at ports that are open.
use std::net::Ipv6Addr;

use slipgate_abi::{
    DropReason, ForwardKey6, IfIndex, Protocol, Refusal, RuleIndex, VmRow,
    timeout::CLOSING_GRACE_NS,
};
use slipgate_model::VmSpec;
use slipgate_policy::{Action, Destination, EgressRoutes, Rule};

use super::*;
use crate::{
    clock::{MILLISECOND_NS, SECOND_NS},
    control::Reload,
    state::Forward,
};

const PORT: u16 = 443;
/// The second guest's /64, and its address.
const SECOND: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 3, 0, 0, 0, 0);
const OTHER: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 3, 0, 0, 0, 0x15);
/// Another address of that /64.
const HOSTS: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 3, 0, 0, 0, 0x99);

fn setup_with(rule: Option<(Action, &str)>) -> Setup {
    let rule = rule.map(|(action, text)| Rule::parse(action, text).unwrap());
    let own = |protocol| Forward {
        protocol,
        host: SECOND.into(),
        host_port: PORT,
        vm: VmId::new(102),
        vm_row: VmRow::new(2),
        guest_port: PORT,
        rule: RuleIndex::new(12),
        is_own: true,
    };
    Setup {
        is_routed: true,
        second: Some(ipnet::Ipv6Net::new(SECOND, 64).unwrap()),
        rules: rule.into_iter().collect(),
        forwards: [Protocol::Tcp, Protocol::Udp].map(own).into(),
        ..setup()
    }
}

/// The host's network, whose guests have the pool of both.
fn network_of_guests() -> slipgate_model::NetworkView {
    let mut network = network_of_both();
    let pool = "fd00:0:0:2::/63".parse().unwrap();
    network.local.guests.push(pool);
    network
}

/// VMs 1 and 2 with a /64 each, and the port of the second's open.
fn rig_with(rule: Option<(Action, &str)>) -> Rig {
    let mut rig = Rig::with(setup_with(rule));
    let network = network_of_guests();
    rig.tell(move |engine| engine.set_network(&network));
    {
        let forwards6 = &mut rig.kernel.borrow_mut().forwards6;
        forwards6.insert((SECOND.into(), 0, 58), (2, 102));
        for protocol in [6, 17] {
            let key = ForwardKey6::of_routed_port(SECOND.into(), PORT, protocol);
            forwards6.insert((key.host, key.port, key.protocol), (2, 102));
        }
    }
    rig
}

/// The rule by which the first guest may reach the second's network.
const ALLOW: Option<(Action, &str)> = Some((Action::Allow, "fd00:0:0:3::/64"));

const ONE: End = (IpAddr::V6(GUEST6), 40_000);
const TWO: End = (IpAddr::V6(OTHER), PORT);

/// What a guest got: the VM, and from and to whom.
fn got(rig: &mut Rig) -> Option<(u32, End, End)> {
    let (vm, came) = rig.at_guest().pop()?;
    let packet = read(&came);
    let (from, to) = packet.transport.ports().unwrap();
    Some((vm, (packet.ip.source, from), (packet.ip.destination, to)))
}

#[test]
fn a_guest_reaches_anothers_open_port_by_their_own_addresses() {
    let mut rig = rig_with(ALLOW);
    rig.guest(1, &syn(ONE, TWO, 7));
    assert_eq!(got(&mut rig), Some((102, ONE, TWO)));
    rig.guest(2, &syn_ack(TWO, ONE, 700, 8));
    assert_eq!(got(&mut rig), Some((101, TWO, ONE)));
    rig.guest(1, &ack(ONE, TWO, 0, 8, 701));
    assert_eq!(got(&mut rig), Some((102, ONE, TWO)));
    rig.guest(1, &udp(ONE, TWO, b"x"));
    assert_eq!(got(&mut rig), Some((102, ONE, TWO)));
    rig.guest(2, &udp(TWO, ONE, b"y"));
    assert_eq!(got(&mut rig), Some((101, TWO, ONE)));
    assert!(rig.at_world().is_empty(), "nothing leaves");
    // One flow of each VM's for each of the two.
    assert_eq!(rig.flows(), 4);
    rig.assert_paired();
    rig.pass(8_000 * SECOND_NS);
    rig.assert_empty();
    let ends = rig.records();
    assert!(
        ends.iter().all(|end| end["guest"] == end["nat"]),
        "{ends:?}"
    );
    assert!(ends.iter().all(|end| end["path"] == "hairpin"), "{ends:?}");
    assert_eq!(ends.len(), 4, "{ends:?}");
}

#[test]
fn the_ones_rules_and_the_others_ports_decide() {
    // Guests' networks are protected, until a rule opens them.
    for rule in [None, Some((Action::Deny, "fd00:0:0:3::/64"))] {
        let mut rig = rig_with(rule);
        rig.guest(1, &syn(ONE, TWO, 7));
        let refused = rig.refused(1, Refusal::Protected) + rig.refused(1, Refusal::Rule);
        assert_eq!((refused, rig.flows()), (1, 0), "{rule:?}");
        assert!(rig.at_world().is_empty());
    }
    let mut rig = rig_with(Some((Action::Inspect, "fd00:0:0:3::/64")));
    rig.guest(1, &syn(ONE, TWO, 7));
    assert_eq!(rig.refused(1, Refusal::Inspection), 1);
    let mut rig = rig_with(ALLOW);
    let to_closed = (IpAddr::V6(OTHER), 80);
    rig.guest(1, &syn(ONE, to_closed, 7));
    assert!(rig.at_guest().iter().all(|(vm, _)| *vm != 102));
    // Nobody outside is taken for the guest.
    rig.world(&syn(ONE, TWO, 7));
    assert!(rig.at_guest().iter().all(|(vm, _)| *vm != 102));
}

#[test]
fn a_successor_has_both_halves_and_changes_of_the_host_are_in_no_ones_way() {
    let mut rig = rig_with(ALLOW);
    let connect = |rig: &mut Rig| {
        rig.guest(1, &syn(ONE, TWO, 7));
        rig.guest(2, &syn_ack(TWO, ONE, 700, 8));
        rig.guest(1, &ack(ONE, TWO, 0, 8, 701));
        rig.at_guest();
        assert_eq!(rig.flows(), 2);
    };
    connect(&mut rig);
    let mut network = network_of_guests();
    let addresses = &mut network.routes.addresses;
    addresses.retain(|own| own.addr.addr().is_ipv4());
    rig.engine.set_network(&network);
    rig.pass(SECOND_NS);
    assert_eq!(rig.flows(), 2);
    let (mut rig, _) = rig.restart(&setup_with(ALLOW));
    rig.guest(1, &ack(ONE, TWO, 0, 8, 701));
    assert_eq!(got(&mut rig), Some((102, ONE, TWO)));
    rig.pass(SECOND_NS);
    assert_eq!(rig.flows(), 2);
}

#[test]
fn while_the_host_has_an_address_in_a_prefix_its_ports_are_shut_to_guests_too() {
    let mut rig = rig_with(ALLOW);
    let elsewhere = (IpAddr::V6(GUEST6), 40_001);
    rig.guest(1, &udp(ONE, TWO, b"x"));
    rig.guest(2, &udp(TWO, ONE, b"y"));
    rig.at_guest();
    let mut network = network_of_guests();
    // Another than the guest's, which nobody needs.
    add_addresses(&mut network, [IpAddr::V6(HOSTS)].into_iter());
    rig.engine.set_network(&network);
    rig.pass(SECOND_NS);
    // Advertisements of the router.
    rig.at_guest();
    for opener in [syn(elsewhere, TWO, 7), udp(elsewhere, TWO, b"z")] {
        rig.guest(1, &opener);
        assert!(rig.at_guest().iter().all(|(vm, _)| *vm != 102));
    }
    assert_eq!(rig.refused(1, Refusal::Protected), 2);
    assert!(rig.at_world().is_empty(), "nothing leaves");
    let to = Destination {
        addr: TWO.0,
        port: PORT,
        protocol: Protocol::Tcp,
    };
    let why = rig.tell(move |engine| engine.why(VmRow::new(1), to, None));
    assert!(!why.admitted && why.outcome.contains("shut"), "{why:?}");
    // Who comes from outside finds them shut by the programs, and what was on its way by the engine.
    let before = rig.dropped(2, DropReason::NoFlow);
    rig.world(&syn((IpAddr::V6(PEER6), 50_000), TWO, 5));
    assert_eq!(rig.dropped(2, DropReason::NoFlow), before + 1);
    // What is open goes on.
    rig.guest(1, &udp(ONE, TWO, b"x"));
    assert_eq!(got(&mut rig), Some((102, ONE, TWO)));
    rig.engine.set_network(&network_of_guests());
    rig.pass(SECOND_NS);
    rig.guest(1, &syn(elsewhere, TWO, 8));
    assert_eq!(got(&mut rig), Some((102, elsewhere, TWO)));
}

/// Has the policy of one VM choose other routes.
fn give_routes(rig: &mut Rig, row: u16) {
    let vm = VmSpec {
        routes: Some(EgressRoutes::Table(100)),
        ..spec(row, &setup_with(ALLOW))
    };
    rig.tell(|engine| {
        engine.reload(Reload {
            id: 1,
            policies: Vec::new(),
            local: network_of_guests().local,
            vms: vec![vm],
            strictly: Vec::new(),
        });
    });
    rig.pass(CLOSING_GRACE_NS + MILLISECOND_NS);
}

#[test]
fn a_policy_that_keeps_two_guests_apart_ends_what_is_between_them() {
    // Whichever of the two has it, its half of the flow ends.
    for row in [1, 2] {
        let mut rig = rig_with(ALLOW);
        rig.guest(1, &udp(ONE, TWO, b"x"));
        rig.guest(2, &udp(TWO, ONE, b"y"));
        rig.at_guest();
        give_routes(&mut rig, row);
        let reloaded = rig.broker.reloaded.pop().unwrap();
        assert_eq!((reloaded.cut, reloaded.kept), (1, 0), "vm{row}");
        rig.guest(1, &udp(ONE, TWO, b"x"));
        rig.guest(2, &udp(TWO, ONE, b"y"));
        // What they get is at most that it was refused.
        let came = rig.at_guest();
        let mut came = came.iter().map(|(_, came)| read(came).transport.ports());
        assert!(came.all(|ports| ports.is_none()), "vm{row}");
    }
}

/// The definition of a VM changes: it has an uplink of its own.
fn give_uplink(rig: &mut Rig, row: u16) {
    let vm = VmSpec {
        uplink: Some(IfIndex::new(9)),
        ..spec(row, &setup_with(ALLOW))
    };
    rig.tell(|engine| engine.set_vm(vm));
    rig.pass(CLOSING_GRACE_NS + MILLISECOND_NS);
}

#[test]
fn another_uplink_of_a_vms_own_ends_its_flows_with_guests() {
    for row in [1, 2] {
        let mut rig = rig_with(ALLOW);
        rig.guest(1, &udp(ONE, TWO, b"x"));
        rig.guest(2, &udp(TWO, ONE, b"y"));
        rig.at_guest();
        assert_eq!(rig.flows(), 2);
        give_uplink(&mut rig, row);
        let of_row = |end: &serde_json::Value| end["vm"] == format!("vm{row}");
        let ends = rig.records();
        assert!(ends.len() == 1 && of_row(&ends[0]), "{ends:?}");
        assert_eq!(ends[0]["end"], "policy", "{ends:?}");
        rig.guest(1, &udp(ONE, TWO, b"x"));
        rig.guest(2, &udp(TWO, ONE, b"y"));
        // What they get is at most that it was refused.
        let came = rig.at_guest();
        let mut came = came.iter().map(|(_, came)| read(came).transport.ports());
        assert!(came.all(|ports| ports.is_none()), "vm{row}");
    }
}
