//! Tests of packets that the engine itself translates: they are charged like those that the kernel
//! translates, dropped when their flow is cut, and never more at a time than a turn allows.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{DropReason, Handover, Rate, SlotIndex, VmRates, vm::VmFlags};
use slipgate_model::Subject;

use super::rig::*;
use crate::{
    clock::{MILLISECOND_NS, SECOND_NS},
    event_loop::WORK_PER_TURN,
    flow::EndReason,
    port::{BATCH, VirtioNetHdr},
};

/// The guest's end of the flow that each test opens.
const GUEST_AT: At = (GUEST, 5_000);
/// In fragments of the uplink's 1,400 bytes: 1,376 bytes of data each.
const UPLINK_MTU: u32 = 1_400;

fn bytes(bytes_per_second: u64) -> Rate {
    Rate {
        bytes_per_second,
        packets_per_second: 0,
        ..Rate::default()
    }
}

fn packets(packets_per_second: u64) -> Rate {
    Rate {
        packets_per_second,
        bytes_per_second: 0,
        ..Rate::default()
    }
}

fn tx(rate: Rate) -> VmRates {
    VmRates {
        tx: rate,
        ..VmRates::default()
    }
}

fn rx(rate: Rate) -> VmRates {
    VmRates {
        rx: rate,
        ..VmRates::default()
    }
}

/// A flow whose next hop is known, with what it carries; its translated address.
fn open(rig: &mut Rig) -> At {
    rig.guest(1, &udp(GUEST_AT, SERVER, b"x"));
    let sent = rig.at_world().pop().expect("it goes out");
    set_mtu(rig, UPLINK_MTU);
    (NAT, u16::from_be_bytes([sent[20], sent[21]]))
}

/// Sets the MTU of the next hop of the only flow, bytes.
fn set_mtu(rig: &Rig, mtu: u32) {
    let kernel = rig.kernel.borrow();
    let hop = kernel
        .slot(kernel.slots_in_use()[0])
        .next_hop()
        .load(Relaxed);
    kernel.set_next_hop_mtu(hop, mtu);
}

fn slot(rig: &Rig) -> SlotIndex {
    rig.kernel.borrow().slots_in_use()[0]
}

/// In so many bytes of L3.
fn datagram(from: At, to: At, l3_len: usize) -> Vec<u8> {
    may_fragment(udp(from, to, &vec![7; l3_len - 28]))
}

fn total(packets: &[Vec<u8>]) -> (usize, usize) {
    (packets.len(), packets.iter().map(Vec::len).sum())
}

fn to_guest(rig: &mut Rig) -> Vec<Vec<u8>> {
    rig.at_guest().into_iter().map(|(_, l3)| l3).collect()
}

#[test]
fn what_a_guest_sends_in_fragments_is_charged_as_these() {
    let mut rig = Rig::new();
    open(&mut rig);
    let large = datagram(GUEST_AT, SERVER, 9_000);
    for (rate, reason) in [
        (bytes(100_000), DropReason::ByteRate),
        (packets(100), DropReason::PacketRate),
    ] {
        rig.kernel.borrow_mut().now_ns += SECOND_NS;
        rig.kernel.borrow().set_rates(1, tx(rate));
        let before = rig.dropped(1, reason);
        let mut handed_over = 0;
        for _ in 0..400 {
            rig.kernel.borrow_mut().now_ns += 10 * MILLISECOND_NS;
            handed_over += u64::from(rig.guest(1, &large) == Handling::Engine(Handover::TooBig));
        }
        let (count, len) = total(&rig.at_world());
        // Four seconds, the burst, and the one packet that used it up.
        match rate.bytes_per_second {
            0 => assert!((400..=417).contains(&count), "{count} packets"),
            _ => assert!((400_000..=419_120).contains(&len), "{len} bytes"),
        }
        let passed = count as u64 / 7;
        assert_eq!(rig.dropped(1, reason) - before, 400 - passed);
        // What would be refused is not even handed over.
        assert_eq!(handed_over, passed);
    }
    // In the books it is the packet that the guest sent.
    let kernel = rig.kernel.borrow();
    let live = kernel.slot(kernel.slots_in_use()[0]);
    let packets = live.tx_packets().load(Relaxed) - 1;
    assert_eq!(live.tx_bytes().load(Relaxed) - 29, packets * 9_000);
}

