//! Tests of the shares that one VM or peer may use up, and of their cost to the engine.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{Command, Handover, Ip4, PortHeader, Protocol, Refusal, RuleIndex, VmId, VmRow};

use super::rig::*;
use crate::{
    clock::{MILLISECOND_NS, SECOND_NS},
    datapath::{Hop, Tables as _},
    event_loop::{OPENING_WORK, WORK_PER_READ},
    port::{BATCH, PORT_HEADER_AT, VirtioNetHdr},
    state::{Core, Forward, hops::SCAN_BUDGET},
};

/// The rig's VM 1 takes UDP from the world at port 53,000 of the host.
fn with_forward(setup: Setup) -> Rig {
    let mut rig = Rig::with(setup);
    let forward = Forward {
        protocol: Protocol::Udp,
        host: [0, 0, 0, 0].into(),
        host_port: 53_000,
        vm: VmId::new(101),
        vm_row: VmRow::new(1),
        guest_port: 53_000,
        rule: RuleIndex::new(12),
        is_own: false,
    };
    rig.tell(move |engine| engine.set_forwards(vec![forward]));
    rig.kernel
        .borrow_mut()
        .forwards
        .insert((NAT, 53_000, 17), (1, 101));
    rig
}

fn from_world(rig: &mut Rig, client_port: u16) {
    rig.world(&udp((PEER, client_port), (NAT, 53_000), b"x"));
}

#[test]
fn the_world_leaves_a_vm_a_quarter_of_its_flows() {
    let mut rig = with_forward(Setup {
        max_flows: 8,
        ..Setup::default()
    });
    for port in 0..20 {
        from_world(&mut rig, 1_000 + port);
    }
    assert_eq!((rig.flows(), rig.refused(1, Refusal::FlowCap)), (6, 14));
    for port in 0..3 {
        rig.guest(1, &udp((GUEST, 5_000 + port), SERVER, b"x"));
    }
    assert_eq!((rig.flows(), rig.refused(1, Refusal::FlowCap)), (8, 15));
    // Its own are no reason to refuse the world within its share.
    let mut rig = with_forward(Setup {
        max_flows: 8,
        ..Setup::default()
    });
    for port in 0..2 {
        rig.guest(1, &udp((GUEST, 5_000 + port), SERVER, b"x"));
        from_world(&mut rig, 1_000 + port);
    }
    assert_eq!((rig.flows(), rig.refused(1, Refusal::FlowCap)), (4, 0));
}

#[test]
fn an_adopter_knows_which_flows_the_world_opened() {
    let setup = Setup {
        max_flows: 8,
        ..Setup::default()
    };
    let mut rig = with_forward(setup);
    for port in 0..6 {
        from_world(&mut rig, 1_000 + port);
    }
    let live = |rig: &Rig| rig.engine.core.nat.flows.count_from_world(VmRow::new(1));
    assert_eq!(live(&rig), 6);
    // Its flows end, one by one or all: the count follows.
    rig.pass(301 * SECOND_NS);
    assert_eq!((rig.flows(), live(&rig)), (0, 0));
}

#[test]
fn the_world_leaves_a_vm_a_quarter_of_its_rate() {
    let mut rig = with_forward(Setup {
        rate: 8,
        ..Setup::default()
    });
    for port in 0..20 {
        from_world(&mut rig, 1_000 + port);
    }
    assert_eq!((rig.flows(), rig.refused(1, Refusal::FlowRate)), (6, 14));
    for port in 0..3 {
        rig.guest(1, &udp((GUEST, 5_000 + port), SERVER, b"x"));
    }
    assert_eq!((rig.flows(), rig.refused(1, Refusal::FlowRate)), (8, 15));
}

