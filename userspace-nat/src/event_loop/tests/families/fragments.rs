//! Fragments of both families in every order: a guest's, the world's to a live flow, and the world's to
//! a forward.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{
    DropReason, Handover, Refusal,
    early_fragment::{PLACES, has_hash},
    tcp::Flags,
};
use slipgate_policy::{Action, Rule};

use super::{
    super::fragments::{ORDERS, data},
    forwards::with_forwards,
    *,
};
use crate::{
    clock::SECOND_NS,
    event_loop::WORK_PER_TURN,
    fake::hellos::{self, records},
    packet::Fragment,
    port::VirtioNetHdr,
};

/// Data of each fragment but the last, bytes.
const STEP: usize = 1_248;
const PORT: u16 = 5_000;
const HANDED: Handling = Handling::Engine(Handover::Fragment);

impl Family {
    /// Time for which a datagram waits for the rest, ns.
    fn patience_ns(&self) -> u64 {
        match self.version {
            Version::V4 => 30 * SECOND_NS,
            Version::V6 => 60 * SECOND_NS,
        }
    }
}

/// A fragment of a packet: these bytes of its data.
fn part(packet: &[u8], id: u16, begin: usize, data: &[u8], has_more: bool) -> Vec<u8> {
    let head = Version::of(Ip::parse(packet).unwrap().source).header_len();
    let mut fragment = packet[..head].to_vec();
    if head == 20 {
        fragment[2..4].copy_from_slice(&((head + data.len()) as u16).to_be_bytes());
        fragment[4..6].copy_from_slice(&id.to_be_bytes());
        let field = (begin / 8) as u16 | if has_more { 0x2000 } else { 0 };
        fragment[6..8].copy_from_slice(&field.to_be_bytes());
        crate::packet::ipv4::fill_checksum(&mut fragment, 20);
    } else {
        fragment[4..6].copy_from_slice(&(8 + data.len() as u16).to_be_bytes());
        fragment[6] = 44;
        fragment.extend([packet[6], 0]);
        fragment.extend((begin as u16 | u16::from(has_more)).to_be_bytes());
        fragment.extend(u32::from(id).to_be_bytes());
    }
    fragment.extend_from_slice(data);
    fragment
}

/// The packet in fragments.
fn cut_as(packet: &[u8], id: u16, step: usize) -> Vec<Vec<u8>> {
    let head = Version::of(Ip::parse(packet).unwrap().source).header_len();
    let data = &packet[head..];
    let all = data.chunks(step).enumerate().map(|(number, chunk)| {
        let begin = number * step;
        part(packet, id, begin, chunk, begin + chunk.len() < data.len())
    });
    all.collect()
}

pub(super) fn cut(packet: &[u8], id: u16) -> Vec<Vec<u8>> {
    cut_as(packet, id, STEP)
}

/// Joins fragments, in their order, to the packet that they come from.
fn joined(fragments: &[Vec<u8>]) -> Vec<u8> {
    let first = Fragment::parse(&fragments[0]).unwrap();
    let head = first.version().header_len();
    let mut whole = fragments[0][..head].to_vec();
    for bytes in fragments {
        let fragment = Fragment::parse(bytes).unwrap();
        assert_eq!(fragment.begin, whole.len() - head);
        assert_eq!(fragment.identification, first.identification);
        whole.extend_from_slice(fragment.data);
    }
    if head == 20 {
        let total = whole.len() as u16;
        whole[2..4].copy_from_slice(&total.to_be_bytes());
        whole[6..8].fill(0);
        crate::packet::ipv4::fill_checksum(&mut whole, 20);
    } else {
        let len = (whole.len() - head) as u16;
        whole[4..6].copy_from_slice(&len.to_be_bytes());
        whole[6] = first.protocol;
    }
    whole
}

fn sizes(packets: &[Vec<u8>]) -> Vec<usize> {
    packets.iter().map(Vec::len).collect()
}