#[test]
fn what_the_world_sends_in_fragments_is_charged_as_these() {
    let mut rig = Rig::new();
    let nat = open(&mut rig);
    rig.kernel.borrow().set_rates(1, rx(bytes(100_000)));
    let large = datagram(SERVER, nat, 9_000);
    for _ in 0..400 {
        rig.kernel.borrow_mut().now_ns += 10 * MILLISECOND_NS;
        rig.world(&large);
    }
    let (count, len) = total(&to_guest(&mut rig));
    assert!((400_000..=419_120).contains(&len), "{len} bytes");
    let passed = count as u64 / 7;
    assert_eq!(rig.dropped(1, DropReason::ByteRate), 400 - passed);
    let kernel = rig.kernel.borrow();
    let live = kernel.slot(kernel.slots_in_use()[0]);
    assert_eq!(live.rx_packets().load(Relaxed), passed);
    assert_eq!(live.rx_bytes().load(Relaxed), passed * 9_000);
}

#[test]
fn a_large_first_packet_is_charged_too() {
    let mut rig = Rig::new();
    rig.kernel.borrow().set_rates(1, tx(packets(10)));
    for port in 0..4 {
        rig.guest(1, &datagram((GUEST, 6_000 + port), SERVER, 9_000));
    }
    assert_eq!(rig.at_world().len(), 7, "one, in fragments");
    assert_eq!(rig.dropped(1, DropReason::PacketRate), 3);
}

#[test]
fn errors_are_charged_both_ways() {
    let mut rig = Rig::new();
    let nat = open(&mut rig);
    rig.world(&udp(SERVER, nat, &[7; 1_000]));
    let (_, delivered) = rig.at_guest().pop().expect("it arrives");
    rig.guest(1, &udp(GUEST_AT, SERVER, &[7; 1_000]));
    let sent = rig.at_world().pop().expect("it goes out");
    let of_guest = icmp_error(GUEST, PEER, 3, 3, &delivered);
    let of_world = icmp_error(PEER, NAT, 3, 3, &sent);
    let rates = VmRates {
        tx: bytes(100_000),
        rx: bytes(100_000),
        ..VmRates::default()
    };
    rig.kernel.borrow().set_rates(1, rates);
    for _ in 0..2_000 {
        rig.kernel.borrow_mut().now_ns += 2 * MILLISECOND_NS;
        rig.guest(1, &of_guest);
        rig.world(&of_world);
    }
    let (sent, sent_len) = total(&rig.at_world());
    let (got, got_len) = total(&to_guest(&mut rig));
    for len in [sent_len, got_len] {
        assert!((400_000..=411_000).contains(&len), "{len} bytes");
    }
    let dropped = rig.dropped(1, DropReason::ByteRate);
    assert_eq!(sent as u64 + got as u64 + dropped, 4_000);
}

#[test]
fn what_ordinary_packets_used_up_is_gone_for_all() {
    let mut rig = Rig::new();
    let nat = open(&mut rig);
    rig.world(&udp(SERVER, nat, b"y"));
    let (_, delivered) = rig.at_guest().pop().expect("it arrives");
    rig.kernel.borrow().set_rates(1, tx(packets(10)));
    assert_eq!(rig.guest(1, &udp(GUEST_AT, SERVER, b"x")), Handling::Fast);
    let over = Handling::Dropped(DropReason::PacketRate);
    let large = datagram(GUEST_AT, SERVER, 9_000);
    assert_eq!(rig.guest(1, &large), over);
    rig.guest(1, &icmp_error(GUEST, PEER, 3, 3, &delivered));
    assert_eq!(rig.at_world().len(), 1);
    // And the other way round: seven packets, 700 ms.
    rig.kernel.borrow_mut().now_ns += 100 * MILLISECOND_NS;
    rig.guest(1, &large);
    assert_eq!(rig.at_world().len(), 7);
    rig.kernel.borrow_mut().now_ns += 590 * MILLISECOND_NS;
    assert_eq!(rig.guest(1, &udp(GUEST_AT, SERVER, b"x")), over);
    rig.kernel.borrow_mut().now_ns += 20 * MILLISECOND_NS;
    assert_eq!(rig.guest(1, &udp(GUEST_AT, SERVER, b"x")), Handling::Fast);
}

#[test]
fn what_is_told_about_a_large_packet_is_not_charged() {
    let mut rig = Rig::new();
    open(&mut rig);
    rig.kernel.borrow().set_rates(1, tx(packets(10)));
    let large = udp(GUEST_AT, SERVER, &[7; 8_972]);
    for _ in 0..5 {
        rig.guest(1, &large);
    }
    // It may not be fragmented, so it goes nowhere.
    assert_eq!(rig.dropped(1, DropReason::TooBig), 5);
    assert_eq!(rig.guest(1, &udp(GUEST_AT, SERVER, b"x")), Handling::Fast);
}

