//! VMs that sleep, and wake.
use slipgate_abi::{DropReason, Handover, Ip4, VmRow, tcp::Flags};
use slipgate_model::{Knock, RouteEntry, RouteKind, SleepChange, Subject};
use slipgate_policy::Sleep;

use super::{
    changes::tcp_of,
    forwards::{HTTP, with_forwards},
    rig::*,
    slaac,
};
use crate::{
    clock::SECOND_NS,
    dhcp,
    ndp::wire::{
        kind,
        tests::{message, solicitation},
    },
    packet::{Ipv4, checksum::Sum},
    port::{ETHERNET_LEN, VirtioNetHdr},
};

const GUEST_AT: At = (GUEST, 40_000);
const ROW: VmRow = VmRow::new(1);

fn sleep(rig: &mut Rig) {
    rig.tell(|engine| engine.sleep(ROW));
}

fn wake(rig: &mut Rig) -> bool {
    rig.tell(|engine| engine.wake(ROW))
}

fn sequences_at_guest(rig: &mut Rig) -> Vec<u32> {
    let all = rig.at_guest();
    all.iter().map(|(_, l3)| tcp_of(l3).sequence).collect()
}

#[test]
fn what_came_for_a_vm_that_slept_is_delivered_in_order() {
    let mut rig = Rig::new();
    let nat = rig.connect(40_000, 7);
    rig.at_guest();
    sleep(&mut rig);
    let held = Handling::Engine(Handover::Asleep);
    for sequence in [10, 20, 30] {
        assert_eq!(rig.world(&ack(SERVER, nat, 0, sequence, 8)), held);
    }
    assert!(rig.at_guest().is_empty());
    // What its guest still sends goes on.
    assert_eq!(
        rig.guest(1, &ack(GUEST_AT, SERVER, 0, 8, 2)),
        Handling::Fast
    );
    assert!(wake(&mut rig));
    assert_eq!(sequences_at_guest(&mut rig), [10, 20, 30]);
    assert_eq!(
        rig.world(&ack(SERVER, nat, 0, 40, 8)),
        Handling::Fast,
        "later ones go by the kernel's path"
    );
}

#[test]
fn a_former_generations_peer_is_reset_while_the_vm_sleeps() {
    let mut rig = Rig::new();
    let nat = rig.connect(40_000, 7);
    let other = rig.connect(40_001, 7);
    sleep(&mut rig);
    rig.at_world();
    rig.tell(|engine| engine.end_generation(ROW));
    assert_eq!(rig.at_world().len(), 2, "the peers are asked");
    for nat in [nat, other] {
        rig.world(&ack(SERVER, nat, 0, 9_501, 508));
        let reset = tcp_of(&rig.at_world().pop().unwrap());
        assert_eq!((reset.flags, reset.sequence), (Flags::RST, 508));
    }
    rig.at_guest();
    assert!(wake(&mut rig));
    assert!(rig.at_guest().is_empty(), "no answer of theirs was held");
}

#[test]
fn an_opening_segment_is_admitted_when_the_vm_wakes() {
    let mut rig = with_forwards(Setup::default());
    sleep(&mut rig);
    rig.world(&syn(SERVER, HTTP, 5_000));
    assert_eq!((rig.flows(), rig.at_guest().len()), (0, 0));
    assert!(rig.at_world().is_empty(), "nothing answers for the guest");
    assert!(wake(&mut rig));
    assert_eq!(
        (rig.flows(), sequences_at_guest(&mut rig)),
        (1, vec![5_000])
    );
}

#[test]
fn a_repeated_segment_is_held_once_and_the_rest_is_bounded() {
    let mut rig = Rig::new();
    let nat = rig.connect(40_000, 7);
    rig.at_guest();
    sleep(&mut rig);
    for _ in 0..3 {
        rig.world(&ack(SERVER, nat, 0, 10, 8));
    }
    assert_eq!(rig.dropped(1, DropReason::Held), 2);
    let most = Sleep::default().packets;
    for sequence in 0..most {
        rig.world(&ack(SERVER, nat, 0, 1_000 + sequence, 8));
    }
    assert_eq!(rig.dropped(1, DropReason::EngineBusy), 1);
    assert!(wake(&mut rig));
    assert_eq!(sequences_at_guest(&mut rig).len(), most as usize);
}

