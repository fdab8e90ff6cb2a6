//! First packets that go by the ring, and those that do not fit it.
use slipgate_abi::{
    FirstPacket, FirstPacketRef, Handover, PortHeader, Protocol,
    first_packet::{RING_LEN, VNET_LEN, place},
    tcp::Flags,
};

use crate::{datapath::*, frame::*, frame6::Frame6, loaded, mapped::Mapped, pool::Datapath};

const EGRESS: &str = "guest_egress";
const HEADER: PortHeader = PortHeader {
    code: Handover::Miss as u8,
    flags: 0,
    vm_row: ROW as u16,
    id: VM,
};

/// Makes the ring one of an engine that has read up to a number.
fn open(datapath: &Datapath, number: u64) {
    datapath.owners.change(OWNER, |owner| {
        owner.ring_open = 1;
        (owner.ring_tail, owner.ring_head) = (number, number);
    });
}

/// Runs the program, and expects the frame in the ring under this number, as the port would have it.
#[track_caller]
fn expect_queued(datapath: &Datapath, frame: &[u8], number: u64) {
    let ring = Mapped::<FirstPacket>::of(&datapath.ebpf, "FIRST_PACKETS");
    let before = datapath.tally();
    let run = datapath.run(EGRESS, frame);
    assert_eq!(run.action, SHOT, "{:?}", datapath.drops_of(ROW));
    assert_eq!(datapath.drops_of(ROW), []);
    assert_eq!(datapath.tally() - before, 1);
    let owner = datapath.owners.get(OWNER);
    assert_eq!((owner.ring_tail, owner.port_handed), (number + 1, 0));
    // SAFETY: an element of the map, which outlives this.
    let packet = unsafe { FirstPacketRef::new(ring.at(place(OWNER, number))) };
    let mut buffer = [0; 512];
    let (len, at_ns) = packet.read(number, &mut buffer).expect("the packet");
    assert_ne!(at_ns, 0);
    let (vnet, queued) = buffer[..len].split_at(VNET_LEN);
    assert_eq!(vnet, [0; VNET_LEN]);
    let (header, rest) = handed(queued);
    assert_eq!((header, rest), (HEADER, &frame[12..]));
}

#[test]
fn a_first_packet_is_in_the_ring_as_the_port_would_have_it() {
    let syn = Frame {
        tcp_flags: Flags::SYN,
        ..Frame::tx(Protocol::Tcp)
    };
    for (number, frame) in [
        (0, syn.bytes()),
        (1, Frame::tx(Protocol::Udp).bytes()),
        (2, Frame::tx(Protocol::Icmp).bytes()),
        (u64::from(RING_LEN) - 1, syn.bytes()),
        (u64::from(RING_LEN) * 5, Frame::tx(Protocol::Udp).bytes()),
        (u64::MAX, syn.bytes()),
        (7, Frame6::tx(Protocol::Udp).bytes()),
        (8, Frame6::tx(Protocol::Tcp).bytes()),
    ] {
        let datapath = loaded!();
        open(&datapath, number);
        if number == u64::MAX {
            let run = datapath.run(EGRESS, &frame);
            assert_eq!(
                (run.action, datapath.owners.get(OWNER).ring_tail),
                (SHOT, 0)
            );
            continue;
        }
        expect_queued(&datapath, &frame, number);
    }
}

#[test]
fn the_longest_packet_that_fits_is_whole() {
    let datapath = loaded!();
    let mut frame = Frame::tx(Protocol::Udp);
    let headers = frame.bytes().len() - frame.payload.len();
    frame.payload = (0..(224 - headers)).map(|at| at as u8).collect();
    open(&datapath, 3);
    expect_queued(&datapath, &frame.bytes(), 3);
    frame.payload.push(1);
    datapath.expect_by_port(&frame.bytes(), 1);
}

impl Datapath {
    /// Runs the program, and expects the frame at the port, and this many counted there by now.
    #[track_caller]
    fn expect_by_port(&self, frame: &[u8], packets: u64) {
        let tail = self.owners.get(OWNER).ring_tail;
        let run = self.run(EGRESS, frame);
        assert_eq!(run.action, REDIRECT, "{:?}", self.drops_of(ROW));
        assert_eq!(handed(&run.frame).0, HEADER);
        let owner = self.owners.get(OWNER);
        assert_eq!((owner.ring_tail, owner.port_handed), (tail, packets));
    }
}

#[test]
fn without_an_open_ring_and_with_a_full_one_packets_go_by_the_port() {
    let datapath = loaded!();
    let frame = Frame::tx(Protocol::Udp).bytes();
    datapath.expect_by_port(&frame, 1);
    // Until the engine has read it there.
    open(&datapath, 9);
    datapath.expect_by_port(&frame, 2);
    datapath.owners.change(OWNER, |owner| owner.port_taken = 2);
    datapath.owners.change(OWNER, |owner| {
        owner.ring_head = owner.ring_tail.wrapping_sub(u64::from(RING_LEN));
    });
    datapath.expect_by_port(&frame, 3);
    datapath.owners.change(OWNER, |owner| {
        owner.port_taken = 3;
        owner.ring_head += 1;
    });
    let run = datapath.run(EGRESS, &frame);
    assert_eq!(
        (run.action, datapath.owners.get(OWNER).ring_tail),
        (SHOT, 10)
    );
    assert_eq!(datapath.handed_over(), 4);
}

/// The ring is no way around the limits of what is under way.
#[test]
fn a_packet_without_a_credit_is_not_in_the_ring() {
    let datapath = loaded!();
    open(&datapath, 0);
    datapath.vms.change(ROW, |vm| vm.credits = 2);
    let frame = Frame::tx(Protocol::Udp).bytes();
    for _ in 0..3 {
        assert_eq!(datapath.run(EGRESS, &frame).action, SHOT);
    }
    assert_eq!(datapath.owners.get(OWNER).ring_tail, 2);
    assert_eq!(datapath.drops.get(ROW).no_credit.packets, 1);
}

#[test]
fn what_is_no_first_packet_goes_by_the_port() {
    let datapath = loaded!();
    open(&datapath, 0);
    let to_gateway = Frame {
        destination: GATEWAY,
        ..Frame::tx(Protocol::Udp)
    };
    datapath.expect_handover(EGRESS, &to_gateway.bytes(), Handover::Local, 0);
    let owner = datapath.owners.get(OWNER);
    assert_eq!((owner.ring_tail, owner.port_handed), (0, 0));
}
