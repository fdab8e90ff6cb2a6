//! Tests of changes by the broker: flows cut and captured, VMs frozen, the port's frames written.
use std::{
    collections::HashSet,
    io::Read as _,
    os::unix::net::UnixStream,
    sync::{Arc, Mutex},
};

use pcap_file::pcapng::{Block, PcapNgReader};
use slipgate_abi::{
    DropReason, Handover, SlotIndex, Verdict, VmRow, tcp::Flags, timeout::CLOSING_GRACE_NS,
};
use std::sync::atomic::Ordering::Relaxed;

use slipgate_model::{OnExit, Subject};

use super::rig::*;
use crate::{
    clock::{MILLISECOND_NS, SECOND_NS},
    event_loop::cut::MOST_PROBES,
    observe::{CaptureRequest, MOST_CAPTURES, NotCaptured},
    packet::{Ipv4, Packet, Transport, transport::Tcp},
};

const PSH: u8 = 8;
const MINUTE_NS: u64 = 60 * SECOND_NS;

impl Rig {
    /// The flow in the only slot in use.
    fn subject(&self) -> Subject {
        let kernel = self.kernel.borrow();
        let slot = kernel.slots_in_use()[0];
        Subject::Flow {
            slot,
            generation: kernel.slot(slot).generation().load(Relaxed),
        }
    }

    fn capture(&mut self, subject: Subject, packets: Option<u64>) -> UnixStream {
        let (ours, started) = self.try_capture(subject, packets);
        assert_eq!(started, Ok(()));
        ours
    }

    fn try_capture(
        &mut self,
        subject: Subject,
        packets: Option<u64>,
    ) -> (UnixStream, Result<(), NotCaptured>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let request = CaptureRequest {
            subject,
            to: theirs.into(),
            packets,
            lasts_ns: None,
        };
        (ours, self.tell(|engine| engine.capture(request)))
    }
}

pub(super) fn tcp_of(packet: &[u8]) -> Tcp {
    assert!(is_right(packet), "a checksum is wrong");
    match Packet::parse(Ipv4::parse(packet).unwrap())
        .unwrap()
        .transport
    {
        Transport::Tcp(tcp) => tcp,
        other => panic!("{other:?} is no TCP"),
    }
}

/// The packets of a pcapng stream, without their Ethernet headers, and whether they came.
fn captured(bytes: &[u8]) -> Vec<(Vec<u8>, bool)> {
    let mut reader = PcapNgReader::new(bytes).unwrap();
    let mut packets = Vec::new();
    while let Some(block) = reader.next_block() {
        if let Block::EnhancedPacket(packet) = block.unwrap() {
            use pcap_file::pcapng::blocks::enhanced_packet::EnhancedPacketOption::Flags;
            let came = packet.options.contains(&Flags(1));
            packets.push((packet.data[14..].to_vec(), came));
        }
    }
    packets
}

fn read(from: &mut UnixStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    // The rest is still to come.
    let _ = from.read_to_end(&mut bytes);
    bytes
}