/// Opens a flow of VM 1 by a datagram. Returns its end on the uplink.
fn open(rig: &mut Rig, family: Family) -> End {
    rig.guest(1, &udp((family.guest, PORT), family.server(), b"x"));
    let sent = rig.at_world().pop().expect("the datagram goes out");
    (family.nat, read(&sent).transport.ports().unwrap().0)
}

/// Sends fragments in an order. Those before the first one are left to the host, and the rest is
/// handed over.
fn world_sends(rig: &mut Rig, fragments: &[Vec<u8>], order: [usize; 3]) {
    let mut is_known = false;
    for at in order {
        is_known |= at == 0;
        let expected = if is_known { HANDED } else { Handling::Passed };
        assert_eq!(rig.world(&fragments[at]), expected, "{at} of {order:?}");
    }
}

/// The fragments that came to the guest.
fn came(rig: &mut Rig) -> Vec<Vec<u8>> {
    let all = rig.at_guest().into_iter().map(|(_, l3)| l3);
    all.filter(|l3| Fragment::parse(l3).is_ok()).collect()
}

/// The packet that came to the guest, in fragments of these sizes.
fn at_guest_in(rig: &mut Rig, came_in: &[Vec<u8>]) -> Vec<u8> {
    let got = came(rig);
    assert_eq!(sizes(&got), sizes(came_in), "in the size that they came in");
    let whole = joined(&got);
    assert!(is_right(&whole));
    whole
}

/// Packets and bytes of the only flow toward its guest.
fn received(rig: &Rig) -> (u64, u64) {
    let kernel = rig.kernel.borrow();
    let live = kernel.slot(kernel.slots_in_use()[0]);
    let (packets, bytes) = (live.rx_packets(), live.rx_bytes());
    (packets.load(Relaxed), bytes.load(Relaxed))
}

/// Number of packets that were dropped in VM 1's row.
fn drops(rig: &Rig) -> u64 {
    let all = DropReason::ALL.iter();
    all.map(|reason| rig.dropped(1, *reason)).sum()
}

#[test]
fn every_order_of_three_fragments_goes_from_a_guest_to_the_world() {
    for family in families() {
        for order in ORDERS {
            let mut rig = Rig::with(setup());
            let packet = udp((family.guest, PORT), family.server(), &data());
            let fragments = cut(&packet, 7);
            for at in order {
                assert!(rig.at_world().is_empty(), "{order:?}");
                assert_eq!(rig.guest(1, &fragments[at]), HANDED);
            }
            let sent = rig.at_world();
            assert_eq!(sizes(&sent), sizes(&fragments), "{family:?} {order:?}");
            let whole = joined(&sent);
            assert_eq!(read(&whole).ip.source, family.nat);
            assert_eq!(whole[family.header_len() + 8..], data());
        }
    }
}

#[test]
fn every_order_of_three_fragments_comes_from_the_world_to_a_live_flow() {
    for family in families() {
        for order in ORDERS {
            let mut rig = Rig::with(setup());
            let nat = open(&mut rig, family);
            let packet = udp(family.server(), nat, &data());
            let fragments = cut(&packet, 7);
            world_sends(&mut rig, &fragments, order);
            let whole = at_guest_in(&mut rig, &fragments);
            assert_eq!(read(&whole).ip.destination, family.guest);
            assert_eq!(whole[family.header_len() + 8..], data(), "{order:?}");
            assert_eq!(received(&rig), (1, packet.len() as u64));
            assert_eq!(drops(&rig), 0, "{family:?} {order:?}");
        }
    }
}

