//! Streams against the kernel's own loopback.
use std::{
    io::Write as _,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, TcpListener, TcpStream},
    os::fd::OwnedFd,
};

use slipgate_abi::{DropReason, tcp::Flags};

use super::*;
use crate::{
    fake::packets::{ack, syn},
    packet::{Ip, Transport},
};

type At = (IpAddr, u16);

/// The guest's translated address and the server's, of each family.
const ENDS: [(At, At); 2] = [
    (
        (IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), 40_000),
        (IpAddr::V4(Ipv4Addr::new(198, 51, 100, 7)), 80),
    ),
    (
        (
            IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)),
            40_000,
        ),
        (
            IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 7, 0, 0, 0, 0, 7)),
            80,
        ),
    ),
];
const GUESTS_FIRST: u32 = 100;
const OURS_FIRST: u32 = 5_000;
const PATIENCE_MS: u16 = 10_000;

/// A guest that takes everything: flags, sequence number and payload length of each segment.
#[derive(Default)]
struct Taken(Vec<(u8, u32, usize)>);

impl ToGuest for Taken {
    fn has_room(&mut self) -> bool {
        true
    }

    fn deliver(&mut self, _: VirtioNetHdr, frame: &mut [u8]) -> Delivered {
        let ip = Ip::parse(&frame[L3_START..]).unwrap();
        let packet = Packet::parse(ip).unwrap();
        let Transport::Tcp(tcp) = packet.transport else {
            panic!("no segment");
        };
        let payload = packet.ip.payload().len() - tcp.header_len;
        self.0.push((tcp.flags, tcp.sequence, payload));
        Delivered::Yes
    }

    fn lost(&mut self, reason: DropReason, _: VirtioNetHdr, len: usize) {
        panic!("{reason:?}: {len} bytes");
    }
}

fn with_segment<T>(bytes: &[u8], f: impl FnOnce(&Packet<'_>, &Tcp) -> T) -> T {
    let packet = Packet::parse(Ip::parse(bytes).unwrap()).unwrap();
    let Transport::Tcp(tcp) = packet.transport else {
        panic!("no segment");
    };
    f(&packet, &tcp)
}

/// An open connection whose kernel can't be told where to peek.
fn open_before_6_9((from, to): (At, At), guest: &mut Taken) -> (Sockets, TcpStream, Epoll) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let server = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let socket: OwnedFd = listener.accept().unwrap().0.into();
    let epoll = Epoll::new(nix::sys::epoll::EpollCreateFlags::empty()).unwrap();
    let mut sockets = Sockets::new(false, 1_500);
    let opener = syn(from, to, GUESTS_FIRST);
    let key = with_segment(&opener, |packet, tcp| {
        let segment = Segment::read(tcp, packet.ip.payload());
        let tuple = packet
            .tuple(FlowTuple::WORLD, slipgate_abi::Direction::Tx)
            .unwrap();
        let connection = Connection::new(packet.ip.version(), &segment, OURS_FIRST);
        let stream = Stream::new(connection, socket).without_places();
        sockets.add(tuple, Kind::Stream(Box::new(stream)))
    });
    sockets.ready(key, EpollFlags::EPOLLOUT, guest, 0);
    let acknowledgement = ack(from, to, 0, GUESTS_FIRST + 1, OURS_FIRST + 1);
    with_segment(&acknowledgement, |packet, _| {
        sockets.take(packet, VirtioNetHdr::default(), &epoll, guest, 0);
    });
    while sockets.work(&epoll, guest, 0) {}
    guest.0.clear();
    let stream = sockets.stream(key).unwrap();
    watch(&epoll, stream.socket().unwrap(), key, EVENTS).unwrap();
    (sockets, server, epoll)
}

/// Has the kernel's events handled until one of this kind came.
fn hear(sockets: &mut Sockets, epoll: &Epoll, of: EpollFlags, guest: &mut Taken) {
    let mut events = [EpollEvent::empty()];
    loop {
        let heard = epoll.wait(&mut events, PATIENCE_MS).unwrap();
        assert_eq!(heard, 1, "no {of:?} in {PATIENCE_MS} ms");
        let (key, flags) = (events[0].data() as u32, events[0].events());
        sockets.ready(key, flags, guest, 0);
        while sockets.work(epoll, guest, 0) {}
        if flags.contains(of) {
            return;
        }
    }
}

#[test]
fn before_linux_6_9_the_end_is_told_behind_bytes_that_are_not_acknowledged() {
    for ends in ENDS {
        the_end_is_told(ends);
    }
}

fn the_end_is_told(ends: (At, At)) {
    let mut guest = Taken::default();
    let (mut sockets, mut server, epoll) = open_before_6_9(ends, &mut guest);
    server.write_all(&[7; 1_000]).unwrap();
    hear(&mut sockets, &epoll, EpollFlags::EPOLLIN, &mut guest);
    let sent: usize = guest.0.iter().map(|(_, _, payload)| payload).sum();
    let has_fin = |guest: &Taken| guest.0.iter().any(|(flags, ..)| flags & Flags::FIN != 0);
    assert_eq!((sent, has_fin(&guest)), (1_000, false), "{:?}", guest.0);
    server.shutdown(Shutdown::Write).unwrap();
    hear(&mut sockets, &epoll, EpollFlags::EPOLLRDHUP, &mut guest);
    let (flags, sequence, payload) = *guest.0.last().unwrap();
    assert!(flags & Flags::FIN != 0, "{:?}", guest.0);
    assert_eq!((sequence, payload), (OURS_FIRST + 1_001, 0));
}

#[test]
fn a_refused_connection_is_reset_and_an_address_of_this_host_is_no_server() {
    let (here, there) = (Ipv6Addr::LOCALHOST, Ipv4Addr::LOCALHOST.to_ipv6_mapped());
    for server in [IpAddr::V4(Ipv4Addr::LOCALHOST), here.into(), there.into()] {
        let from = match server {
            IpAddr::V4(_) => ENDS[0].0,
            IpAddr::V6(_) => ENDS[1].0,
        };
        let mut guest = Taken::default();
        let mut sockets = Sockets::new(false, 1_500);
        let epoll = Epoll::new(nix::sys::epoll::EpollCreateFlags::empty()).unwrap();
        with_segment(&syn(from, (server, 80), GUESTS_FIRST), |packet, _| {
            sockets.take(packet, VirtioNetHdr::default(), &epoll, &mut guest, 0);
        });
        let flags: Vec<u8> = guest.0.iter().map(|(flags, ..)| *flags).collect();
        assert_eq!(flags, [Flags::RST | Flags::ACK], "{server}");
        assert!(sockets.is_empty());
    }
}
