//! Ports of a guest's own addresses that the world may open, without translation.
use std::net::{Ipv6Addr, SocketAddr};

use slipgate_abi::{
    AtEnd, Budget, DropReason, ForwardKey6, Handover, Protocol, Rate, Refusal, RuleIndex, VmRates,
    VmRow, tcp::Flags,
};
use slipgate_model::{Knock, SleepChange};

use super::*;
use crate::{clock::SECOND_NS, control::ForwardChange, state::Forward};

const PORT: u16 = 443;
/// The guests' /64, and an address of it that nobody has.
const PREFIX: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 2, 0, 0, 0, 0);
const UNBOUND: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 2, 0, 0, 0, 0x7777);

fn own(protocol: Protocol, host: Ipv6Addr) -> Forward {
    Forward {
        protocol,
        host: host.into(),
        host_port: PORT,
        vm: VmId::new(101),
        vm_row: VmRow::new(1),
        guest_port: PORT,
        rule: RuleIndex::new(12),
        is_own: true,
    }
}

/// VM 1 has the /64, whose port is open at these addresses: all of it, or one.
fn setup_at(host: Ipv6Addr) -> Setup {
    Setup {
        is_routed: true,
        forwards: [Protocol::Tcp, Protocol::Udp]
            .map(|protocol| own(protocol, host))
            .into(),
        ..setup()
    }
}

fn rig_at(host: Ipv6Addr) -> Rig {
    let rig = Rig::with(setup_at(host));
    {
        let forwards6 = &mut rig.kernel.borrow_mut().forwards6;
        forwards6.insert((PREFIX.into(), 0, 58), (1, 101));
        for protocol in [6, 17] {
            let key = match host == PREFIX {
                true => ForwardKey6::of_routed_port(host.into(), PORT, protocol),
                false => ForwardKey6::new(host.into(), PORT, protocol),
            };
            let key = (key.host, key.port, key.protocol);
            forwards6.insert(key, (1, 101));
        }
    }
    rig
}

fn six() -> Family {
    families()[1]
}

#[test]
fn the_world_opens_a_port_of_the_guests_own_address() {
    for host in [PREFIX, GUEST6] {
        let (mut rig, family) = (rig_at(host), six());
        let (client, guest) = ((family.peer, 50_000), (family.guest, PORT));
        for opener in [syn(client, guest, 5), udp(client, guest, b"x")] {
            let handled = rig.world(&opener);
            assert_eq!(handled, Handling::Engine(Handover::Forward));
            let (vm, came) = rig.at_guest().pop().expect("it comes in");
            let (before, after) = (read(&opener), read(&came));
            assert_eq!(vm, 101);
            assert_eq!(
                (after.ip.source, after.ip.destination, after.ip.ttl),
                (family.peer, family.guest, before.ip.ttl - 1)
            );
            assert_eq!(after.transport.ports(), before.transport.ports());
        }
        assert_eq!(
            rig.guest(1, &syn_ack(guest, client, 700, 6)),
            Handling::Fast
        );
        let sent = rig.at_world().pop().expect("the answer goes out");
        assert_eq!(read(&sent).ip.source, family.guest);
        assert_eq!(rig.world(&ack(client, guest, 0, 6, 701)), Handling::Fast);
        assert_eq!(rig.guest(1, &udp(guest, client, b"y")), Handling::Fast);
        assert_eq!(rig.flows(), 2);
        rig.assert_paired();
        // No port of the pool is taken, and none given back.
        rig.pass(8_000 * SECOND_NS);
        rig.assert_empty();
        let ends = rig.records();
        assert_eq!(ends.len(), 2, "{ends:?}");
        assert!(
            ends.iter().all(|end| end["guest"] == end["nat"]),
            "{ends:?}"
        );
    }
}