#[test]
fn every_order_of_three_fragments_opens_a_flow_by_a_forward() {
    for family in families() {
        let (client, host) = ((family.peer, 50_000), (family.nat, 8_080));
        let syn = tcp(client, host, Flags::SYN, 5, 0, &[], &data());
        for packet in [udp(client, host, &data()), syn] {
            for order in ORDERS {
                let mut rig = with_forwards();
                let fragments = cut(&packet, 7);
                world_sends(&mut rig, &fragments, order);
                let whole = at_guest_in(&mut rig, &fragments);
                let came = read(&whole);
                assert_eq!(came.ip.destination, family.guest);
                assert_eq!(came.transport.ports(), Some((50_000, 80)));
                assert!(whole.ends_with(&data()), "{family:?} {order:?}");
                assert_eq!(rig.flows(), 1);
                assert_eq!(received(&rig), (1, packet.len() as u64));
                assert_eq!(drops(&rig), 0);
                rig.assert_paired();
            }
        }
    }
}

/// A first fragment alone decides nothing: only the whole shows that it opens no connection.
#[test]
fn fragments_to_a_forward_are_judged_as_one_packet() {
    for family in families() {
        let (client, host) = ((family.peer, 50_000), (family.nat, 8_080));
        let mut rig = with_forwards();
        // Its flags are in the first fragment: the host's, as a segment that is whole.
        let segment = tcp(client, host, Flags::ACK, 5, 6, &[], &data());
        for fragment in cut(&segment, 7) {
            assert_eq!(rig.world(&fragment), Handling::Passed);
        }
        // They are in the second: IPv6 wants all headers in the first (RFC 7112), so that it is the host's.
        let segment = tcp(client, host, Flags::ACK, 5, 6, &[], b"");
        let (handling, dropped) = match family.version {
            Version::V4 => (HANDED, 1),
            Version::V6 => (Handling::Passed, 0),
        };
        for fragment in cut_as(&segment, 8, 8) {
            assert_eq!(rig.world(&fragment), handling);
        }
        assert_eq!(
            (rig.flows(), rig.dropped(1, DropReason::NoFlow)),
            (0, dropped)
        );
        assert_eq!(drops(&rig), dropped);
        assert!(came(&mut rig).is_empty());
        // To no forward's port.
        for fragment in cut(&udp(client, (family.nat, 8_081), &data()), 9) {
            assert_eq!(rig.world(&fragment), Handling::Passed);
        }
    }
}

#[test]
fn the_hosts_own_datagrams_are_the_hosts_in_any_order() {
    for family in families() {
        let mut rig = Rig::with(setup());
        let nat = open(&mut rig, family);
        let read = rig.engine.status().frames_read;
        for (number, order) in ORDERS.into_iter().enumerate() {
            let own = cut(
                &udp(family.server(), (family.nat, 53), &data()),
                number as u16,
            );
            for at in order {
                assert_eq!(rig.world(&own[at]), Handling::Passed);
            }
        }
        assert_eq!(
            rig.engine.status().frames_read,
            read,
            "the engine has no part in it"
        );
        assert_eq!(drops(&rig), 0);
        // The guest is served meanwhile, by fragments too.
        let fragments = cut(&udp(family.server(), nat, &data()), 77);
        world_sends(&mut rig, &fragments, [2, 1, 0]);
        at_guest_in(&mut rig, &fragments);
        assert_eq!(drops(&rig), 0);
        rig.pass(61 * SECOND_NS);
        assert_eq!(
            rig.dropped(1, DropReason::Fragment),
            0,
            "copies are counted nowhere"
        );
    }
}

/// RFC 5722, for those that came early as for the others, and to a flow as to a forward.
#[test]
fn an_overlap_toward_the_guest_ends_the_datagram() {
    for family in families() {
        for is_forward in [false, true] {
            for order in ORDERS {
                let mut rig = with_forwards();
                let to = match is_forward {
                    true => (family.nat, 8_080),
                    false => open(&mut rig, family),
                };
                let (flows, packet) = (rig.flows(), udp(family.server(), to, &data()));
                let mut fragments = cut(&packet, 7);
                let head = family.header_len();
                let (from, end) = (head + STEP - 8, head + 2 * STEP);
                fragments[1] = part(&packet, 7, STEP - 8, &packet[from..end], true);
                world_sends(&mut rig, &fragments, order);
                assert!(came(&mut rig).is_empty(), "{family:?} {order:?}");
                assert_eq!(rig.dropped(1, DropReason::Fragment), 3);
                assert_eq!((drops(&rig), rig.flows()), (3, flows));
            }
        }
    }
}