#[test]
fn what_is_held_longer_than_the_policys_patience_is_dropped() {
    let mut rig = Rig::new();
    let nat = rig.connect(40_000, 7);
    rig.at_guest();
    sleep(&mut rig);
    rig.world(&ack(SERVER, nat, 0, 10, 8));
    rig.pass(40 * SECOND_NS);
    rig.world(&ack(SERVER, nat, 0, 20, 8));
    rig.pass(30 * SECOND_NS);
    assert_eq!(rig.dropped(1, DropReason::EngineBusy), 1);
    assert!(wake(&mut rig));
    assert_eq!(sequences_at_guest(&mut rig), [20]);
}

#[test]
fn who_knocks_is_told_once_a_second() {
    let mut rig = with_forwards(Setup::default());
    sleep(&mut rig);
    rig.world(&syn(SERVER, HTTP, 5_000));
    rig.world(&syn(SERVER, HTTP, 5_001));
    rig.pass(SECOND_NS);
    rig.world(&syn(SERVER, HTTP, 5_002));
    assert!(wake(&mut rig));
    rig.turn();
    let changes: Vec<_> = rig.broker.sleep_changes.iter().map(|(_, c)| *c).collect();
    let [
        SleepChange::Asleep,
        SleepChange::Knock(first),
        SleepChange::Knock(_),
        SleepChange::Awake,
    ] = changes[..]
    else {
        panic!("{changes:?}");
    };
    let address = |(ip, port): At| std::net::SocketAddr::new(ip.into(), port);
    let (protocol, from, to) = (6, address(SERVER), address(HTTP));
    assert_eq!(first, Knock { protocol, from, to });
}

/// What was told of sleep, without the beginning.
fn told(rig: &Rig) -> Vec<SleepChange> {
    let told = rig.broker.sleep_changes.iter().map(|(_, change)| *change);
    told.filter(|change| *change != SleepChange::Asleep)
        .collect()
}

#[test]
fn nobody_knocks_where_routes_change_or_flows_are_cut() {
    let mut rig = Rig::new();
    rig.connect(40_000, 7);
    rig.connect(40_001, 7);
    sleep(&mut rig);
    rig.at_guest();
    let mut away = network();
    away.routes.routes.push(RouteEntry {
        prefix: std::net::IpAddr::from(PEER).into(),
        kind: RouteKind::Blackhole,
        ..away.routes.routes[0]
    });
    rig.follow(away);
    rig.pass(SECOND_NS);
    assert_eq!(rig.at_guest().len(), 2, "the guest is made to send");
    rig.follow(network());
    rig.pass(20 * SECOND_NS);
    assert_eq!((rig.flows(), told(&rig)), (0, vec![]));
    assert!(wake(&mut rig));
    rig.connect(40_002, 7);
    sleep(&mut rig);
    rig.at_guest();
    rig.tell(|engine| engine.cut(Subject::Vm { row: ROW }));
    assert_eq!(rig.at_guest().len(), 1);
    assert_eq!(told(&rig), [SleepChange::Awake]);
}

#[test]
fn flows_of_a_vm_that_sleeps_do_not_idle_out() {
    let mut rig = Rig::new();
    let nat = rig.connect(40_000, 7);
    rig.at_guest();
    sleep(&mut rig);
    rig.pass(3 * 3_600 * SECOND_NS);
    assert!(wake(&mut rig));
    rig.pass(3_600 * SECOND_NS);
    assert_eq!(rig.world(&ack(SERVER, nat, 0, 2, 8)), Handling::Fast);
    assert_eq!(rig.flows(), 1);
}

#[test]
fn a_successor_holds_what_comes_for_a_vm_that_was_put_to_sleep_before() {
    let mut rig = Rig::new();
    let nat = rig.connect(40_000, 7);
    sleep(&mut rig);
    let (mut rig, _) = rig.restart(&Setup::default());
    rig.at_guest();
    rig.world(&ack(SERVER, nat, 0, 10, 8));
    assert!(rig.at_guest().is_empty());
    assert!(wake(&mut rig));
    assert_eq!(sequences_at_guest(&mut rig), [10]);
}

#[test]
fn a_vm_whose_tap_is_away_sleeps_on() {
    let mut rig = Rig::new();
    let nat = rig.connect(40_000, 7);
    rig.at_guest();
    sleep(&mut rig);
    let tap = |rig: &Rig, ifindex| {
        let vm = rig.kernel.borrow().vm(1);
        vm.tap_ifindex()
            .swap(ifindex, std::sync::atomic::Ordering::Relaxed)
    };
    let there = tap(&rig, 0);
    rig.world(&ack(SERVER, nat, 0, 10, 8));
    assert!(!wake(&mut rig));
    tap(&rig, there);
    assert!(wake(&mut rig));
    assert_eq!(sequences_at_guest(&mut rig), [10]);
}

