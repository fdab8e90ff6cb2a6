//! The port between a guest on a stream socket and the kernel's own loopback.
use std::{
    io::{Read as _, Write as _},
    net::{Ipv4Addr as Address, Shutdown, TcpListener, TcpStream},
    os::unix::net::{UnixListener, UnixStream},
};

use nix::sys::epoll::EpollTimeout;
use slipgate_abi::{FlowRef, Ip4, Protocol, Slot, SlotIndex, TapEntry, Verdict, VmId, tcp::Flags};

use super::*;
use crate::{
    fake::{
        Kernel,
        packets::{ack, syn},
    },
    guest_link::{RingLink, StreamLink},
    packet::{Transport, transport::Tcp},
    tcp::Segment,
};

const PATIENCE_MS: u16 = 10_000;
pub(super) const ROW: u16 = 1;
const VM: u32 = 7;
pub(super) const GUEST_AT: (Ip4, u16) = (
    Ip4 {
        octets: [10, 0, 2, 15],
    },
    40_000,
);
const GATEWAY: Ip4 = Ip4 {
    octets: [10, 0, 2, 2],
};
pub(super) const WORLD_AT: (Ip4, u16) = (
    Ip4 {
        octets: [192, 0, 2, 1],
    },
    50_000,
);
pub(super) const SERVER_AT: (Ip4, u16) = (
    Ip4 {
        octets: [198, 51, 100, 7],
    },
    80,
);
pub(super) const FIRST: u32 = 100;
pub(super) const MACS: [u8; 12] = [2, 0, 0, 0, 2, 2, 2, 0, 0, 0, 2, 1];

pub(super) struct InMemory(pub(super) Kernel);

impl MemoryTables for InMemory {
    type Maps<'t> = &'t Kernel;

    fn maps(&self) -> &Kernel {
        &self.0
    }

    fn stats(&self, row: VmRow) -> VmStats {
        self.0.stats(row.get())
    }
}

/// Tables with a VM and its flow to the server.
pub(super) fn tables() -> InMemory {
    let kernel = Kernel::new(1_024);
    let mut kernel = std::rc::Rc::into_inner(kernel).unwrap().into_inner();
    kernel.add_vm(ROW, VM, GUEST_AT.0, GATEWAY, 1_500);
    kernel.taps.clear();
    let entry = TapEntry::new(VmId::new(VM), VmRow::new(ROW));
    kernel.taps.insert(GUEST, entry);
    kernel.vm(ROW).tap_ifindex().store(GUEST, Relaxed);
    let index = SlotIndex::new(3);
    let slot = Slot {
        generation: 1,
        verdict: Verdict::Fast,
        tcp: 0,
        next_hop: 0,
        tx_packets: 0,
        tx_bytes: 0,
        rx_packets: 0,
        rx_bytes: 0,
        tx_last_ns: 0,
        rx_last_ns: 0,
        vm: VM,
        vm_row: ROW,
        owner: 0,
        guest: GUEST_AT.0,
        remote: SERVER_AT.0,
        nat: WORLD_AT.0,
        guest_port: GUEST_AT.1,
        remote_port: SERVER_AT.1,
        nat_port: WORLD_AT.1,
        protocol: Protocol::Tcp,
        flags: 0,
        isn: FIRST,
        created_ns: 1,
        rule: 0,
        uplink_ifindex: 3,
        epoch: 1,
        fin_end_tx: 0,
        fin_end_rx: 0,
        connect_us: 0,
    };
    kernel.set_slot(index, slot);
    let flow = FlowRef::new(index, 1);
    let slot = kernel.slot(index);
    kernel.flows.insert(slot.world_tuple(), flow);
    kernel.flows.insert(slot.guest_tuple(), flow);
    InMemory(kernel)
}

/// A guest's connection to a server on loopback, which stands.
struct Scene {
    port: UserspacePort<InMemory>,
    guest: UnixStream,
    server: TcpStream,
    /// What was read of the guest's link.
    read: Vec<u8>,
    batch: Batch,
}

