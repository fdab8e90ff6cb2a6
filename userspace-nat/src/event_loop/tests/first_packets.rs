//! First packets come by the ring where they fit, and none is lost, doubled or overtaken.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{DropReason, first_packet::RING_LEN};

use super::rig::*;
use crate::{
    clock::{MILLISECOND_NS, SECOND_NS},
    port::VirtioNetHdr,
};

/// Longer than a place of the ring.
const LONG: [u8; 400] = [0x4c; 400];

fn no_offload() -> VirtioNetHdr {
    VirtioNetHdr::default()
}

impl Rig {
    /// VM 1 sends, and the engine does not turn.
    fn queue(&self, packet: &[u8]) -> Handling {
        let mut kernel = self.kernel.borrow_mut();
        kernel.guest_sends(1, no_offload(), packet)
    }

    /// Frames that wait for the engine at the port.
    fn at_port(&self) -> usize {
        self.kernel.borrow().queue.len()
    }

    fn in_ring(&self) -> u64 {
        self.kernel.borrow().in_ring
    }

    /// Lets the VMs have as many frames under way as any test needs.
    fn with_credits(self) -> Self {
        let kernel = self.kernel.borrow();
        // SAFETY: a live row; one thread.
        unsafe { (*kernel.vm(1).as_ptr()).credits = 4_096 };
        drop(kernel);
        self
    }

    fn credits_under_way(&self) -> u64 {
        let vm = self.kernel.borrow().vm(1);
        vm.handed_over().load(Relaxed) - vm.taken_in().load(Relaxed)
    }
}

/// Last octets of the payloads, in the order in which they arrived.
fn marks(packets: Vec<Vec<u8>>) -> Vec<u8> {
    let last = packets.iter().map(|packet| *packet.last().unwrap());
    last.collect()
}

/// A datagram of one flow, with a mark as its last octet.
fn datagram(mut payload: Vec<u8>, mark: u8) -> Vec<u8> {
    payload.push(mark);
    udp((GUEST, 5_000), (PEER, 9), &payload)
}

fn datagram_of(flow: u16) -> Vec<u8> {
    udp((GUEST, 5_000 + flow), (PEER, 1_000 + flow), b"x")
}

#[test]
fn a_short_first_packet_is_read_without_the_port() {
    let mut rig = Rig::new();
    // The engine is awake from its first turn on.
    rig.turn();
    assert!(matches!(
        rig.queue(&syn((GUEST, 40_000), SERVER, 7)),
        Handling::Engine(_)
    ));
    assert!(matches!(
        rig.queue(&datagram(vec![], 1)),
        Handling::Engine(_)
    ));
    assert_eq!((rig.at_port(), rig.in_ring()), (0, 2));
    assert_eq!(rig.credits_under_way(), 2);
    rig.turn();
    assert_eq!((rig.flows(), rig.at_world().len()), (2, 2));
    assert_eq!(rig.credits_under_way(), 0);
    rig.assert_paired();
}

#[test]
fn long_packets_and_those_that_the_kernel_segments_go_by_the_port() {
    let mut rig = Rig::new();
    rig.turn();
    rig.queue(&datagram(LONG.to_vec(), 1));
    assert_eq!((rig.at_port(), rig.in_ring()), (1, 0));
    rig.turn();
    let gso = VirtioNetHdr {
        gso_type: VirtioNetHdr::GSO_UDP_L4,
        gso_size: 600,
        flags: VirtioNetHdr::NEEDS_CSUM,
        csum_start: 34,
        csum_offset: 6,
        ..VirtioNetHdr::default()
    };
    let packet = udp((GUEST, 5_001), (PEER, 9), &[1; 1_200]);
    rig.kernel.borrow_mut().guest_sends(1, gso, &packet);
    assert_eq!((rig.at_port(), rig.in_ring()), (1, 0));
    rig.turn();
    assert_eq!(rig.flows(), 2);
}

/// The port, then the ring: the second packet waits for no ring, but goes behind the first.
#[test]
fn a_short_packet_does_not_overtake_a_long_one() {
    let mut rig = Rig::new();
    rig.turn();
    rig.queue(&datagram(LONG.to_vec(), 1));
    rig.queue(&datagram(vec![], 2));
    assert_eq!((rig.at_port(), rig.in_ring()), (2, 0));
    rig.turn();
    assert_eq!(marks(rig.at_world()), [1, 2]);
    // The port was read: the ring is in use again.
    rig.queue(&datagram_of(7));
    assert_eq!((rig.at_port(), rig.in_ring()), (0, 1));
}