#[test]
fn what_is_held_for_a_vm_that_is_removed_is_counted() {
    let mut rig = Rig::new();
    let nat = rig.connect(40_000, 7);
    sleep(&mut rig);
    rig.world(&ack(SERVER, nat, 0, 10, 8));
    let id = rig.engine.core.vms.id_of(ROW).unwrap();
    rig.tell(move |engine| engine.remove_vm(ROW, id));
    assert_eq!(rig.dropped(0, DropReason::StaleVm), 1);
}

/// A rig whose policy says this of `[sleep]`, and the port of a live connection on the uplink.
fn bounded(sleep: Sleep) -> (Rig, At) {
    let mut rig = Rig::with(Setup {
        sleep,
        ..Setup::default()
    });
    let nat = rig.connect(40_000, 7);
    rig.at_guest();
    (rig, nat)
}

#[test]
fn the_bounds_are_those_of_the_vms_policy() {
    let (mut rig, nat) = bounded(Sleep {
        packets: 4,
        patience_s: 5,
        ..Sleep::default()
    });
    sleep(&mut rig);
    for sequence in 0..10 {
        rig.world(&ack(SERVER, nat, 0, 1_000 + sequence, 8));
    }
    assert_eq!(rig.dropped(1, DropReason::EngineBusy), 6);
    rig.pass(4 * SECOND_NS);
    assert_eq!(rig.dropped(1, DropReason::EngineBusy), 6);
    rig.pass(SECOND_NS);
    assert_eq!(rig.dropped(1, DropReason::EngineBusy), 10);
    // What has expired leaves room.
    for sequence in 10..13 {
        rig.world(&ack(SERVER, nat, 0, 1_000 + sequence, 8));
    }
    assert!(wake(&mut rig));
    assert_eq!(sequences_at_guest(&mut rig), [1_010, 1_011, 1_012]);
}

#[test]
fn bytes_are_bounded_too_and_counted_from_the_ip_header_on() {
    let segment = ack(SERVER, (NAT, 1), 0, 1, 8).len() as u32;
    let (mut rig, nat) = bounded(Sleep {
        bytes: 3 * segment,
        ..Sleep::default()
    });
    sleep(&mut rig);
    for sequence in [10, 20, 30, 40] {
        rig.world(&ack(SERVER, nat, 0, sequence, 8));
    }
    assert_eq!(rig.dropped(1, DropReason::EngineBusy), 1);
    assert!(wake(&mut rig));
    assert_eq!(sequences_at_guest(&mut rig), [10, 20, 30]);
    // All of it is free again.
    sleep(&mut rig);
    for sequence in [50, 60, 70] {
        rig.world(&ack(SERVER, nat, 0, sequence, 8));
    }
    assert!(wake(&mut rig));
    assert_eq!(sequences_at_guest(&mut rig), [50, 60, 70]);
    assert_eq!(rig.dropped(1, DropReason::EngineBusy), 1);
}

/// A train of segments from the server, as a card with receive offload brings it: with the
/// pseudo-header's sum in its checksum.
fn train(nat: At, sequence: u32, payload: &[u8]) -> (VirtioNetHdr, Vec<u8>) {
    const MSS: u16 = 1_000;
    let mut packet = tcp(SERVER, nat, 0x10, sequence, 8, &[], payload);
    let ip = Ipv4::parse(&packet).unwrap();
    let sum = Sum::default().pseudo(ip.source, ip.destination, 6, packet.len() - 20);
    let partial = sum.folded().to_be_bytes();
    packet[36..38].copy_from_slice(&partial);
    let vnet = VirtioNetHdr {
        flags: VirtioNetHdr::NEEDS_CSUM,
        gso_type: VirtioNetHdr::GSO_TCPV4,
        hdr_len: (ETHERNET_LEN + 40) as u16,
        gso_size: MSS,
        csum_start: (ETHERNET_LEN + 20) as u16,
        csum_offset: 16,
    };
    (vnet, packet)
}

