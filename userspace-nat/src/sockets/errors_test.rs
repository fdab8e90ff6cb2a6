//! Against the kernel's own loopback, where nobody listens.
use std::{
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    time::Duration,
};

use nix::sys::epoll::{Epoll, EpollCreateFlags};
use slipgate_abi::DropReason;

use super::*;
use crate::{
    fake::packets::syn,
    packet::{Ip, Packet, Transport},
    sockets::{Delivered, no_space},
    tcp::Segment,
};

/// A guest that takes everything.
#[derive(Default)]
struct Taken(Vec<Vec<u8>>);

impl ToGuest for Taken {
    fn has_room(&mut self) -> bool {
        true
    }

    fn deliver(&mut self, _: VirtioNetHdr, frame: &mut [u8]) -> Delivered {
        self.0.push(frame[L3_START..].to_vec());
        Delivered::Yes
    }

    no_space!();

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

/// A socket whose datagram to a port of `host` nobody took, and its flow.
fn refused(host: IpAddr) -> (OwnedFd, FlowTuple) {
    let closed = UdpSocket::bind((host, 0)).unwrap();
    let remote = closed.local_addr().unwrap();
    drop(closed);
    let socket = UdpSocket::bind((host, 0)).unwrap();
    socket.connect(remote).unwrap();
    let local: SocketAddr = socket.local_addr().unwrap();
    let socket = OwnedFd::from(socket);
    keep_for(&socket, Version::of(host));
    let sender = UdpSocket::from(socket.try_clone().unwrap());
    sender.send(b"a question").unwrap();
    sender
        .set_read_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    // It waits for the message.
    sender.recv(&mut [0; 1]).unwrap_err();
    let tuple = FlowTuple {
        scope: FlowTuple::WORLD,
        local: local.ip(),
        remote: remote.ip(),
        local_port: local.port(),
        remote_port: remote.port(),
        protocol: Protocol::Udp as u8,
    };
    (socket, tuple)
}

#[test]
fn a_message_of_the_network_is_told_with_its_type_code_sender_and_quote() {
    for (host, kind, code) in [
        (IpAddr::from(Ipv4Addr::LOCALHOST), 3, 3),
        (IpAddr::from(Ipv6Addr::LOCALHOST), 1, 4),
    ] {
        let (socket, tuple) = refused(host);
        let mut sockets = Sockets::new(false, 1_500, 1 << 20);
        let key = sockets.add(tuple, Kind::Datagrams(Datagrams::new(socket)));
        let mut guest = Taken::default();
        assert!(sockets.tell_messages(key, &mut guest).is_told);
        assert_eq!(
            sockets.tell_messages(key, &mut guest),
            Heard::default(),
            "once"
        );
        let [packet] = &guest.0[..] else {
            panic!("{:?}", guest.0);
        };
        let ip = Ip::parse(packet).unwrap();
        assert_eq!((ip.source, ip.destination), (host, tuple.local));
        let message = ip.payload();
        assert_eq!((message[0], message[1]), (kind, code));
        let quoted = Packet::parse(Ip::parse(&message[8..]).unwrap()).unwrap();
        let Transport::Udp(udp) = quoted.transport else {
            panic!("{quoted:?}");
        };
        assert_eq!(
            (quoted.ip.source, quoted.ip.destination),
            (tuple.local, tuple.remote)
        );
        assert_eq!(
            (udp.source, udp.destination),
            (tuple.local_port, tuple.remote_port)
        );
        assert!(quoted.ip.payload().ends_with(b"a question"));
    }
}

#[test]
fn what_a_socket_refuses_is_unreachable() {
    let (_, tuple) = refused(Ipv4Addr::LOCALHOST.into());
    let mut sockets = Sockets::new(false, 1_500, 1 << 20);
    let mut guest = Taken::default();
    for (errno, code) in [
        (libc::ECONNREFUSED, 3),
        (libc::ENETUNREACH, 0),
        (libc::EPERM, 13),
        (libc::EADDRINUSE, 1),
    ] {
        let error = io::Error::from_raw_os_error(errno);
        sockets.unreachable(&tuple, &error, &mut guest);
        let packet = guest.0.pop().unwrap();
        assert_eq!(Ip::parse(&packet).unwrap().payload()[..2], [3, code]);
    }
}

#[test]
fn a_syn_that_has_no_way_to_its_server_is_answered_as_the_network_would() {
    for remote in [
        IpAddr::from(Ipv4Addr::new(198, 51, 100, 7)),
        Ipv6Addr::new(0x2001, 0xdb8, 7, 0, 0, 0, 0, 7).into(),
    ] {
        let (_, datagrams) = refused(Ipv4Addr::LOCALHOST.into());
        let local = match remote {
            IpAddr::V4(_) => IpAddr::from(Ipv4Addr::new(192, 0, 2, 1)),
            IpAddr::V6(_) => Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into(),
        };
        let tuple = FlowTuple {
            local,
            remote,
            protocol: Protocol::Tcp as u8,
            ..datagrams
        };
        let mut sockets = Sockets::new(false, 1_500, 1 << 20);
        let epoll = Epoll::new(EpollCreateFlags::empty()).unwrap();
        let mut guest = Taken::default();
        let codes = if remote.is_ipv4() { [1, 0] } else { [3, 0] };
        for (errno, code) in [libc::EHOSTUNREACH, libc::ENETUNREACH]
            .into_iter()
            .zip(codes)
        {
            let opener = syn((local, tuple.local_port), (remote, tuple.remote_port), 77);
            let packet = Packet::parse(Ip::parse(&opener).unwrap()).unwrap();
            let Transport::Tcp(tcp) = packet.transport else {
                panic!("{packet:?}");
            };
            let segment = Segment::read(&tcp, packet.ip.payload());
            let refused = Err(io::Error::from_raw_os_error(errno));
            sockets.begin_stream(tuple, &segment, refused, &epoll, &mut guest);
            assert!(sockets.endpoints.is_empty());
            let packet = guest.0.pop().unwrap();
            let message = Ip::parse(&packet).unwrap().payload().to_vec();
            let kind = if remote.is_ipv4() { 3 } else { 1 };
            assert_eq!(message[..2], [kind, code], "{remote} {errno}");
            let quoted = Packet::parse(Ip::parse(&message[8..]).unwrap()).unwrap();
            let Transport::Tcp(tcp) = quoted.transport else {
                panic!("{quoted:?}");
            };
            // What the guest looks its connection up by, and checks.
            assert!(tcp.is_opening_syn());
            assert_eq!(tcp.sequence, 77);
            assert_eq!(
                (tcp.source, tcp.destination),
                (tuple.local_port, tuple.remote_port)
            );
        }
    }
}