#[test]
fn nothing_else_of_the_guests_address_is_open() {
    let (mut rig, family) = (rig_at(PREFIX), six());
    let client = (family.peer, 50_000);
    let no_flow = Handling::Dropped(DropReason::NoFlow);
    for closed in [
        syn(client, (family.guest, 80), 5),
        udp(client, (family.guest, 80), b"x"),
        ack(client, (family.guest, PORT), Flags::RST, 1, 1),
        echo(family.peer, family.guest, true, 1, b"x"),
    ] {
        assert_eq!(rig.world(&closed), no_flow);
    }
    // Nor an address that nobody has, nor to who can't be a client.
    let before = rig.dropped(1, DropReason::NoFlow);
    rig.world(&syn(client, (IpAddr::V6(UNBOUND), PORT), 5));
    assert_eq!(rig.dropped(1, DropReason::NoFlow), before + 1);
    rig.world(&syn((family.nat, 50_000), (family.guest, PORT), 5));
    assert_eq!(rig.refused(1, Refusal::Protected), 1);
    assert_eq!(rig.flows(), 0);
    assert!(rig.at_guest().is_empty() && rig.at_world().is_empty());
    // It does not let the guest connect to who has come.
    rig.world(&syn(client, (family.guest, PORT), 5));
    rig.at_guest();
    rig.guest(1, &syn((family.guest, PORT), client, 9));
    assert_eq!(rig.at_world().len(), 1, "a connection of its own");
    rig.pass(SECOND_NS);
    let records = rig.records();
    assert!(
        records.iter().any(|it| it["end"].is_string()),
        "{records:?}"
    );
}

#[test]
fn a_flood_of_forged_clients_leaves_the_guest_its_own_part() {
    let (mut rig, family) = (rig_at(PREFIX), six());
    for port in 0..20_000 {
        rig.world(&syn((family.peer, 1_000 + port), (family.guest, PORT), 5));
    }
    rig.at_guest();
    let refused = rig.refused(1, Refusal::FlowRate) + rig.refused(1, Refusal::FlowCap);
    assert!(refused > 0 || rig.dropped(1, DropReason::NoCredit) > 0);
    rig.guest(1, &syn((family.guest, 40_000), family.server(), 7));
    assert_eq!(rig.at_world().len(), 1, "the guest's own");
}

#[test]
fn flows_of_an_own_port_are_adopted_and_end_with_it() {
    let (mut rig, family) = (rig_at(PREFIX), six());
    let (client, guest) = ((family.peer, 50_000), (family.guest, PORT));
    let connect = |rig: &mut Rig| {
        rig.world(&syn(client, guest, 5));
        rig.guest(1, &syn_ack(guest, client, 700, 6));
        rig.world(&ack(client, guest, 0, 6, 701));
        rig.at_guest();
        rig.at_world();
        assert_eq!(rig.flows(), 1);
    };
    connect(&mut rig);
    let (mut rig, _) = rig.restart(&setup_at(PREFIX));
    rig.pass(SECOND_NS);
    assert_eq!(rig.flows(), 1);
    rig.assert_paired();
    assert_eq!(rig.world(&ack(client, guest, 0, 6, 701)), Handling::Fast);
    // Routes and addresses that change are followed as the guest's own flows follow them.
    let mut network = network_of_both();
    let addresses = &mut network.routes.addresses;
    addresses.retain(|own| own.addr.addr().is_ipv4());
    rig.engine.set_network(&network);
    rig.pass(SECOND_NS);
    assert_eq!(rig.flows(), 1);
    let change = ForwardChange {
        vm: VmId::new(101),
        row: VmRow::new(1),
        removed: vec![(Protocol::Tcp, SocketAddr::new(PREFIX.into(), PORT))],
        added: Vec::new(),
    };
    rig.tell(move |engine| engine.change_forwards(change).unwrap());
    assert_ne!(rig.world(&ack(client, guest, 0, 6, 701)), Handling::Fast);
    rig.pass(100 * SECOND_NS);
    assert_eq!(rig.flows(), 0);
    assert_eq!(rig.records().last().unwrap()["end"], "policy");
    // A successor without the port lets none of its flows go on.
    let mut rig = rig_at(PREFIX);
    connect(&mut rig);
    let without = Setup {
        forwards: Vec::new(),
        ..setup_at(PREFIX)
    };
    let (mut rig, _) = rig.restart(&without);
    rig.pass(100 * SECOND_NS);
    assert_eq!(rig.flows(), 0);
}