#[test]
fn a_train_of_segments_is_held_as_one_packet_and_delivered_whole() {
    let (mut rig, nat) = bounded(Sleep {
        packets: 2,
        ..Sleep::default()
    });
    sleep(&mut rig);
    let payload: Vec<u8> = (0..4_000_u32).map(|n| n as u8).collect();
    // The first, itself again, a plain segment behind it, and one that finds no room.
    let (vnet, first) = train(nat, 9_001, &payload);
    let (_, last) = train(nat, 14_001, &payload);
    let plain = ack(SERVER, nat, 0, 13_001, 8);
    let frames = [
        (vnet, &first),
        (vnet, &first),
        (VirtioNetHdr::default(), &plain),
        (vnet, &last),
    ];
    for (vnet, packet) in frames {
        let held = Handling::Engine(Handover::Asleep);
        assert_eq!(rig.kernel.borrow_mut().world_sends(vnet, packet), held);
        rig.turn();
    }
    // What is dropped is counted as its segments.
    assert_eq!(rig.dropped(1, DropReason::Held), 4);
    assert_eq!(rig.dropped(1, DropReason::EngineBusy), 4);
    assert!(rig.at_guest().is_empty());
    assert!(wake(&mut rig));
    let got = rig.at_guest();
    assert_eq!(got.len(), 2, "the train is one frame still");
    assert_eq!(got[0].1[40..], payload);
    let sequences = got.iter().map(|(_, l3)| l3[24..28].try_into().unwrap());
    let sequences: Vec<_> = sequences.map(u32::from_be_bytes).collect();
    assert_eq!(sequences, [9_001, 13_001]);
}

/// What comes while the held packets are on their way is behind them.
#[test]
fn what_comes_while_the_vm_wakes_is_delivered_behind_what_was_held() {
    let mut rig = Rig::new();
    let nat = rig.connect(40_000, 7);
    rig.at_guest();
    sleep(&mut rig);
    rig.world(&ack(SERVER, nat, 0, 10, 8));
    let later = ack(SERVER, nat, 0, 20, 8);
    let kernel = rig.kernel.clone();
    // The engine has read its port in this turn when it is told to wake the VM.
    rig.send(move |_| {
        let way = kernel
            .borrow_mut()
            .world_sends(VirtioNetHdr::default(), &later);
        assert_eq!(way, Handling::Engine(Handover::Asleep));
    });
    let latest = ack(SERVER, nat, 0, 30, 8);
    let kernel = rig.kernel.clone();
    rig.send(|engine| assert!(engine.wake(ROW)));
    // And this one comes when it has woken, before the next turn.
    rig.send(move |_| {
        let way = kernel
            .borrow_mut()
            .world_sends(VirtioNetHdr::default(), &latest);
        assert_eq!(way, Handling::Fast);
    });
    rig.turn();
    rig.turn();
    assert_eq!(sequences_at_guest(&mut rig), [10, 20, 30]);
}

const GUEST_MAC: [u8; 6] = [2, 0, 0, 0, 2, 1];
const UPLINK_MAC: [u8; 6] = [2, 0, 0, 0, 1, 9];

/// Something by which a guest keeps its neighbours, address and lease, or is kept by a neighbour: how the
/// programs handled it, and what came in answer.
#[derive(PartialEq)]
struct Upkeep {
    what: &'static str,
    handling: Handling,
    answer: Vec<u8>,
}

