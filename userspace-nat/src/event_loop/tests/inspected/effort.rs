//! Tests of the bound on the work that a VM's Initial packets cause.
use super::{super::rig::*, scene::*};
use crate::{
    clock::SECOND_NS,
    fake::{hellos, initials},
    inspection::quic::{Allowance, DERIVED, Effort, Flow, Keys, MIN_DATAGRAM, Version, effort},
    port::VirtioNetHdr,
    record::{Event, Events},
};
use slipgate_abi::VmId;

/// Keys that a VM may have made at once.
const MOST_AT_ONCE: usize = (effort::MOST / (effort::DERIVATION + effort::TRIAL)) as usize;

/// A frame of as many datagrams as fit, each of seven Initials that decrypt and one that does not.
fn frame_that_does_not_open(port: u16) -> (VirtioNetHdr, Vec<u8>) {
    let short = |id: &[u8]| initials::short_initial(id, &[1; 32]);
    let mut payload = Vec::new();
    for n in 0..54u8 {
        let mut datagram: Vec<u8> = (0..7)
            .flat_map(|m| short(&[n, m, 0, 0, 0, 0, 0, 0]))
            .collect();
        let mut last = short(&[n, 7, 0, 0, 0, 0, 0, 0]);
        *last.last_mut().unwrap() ^= 1;
        datagram.extend(last);
        datagram.resize(MIN_DATAGRAM, 0);
        payload.extend(datagram);
    }
    let vnet = VirtioNetHdr {
        gso_type: VirtioNetHdr::GSO_UDP_L4,
        gso_size: MIN_DATAGRAM as u16,
        hdr_len: 42,
        ..VirtioNetHdr::default()
    };
    (vnet, udp((GUEST, port), SERVER, &payload))
}

/// The first packet of a QUIC connection.
fn begin(port: u16) -> Vec<u8> {
    let payload = initials::crypto(0, &hellos::client_hello(NAME));
    let id = port.to_be_bytes();
    let datagram = initials::initial(Version::One, &id, &id, 0, &payload);
    udp((GUEST, port), SERVER, &datagram)
}

fn send(rig: &Rig, row: u16, vnet: VirtioNetHdr, packet: &[u8]) {
    rig.kernel.borrow_mut().guest_sends(row, vnet, packet);
}

/// Keys made in one turn.
fn derived_in_a_turn(rig: &mut Rig) -> usize {
    let before = DERIVED.get();
    rig.turn();
    DERIVED.get() - before
}

fn rig() -> Rig {
    let events = Events::from_iter([Event::FlowEnd, Event::Refused]);
    let rig = Rig::with(Setup { events, ..setup() });
    tell_vm(&rig, VmId::new(101), NAME);
    tell_vm(&rig, VmId::new(102), NAME);
    rig
}

#[test]
fn a_replayed_frame_costs_so_many_derivations_a_turn_and_another_vm_is_served_in_it() {
    let mut rig = rig();
    let vm = rig.kernel.borrow().vm(1);
    // Enough for all of the frames.
    // SAFETY: a live row; one thread.
    unsafe { (*vm.as_ptr()).credits = 1_024 };
    for n in 0..60 {
        let (vnet, frame) = frame_that_does_not_open(GUEST_PORT + n);
        send(&rig, 1, vnet, &frame);
    }
    let others = begin(GUEST_PORT);
    send(&rig, 2, VirtioNetHdr::default(), &others);
    let mut derived = derived_in_a_turn(&mut rig);
    let sent = rig.at_world();
    assert_eq!(sent.len(), 1, "the other VM's goes out in that turn");
    assert_eq!(sent[0].len(), others.len());
    // What of the batch waited for a turn of its own.
    derived += (0..4).map(|_| derived_in_a_turn(&mut rig)).sum::<usize>();
    assert!(derived <= MOST_AT_ONCE + 1, "{derived} keys");
    // And so it goes on, as fast as time gives.
    let (vnet, frame) = frame_that_does_not_open(GUEST_PORT + 60);
    for _ in 0..100 {
        send(&rig, 1, vnet, &frame);
        assert!(derived_in_a_turn(&mut rig) <= 1);
        rig.kernel.borrow_mut().now_ns += 1_000_000;
    }
}

#[test]
fn a_flow_that_wastes_work_ends_and_says_why() {
    let mut rig = rig();
    let (vnet, frame) = frame_that_does_not_open(GUEST_PORT);
    let wasted = (effort::MAX_WASTED / (effort::DERIVATION + effort::TRIAL)) as usize;
    let mut derived = 0;
    for _ in 0..10 {
        send(&rig, 1, vnet, &frame);
        derived += derived_in_a_turn(&mut rig);
    }
    assert!(derived <= wasted + 8, "{derived} keys");
    assert_eq!(rig.engine.core.inspected.counts(VmId::new(101)).unopened, 1);
    assert_eq!(rig.at_guest()[0].1[20..22], [3, 13], "prohibited");
    assert_eq!(rig.at_world(), Vec::<Vec<u8>>::new());
    rig.pass(60 * SECOND_NS);
    let records = rig.records();
    let has = |key: &str, value: &str| records.iter().any(|record| record[key] == value);
    assert!(has("end", "inspection"), "{records:?}");
    assert!(has("reason", "inspect_unopened"), "{records:?}");
}