#[test]
fn a_flow_that_is_cut_sends_nothing_more_and_both_ends_are_told() {
    let mut rig = Rig::new();
    let nat = rig.connect(40_000, 7);
    let what = rig.subject();
    let cut = rig.tell(move |engine| engine.cut(what)).unwrap();
    assert_eq!(cut.flows, 1);
    assert_eq!(rig.ended(), [], "answered before the grace");
    // A guest that says nothing is asked where it stands.
    let asked = rig.at_guest();
    assert_eq!(asked.len(), 1);
    let probe = tcp_of(&asked[0].1);
    assert_eq!((probe.source, probe.destination), (443, 40_000));
    assert_eq!(probe.flags, Flags::ACK);
    // Of what the guest has not sent, by far: it has to say what it has.
    assert!(probe.acknowledgement.wrapping_sub(1 << 20) < 1 << 31);
    // Its answer is not sent on: it has an RST at once, and the server one in its name.
    let said = ack((GUEST, 40_000), SERVER, 0, 8, 9_001);
    assert_ne!(rig.guest(1, &said), Handling::Fast);
    let to_guest = tcp_of(&rig.at_guest().pop().unwrap().1);
    assert_eq!((to_guest.flags, to_guest.sequence), (Flags::RST, 9_001));
    let to_server = rig.at_world();
    assert_eq!(to_server.len(), 1);
    let ip = Ipv4::parse(&to_server[0]).unwrap();
    assert_eq!((ip.source, ip.destination), (NAT, PEER));
    let reset = tcp_of(&to_server[0]);
    assert_eq!((reset.source, reset.destination), (nat.1, 443));
    assert_eq!((reset.flags, reset.sequence), (Flags::RST, 8));
    // The other way round.
    let came = ack(SERVER, nat, PSH, 9_001, 8);
    assert_ne!(rig.world(&came), Handling::Fast);
    let back = tcp_of(&rig.at_world().pop().unwrap());
    assert_eq!((back.flags, back.sequence), (Flags::RST, 8));
    let on = tcp_of(&rig.at_guest().pop().unwrap().1);
    assert_eq!((on.flags, on.sequence), (Flags::RST, 9_001));
    assert_eq!(rig.dropped(1, DropReason::Denied), 2);
    rig.pass(CLOSING_GRACE_NS + MILLISECOND_NS);
    assert_eq!(rig.ended(), [cut.ends]);
    rig.assert_empty();
    let records = rig.records();
    assert_eq!(records.len(), 1);
    assert_eq!(records[0]["end"], "cut");
    // The SYN and the ACK, and none of what was refused.
    assert_eq!(records[0]["tx_packets"], 2);
    // Late segments meet no flow.
    rig.guest(1, &said);
    assert_eq!(rig.at_world(), Vec::<Vec<u8>>::new());
}

/// The guest is not running: only its peer can say where it stands.
#[test]
fn a_former_generations_peer_is_reset_by_its_own_numbers() {
    let mut rig = Rig::new();
    let nat = rig.connect(40_000, 7);
    rig.connect_from(2, 40_000, 7);
    rig.guest(1, &udp((GUEST, 5_000), SERVER, b"x"));
    rig.at_world();
    let cut = rig.tell(|engine| engine.end_generation(VmRow::new(1)));
    assert_eq!(cut.flows, 2);
    assert_eq!(rig.at_guest().len(), 1, "the guest is asked too");
    let asked = rig.at_world();
    assert_eq!(asked.len(), 1);
    let probe = tcp_of(&asked[0]);
    assert_eq!((probe.source, probe.destination), (nat.1, 443));
    // Before all that the peer expects, so it must answer (RFC 9293 section 3.10.7.4).
    assert_eq!((probe.flags, probe.sequence), (Flags::ACK, 7));
    assert_ne!(
        rig.world(&ack(SERVER, nat, 0, 9_501, 508)),
        Handling::Fast,
        "what it expects"
    );
    let reset = tcp_of(&rig.at_world().pop().unwrap());
    assert_eq!((reset.flags, reset.sequence), (Flags::RST, 508));
    rig.at_guest();
    // The guest runs on from a state that is older than the connection's: the peer answers its RST.
    rig.guest(1, &ack((GUEST, 40_000), SERVER, 0, 8, 9_001));
    let stale = tcp_of(&rig.at_world().pop().unwrap());
    assert_eq!((stale.flags, stale.sequence), (Flags::RST, 8));
    rig.pass(CLOSING_GRACE_NS + MILLISECOND_NS);
    assert_eq!(rig.ended(), [cut.ends]);
    let ends = rig
        .records()
        .into_iter()
        .map(|record| record["end"].clone());
    assert_eq!(ends.collect::<Vec<_>>(), ["generation", "generation"]);
    assert_eq!(rig.flows(), 1, "another VM's");
}