#[test]
fn a_vm_at_its_cap_costs_a_bounded_look_at_its_flows() {
    let mut rig = Rig::with(Setup {
        slots: 4_096,
        max_flows: 2_000,
        ..Setup::default()
    });
    for port in 0..2_000 {
        rig.guest(1, &udp((GUEST, 5_000 + port), SERVER, b"x"));
    }
    assert_eq!(rig.flows(), 2_000);
    let looks = |rig: &Rig| rig.kernel.borrow().slots_looked_at.get();
    let (mut most, mut refused) = (0, 0);
    for try_number in 0..10u16 {
        // Past the interval, before the next scan of all.
        rig.kernel.borrow_mut().now_ns += 6 * MILLISECOND_NS;
        let before = looks(&rig);
        rig.guest(1, &udp((GUEST, 20_000 + try_number), SERVER, b"x"));
        most = most.max(looks(&rig) - before);
        refused += 1;
    }
    assert_eq!(rig.refused(1, Refusal::FlowCap), refused);
    assert!(most <= 300, "{most} slots were looked at for one refusal");
}

#[test]
fn at_the_cap_all_closed_flows_are_found_in_turn() {
    let mut rig = Rig::with(Setup {
        max_flows: 600,
        ..Setup::default()
    });
    let mut last = (NAT, 0);
    for port in 0..600 {
        last = rig.connect(10_000 + port, 7);
    }
    rig.close(10_599, last, true);
    // 256 at a time, the closed one among the last.
    let mut tries = 0;
    let admitted = (0..10u16).any(|port| {
        tries += 1;
        rig.kernel.borrow_mut().now_ns += 6 * MILLISECOND_NS;
        rig.guest(1, &syn((GUEST, 30_000 + port), SERVER, 7));
        !rig.at_world().is_empty()
    });
    assert!(admitted && tries <= 3, "{tries}");
}

#[test]
fn what_is_refused_for_want_of_ports_has_cost_its_token() {
    let mut rig = Rig::with(Setup {
        nat_ports: 61_000..=61_002,
        rate: 10,
        ..Setup::default()
    });
    for port in 0..100 {
        rig.guest(1, &syn((GUEST, 40_000 + port), SERVER, 7));
    }
    let refused = |reason| rig.refused(1, reason);
    assert_eq!(refused(Refusal::PortsExhausted), 7);
    assert_eq!(refused(Refusal::FlowRate), 90);
}

/// Opening a flow takes longer than anything else that is done with a frame, so the port is read
/// again after few.
#[test]
fn the_new_flows_of_one_are_handled_few_at_a_time() {
    let mut rig = Rig::with(Setup {
        slots: 4_096,
        ..Setup::default()
    });
    let sends = |row, port, payload: &[u8]| {
        let first = udp((GUEST, port), SERVER, payload);
        let mut kernel = rig.kernel.borrow_mut();
        kernel.guest_sends(row, VirtioNetHdr::default(), &first);
        kernel.queue.len()
    };
    let waiting = (5_000..5_512).map(|port| sends(1, port, b"x")).max();
    assert_eq!(waiting, Some(BATCH), "by its credits");
    sends(2, 7_000, b"another");
    rig.turn();
    let sent = rig.at_world();
    let longest = sent.iter().map(Vec::len).max().unwrap();
    let before = sent.iter().position(|l3| l3.len() == longest).unwrap();
    assert!(sent.len() > before + 1 && sent[before].len() > sent[0].len());
    // It is read with the second batch.
    let between = WORK_PER_READ / OPENING_WORK;
    assert!(before <= between + 2, "{before} before it");
}