#[test]
fn connections_that_begin_together_are_all_let_in() {
    let mut rig = rig();
    // As many frames as may be on their way, at one time.
    for half in [0..50, 50..100] {
        for n in half {
            send(&rig, 1, VirtioNetHdr::default(), &begin(GUEST_PORT + n));
        }
        assert_eq!(derived_in_a_turn(&mut rig), 50);
    }
    assert_eq!(rig.at_world().len(), 100);
    // Each sends its own again, and is answered.
    for n in 0..100 {
        rig.guest(1, &begin(GUEST_PORT + n));
        let sent = rig.at_world().pop().expect("it goes on");
        let nat = (NAT, u16::from_be_bytes([sent[20], sent[21]]));
        let id = (GUEST_PORT + n).to_be_bytes();
        let answer = initials::answer(Version::One, &id, b"server");
        rig.world(&udp(SERVER, nat, &answer));
        let next = initials::initial(Version::One, &id, b"server", 1, &[2, 0, 0, 0, 0]);
        rig.guest(1, &udp((GUEST, GUEST_PORT + n), SERVER, &next));
        assert_eq!(rig.at_world().len(), 1, "{n}");
        rig.pass(SECOND_NS / 50);
    }
    assert_eq!(
        rig.engine.core.inspected.counts(VmId::new(101)),
        Default::default()
    );
}

#[test]
fn who_has_spent_all_waits_for_time_to_refill_it_and_others_do_not() {
    let mut rig = rig();
    for n in 0..8 {
        let (vnet, frame) = frame_that_does_not_open(GUEST_PORT + n);
        for _ in 0..6 {
            send(&rig, 1, vnet, &frame);
            rig.turn();
        }
    }
    rig.at_world();
    rig.guest(1, &begin(50_000));
    assert_eq!(rig.at_world().len(), 0);
    rig.guest(2, &begin(50_000));
    assert_eq!(rig.at_world().len(), 1);
    rig.pass(SECOND_NS);
    rig.guest(1, &begin(50_000));
    assert_eq!(rig.at_world().len(), 1, "its client sends it again");
}

#[test]
fn what_servers_send_is_not_on_the_guests_account() {
    let mut rig = rig();
    rig.guest(1, &begin(GUEST_PORT));
    let sent = rig.at_world().pop().expect("it goes out");
    let nat = (NAT, u16::from_be_bytes([sent[20], sent[21]]));
    // Answers that nobody's keys open.
    let forged = initials::answer(Version::One, b"another", b"server").repeat(8);
    let before = DERIVED.get();
    for _ in 0..2_000 {
        rig.world(&udp(SERVER, nat, &forged));
    }
    assert_eq!(DERIVED.get() - before, 1, "a connection keeps its keys");
    assert_eq!(rig.at_guest().len(), 2_000, "they go on");
    rig.guest(1, &begin(50_000));
    assert_eq!(rig.at_world().len(), 1);
}

/// Prints what the dear parts cost, and a frame, with and without bounds. Run with
/// `cargo test --release -p userspace-nat ns_per_frame_of_initials -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn ns_per_frame_of_initials() {
    const ROUNDS: u64 = 100;
    let time = |mut work: Box<dyn FnMut(u64)>| {
        let begin = std::time::Instant::now();
        (0..ROUNDS).for_each(&mut work);
        begin.elapsed().as_nanos() as u64 / ROUNDS
    };
    let derivation = time(Box::new(|n| {
        std::hint::black_box(Keys::of_client(Version::One, &n.to_be_bytes()));
    }));
    let keys = Keys::of_client(Version::One, b"id");
    let packet = initials::short_initial(b"id", &[1; 32]);
    let trial = time(Box::new(move |_| {
        let initial = crate::inspection::quic::initials(&packet).unwrap()[0];
        std::hint::black_box(initial.open(&keys));
    }));
    let (vnet, frame) = frame_that_does_not_open(GUEST_PORT);
    let datagrams = frame[28..].to_vec();
    let unbounded = time(Box::new(move |_| {
        for datagram in datagrams.chunks(MIN_DATAGRAM) {
            let mut allowance = Allowance::default();
            let effort = &mut Effort::new(&mut allowance, 0);
            let _ = Flow::default().datagram(datagram, effort, &mut |_| true);
        }
    }));
    let mut rig = rig();
    let bounded = time(Box::new(move |_| {
        send(&rig, 1, vnet, &frame);
        rig.turn();
    }));
    let mut open = Flow::default();
    let mut allowance = Allowance::default();
    let effort = &mut Effort::new(&mut allowance, 0);
    let first = begin(GUEST_PORT)[28..].to_vec();
    open.datagram(&first, effort, &mut |_| true).unwrap();
    let data: Vec<u8> = (0..1_200u32)
        .map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect();
    let data = [&[0x40], &data[..]].concat();
    let data = time(Box::new(move |_| {
        let mut allowance = Allowance::default();
        let effort = &mut Effort::new(&mut allowance, 0);
        std::hint::black_box(open.datagram(&data, effort, &mut |_| true).unwrap());
    }));
    println!("{derivation} ns a derivation, {trial} a trial, {data} a datagram of data");
    println!("{unbounded} ns a frame without bounds, {bounded} with them, when it is replayed");
}