/// The ring, then the port: what the port has is put behind.
#[test]
fn a_long_packet_does_not_overtake_a_short_one() {
    let mut rig = Rig::new().with_credits();
    rig.turn();
    // More than one batch of others is before it in the ring.
    for flow in 1..200 {
        rig.queue(&datagram_of(flow));
    }
    rig.queue(&datagram(vec![], 1));
    rig.queue(&datagram(LONG.to_vec(), 2));
    rig.queue(&datagram(vec![], 3));
    assert_eq!((rig.at_port(), rig.in_ring()), (2, 200));
    rig.pass(MILLISECOND_NS);
    let arrived = marks(rig.at_world());
    assert_eq!(arrived[199..], [1, 2, 3]);
    rig.assert_paired();
}

/// A program on another CPU has claimed a place before the engine read the port, and fills it in.
#[test]
fn a_long_packet_does_not_overtake_a_short_one_that_is_being_copied() {
    let mut rig = Rig::new();
    rig.turn();
    rig.queue(&datagram(vec![], 1));
    rig.queue(&datagram(LONG.to_vec(), 2));
    assert_eq!((rig.at_port(), rig.in_ring()), (1, 1));
    rig.kernel.borrow().faults.unpublished_looks.set(50);
    rig.pass(MILLISECOND_NS);
    assert_eq!(marks(rig.at_world()), [1, 2]);
    assert_eq!(rig.credits_under_way(), 0);
}

#[test]
fn a_place_that_is_not_published_for_long_stops_nobody() {
    let mut rig = Rig::new();
    rig.turn();
    rig.queue(&datagram(vec![], 1));
    rig.queue(&datagram(LONG.to_vec(), 2));
    rig.kernel.borrow().faults.unpublished_looks.set(u32::MAX);
    rig.turn();
    assert_eq!(marks(rig.at_world()), [2]);
    rig.kernel.borrow().faults.unpublished_looks.set(0);
    rig.turn();
    assert_eq!(marks(rig.at_world()), [1]);
    assert_eq!(rig.credits_under_way(), 0);
}

/// The time that a place says may be another process's word.
#[test]
fn a_place_with_any_time_is_read() {
    let mut rig = Rig::new();
    rig.turn();
    rig.queue(&datagram(vec![], 1));
    {
        let kernel = rig.kernel.borrow();
        // SAFETY: a live element; one thread.
        unsafe { (*kernel.first_packet(0).as_ptr()).at_ns = u64::MAX };
    }
    let (mut rig, _) = rig.restart(&Setup::default());
    rig.turn();
    assert_eq!(marks(rig.at_world()), [1]);
}

#[test]
fn what_a_full_ring_does_not_take_goes_by_the_port_in_order() {
    let mut rig = Rig::with(Setup {
        slots: 8_192,
        max_flows: 4_000,
        ..Setup::default()
    })
    .with_credits();
    rig.turn();
    let len = RING_LEN as u16;
    for flow in 0..len + 100 {
        rig.queue(&datagram_of(flow));
    }
    assert_eq!((rig.at_port(), rig.in_ring()), (100, u64::from(len)));
    rig.pass(10 * MILLISECOND_NS);
    let ports = |packet: &Vec<u8>| u16::from_be_bytes([packet[22], packet[23]]);
    let arrived: Vec<u16> = rig.at_world().iter().map(ports).collect();
    let sent: Vec<u16> = (0..len + 100).map(|flow| 1_000 + flow).collect();
    assert_eq!(arrived, sent);
    assert_eq!((rig.flows(), rig.credits_under_way()), (612, 0));
    // More laps of the ring.
    for flow in 612..2_000 {
        rig.guest(1, &datagram_of(flow));
    }
    assert_eq!(rig.at_world().len(), 1_388);
    assert_eq!(rig.at_port(), 0);
    rig.assert_paired();
}

#[test]
fn a_partial_checksum_stays_partial() {
    let mut rig = Rig::new();
    rig.turn();
    let partial = VirtioNetHdr {
        flags: VirtioNetHdr::NEEDS_CSUM,
        csum_start: 34,
        csum_offset: 16,
        ..VirtioNetHdr::default()
    };
    let packet = syn((GUEST, 40_000), SERVER, 7);
    rig.kernel.borrow_mut().guest_sends(1, partial, &packet);
    assert_eq!(rig.in_ring(), 1);
    rig.turn();
    let written = rig.kernel.borrow().last_written.clone();
    assert_eq!(
        VirtioNetHdr::decode(written.first_chunk().unwrap()),
        partial
    );
    // One that lies elsewhere is for the kernel's frame to keep.
    let odd = VirtioNetHdr {
        csum_start: 36,
        ..partial
    };
    let packet = syn((GUEST, 40_001), SERVER, 7);
    rig.kernel.borrow_mut().guest_sends(1, odd, &packet);
    assert_eq!((rig.at_port(), rig.in_ring()), (1, 1));
}

/// The engine looked before the packet was there, and the program after the engine slept.
#[test]
fn a_packet_that_an_engine_going_to_sleep_did_not_see_wakes_it() {
    let mut rig = Rig::new();
    rig.turn();
    rig.kernel.borrow().faults.sleeps_meanwhile.set(true);
    rig.queue(&datagram(vec![], 1));
    // The frame is at the port, and the packet in the ring.
    assert_eq!((rig.at_port(), rig.in_ring()), (1, 0));
    rig.turn();
    assert_eq!(marks(rig.at_world()), [1]);
    assert_eq!((rig.flows(), rig.credits_under_way()), (1, 0));
    assert_eq!(rig.engine.status().frames_read, 1);
}