#[test]
fn without_the_flag_nothing_is_charged() {
    let mut rig = Rig::new();
    open(&mut rig);
    rig.kernel.borrow().set_rates(1, tx(packets(1)));
    let flags = rig.kernel.borrow().vm(1);
    flags.flags().fetch_and(!VmFlags::LIMITED, Relaxed);
    for _ in 0..5 {
        rig.guest(1, &datagram(GUEST_AT, SERVER, 9_000));
    }
    assert_eq!(rig.at_world().len(), 5 * 7);
}

/// Frames that the kernel handed over before, and that the engine comes to after.
fn queue(rig: &Rig, row: u16, why: Handover, packet: &[u8]) {
    let vnet = VirtioNetHdr::default();
    let way = rig.kernel.borrow_mut().hand_over(row, why, 0, vnet, packet);
    assert_eq!(way, Handling::Engine(why));
}

#[test]
fn nothing_of_a_flow_that_is_cut_leaves_the_queue() {
    let mut rig = Rig::new();
    let nat = open(&mut rig);
    rig.world(&udp(SERVER, nat, b"y"));
    let (_, delivered) = rig.at_guest().pop().expect("it arrives");
    let slot = slot(&rig);
    let generation = rig.kernel.borrow().slot(slot).generation().load(Relaxed);
    let large = datagram(GUEST_AT, SERVER, 60_000);
    // More than a turn's, so that some wait in the engine's own batch when the flow is cut.
    for _ in 0..30 {
        rig.kernel
            .borrow_mut()
            .guest_sends(1, VirtioNetHdr::default(), &large);
        let vm = rig.kernel.borrow().vm(1);
        vm.taken_in().store(vm.handed_over().load(Relaxed), Relaxed);
    }
    let what = Subject::Flow { slot, generation };
    rig.tell(move |engine| engine.cut(what));
    let before = rig.at_world().len();
    assert!(before < 30 * 44, "{before}");
    queue(
        &rig,
        1,
        Handover::Icmp,
        &icmp_error(GUEST, PEER, 3, 3, &delivered),
    );
    let back = datagram(SERVER, nat, 9_000);
    rig.kernel.borrow_mut().hand_over(
        1,
        Handover::TooBig,
        slipgate_abi::portframe::PortFlags::FROM_UPLINK,
        VirtioNetHdr::default(),
        &back,
    );
    for _ in 0..10 {
        rig.turn();
    }
    assert_eq!(rig.at_world().len(), 0, "nothing leaves after the cut");
    let answers = to_guest(&mut rig);
    assert!(
        answers.iter().all(|l3| l3[9] == 1),
        "told, and sent nothing"
    );
    let passed = before as u64 / 44;
    assert_eq!(rig.dropped(1, DropReason::Denied), 30 - passed + 2);
}

#[test]
fn nothing_of_a_flow_that_a_policy_ended_leaves_the_queue() {
    let mut rig = Rig::new();
    open(&mut rig);
    let large = datagram(GUEST_AT, SERVER, 9_000);
    rig.kernel
        .borrow_mut()
        .guest_sends(1, VirtioNetHdr::default(), &large);
    let now_ns = rig.kernel.borrow().now_ns;
    let slot = slot(&rig);
    let core = &mut rig.engine.core;
    assert!(
        core.nat
            .flows
            .cut(&mut core.nat.datapath, slot, EndReason::Policy, now_ns)
    );
    rig.turn();
    assert_eq!(
        (rig.at_world().len(), rig.dropped(1, DropReason::Denied)),
        (0, 1)
    );
}

#[test]
fn what_is_for_a_frozen_vm_is_counted_once() {
    let mut rig = Rig::new();
    open(&mut rig);
    let large = datagram(GUEST_AT, SERVER, 9_000);
    rig.kernel
        .borrow_mut()
        .guest_sends(1, VirtioNetHdr::default(), &large);
    rig.kernel.borrow().set_frozen(1, true);
    rig.turn();
    assert_eq!(rig.dropped(1, DropReason::Frozen), 1);
    let live = rig.kernel.borrow().slot(slot(&rig));
    assert_eq!(live.tx_packets().load(Relaxed), 1);
}