/// What they are asked is bounded. The rest learns it when it sends, or is sent to.
#[test]
fn of_more_connections_than_are_probed_the_rest_is_told_when_it_sends() {
    const MORE: u16 = 60;
    let all = MOST_PROBES as u16 + MORE;
    let mut rig = Rig::with(Setup {
        slots: 4_096,
        max_flows: 4_096,
        ..Setup::default()
    });
    let nats: Vec<At> = (0..all).map(|n| rig.connect(30_000 + n, 7)).collect();
    let cut = rig.tell(|engine| engine.end_generation(VmRow::new(1)));
    assert_eq!(cut.flows, u64::from(all));
    let sources = |packets: &[Vec<u8>]| -> HashSet<u16> {
        let ports = packets.iter().map(|packet| tcp_of(packet).source);
        ports.collect()
    };
    let asked = sources(&rig.at_world());
    let asked_guests: HashSet<u16> = rig
        .at_guest()
        .iter()
        .map(|(_, packet)| tcp_of(packet).destination)
        .collect();
    assert_eq!(
        (asked.len(), asked_guests.len()),
        (MOST_PROBES, MOST_PROBES)
    );
    let mut told = 0;
    for (port, nat) in (30_000..).zip(nats) {
        if asked.contains(&nat.1) {
            continue;
        }
        assert!(!asked_guests.contains(&port), "both of its ends, or none");
        // The guest's next segment, and of every other one the server's.
        match told % 2 {
            0 => rig.guest(1, &ack((GUEST, port), SERVER, 0, 8, 9_001)),
            _ => rig.world(&ack(SERVER, nat, 0, 9_001, 8)),
        };
        let to_guest = tcp_of(&rig.at_guest().pop().expect("the guest is told").1);
        assert_eq!((to_guest.flags, to_guest.destination), (Flags::RST, port));
        assert_eq!(to_guest.sequence, 9_001);
        let to_server = tcp_of(&rig.at_world().pop().expect("the server is told"));
        assert_eq!((to_server.flags, to_server.source), (Flags::RST, nat.1));
        assert_eq!(to_server.sequence, 8);
        told += 1;
    }
    assert_eq!(told, MORE);
    rig.pass(CLOSING_GRACE_NS + MILLISECOND_NS);
    assert_eq!(rig.ended(), [cut.ends]);
    rig.assert_empty();
}

#[test]
fn a_whole_vm_is_cut_and_no_other() {
    let mut rig = Rig::new();
    for port in 0..600 {
        rig.connect(40_000 + port, 7);
    }
    rig.guest(1, &udp((GUEST, 5_000), SERVER, b"x"));
    rig.connect_from(2, 40_000, 7);
    rig.at_guest();
    let cut = rig.tell(|engine| engine.cut(Subject::Vm { row: VmRow::new(1) }));
    let cut = cut.unwrap();
    assert_eq!(rig.at_guest().len(), 600, "as many were asked");
    rig.at_world();
    rig.guest(1, &udp((GUEST, 5_000), SERVER, b"x"));
    assert_eq!(rig.at_world(), Vec::<Vec<u8>>::new());
    rig.pass(CLOSING_GRACE_NS + MILLISECOND_NS);
    assert_eq!(rig.ended(), [cut.ends]);
    assert_eq!(cut.flows, 601);
    assert_eq!(rig.flows(), 1);
    assert_eq!(rig.records().len(), 601);
    let again = ack((GUEST, 40_000), SERVER, 0, 8, 9_001);
    assert_eq!(rig.guest(2, &again), Handling::Fast);
    // The VM may open others.
    rig.connect(40_000, 77);
    assert_eq!(rig.flows(), 2);
}

#[test]
fn a_new_connection_on_a_cut_ones_tuple_is_decided_on_its_own() {
    let mut rig = Rig::new();
    rig.connect(40_000, 7);
    let what = rig.subject();
    let cut = rig.tell(move |engine| engine.cut(what)).unwrap();
    rig.at_guest();
    rig.guest(1, &syn((GUEST, 40_000), SERVER, 1_000_000));
    assert_eq!(rig.at_world().len(), 1, "the SYN goes out");
    rig.pass(CLOSING_GRACE_NS + MILLISECOND_NS);
    assert_eq!(rig.records()[0]["end"], "cut");
    assert_eq!(rig.flows(), 1);
    rig.assert_paired();
    // What has gone can't be cut.
    assert_eq!(rig.tell(move |engine| engine.cut(what)), None);
    assert_eq!((rig.ended(), cut.flows), (vec![cut.ends], 1));
}