#[test]
fn a_successor_handles_what_is_left_in_the_ring() {
    let mut rig = Rig::new().with_credits();
    rig.connect(40_000, 7);
    for flow in 0..100 {
        rig.queue(&datagram_of(flow));
    }
    assert_eq!(rig.in_ring(), 100);
    let (mut rig, _) = rig.restart(&Setup::default());
    // The ring was open when the engine died: more goes there until it is full.
    rig.queue(&datagram_of(100));
    rig.pass(MILLISECOND_NS);
    assert_eq!((rig.flows(), rig.at_world().len()), (102, 101));
    assert_eq!(rig.credits_under_way(), 0);
    rig.assert_paired();
}

#[test]
fn a_successor_drops_what_is_older_than_its_senders_wait() {
    let mut rig = Rig::new();
    rig.turn();
    rig.queue(&datagram_of(0));
    rig.kernel.borrow_mut().now_ns += 6 * SECOND_NS;
    rig.queue(&datagram_of(1));
    let (mut rig, _) = rig.restart(&Setup::default());
    rig.turn();
    assert_eq!((rig.flows(), rig.at_world().len()), (1, 1));
    assert_eq!(rig.dropped(1, DropReason::EngineBusy), 1);
    assert_eq!(rig.credits_under_way(), 0);
}

/// A lost frame must not keep the ring from being used for ever.
#[test]
fn a_first_packet_that_the_ports_queue_lost_is_forgotten() {
    let mut rig = Rig::new();
    rig.turn();
    rig.kernel.borrow_mut().faults.queue_len = 1;
    rig.queue(&datagram(LONG.to_vec(), 1));
    rig.queue(&datagram(LONG.to_vec(), 2));
    rig.turn();
    rig.queue(&datagram_of(1));
    assert_eq!(rig.in_ring(), 0);
    rig.pass(3 * SECOND_NS);
    rig.queue(&datagram_of(2));
    assert_eq!(rig.in_ring(), 1);
}

/// An engine that stops reads no more: what comes then is its successor's, by the port.
#[test]
fn an_engine_that_stops_closes_the_ring() {
    let mut rig = Rig::new();
    rig.turn();
    rig.send(|engine| engine.stop(slipgate_model::OnExit::Keep));
    rig.run().unwrap();
    rig.queue(&datagram_of(0));
    assert_eq!((rig.at_port(), rig.in_ring()), (1, 0));
    let (mut rig, _) = rig.restart(&Setup::default());
    rig.turn();
    assert_eq!(rig.at_world().len(), 1);
}

/// Another engine's VM has another ring.
#[test]
fn each_engine_reads_its_own_ring() {
    let mut rig = Rig::new();
    rig.turn();
    {
        let kernel = rig.kernel.borrow();
        // SAFETY: a live row; one thread.
        unsafe { (*kernel.vm(2).as_ptr()).owner = 1 };
        kernel.owner_row(1).ring_open().store(1, Relaxed);
    }
    let packet = datagram_of(0);
    let mut kernel = rig.kernel.borrow_mut();
    kernel.guest_sends(2, no_offload(), &packet);
    let tails = [0, 1].map(|row| kernel.owner_row(row).ring_tail().load(Relaxed));
    assert_eq!(tails, [0, 1]);
    drop(kernel);
    rig.turn();
    assert_eq!(rig.flows(), 0);
}

/// A port of user mode carries established traffic as it is read, and has few frames for the engine.
#[test]
fn a_port_with_more_to_do_is_read_in_each_turn() {
    let mut rig = Rig::new();
    rig.engine.port.has_more_without_events();
    let before = rig.engine.port.readings();
    for _ in 0..10 {
        rig.turn();
    }
    assert_eq!(rig.engine.port.readings(), before + 10);
    // Frames that the last reading had do not change that.
    rig.queue(&datagram(LONG.to_vec(), 1));
    for _ in 0..10 {
        rig.turn();
    }
    assert_eq!(rig.engine.port.readings(), before + 20);
    assert_eq!(marks(rig.at_world()), [1]);
}

/// While the ring has packets, a reading of an empty port is not worth its system call each time.
#[test]
fn an_empty_port_is_left_out_while_first_packets_come_by_the_ring() {
    let mut rig = Rig::new();
    rig.turn();
    rig.engine.port.has_more_without_events();
    let before = rig.engine.port.readings();
    for flow in 0..8 {
        rig.queue(&datagram_of(flow));
        rig.turn();
    }
    assert_eq!(rig.engine.port.readings(), before + 2);
    assert_eq!(rig.at_world().len(), 8);
}