#[test]
fn the_worlds_datagrams_that_lack_a_fragment_are_counted_when_their_time_is_over() {
    for family in families() {
        for missing in 0..3 {
            let mut rig = Rig::with(setup());
            let nat = open(&mut rig, family);
            let mut fragments = cut(&udp(family.server(), nat, &data()), 7);
            fragments.remove(missing);
            for fragment in fragments.iter().rev() {
                rig.world(fragment);
            }
            rig.pass(family.patience_ns() - SECOND_NS);
            assert_eq!(drops(&rig), 0);
            rig.pass(2 * SECOND_NS);
            // Without a first one nobody knows whose they are: they are the host's.
            let counted = if missing == 0 { 0 } else { 2 };
            assert_eq!(rig.dropped(1, DropReason::Fragment), counted);
            assert!(came(&mut rig).is_empty());
            assert_eq!(drops(&rig), counted);
        }
    }
}

#[test]
fn early_fragments_are_kept_as_long_as_others_wait() {
    for family in families() {
        for (waits_ns, is_kept) in [(SECOND_NS, true), (0, false)] {
            let mut rig = Rig::with(setup());
            let nat = open(&mut rig, family);
            let fragments = cut(&udp(family.server(), nat, &data()), 7);
            rig.world(&fragments[2]);
            rig.kernel.borrow_mut().now_ns += family.patience_ns() - waits_ns;
            rig.world(&fragments[0]);
            rig.world(&fragments[1]);
            assert_eq!(!came(&mut rig).is_empty(), is_kept, "{family:?}");
        }
    }
}

/// The search for copies and their handling are work of the world that sends to the VM.
#[test]
fn early_fragments_are_work_of_their_sender() {
    for family in families() {
        let mut rig = Rig::with(setup());
        let nat = open(&mut rig, family);
        let mut work_of = |fragment: &[u8]| {
            let mut kernel = rig.kernel.borrow_mut();
            let way = kernel.world_sends(VirtioNetHdr::default(), fragment);
            drop(kernel);
            rig.engine.read_frames().unwrap();
            (way, rig.engine.handle_some(WORK_PER_TURN))
        };
        let early = cut_as(&udp(family.server(), nat, &data()), 7, 800);
        for fragment in &early[1..3] {
            assert_eq!(work_of(fragment), (Handling::Passed, 0));
        }
        assert_eq!(work_of(&early[0]), (HANDED, 1 + 1 + 2), "{family:?}");
        let again = work_of(&early[1]);
        assert_eq!(again, (HANDED, 1), "none is looked for");
    }
}

/// Copies are in the kernel: an engine that dies loses none.
#[test]
fn an_engines_successor_has_the_early_fragments() {
    for family in families() {
        let mut rig = Rig::with(setup());
        let nat = open(&mut rig, family);
        let fragments = cut(&udp(family.server(), nat, &data()), 7);
        rig.world(&fragments[2]);
        rig.world(&fragments[1]);
        let (mut rig, _) = rig.restart(&setup());
        rig.world(&fragments[0]);
        at_guest_in(&mut rig, &fragments);
    }
}