impl Upkeep {
    /// Has VM 1 send what there is of it, and a neighbour on the uplink ask for it.
    fn of(rig: &mut Rig) -> Vec<Self> {
        const ROUTERS: &str = "ff02::2";
        let guest = GUEST6.to_string();
        let gateway = "fd00:0:0:2::1";
        let solicits = |from: &str, to: &str, target: &str, mac| {
            message(
                from,
                to,
                kind::NEIGHBOUR_SOLICITATION,
                &solicitation(target, mac),
            )
        };
        let arp = |target: Ip4| {
            let header = [0, 1, 8, 0, 6, 4, 0, 1];
            let rest = [&GUEST_MAC[..], &GUEST.octets, &[0; 6], &target.octets];
            [&header, &rest.concat()[..]].concat()
        };
        let mut all = Vec::new();
        let mut note = |rig: &mut Rig, what, handling| {
            rig.turn();
            let at_guest = rig.at_guest().into_iter().map(|(_, packet)| packet);
            let answers: Vec<_> = at_guest.chain(rig.at_world()).collect();
            let answer = answers.concat();
            all.push(Self {
                what,
                handling,
                answer,
            });
        };
        let resolver = Ip4 {
            octets: [10, 0, 2, 3],
        };
        for (what, target) in [("ARP, gateway", GATEWAY), ("ARP, resolver", resolver)] {
            let handling = rig.kernel.borrow_mut().guest_sends_arp(1, &arp(target));
            note(rig, what, handling);
        }
        let group = "ff02::1:ff00:1";
        for (what, mac) in [("NS", Some(GUEST_MAC)), ("NS without a MAC", None)] {
            let handling = slaac::send(rig, &solicits(&guest, group, gateway, mac));
            note(rig, what, handling);
        }
        let asked = message(
            slaac::LINK_LOCAL,
            ROUTERS,
            kind::ROUTER_SOLICITATION,
            &[0; 4],
        );
        let handling = slaac::send(rig, &asked);
        note(rig, "RS", handling);
        let handling = rig.guest(1, &udp((GUEST, 68), (GATEWAY, 67), &renewal()));
        note(rig, "DHCP", handling);
        let asked = [11, 1, 2, 3, 0, 6, 0, 2, 0, 23];
        let asked = slaac::udp6(slaac::LINK_LOCAL, 546, "ff02::1:2", 547, &asked);
        let handling = slaac::send(rig, &asked);
        note(rig, "DHCPv6", handling);
        let router = Some([2, 0, 0, 0, 1, 1]);
        let handling = rig.world(&solicits("2001:db8:1::77", &guest, &guest, router));
        note(rig, "NS of the uplink", handling);
        all
    }
}

/// A DHCPREQUEST of a guest that renews (RFC 2131 section 4.3.2).
fn renewal() -> Vec<u8> {
    let mut request = vec![0; 236];
    request[..8].copy_from_slice(&[1, 1, 6, 0, 1, 2, 3, 4]);
    request[12..16].copy_from_slice(&GUEST.octets);
    request[28..34].copy_from_slice(&GUEST_MAC);
    request.extend([99, 130, 83, 99, 53, 1, 3, 255]);
    request
}

/// What is under way when the guest is paused is answered, so that it finds its neighbours and its lease
/// when it runs again; and a router finds the guest.
#[test]
fn arp_ndp_and_leases_outlast_a_sleep() {
    let mut rig = Rig::with(Setup {
        ipv6: Some("fd00:0:0:2::/64".parse().unwrap()),
        is_routed: true,
        ..Setup::default()
    });
    {
        let mut kernel = rig.kernel.borrow_mut();
        let prefix = std::net::Ipv6Addr::new(0xfd00, 0, 0, 2, 0, 0, 0, 0);
        let icmpv6 = 58;
        kernel
            .forwards6
            .insert((prefix.into(), 0, icmpv6), (1, 101));
        kernel.vm6(1).set_proxy(Some((kernel.uplink, UPLINK_MAC)));
    }
    let nat = rig.connect(40_000, 7);
    Upkeep::of(&mut rig);
    let before = Upkeep::of(&mut rig);
    for upkeep in &before {
        let Upkeep {
            what,
            handling,
            answer,
        } = upkeep;
        assert!(!answer.is_empty(), "{what}: {handling:?}");
    }
    let by = |what| before.iter().find(|upkeep| upkeep.what == what).unwrap();
    for what in ["ARP, gateway", "NS", "NS of the uplink"] {
        assert_eq!(by(what).handling, Handling::Fast, "{what}");
    }
    let acknowledged = &by("DHCP").answer[28..];
    assert_eq!(acknowledged[16..20], GUEST.octets);
    let lease = [&[51, 4], &dhcp::LEASE_S.to_be_bytes()[..]].concat();
    assert!(acknowledged.windows(6).any(|option| option == lease));

    sleep(&mut rig);
    // A guest renews after that time.
    rig.pass(u64::from(dhcp::RENEW_S) * SECOND_NS);
    rig.at_guest();
    let changed = |rig: &mut Rig| {
        let now = Upkeep::of(rig);
        let pairs = before.iter().zip(now);
        let changed = pairs.filter(|(before, now)| *before != now);
        changed.map(|(before, _)| before.what).collect::<Vec<_>>()
    };
    assert_eq!(changed(&mut rig), [""; 0], "while it sleeps");
    assert_eq!(told(&rig), [], "its own upkeep wakes nobody");
    let held = Handling::Engine(Handover::Asleep);
    assert_eq!(rig.world(&ack(SERVER, nat, 0, 10, 8)), held);
    assert!(wake(&mut rig));
    assert_eq!(sequences_at_guest(&mut rig), [10]);
    assert_eq!(changed(&mut rig), [""; 0], "after it");
}