#[test]
fn flows_of_a_frozen_vm_do_not_idle_out() {
    let mut rig = Rig::new();
    rig.connect(40_000, 7);
    rig.guest(1, &udp((GUEST, 5_000), SERVER, b"x"));
    rig.guest(2, &udp((GUEST, 5_000), SERVER, b"x"));
    rig.kernel.borrow().set_frozen(1, true);
    rig.pass(200 * MINUTE_NS);
    assert_eq!(rig.flows(), 2);
    rig.tell(|engine| engine.thaw(VmRow::new(1)));
    rig.kernel.borrow().set_frozen(1, false);
    // As long as after a packet.
    rig.pass(4 * MINUTE_NS);
    assert_eq!(rig.flows(), 2);
    rig.pass(2 * MINUTE_NS);
    assert_eq!(rig.flows(), 1);
    rig.pass(124 * MINUTE_NS);
    rig.assert_empty();
}

#[test]
fn a_captured_flow_is_seen_as_its_guest_sees_it() {
    let mut rig = Rig::new();
    let nat = rig.connect(40_000, 7);
    let what = rig.subject();
    let Subject::Flow { slot, .. } = what else {
        panic!("a flow");
    };
    rig.connect(40_001, 7);
    let mut client = rig.capture(what, None);
    let guest = (GUEST, 40_000);
    let out = ack(guest, SERVER, PSH, 8, 9_001);
    rig.guest(1, &out);
    assert_eq!(rig.at_world().len(), 1, "it is sent on");
    rig.world(&with_ttl(ack(SERVER, nat, 0, 9_001, 9), 50));
    let delivered = rig.at_guest();
    assert_eq!(delivered.len(), 1, "it is delivered");
    // Another one's.
    rig.guest(1, &ack((GUEST, 40_001), SERVER, 0, 8, 9_001));
    let packets = captured(&read(&mut client));
    assert_eq!(packets.len(), 2);
    assert_eq!(packets[0], (out, true));
    assert!(!packets[1].1);
    assert!(is_right(&packets[1].0));
    let seen = Ipv4::parse(&packets[1].0).unwrap();
    assert_eq!((seen.source, seen.destination, seen.ttl), (PEER, GUEST, 49));
    assert_eq!(tcp_of(&packets[1].0).destination, 40_000);
    // When the client goes, the kernel has it again.
    drop(client);
    rig.turn();
    rig.turn();
    let verdict = rig.kernel.borrow().slot(slot).verdict().load(Relaxed);
    assert_eq!(verdict, Verdict::Fast as u32);
    let later = ack(guest, SERVER, 0, 9, 9_001);
    assert_eq!(rig.guest(1, &later), Handling::Fast);
    let read = rig.kernel.borrow().slot(slot).tx_packets().load(Relaxed);
    assert_eq!(read, 4, "each is counted once");
}

#[test]
fn a_capture_of_a_vm_has_new_flows_too_and_ends_after_as_many_packets() {
    let mut rig = Rig::new();
    let mut client = rig.capture(Subject::Vm { row: VmRow::new(1) }, Some(3));
    rig.guest(1, &udp((GUEST, 5_000), SERVER, b"1"));
    rig.guest(2, &udp((GUEST, 5_000), SERVER, b"another's"));
    assert_ne!(
        rig.guest(1, &udp((GUEST, 5_000), SERVER, b"2")),
        Handling::Fast
    );
    rig.guest(1, &udp((GUEST, 5_000), SERVER, b"3"));
    rig.guest(1, &udp((GUEST, 5_000), SERVER, b"4"));
    let bytes = read(&mut client);
    let packets = captured(&bytes);
    let last: Vec<u8> = packets.iter().map(|(l3, _)| l3[28]).collect();
    assert_eq!(last, b"123");
    assert_eq!(
        rig.guest(1, &udp((GUEST, 5_000), SERVER, b"5")),
        Handling::Fast
    );
    assert_eq!(
        rig.guest(1, &udp((GUEST, 5_001), SERVER, b"6")),
        Handling::Engine(Handover::Miss)
    );
    assert_eq!(
        rig.guest(1, &udp((GUEST, 5_001), SERVER, b"7")),
        Handling::Fast
    );
    // It is over: the other end is closed.
    client.set_nonblocking(false).unwrap();
    assert_eq!(client.read(&mut [0; 8]).unwrap(), 0);
}