/// A later fragment is being copied while another CPU has the first one: it is handed over, or the
/// engine has the copy, and never both.
#[test]
fn a_fragment_that_is_copied_while_its_first_one_comes_is_not_lost() {
    for family in families() {
        for is_taken in [false, true] {
            let mut rig = Rig::with(setup());
            let nat = open(&mut rig, family);
            let fragments = cut(&udp(family.server(), nat, &data()[..2_000]), 7);
            assert_eq!(rig.world(&fragments[0]), HANDED);
            {
                let faults = &rig.kernel.borrow().faults;
                faults.unseen_fragments.set(1);
                faults.takes_early.set(is_taken);
            }
            let expected = if is_taken {
                Handling::Discarded
            } else {
                HANDED
            };
            assert_eq!(rig.world(&fragments[1]), expected, "{family:?}");
            assert_eq!(came(&mut rig).is_empty(), is_taken);
            let kernel = rig.kernel.borrow();
            let is_tag = |word: u64| has_hash(word, (word >> 32) as u32);
            let left = (0..PLACES).filter(|at| is_tag(kernel.early_tag(*at).word().load(Relaxed)));
            assert_eq!((left.count(), kernel.dropped), (0, 0), "none is kept");
        }
    }
}

/// A program may claim a copy's place while an engine reads it: what was read is then of two packets.
#[test]
fn a_copy_that_is_overwritten_while_it_is_read_is_not_taken() {
    for family in families() {
        let mut rig = Rig::with(setup());
        let nat = open(&mut rig, family);
        let fragments = cut(&udp(family.server(), nat, &data()), 7);
        rig.world(&fragments[1]);
        rig.world(&fragments[2]);
        rig.kernel.borrow().faults.claims_early.set(true);
        assert_eq!(rig.world(&fragments[0]), HANDED);
        assert!(came(&mut rig).is_empty(), "{family:?}");
        // The packet was the host's, and the other copy was good.
        rig.world(&fragments[1]);
        at_guest_in(&mut rig, &fragments);
        assert_eq!(rig.dropped(1, DropReason::Fragment), 0);
    }
}

/// Another's network could guess a datagram's name, to inject data.
#[test]
fn the_fragments_of_a_datagram_come_by_one_link() {
    const OTHER: u32 = 77;
    for family in families() {
        for order in [[1, 0, 2], [0, 1, 2]] {
            let mut rig = Rig::with(setup());
            let nat = open(&mut rig, family);
            let own = rig.kernel.borrow().uplink;
            let fragments = cut(&udp(family.server(), nat, &data()), 7);
            for at in order {
                rig.kernel.borrow_mut().uplink = if at == 1 { OTHER } else { own };
                let handled = match at {
                    1 => Handling::Passed,
                    _ => HANDED,
                };
                assert_eq!(rig.world(&fragments[at]), handled, "{family:?} {order:?}");
            }
            assert!(came(&mut rig).is_empty());
            // The genuine one.
            rig.world(&fragments[1]);
            at_guest_in(&mut rig, &fragments);
        }
    }
}

/// The name of a datagram is no secret, and its hash less: first fragments that are sent to a forward by
/// another link meanwhile, of its name or of another with the same hash, do not tell whose copies it gets.
#[test]
fn nobodys_first_fragment_tells_the_link_of_anothers() {
    const OTHER: u32 = 77;
    for family in families() {
        for is_same in [true, false] {
            let mut rig = with_forwards();
            let (client, forward) = ((family.peer, 50_000), (family.nat, 8_080));
            let own = rig.kernel.borrow().uplink;
            let fragments = cut(&udp(client, forward, &data()), 7);
            let forged = cut(&udp(client, forward, &[0xbd; 3_000]), 7);
            let sends = |link: u32, fragment: &[u8]| {
                let mut kernel = rig.kernel.borrow_mut();
                kernel.uplink = link;
                kernel.world_sends(VirtioNetHdr::default(), fragment)
            };
            // All are on their way before the engine has looked at any.
            assert_eq!(sends(OTHER, &forged[1]), Handling::Passed);
            assert_eq!(sends(own, &fragments[1]), Handling::Passed);
            assert_eq!(sends(own, &fragments[0]), HANDED);
            let meanwhile = match is_same {
                true => forged[0].clone(),
                false => with_the_same_hash(&forged[0]),
            };
            assert_eq!(sends(OTHER, &meanwhile), HANDED);
            // Its entry of the table is the other's by now, so a copy of it is kept.
            assert_eq!(sends(own, &fragments[2]), Handling::Passed);
            rig.turn();
            let whole = at_guest_in(&mut rig, &fragments);
            assert!(whole.ends_with(&data()), "{family:?} {is_same}");
            assert_eq!(rig.flows(), 1);
        }
    }
}

