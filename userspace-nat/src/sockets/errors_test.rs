//! Against the kernel's own loopback, where nobody listens.
use std::{
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    time::Duration,
};

use slipgate_abi::DropReason;

use super::*;
use crate::{
    packet::{Ip, Packet, Transport},
    sockets::Delivered,
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

    fn lost(&mut self, reason: DropReason, _: VirtioNetHdr, len: usize) {
        panic!("{reason:?}: {len} bytes");
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
        let mut sockets = Sockets::new(false, 1_500);
        let key = sockets.add(tuple, Kind::Datagrams(Datagrams::new(socket)));
        let mut guest = Taken::default();
        assert!(sockets.tell_messages(key, &mut guest));
        assert!(!sockets.tell_messages(key, &mut guest), "once");
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
    let mut sockets = Sockets::new(false, 1_500);
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