/// Ports as `docs/deploy/host.md` says to set for many VMs that use one server.
#[test]
fn a_thousand_vms_have_twenty_connections_each_to_one_server() {
    const VMS: u16 = 1_000;
    const EACH: u16 = 20;
    let setup = || Setup {
        slots: 65_536,
        nat_ports: 28_672..=65_535,
        ..Setup::default()
    };
    let mut rig = Rig::with(setup());
    for row in 4..=VMS {
        let id = 100 + u32::from(row);
        rig.kernel
            .borrow_mut()
            .add_vm(row, id, GUEST, GATEWAY, 1_500);
        let spec = spec(row, &setup());
        rig.engine.set_vm(spec);
    }
    let refused = |rig: &Rig| -> u64 {
        let of = |row| {
            Refusal::ALL
                .iter()
                .map(|reason| rig.refused(row, *reason))
                .sum::<u64>()
        };
        (1..=VMS).map(of).sum()
    };
    // In turn, and then one VM after the other: the last finds as many as the first.
    let mut nats = Vec::new();
    for port in 0..EACH / 2 {
        for row in 1..=VMS {
            nats.push((row, port, rig.connect_from(row, 5_000 + port, 1)));
        }
    }
    for row in 1..=VMS {
        for port in EACH / 2..EACH {
            nats.push((row, port, rig.connect_from(row, 5_000 + port, 1)));
        }
    }
    let all = usize::from(VMS * EACH);
    assert_eq!((rig.flows(), refused(&rig)), (all, 0));
    // A quarter is closed by the server, so that their ports rest, and opened anew.
    for (row, port, nat) in nats.into_iter().filter(|(_, port, _)| port % 4 == 0) {
        use slipgate_abi::tcp::Flags;
        let guest = (GUEST, 5_000 + port);
        rig.world(&ack(SERVER, nat, Flags::FIN, 9_001, 2));
        rig.guest(row, &ack(guest, SERVER, Flags::FIN, 2, 9_002));
        rig.world(&ack(SERVER, nat, 0, 9_002, 3));
        rig.at_world();
        rig.at_guest();
        rig.connect_from(row, 6_000 + port, 1);
    }
    rig.pass(SECOND_NS);
    assert_eq!((rig.flows(), refused(&rig)), (all, 0));
    rig.assert_paired();
}

/// Every destination is on the link.
fn on_link() -> Rig {
    on_link_with(Setup::default())
}

fn on_link_with(setup: Setup) -> Rig {
    let mut rig = Rig::with(setup);
    let mut network = network();
    network.routes.routes[0].gateway = None;
    rig.follow(network);
    rig
}

fn hop(number: u16) -> Hop {
    Hop {
        ifindex: UPLINK,
        neighbour: neighbour(number).into(),
        route_mtu: 0,
    }
}

fn neighbour(number: u16) -> Ip4 {
    let [high, low] = number.to_be_bytes();
    Ip4 {
        octets: [198, 51, 100 + high, low],
    }
}

fn hops_of(rig: &Rig) -> Vec<u32> {
    rig.engine.core.nat.datapath.own_next_hops()
}

#[test]
fn next_hops_that_no_flow_names_are_given_back() {
    let mut rig = on_link();
    for number in 0..300 {
        rig.guest(1, &udp((GUEST, 5_000), (neighbour(number), 9), b"x"));
    }
    assert_eq!(hops_of(&rig).len(), 256);
    // One goes on, the others end by themselves.
    for _ in 0..8 {
        rig.pass(60 * SECOND_NS);
        rig.guest(1, &udp((GUEST, 5_000), (neighbour(0), 9), b"x"));
    }
    assert_eq!(rig.flows(), 1);
    let slot = rig.kernel.borrow().slots_in_use()[0];
    let kept = rig.kernel.borrow().slot(slot).next_hop().load(Relaxed);
    assert_eq!(hops_of(&rig), [kept]);
    // Those who had to do without find room now.
    for number in 256..300 {
        rig.guest(1, &udp((GUEST, 5_000), (neighbour(number), 9), b"x"));
    }
    assert_eq!(hops_of(&rig).len(), 45);
}

#[test]
fn a_next_hop_is_not_given_back_before_a_whole_interval_has_passed() {
    let mut rig = on_link();
    rig.guest(1, &udp((GUEST, 5_000), (neighbour(7), 9), b"x"));
    rig.pass(SECOND_NS);
    rig.send(|engine| engine.remove_vm(VmRow::new(1), VmId::new(101)));
    rig.pass(9 * SECOND_NS);
    assert_eq!((rig.flows(), hops_of(&rig).len()), (0, 1));
    rig.pass(12 * SECOND_NS);
    assert_eq!(hops_of(&rig).len(), 0);
}

#[test]
fn a_next_hop_that_is_asked_for_between_two_looks_is_not_given_back() {
    let mut rig = on_link();
    let core = &mut rig.engine.core;
    let now_ns = 3_600 * SECOND_NS;
    let ask = |core: &mut Core<_>| core.nat.next_hop(hop(7), neighbour(7).into());
    let index = ask(core);
    core.nat.release_idle_hops(now_ns);
    // What was sent by it may still be under way at the next look.
    assert_eq!(ask(core), index);
    core.nat.release_idle_hops(now_ns + 10 * SECOND_NS);
    assert_eq!(core.nat.datapath.own_next_hops(), [index]);
    core.nat.release_idle_hops(now_ns + 20 * SECOND_NS);
    assert!(core.nat.datapath.own_next_hops().is_empty());
}