/// A fragment of another datagram, whose hash is the same.
fn with_the_same_hash(fragment: &[u8]) -> Vec<u8> {
    let mut other = fragment.to_vec();
    // Octets of source and identification that are mixed by exclusive or.
    let is_ipv6 = other[0] >> 4 == 6;
    for at in if is_ipv6 { [11, 47] } else { [4, 14] } {
        other[at] ^= 1;
    }
    if !is_ipv6 {
        crate::packet::ipv4::fill_checksum(&mut other, 20);
    }
    other
}

/// Whoever floods takes the places of other early fragments, the oldest first, and nothing else.
#[test]
fn a_flood_of_early_fragments_costs_only_older_ones_their_places() {
    for family in families() {
        for (flood, is_kept) in [(PLACES - 1, true), (PLACES, false)] {
            let mut rig = Rig::with(setup());
            let nat = open(&mut rig, family);
            let (read, handed) = {
                let kernel = rig.kernel.borrow();
                (rig.engine.status().frames_read, kernel.handed_over)
            };
            let fragments = cut(&udp(family.server(), nat, &data()[..2_000]), 7);
            rig.world(&fragments[1]);
            let stranger = udp((family.peer, 9), (family.nat, 9), &data());
            for number in 0..flood {
                let id = 1_000 + number as u16;
                let one = part(&stranger, id, 800, &stranger[40..56], number % 2 == 0);
                assert_eq!(rig.world(&one), Handling::Passed);
                if number % 100 == 0 {
                    let answer = udp(family.server(), nat, b"y");
                    assert_eq!(rig.world(&answer), Handling::Fast, "its flow is served");
                }
            }
            let status = rig.engine.status();
            assert_eq!(status.frames_read, read, "none is the engine's");
            assert_eq!(
                rig.kernel.borrow().handed_over,
                handed,
                "none takes a credit"
            );
            rig.at_guest();
            rig.world(&fragments[0]);
            assert_eq!(!came(&mut rig).is_empty(), is_kept, "{family:?}");
            assert_eq!(drops(&rig), 0);
        }
    }
}

/// Fragments to a forward, which anybody may send, take no room from those of a flow.
#[test]
fn a_flood_of_fragments_to_a_forward_takes_no_room_from_a_flow() {
    for family in families() {
        let mut rig = with_forwards();
        let nat = open(&mut rig, family);
        let fragments = cut(&udp(family.server(), nat, &data()), 7);
        rig.world(&fragments[1]);
        rig.world(&fragments[0]);
        let stranger = udp((family.peer, 9), (family.nat, 8_080), &data());
        for id in 1_000..1_200 {
            let one = &cut(&stranger, id)[0];
            assert_eq!(rig.world(one), HANDED);
        }
        assert_eq!(rig.dropped(1, DropReason::Fragment), 200 - 16);
        rig.world(&fragments[2]);
        at_guest_in(&mut rig, &fragments);
    }
}

/// The table of datagrams is small: first fragments of the host's own datagrams take no entry of a
/// guest's.
#[test]
fn a_flood_of_the_hosts_first_fragments_has_no_entry_of_a_guests() {
    for family in families() {
        let mut rig = Rig::with(setup());
        let nat = open(&mut rig, family);
        let fragments = cut(&udp(family.server(), nat, &data()), 7);
        rig.world(&fragments[0]);
        let own = udp(family.server(), (family.nat, 53), &data());
        for id in 1_000..6_000 {
            let one = &cut(&own, id)[0];
            assert_eq!(rig.world(one), Handling::Passed);
        }
        assert_eq!(rig.world(&fragments[1]), HANDED);
        assert_eq!(rig.world(&fragments[2]), HANDED);
        at_guest_in(&mut rig, &fragments);
    }
}