/// Datagrams of 60,000 bytes, 44 fragments each, as many as the credits let through.
fn flood(rig: &Rig, credits: u32) -> usize {
    // SAFETY: a live row; one thread.
    unsafe { (*rig.kernel.borrow().vm(1).as_ptr()).credits = credits };
    let large = datagram(GUEST_AT, SERVER, 60_000);
    let mut kernel = rig.kernel.borrow_mut();
    let sends = |_: &usize| {
        kernel.guest_sends(1, VirtioNetHdr::default(), &large)
            != Handling::Dropped(DropReason::NoCredit)
    };
    (0..1_000).take_while(sends).count()
}

#[test]
fn a_large_datagram_costs_the_credits_of_its_fragments() {
    let mut rig = Rig::new();
    open(&mut rig);
    // Of an ordinary link, 41 each: the thirteenth uses them up.
    assert_eq!(flood(&rig, 512), 13);
    for _ in 0..4 {
        rig.turn();
    }
    assert_eq!(rig.at_world().len(), 13 * 44);
    let vm = rig.kernel.borrow().vm(1);
    let (out, back) = (vm.handed_over().load(Relaxed), vm.taken_in().load(Relaxed));
    assert_eq!(out, back, "all come back");
}

/// How many packets the world gets before the first one of VM 2, which comes behind so many frames
/// of VM 1's flood.
fn writes_before_another(credits: u32, behind: usize) -> usize {
    let mut rig = Rig::new();
    open(&mut rig);
    let sent = flood(&rig, credits);
    let behind = behind.min(sent);
    let rest = rig.kernel.borrow_mut().queue.split_off(behind);
    let first = udp((GUEST, 7_000), SERVER, b"x");
    let vnet = VirtioNetHdr::default();
    rig.kernel.borrow_mut().guest_sends(2, vnet, &first);
    rig.kernel.borrow_mut().queue.extend(rest);
    for _ in 0..1_000 {
        rig.turn();
        let sent = &rig.kernel.borrow().at_world;
        if let Some(at) = sent.iter().position(|l3| l3.len() == first.len()) {
            return at;
        }
    }
    panic!("it has not gone");
}

#[test]
fn a_flood_of_large_datagrams_delays_no_other_beyond_its_turn() {
    // In the flood's first batch: behind one frame of the other VM's.
    for behind in [0, 1, 10, BATCH - 1] {
        let before = writes_before_another(u32::MAX, behind);
        assert!(before <= 44, "behind {before} writes");
    }
    // Behind all that the other's credits let through.
    let before = writes_before_another(512, usize::MAX);
    assert!(before <= 44, "behind {before} writes");
    let before = writes_before_another(4_096, usize::MAX);
    assert!(before <= 4_096 / 41 * 44 + 44, "behind {before} writes");
}

#[test]
fn a_turn_writes_so_much_and_the_rest_waits_for_the_next() {
    let mut rig = Rig::new();
    open(&mut rig);
    flood(&rig, u32::MAX);
    let mut left = 1_000 * 44;
    for _ in 0..1_000 {
        // Nothing of it is lost on the way, and the broker is heard after each turn.
        rig.tell(|engine| engine.after_ends());
        let written = rig.at_world().len();
        assert!(written <= WORK_PER_TURN + 44, "{written} in a turn");
        left -= written;
        if left == 0 {
            break;
        }
        assert!(written >= WORK_PER_TURN, "{written} in a turn");
    }
    assert_eq!(left, 0);
    assert_eq!(
        rig.kernel
            .borrow()
            .slot(slot(&rig))
            .tx_packets()
            .load(Relaxed),
        1_001
    );
    let vm = rig.kernel.borrow().vm(1);
    let (out, back) = (vm.handed_over().load(Relaxed), vm.taken_in().load(Relaxed));
    assert_eq!(out, back);
}

#[test]
fn a_packet_for_which_there_is_no_room_is_not_sent_in_part() {
    let mut rig = Rig::new();
    open(&mut rig);
    set_mtu(&rig, 68);
    rig.kernel.borrow().set_rates(1, tx(packets(10)));
    rig.guest(1, &datagram(GUEST_AT, SERVER, 60_000));
    assert_eq!(rig.at_world().len(), 0);
    assert_eq!(rig.dropped(1, DropReason::EngineBusy), 1);
    // Nor charged.
    assert_eq!(rig.guest(1, &udp(GUEST_AT, SERVER, b"x")), Handling::Fast);
}