impl Scene {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("link");
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let guest = UnixStream::connect(&path).unwrap();
        guest.set_nonblocking(true).unwrap();
        let link = GuestLink::Stream(Box::new(StreamLink::new(listener.into(), false)));
        let mut port = UserspacePort::new(tables(), link, true, 1_500, 1 << 20).unwrap();
        let servers = TcpListener::bind((Address::LOCALHOST, 0)).unwrap();
        let socket = TcpStream::connect(servers.local_addr().unwrap()).unwrap();
        socket.set_nonblocking(true).unwrap();
        let opener = syn(WORLD_AT, SERVER_AT, FIRST);
        let packet = Packet::parse(Ip::parse(&opener).unwrap()).unwrap();
        let segment = Segment::read(&tcp_of(&packet), packet.ip.payload());
        let tuple = packet.tuple(FlowTuple::WORLD, slipgate_abi::Direction::Tx);
        let (sockets, epoll, mut out, _) = port.parts(SystemClock.now_ns());
        let opened = Ok(socket.into());
        sockets.begin_stream(tuple.unwrap(), &segment, opened, epoll, &mut out);
        let mut scene = Self {
            port,
            guest,
            server: servers.accept().unwrap().0,
            read: Vec::new(),
            batch: Batch::new(),
        };
        scene.port.work(SystemClock.now_ns()).unwrap();
        scene
    }

    /// A turn, when there is an event.
    fn turn(&mut self) {
        let mut events = [EpollEvent::empty(); 8];
        let heard = match self.port.has_more() {
            true => self.port.epoll.wait(&mut events, EpollTimeout::ZERO),
            false => self.port.epoll.wait(&mut events, PATIENCE_MS),
        };
        let heard = heard.unwrap();
        assert!(heard > 0 || self.port.has_more(), "no event");
        for event in &events[..heard] {
            self.port.on_ready(event.data() as u32, event.events());
        }
        self.batch.clear();
        self.port.recv(&mut self.batch).unwrap();
    }

    /// The next segment on the guest's link, if there is one.
    fn heard(&mut self) -> Option<Tcp> {
        let mut buffer = [0; 4_096];
        if let Ok(len) = self.guest.read(&mut buffer) {
            self.read.extend_from_slice(&buffer[..len]);
        }
        let (len, rest) = self.read.split_first_chunk()?;
        let len = u32::from_be_bytes(*len) as usize;
        let packet = Packet::parse(Ip::parse(&rest[ETHERNET_LEN..len]).unwrap()).unwrap();
        let tcp = tcp_of(&packet);
        self.read.drain(..4 + len);
        Some(tcp)
    }

    fn hear(&mut self) -> Tcp {
        loop {
            match self.heard() {
                Some(tcp) => return tcp,
                None => self.turn(),
            }
        }
    }

    fn send(&mut self, packet: &[u8]) {
        let len = (ETHERNET_LEN + packet.len()) as u32;
        let ether_type = ethertype_of(packet).to_be_bytes();
        let frame = [&len.to_be_bytes()[..], &MACS, &ether_type, packet].concat();
        self.guest.write_all(&frame).unwrap();
    }

    /// The server ends, and then the guest.
    fn end(&mut self) {
        let ours = self.hear().sequence;
        self.send(&ack(GUEST_AT, SERVER_AT, 0, FIRST + 1, ours + 1));
        self.server.shutdown(Shutdown::Write).unwrap();
        while self.hear().flags & Flags::FIN == 0 {}
        let fin = ack(GUEST_AT, SERVER_AT, Flags::FIN, FIRST + 1, ours + 2);
        self.send(&fin);
        while !self.port.sockets.has_put_off() {
            self.turn();
        }
        assert!(self.heard().is_none(), "the acknowledgement is put off");
    }
}

pub(super) fn tcp_of(packet: &Packet<'_>) -> Tcp {
    match packet.transport {
        Transport::Tcp(tcp) => tcp,
        _ => panic!("no segment"),
    }
}

#[test]
fn what_was_put_off_reaches_the_guest_without_another_event() {
    let mut scene = Scene::new();
    scene.end();
    assert!(!scene.port.rest(), "nothing is left");
    let last = scene.heard().expect("it was written");
    assert_eq!((last.flags, last.acknowledgement), (Flags::ACK, FIRST + 2));
}

#[test]
fn what_was_put_off_reaches_the_engine_in_the_next_turn_without_an_event() {
    let mut scene = Scene::new();
    scene.end();
    let slot = scene.port.tables.0.slot(SlotIndex::new(3));
    slot.set_verdict(Verdict::Engine);
    assert!(scene.port.rest(), "a frame is left for the engine");
    assert!(scene.port.has_more());
    scene.turn();
    assert_eq!(scene.batch.len(), 1);
    assert!(!scene.port.has_more());
}

/// It is not the engine's end, and seen in the counts.
#[test]
fn a_guest_that_cannot_be_watched_is_counted_and_the_next_is_served() {
    let links: [fn(UnixListener) -> GuestLink; 2] = [
        |listener| GuestLink::Stream(Box::new(StreamLink::new(listener.into(), false))),
        |listener| GuestLink::Rings(Box::new(RingLink::new(listener.into(), false))),
    ];
    for link in links {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("link");
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let _guests = [(); 2].map(|()| UnixStream::connect(&path).unwrap());
        let mut port = UserspacePort::new(tables(), link(listener), true, 1_500, 1 << 20).unwrap();
        let busy = |port: &UserspacePort<InMemory>| {
            let (_, drops) = port.tables.stats(VmRow::new(ROW)).snapshot();
            drops.get(DropReason::EngineBusy).packets
        };
        // As if this user watched too much.
        let nothing = Epoll(std::fs::File::open("/dev/null").unwrap().into());
        let epoll = std::mem::replace(&mut port.epoll, Rc::new(nothing));
        let now_ns = SystemClock.now_ns();
        assert!(!port.settle_link(now_ns).unwrap());
        assert_eq!(busy(&port), 1);
        // Nor is the next one refused in the next turn.
        assert!(!port.settle_link(now_ns).unwrap());
        assert_eq!(busy(&port), 1);
        port.epoll = epoll;
        let due_ns = port.link.due_ns().unwrap();
        assert!(port.settle_link(due_ns).unwrap());
        assert_eq!(busy(&port), 1);
    }
}

#[test]
fn a_link_for_which_the_host_is_short_of_something_has_its_turn_without_an_event() {
    // It accepts nothing, as if the host had no descriptor.
    let (listener, _other) = UnixStream::pair().unwrap();
    let link = GuestLink::Stream(Box::new(StreamLink::new(listener.into(), false)));
    let mut port = UserspacePort::new(tables(), link, true, 1_500, 1 << 20).unwrap();
    let now_ns = SystemClock.now_ns();
    port.work(now_ns).unwrap();
    assert!(
        port.next_deadline_ns()
            .is_some_and(|due_ns| due_ns > now_ns)
    );
    assert!(!port.has_more());
}