#[test]
fn fragments_to_where_a_rule_denies_and_answers_from_there_go_nowhere() {
    for family in families() {
        for order in ORDERS {
            let mut rig = Rig::with(Setup {
                default: Action::Deny,
                ..setup()
            });
            let fragments = cut(&udp((family.guest, PORT), family.server(), &data()), 7);
            for at in order {
                assert_eq!(rig.guest(1, &fragments[at]), HANDED);
            }
            assert!(rig.at_world().is_empty());
            assert_eq!(rig.refused(1, Refusal::Default), 1);
            assert_eq!(rig.dropped(1, DropReason::Refused), 1);
            // There is no flow that would let the world in.
            for at in order {
                let from_there = cut(&udp(family.server(), (family.nat, PORT), &data()), 7);
                assert_eq!(rig.world(&from_there[at]), Handling::Passed);
            }
            let told = rig.at_guest();
            assert!(told.iter().all(|(_, l3)| icmp(l3) == family.prohibited));
        }
    }
}

/// A connection of VM 1 under an inspect rule. Returns its end on the uplink.
fn connect_inspected(rig: &mut Rig, family: Family) -> End {
    tell(rig, family, "ok.test");
    let (guest, server) = ((family.guest, 40_000), family.server());
    rig.guest(1, &syn(guest, server, 7));
    let sent = rig.at_world().pop().expect("the SYN goes out");
    let nat = (family.nat, read(&sent).transport.ports().unwrap().0);
    rig.world(&syn_ack(server, nat, 9_000, 8));
    rig.guest(1, &ack(guest, server, 0, 8, 9_001));
    rig.at_world();
    nat
}

fn inspecting() -> Setup {
    Setup {
        default: Action::Deny,
        rules: vec![Rule::parse(Action::Inspect, "ok.test").unwrap()],
        ..setup()
    }
}

/// With an allowed and with a denied name, in every order; and the server's answer in fragments, as it
/// is after the inspection (it acknowledges the hello) and during it.
#[test]
fn fragments_of_an_inspected_connection_are_judged_as_one_segment() {
    for family in families() {
        let (guest, server) = ((family.guest, 40_000), family.server());
        let head = family.header_len();
        for (said, passes) in [("ok.test", true), ("evil.test", false)] {
            let hello = records(&hellos::client_hello(said), 1_000);
            let segment = tcp(guest, server, Flags::ACK, 8, 9_001, &[], &hello);
            let third = (segment.len() - head).div_ceil(24) * 8;
            let fragments = cut_as(&segment, 7, third);
            let heard = [hellos::server_hello(false), data()].concat();
            for acknowledged in [8, 8 + hello.len() as u32] {
                for order in ORDERS {
                    let mut rig = Rig::with(inspecting());
                    let nat = connect_inspected(&mut rig, family);
                    for at in order {
                        assert_eq!(rig.guest(1, &fragments[at]), HANDED);
                    }
                    let sent = rig.at_world();
                    let reached: Vec<u8> = sent
                        .iter()
                        .flat_map(|packet| packet[head + 20..].to_vec())
                        .collect();
                    assert_eq!(reached == hello, passes, "{family:?} {said} {order:?}");
                    rig.at_guest();
                    let answer = tcp(server, nat, Flags::ACK, 9_001, acknowledged, &[], &heard);
                    let parts = cut(&answer, 8);
                    order.iter().for_each(|at| {
                        rig.world(&parts[*at]);
                    });
                    let came = came(&mut rig);
                    if !passes {
                        assert!(came.is_empty());
                        continue;
                    }
                    assert_eq!(sizes(&came), sizes(&parts), "{family:?} {order:?}");
                    let whole = joined(&came);
                    assert!(is_right(&whole) && whole.ends_with(&data()));
                }
            }
        }
    }
}
