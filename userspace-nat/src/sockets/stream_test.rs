//! Streams against the kernel's own loopback.
use std::{
    fs::File,
    io::{Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, TcpListener, TcpStream},
    os::fd::{AsRawFd as _, OwnedFd},
    sync::Arc,
};

use nix::sys::{
    memfd::{MFdFlags, memfd_create},
    socket::{MsgFlags, recv, send},
};
use slipgate_abi::{DropReason, tcp::Flags};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};

use super::*;
use crate::{
    fake::packets::{ack, syn},
    inet::keep_urgent_in_place,
    packet::{Ip, Transport},
    space::Parts,
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
struct Taken(Vec<(u8, u32, usize)>, Spaces);

/// Room in the guest's memory that a stream is given, if there is some.
#[derive(Default)]
struct Spaces {
    memory: Option<Arc<GuestMemoryMmap>>,
    given: usize,
    forgotten: usize,
}

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

    fn space(&mut self, _: &FlowTuple, headers_len: usize, most: usize) -> Option<Space> {
        let memory = self.1.memory.as_ref()?;
        let parts = Parts {
            buffers: vec![(GuestAddress(0), (headers_len + most) as u32)],
            heads: vec![(0, headers_len + most)],
            from: 0,
            at: headers_len,
        };
        self.1.given += 1;
        Space::new(memory, parts, most).ok()
    }

    fn forget(&mut self, _: Space) {
        self.1.forgotten += 1;
    }

    fn deliver_in(&mut self, _: VirtioNetHdr, _: &mut [u8], _: Space, _: usize) -> Delivered {
        unreachable!("nothing can be received into it");
    }

    fn lost(&mut self, reason: DropReason, _: VirtioNetHdr, len: usize) {
        panic!("{reason:?}: {len} bytes");
    }

    fn not_sent(&mut self, _: &FlowTuple, reason: DropReason, len: usize) {
        panic!("{reason:?}: {len} bytes");
    }

    fn limits(&self) -> Option<slipgate_abi::rate::RateRef> {
        None
    }

    fn gateway(&self, version: Version) -> Option<IpAddr> {
        Some(version.unspecified())
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
fn open_before_6_9(ends: (At, At), guest: &mut Taken) -> (Sockets, TcpStream, Epoll) {
    open(ends, Stream::without_places, guest)
}

/// An open connection of this stream.
fn open(
    ends: (At, At),
    stream: impl FnOnce(Stream) -> Stream,
    guest: &mut Taken,
) -> (Sockets, TcpStream, Epoll) {
    let (mut sockets, server, epoll, key) =
        opened(ends, stream, (b"", EpollFlags::EPOLLOUT), guest);
    guest.0.clear();
    let stream = sockets.stream(key).unwrap();
    watch(&epoll, stream.socket().unwrap(), key, EVENTS).unwrap();
    (sockets, server, epoll)
}

/// The same with its key, before its socket is watched. The server has sent this before the event that
/// says that the connection stands.
fn opened(
    (from, to): (At, At),
    stream: impl FnOnce(Stream) -> Stream,
    (greeting, flags): (&[u8], EpollFlags),
    guest: &mut Taken,
) -> (Sockets, TcpStream, Epoll, u32) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    keep_urgent_in_place(&listener);
    let mut server = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    server.write_all(greeting).unwrap();
    let socket: OwnedFd = listener.accept().unwrap().0.into();
    let epoll = Epoll::new(nix::sys::epoll::EpollCreateFlags::empty()).unwrap();
    let mut sockets = Sockets::new(false, 1_500, 1 << 20);
    let opener = syn(from, to, GUESTS_FIRST);
    let key = with_segment(&opener, |packet, tcp| {
        let segment = Segment::read(tcp, packet.ip.payload());
        let tuple = packet
            .tuple(FlowTuple::WORLD, slipgate_abi::Direction::Tx)
            .unwrap();
        let connection = Connection::new(packet.ip.version(), &segment, OURS_FIRST);
        let stream = stream(Stream::new(connection, socket));
        sockets.add(tuple, Kind::Stream(Box::new(stream)))
    });
    sockets.ready(key, flags, guest, 0);
    let acknowledgement = ack(from, to, 0, GUESTS_FIRST + 1, OURS_FIRST + 1);
    with_segment(&acknowledgement, |packet, _| {
        sockets.take(packet, (VirtioNetHdr::default(), false), &epoll, guest, 0);
    });
    while sockets.work(&epoll, guest, 0) {}
    (sockets, server, epoll, key)
}

#[test]
fn a_server_is_looked_at_once_an_event_says_that_it_has_sent_something() {
    let both = EpollFlags::EPOLLOUT | EpollFlags::EPOLLIN;
    for ends in ENDS {
        for (greeting, flags) in [(&b""[..], EpollFlags::EPOLLOUT), (b"hello", both)] {
            let mut guest = Taken::default();
            let heard = (greeting, flags);
            let (mut sockets, _server, epoll, key) =
                opened(ends, |stream| stream, heard, &mut guest);
            let sent: usize = guest.0.iter().map(|(.., payload)| payload).sum();
            assert_eq!(sent, greeting.len(), "{:?}", guest.0);
            while sockets.work(&epoll, &mut guest, 0) {}
            assert!(!sockets.stream(key).unwrap().has_more());
        }
        // Nothing is looked for without an event.
        let mut guest = Taken::default();
        let heard = (&b"hello"[..], EpollFlags::EPOLLOUT);
        let (mut sockets, _server, epoll, key) = opened(ends, |stream| stream, heard, &mut guest);
        let sent = |guest: &Taken| guest.0.iter().map(|(.., payload)| payload).sum::<usize>();
        assert_eq!(sent(&guest), 0, "{:?}", guest.0);
        let stream = sockets.stream(key).unwrap();
        watch(&epoll, stream.socket().unwrap(), key, EVENTS).unwrap();
        hear(&mut sockets, &epoll, EpollFlags::EPOLLIN, &mut guest);
        assert_eq!(sent(&guest), 5, "{:?}", guest.0);
    }
}

/// Memory whose file has been shortened since: what the kernel writes there fails.
fn memory_that_is_gone(len: usize) -> Arc<GuestMemoryMmap> {
    let file = memfd_create(c"guest", MFdFlags::MFD_CLOEXEC).unwrap();
    let file = File::from(file);
    file.set_len(len as u64).unwrap();
    let offset = FileOffset::new(file.try_clone().unwrap(), 0);
    let range = (GuestAddress(0), len, Some(offset));
    let memory = GuestMemoryMmap::from_ranges_with_files([range]).unwrap();
    file.set_len(0).unwrap();
    memory.into()
}

#[test]
fn bytes_that_the_guests_memory_does_not_take_go_by_a_copy() {
    let with_places: fn(Stream) -> Stream = |stream| stream;
    for ends in ENDS {
        for stream in [with_places, Stream::without_places] {
            let mut guest = Taken::default();
            let (mut sockets, mut server, epoll) = open(ends, stream, &mut guest);
            // As long as the segments that the guest takes.
            sockets.mtu = 9_100;
            guest.1.memory = Some(memory_that_is_gone(1 << 16));
            // The first is so long that the next is expected to be.
            for end in [20_000, 40_000] {
                let (from, to) = ends;
                server.write_all(&[7; 20_000]).unwrap();
                let sent = |guest: &Taken| {
                    let of = guest.0.iter().map(|(_, at, len)| *at as usize + len);
                    of.max().unwrap_or(0) - (OURS_FIRST + 1) as usize
                };
                while guest.0.is_empty() || sent(&guest) < end {
                    hear(&mut sockets, &epoll, EpollFlags::EPOLLIN, &mut guest);
                }
                let acknowledged = OURS_FIRST + 1 + end as u32;
                let segment = ack(from, to, 0, GUESTS_FIRST + 1, acknowledged);
                with_segment(&segment, |packet, _| {
                    let how = (VirtioNetHdr::default(), false);
                    sockets.take(packet, how, &epoll, &mut guest, 0);
                });
            }
            let payload: usize = guest.0.iter().map(|(.., len)| len).sum();
            assert_eq!(payload, 40_000, "{:?}", guest.0);
            assert!(guest.1.given > 0, "no stream of bulk: {:?}", guest.0);
            assert_eq!(guest.1.given, guest.1.forgotten);
        }
    }
}

#[test]
fn no_end_is_told_before_bytes_that_the_guests_memory_does_not_take() {
    const SMALL: [u8; 500] = [7; 500];
    for ends in ENDS {
        let mut guest = Taken::default();
        let (mut sockets, mut server, epoll) = open_before_6_9(ends, &mut guest);
        sockets.mtu = 9_100;
        guest.1.memory = Some(memory_that_is_gone(1 << 16));
        server.set_nodelay(true).unwrap();
        let key = *sockets.endpoints.keys().next().unwrap();
        let queued = |sockets: &mut Sockets| {
            let socket = sockets.stream(key).unwrap().socket().unwrap();
            let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
            recv(socket.as_raw_fd(), &mut [0; 1 << 16], flags).unwrap_or(0)
        };
        // So many writes that the kernel has them in several buffers: it joins no more than have 17 pages.
        let mut sent = 0;
        for (writes, end) in [(40, false), (2, true)] {
            for _ in 0..writes {
                server.write_all(&SMALL).unwrap();
                sent += SMALL.len();
            }
            if end {
                server.shutdown(Shutdown::Write).unwrap();
            }
            while queued(&mut sockets) < sent {
                std::thread::yield_now();
            }
            let of = match end {
                true => EpollFlags::EPOLLRDHUP,
                false => EpollFlags::EPOLLIN,
            };
            hear(&mut sockets, &epoll, of, &mut guest);
        }
        assert!(guest.1.given > 0, "no stream of bulk: {:?}", guest.0);
        let payload: usize = guest.0.iter().map(|(.., len)| len).sum();
        assert_eq!(payload, sent, "{:?}", guest.0);
        // Its window takes the end, too, if that was not told yet.
        let acknowledged = OURS_FIRST + 1 + sent as u32;
        let segment = ack(ends.0, ends.1, 0, GUESTS_FIRST + 1, acknowledged);
        with_segment(&segment, |packet, _| {
            let how = (VirtioNetHdr::default(), false);
            sockets.take(packet, how, &epoll, &mut guest, 0);
        });
        while sockets.work(&epoll, &mut guest, 0) {}
        let (flags, at, _) = *guest.0.last().unwrap();
        assert!(flags & Flags::FIN != 0, "{:?}", guest.0);
        assert_eq!(at, acknowledged);
    }
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
fn urgent_data_of_a_server_is_sent_in_its_place_and_the_end_behind_it() {
    for ends in ENDS {
        for stream in [|stream: Stream| stream, Stream::without_places] {
            urgent_data_is_sent(ends, stream);
        }
    }
}

fn urgent_data_is_sent((from, to): (At, At), stream: fn(Stream) -> Stream) {
    let mut guest = Taken::default();
    let (mut sockets, server, epoll) = open((from, to), stream, &mut guest);
    for (data, flags) in [
        (&b"before"[..], MsgFlags::empty()),
        (b"!", MsgFlags::MSG_OOB),
        (b"behind", MsgFlags::empty()),
    ] {
        assert_eq!(send(server.as_raw_fd(), data, flags), Ok(data.len()));
    }
    server.shutdown(Shutdown::Write).unwrap();
    hear(&mut sockets, &epoll, EpollFlags::EPOLLRDHUP, &mut guest);
    // What waits for an acknowledgement comes with it.
    let acknowledgement = ack(from, to, 0, GUESTS_FIRST + 1, OURS_FIRST + 1 + 6);
    with_segment(&acknowledgement, |packet, _| {
        sockets.take(
            packet,
            (VirtioNetHdr::default(), false),
            &epoll,
            &mut guest,
            0,
        );
    });
    while sockets.work(&epoll, &mut guest, 0) {}
    let mut next = OURS_FIRST + 1;
    for (flags, sequence, payload) in guest.0 {
        assert_eq!(sequence, next, "none is sent twice");
        next += payload as u32 + u32::from(flags & Flags::FIN != 0);
    }
    assert_eq!(next, OURS_FIRST + 1 + 13 + 1, "with the end");
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
        let mut sockets = Sockets::new(false, 1_500, 1 << 20);
        let epoll = Epoll::new(nix::sys::epoll::EpollCreateFlags::empty()).unwrap();
        with_segment(&syn(from, (server, 80), GUESTS_FIRST), |packet, _| {
            sockets.take(
                packet,
                (VirtioNetHdr::default(), false),
                &epoll,
                &mut guest,
                0,
            );
        });
        let flags: Vec<u8> = guest.0.iter().map(|(flags, ..)| *flags).collect();
        assert_eq!(flags, [Flags::RST | Flags::ACK], "{server}");
        assert!(sockets.is_empty());
    }
}

/// A connection that the server has ended first, and then the guest, at this time.
fn ended(ends: (At, At), guest: &mut Taken, at_ns: u64) -> (Sockets, TcpStream, Epoll) {
    let (mut sockets, server, epoll) = open(ends, |stream| stream, guest);
    server.shutdown(Shutdown::Write).unwrap();
    hear(&mut sockets, &epoll, EpollFlags::EPOLLRDHUP, guest);
    guest.0.clear();
    let (from, to) = ends;
    let fin = ack(from, to, Flags::FIN, GUESTS_FIRST + 1, OURS_FIRST + 2);
    with_segment(&fin, |packet, _| {
        sockets.take(
            packet,
            (VirtioNetHdr::default(), false),
            &epoll,
            guest,
            at_ns,
        );
    });
    while sockets.work(&epoll, guest, at_ns) {}
    server.set_nonblocking(true).unwrap();
    (sockets, server, epoll)
}

/// Whether the server has heard that the guest has ended.
fn has_heard_end(mut server: &TcpStream) -> bool {
    match server.read(&mut [0]) {
        Ok(0) => true,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => false,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_close_and_the_last_acknowledgement_wait_until_nothing_else_is_to_be_done() {
    for ends in ENDS {
        let mut guest = Taken::default();
        let (mut sockets, server, epoll) = ended(ends, &mut guest, 0);
        assert!(sockets.has_put_off());
        assert_eq!((&guest.0[..], has_heard_end(&server)), (&[][..], false));
        sockets.do_put_off(&epoll, &mut guest, 0);
        let last = (Flags::ACK, OURS_FIRST + 2, 0);
        assert_eq!((&guest.0[..], has_heard_end(&server)), (&[last][..], true));
        assert!(!sockets.has_put_off());
    }
}

#[test]
fn a_busy_thread_does_not_put_off_for_long() {
    for ends in ENDS {
        let mut guest = Taken::default();
        let (mut sockets, server, epoll) = ended(ends, &mut guest, 7);
        while sockets.work(&epoll, &mut guest, 1_000_006) {}
        assert_eq!((guest.0.len(), has_heard_end(&server)), (0, false));
        while sockets.work(&epoll, &mut guest, 1_000_007) {}
        assert_eq!((guest.0.len(), has_heard_end(&server)), (1, true));
    }
}

#[test]
fn what_is_put_off_has_a_deadline_until_it_is_done() {
    let mut guest = Taken::default();
    let (mut sockets, _server, epoll) = ended(ENDS[0], &mut guest, 7);
    sockets.sweep(7, |_| true);
    assert_eq!(sockets.due_ns(), Some(1_000_007));
    sockets.do_put_off(&epoll, &mut guest, 8);
    assert!(sockets.due_ns() > Some(1_000_007));
}

#[test]
fn a_connection_of_the_same_ports_finds_no_socket_that_waits_for_its_close() {
    let mut guest = Taken::default();
    let (mut sockets, server, epoll) = ended(ENDS[0], &mut guest, 0);
    let (from, to) = ENDS[0];
    with_segment(&syn(from, to, GUESTS_FIRST + 1_000), |packet, _| {
        sockets.take(
            packet,
            (VirtioNetHdr::default(), false),
            &epoll,
            &mut guest,
            0,
        );
    });
    assert!(has_heard_end(&server));
}