#[test]
fn captured_flows_are_the_kernels_when_the_engine_ends_in_order() {
    let mut rig = Rig::new();
    rig.connect(40_000, 7);
    let mut client = rig.capture(Subject::Vm { row: VmRow::new(1) }, None);
    let packet = ack((GUEST, 40_000), SERVER, 0, 8, 9_001);
    assert_eq!(rig.guest(1, &packet), Handling::Engine(Handover::Verdict));
    rig.send(|engine| engine.stop(OnExit::Keep));
    assert_eq!(rig.run().unwrap(), OnExit::Keep);
    assert_eq!(rig.guest(1, &packet), Handling::Fast);
    let mut bytes = Vec::new();
    client.read_to_end(&mut bytes).unwrap();
    assert_eq!(captured(&bytes).len(), 1);
}

#[test]
fn a_socket_that_its_client_has_too_is_not_waited_for_any_more() {
    let mut rig = Rig::new();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let both = theirs.try_clone().unwrap();
    let request = CaptureRequest {
        subject: Subject::Vm { row: VmRow::new(1) },
        to: theirs.into(),
        packets: None,
        lasts_ns: None,
    };
    assert_eq!(rig.tell(|engine| engine.capture(request)), Ok(()));
    drop(ours);
    // The end is seen, once.
    rig.turn();
    rig.turn();
    let mut ready = Vec::new();
    rig.engine.poller.wait(Some(0), &mut ready).unwrap();
    assert_eq!(ready, []);
    drop(both);
}

#[test]
fn captures_are_bounded_and_do_not_wait_for_their_clients() {
    let mut rig = Rig::new();
    rig.connect(40_000, 7);
    let clients: Vec<_> = (0..MOST_CAPTURES)
        .map(|_| rig.capture(Subject::Vm { row: VmRow::new(1) }, None))
        .collect();
    let (_, one_more) = rig.try_capture(Subject::Vm { row: VmRow::new(1) }, None);
    assert_eq!(one_more, Err(NotCaptured::TooMany));
    let data = vec![0; 1_300];
    for _ in 0..4_000 {
        rig.guest(1, &udp((GUEST, 5_000), SERVER, &data));
        rig.at_world();
    }
    let lost = rig.kernel.borrow().stats(1).snapshot().0.pcap_lost;
    assert!(lost > 1_000, "{lost}: nobody read");
    drop(clients);
    rig.turn();
    rig.turn();
    assert_eq!(
        rig.guest(1, &udp((GUEST, 5_000), SERVER, b"x")),
        Handling::Fast
    );
    let (_, nobodys) = rig.try_capture(Subject::Vm { row: VmRow::new(9) }, None);
    let gone = Subject::Flow {
        slot: SlotIndex::new(1),
        generation: 99,
    };
    let (_, ended) = rig.try_capture(gone, None);
    assert_eq!(
        [nobodys, ended],
        [Err(NotCaptured::NoVm), Err(NotCaptured::NoFlow)]
    );
}

#[test]
fn the_ports_frames_are_written_and_a_rotated_file_is_whole() {
    let mut rig = Rig::new();
    let write_to = |rig: &mut Rig, file: &Log| {
        let file = Box::new(file.clone());
        rig.tell(|engine| engine.set_pcap_file(file));
    };
    let (first, second) = (Log::default(), Log::default());
    write_to(&mut rig, &first);
    rig.guest(1, &syn((GUEST, 40_000), SERVER, 7));
    write_to(&mut rig, &second);
    rig.guest(1, &udp((GUEST, 5_000), SERVER, b"x"));
    let packets = |log: &Log| {
        let bytes: Arc<Mutex<Vec<u8>>> = log.0.clone();
        let bytes = bytes.lock().unwrap().clone();
        captured(&bytes)
    };
    // As it came, and as it was given back, with another MSS.
    let of_first = packets(&first);
    assert_eq!(of_first.len(), 2);
    assert_eq!(of_first[0], (syn((GUEST, 40_000), SERVER, 7), true));
    assert!(!of_first[1].1);
    assert_eq!(packets(&second).len(), 2);
}