#[test]
fn a_look_for_idle_next_hops_takes_some_flows_at_a_time() {
    const FLOWS: u16 = 10_000;
    let mut rig = on_link_with(Setup {
        slots: 32_768,
        max_flows: 32_768,
        rate: 32_768,
        ..Setup::default()
    });
    for port in 0..FLOWS {
        // A translated port serves each destination once.
        let to = (neighbour(7), 9 + port / 1_000);
        rig.guest(1, &udp((GUEST, 5_000 + port), to, b"x"));
    }
    assert_eq!(rig.flows(), usize::from(FLOWS));
    let looks = |rig: &Rig| rig.kernel.borrow().slots_looked_at.get();
    let core = &mut rig.engine.core;
    let [named, asked_for] = [7, 8].map(|n| core.nat.next_hop(hop(n), neighbour(n).into()));
    core.nat.next_hop(hop(9), neighbour(9).into());
    let (mut now_ns, mut most) = (3_600 * SECOND_NS, 0);
    let mut release = |rig: &mut Rig, now_ns: u64| {
        let before = looks(rig);
        rig.engine.core.nat.release_idle_hops(now_ns);
        most = most.max(looks(rig) - before);
    };
    // Two looks, in the middle of the second of which a flow asks for one.
    for _ in 0..2 {
        release(&mut rig, now_ns);
    }
    now_ns += 10 * SECOND_NS;
    release(&mut rig, now_ns);
    let core = &mut rig.engine.core;
    assert_eq!(core.nat.next_hop(hop(8), neighbour(8).into()), asked_for);
    assert_eq!(core.nat.datapath.own_next_hops().len(), 3);
    release(&mut rig, now_ns);
    assert!((1..=u64::from(SCAN_BUDGET)).contains(&most), "{most}");
    let left = rig.engine.core.nat.datapath.own_next_hops();
    assert_eq!(left, [named, asked_for]);
}

#[test]
fn a_router_stays_and_a_predecessors_remains_go() {
    let mut rig = Rig::new();
    rig.connect(40_000, 7);
    let router = hops_of(&rig);
    assert_eq!(router.len(), 1);
    // A predecessor had claimed another, for a flow that is no more.
    let left = rig.engine.core.nat.datapath.next_hop_for(hop(1));
    assert_ne!(left, 0);
    let (mut rig, _) = rig.restart(&Setup::default());
    rig.pass(25 * SECOND_NS);
    assert_eq!(hops_of(&rig), router);
    rig.pass(3 * 3_600 * SECOND_NS);
    assert_eq!((rig.flows(), hops_of(&rig)), (0, router));
}

/// Packets that the engine itself sends leave even when no next hop is left.
#[test]
fn without_a_next_hop_the_engines_own_leave_by_the_uplink() {
    let mut rig = on_link();
    for number in 0..300 {
        rig.guest(1, &udp((GUEST, 5_000), (neighbour(number), 9), b"x"));
    }
    let to = neighbour(299);
    let sent = rig.at_world().pop().unwrap();
    let nat = (NAT, u16::from_be_bytes([sent[20], sent[21]]));
    rig.world(&udp((to, 9), nat, b"y"));
    let (_, delivered) = rig.at_guest().pop().unwrap();
    let error = icmp_error(GUEST, to, 3, 3, &delivered);
    assert_eq!(rig.guest(1, &error), Handling::Engine(Handover::Icmp));
    let out = rig.at_world().pop().expect("the error goes out");
    assert_eq!(&out[16..20], &to.octets);
    let frame = rig.kernel.borrow().last_written.clone();
    let header = frame[PORT_HEADER_AT..].first_chunk().unwrap();
    let header = PortHeader::decode(header).unwrap();
    assert_eq!(
        (header.code, header.id),
        (Command::EmitBy as u8, UPLINK.get())
    );
}