#[test]
fn a_vm_that_sleeps_is_woken_by_who_comes_to_its_own_port() {
    let (mut rig, family) = (rig_at(PREFIX), six());
    let (client, guest) = ((family.peer, 50_000), (family.guest, PORT));
    let row = VmRow::new(1);
    rig.tell(move |engine| engine.sleep(row));
    // A port that is not open wakes nobody.
    let closed = syn(client, (family.guest, 80), 5);
    assert_eq!(rig.world(&closed), Handling::Dropped(DropReason::NoFlow));
    rig.world(&syn(client, guest, 5));
    rig.world(&udp(client, guest, b"x"));
    assert_eq!(rig.flows(), 0, "it is decided when it wakes");
    assert!(rig.at_guest().is_empty() && rig.at_world().is_empty());
    rig.turn();
    let told = |rig: &Rig| -> Vec<SleepChange> {
        rig.broker
            .sleep_changes
            .iter()
            .map(|(_, change)| *change)
            .collect()
    };
    let at = |(ip, port): End| SocketAddr::new(ip, port);
    let (from, to) = (at(client), at(guest));
    let knock = SleepChange::Knock(Knock {
        protocol: 6,
        from,
        to,
    });
    assert_eq!(told(&rig), [SleepChange::Asleep, knock]);
    assert!(rig.tell(move |engine| engine.wake(row)));
    let ports: Vec<_> = rig
        .at_guest()
        .iter()
        .map(|(vm, came)| (*vm, read(came).transport.ports()))
        .collect();
    assert_eq!(ports, [(101, Some((50_000, PORT))); 2], "in order");
    assert_eq!(rig.flows(), 2);
    // What comes in its flows while it sleeps again is held, too.
    rig.guest(1, &syn_ack(guest, client, 700, 6));
    rig.tell(move |engine| engine.sleep(row));
    let held = rig.world(&ack(client, guest, 0, 6, 701));
    assert_eq!(held, Handling::Engine(Handover::Asleep));
    assert!(rig.at_guest().is_empty());
    assert!(rig.tell(move |engine| engine.wake(row)));
    assert_eq!(rig.at_guest().len(), 1);
    rig.assert_paired();
}

fn set_budget(rig: &Rig, [tx, rx]: [u64; 2], at_end: AtEnd) {
    let rate = |budget_bytes| Rate {
        budget_bytes,
        ..Rate::default()
    };
    let rates = VmRates {
        tx: rate(tx),
        rx: rate(rx),
        budget: Budget {
            per_day: false,
            at_end,
        },
    };
    rig.kernel.borrow().set_rates(1, rates);
}

#[test]
fn a_spent_budget_shuts_the_guests_own_ports_each_way() {
    let (family, none) = (six(), Rate::default().budget_bytes);
    let guest = (family.guest, PORT);
    let from = |port| (family.peer, port);
    // 1,048 bytes each: the fifth exhausts it.
    let long = [7; 1_000];
    for budget in [[5_000, none], [none, 5_000]] {
        let is_tx = budget[0] != none;
        let mut rig = rig_at(PREFIX);
        rig.world(&udp(from(50_000), guest, b""));
        rig.at_guest();
        set_budget(&rig, budget, AtEnd::Cut);
        for _ in 0..10 {
            match is_tx {
                true => rig.guest(1, &udp(guest, from(50_000), &long)),
                false => rig.world(&udp(from(50_000), guest, &long)),
            };
        }
        let (out, came) = (rig.at_world().len(), rig.at_guest().len());
        assert_eq!((out, came), if is_tx { (5, 0) } else { (0, 5) });
        assert_eq!(rig.dropped(1, DropReason::ByteBudget), 5);
        rig.world(&udp(from(50_001), guest, b"x"));
        assert_eq!((rig.flows(), rig.at_guest().len()), (1, 0));
        assert_eq!(rig.refused(1, Refusal::ByteBudget), 1);
        // More, and the world may come in again.
        set_budget(&rig, [none, none], AtEnd::Cut);
        rig.world(&udp(from(50_002), guest, b"x"));
        assert_eq!((rig.flows(), rig.at_guest().len()), (2, 1));
    }
}
