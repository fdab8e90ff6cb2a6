//! Against the kernel's own loopback.
use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket},
    os::fd::AsFd,
    time::Duration,
};

use nix::{libc, sys::epoll::EpollCreateFlags};

use super::*;
use crate::{
    fake::packets::udp,
    packet::Ip,
    sockets::{BUFFER_LEN, Delivered, no_space},
};

const MTU: u16 = 1_500;

/// A guest that takes everything: payload and length of each segment of a frame; and what was lost.
#[derive(Default)]
struct Taken {
    frames: Vec<(Vec<u8>, u16)>,
    lost: Vec<(DropReason, u16, usize)>,
    /// What it says of what it is given.
    lets_in_nothing: bool,
}

impl ToGuest for Taken {
    fn has_room(&mut self) -> bool {
        true
    }

    fn deliver(&mut self, vnet: VirtioNetHdr, frame: &mut [u8]) -> Delivered {
        let packet = Packet::parse(Ip::parse(&frame[L3_START..]).unwrap()).unwrap();
        // Behind the header of UDP, or of an ICMP message.
        let payload = packet.ip.payload()[UDP_HEADER_LEN..].to_vec();
        if self.lets_in_nothing {
            return Delivered::Passed;
        }
        self.frames.push((payload, vnet.gso_size));
        Delivered::Yes
    }

    no_space!();

    fn lost(&mut self, reason: DropReason, vnet: VirtioNetHdr, len: usize) {
        self.lost.push((reason, vnet.gso_size, len));
    }

    fn not_sent(&mut self, _: &FlowTuple, reason: DropReason, len: usize) {
        self.lost.push((reason, 0, len));
    }

    fn limits(&self) -> Option<slipgate_abi::rate::RateRef> {
        None
    }

    fn gateway(&self, version: Version) -> Option<IpAddr> {
        Some(version.unspecified())
    }
}

struct Rig {
    sockets: Sockets,
    epoll: Epoll,
    guest: Taken,
    peer: UdpSocket,
    tuple: FlowTuple,
    key: u32,
}

impl Rig {
    /// A flow with a peer on the loopback. `set`: its socket's options.
    fn new(host: IpAddr, set: impl FnOnce(&UdpSocket)) -> Self {
        let [peer, ours] = [(), ()].map(|()| UdpSocket::bind((host, 0)).unwrap());
        peer.connect(ours.local_addr().unwrap()).unwrap();
        ours.connect(peer.local_addr().unwrap()).unwrap();
        ours.set_nonblocking(true).unwrap();
        peer.set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        set(&ours);
        let tuple = FlowTuple {
            scope: FlowTuple::WORLD,
            local: host,
            remote: host,
            local_port: ours.local_addr().unwrap().port(),
            remote_port: peer.local_addr().unwrap().port(),
            protocol: Protocol::Udp as u8,
        };
        let mut sockets = Sockets::new(true, MTU, 1 << 20);
        let key = sockets.add(tuple, Kind::Datagrams(Datagrams::new(ours.into())));
        Self {
            sockets,
            epoll: Epoll::new(EpollCreateFlags::empty()).unwrap(),
            guest: Taken::default(),
            peer,
            tuple,
            key,
        }
    }

    /// The guest sends a datagram.
    fn take(&mut self, data: &[u8]) {
        self.take_as(data, false);
    }

    fn take_as(&mut self, data: &[u8], came_in_fragments: bool) {
        let ends = (self.tuple.local_addr(), self.tuple.remote_addr());
        let (from, to) = ((ends.0.ip(), ends.0.port()), (ends.1.ip(), ends.1.port()));
        let bytes = udp(from, to, data);
        let packet = Packet::parse(Ip::parse(&bytes).unwrap()).unwrap();
        let vnet = VirtioNetHdr::default();
        self.sockets.take(
            &packet,
            (vnet, came_in_fragments),
            &self.epoll,
            &mut self.guest,
            0,
        );
    }

    fn work(&mut self) {
        self.sockets.work(&self.epoll, &mut self.guest, 0);
    }

    fn receive(&mut self) {
        let events = EpollFlags::EPOLLIN;
        self.sockets.ready(self.key, events, &mut self.guest, 0);
    }

    /// Reads at the peer, by one call.
    fn read(&self) -> Vec<u8> {
        let mut bytes = vec![0; 2_000];
        let len = self.peer.recv(&mut bytes).unwrap();
        bytes.truncate(len);
        bytes
    }
}

fn hosts() -> [IpAddr; 2] {
    [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()]
}

#[test]
fn a_datagram_longer_than_a_frame_is_counted_and_not_delivered_in_part() {
    let mut rig = Rig::new(Ipv6Addr::LOCALHOST.into(), |_| ());
    // The longest that leaves room for an IPv6 header in 65,535 bytes, and the longest of all.
    for len in [65_487, 65_488, 65_527, 9] {
        assert_eq!(rig.peer.send(&vec![7; len]).unwrap(), len);
        rig.receive();
    }
    let lens: Vec<_> = rig.guest.frames.iter().map(|(it, _)| it.len()).collect();
    assert_eq!(lens, [65_487, 9]);
    assert_eq!(rig.guest.lost, [(DropReason::TooBig, 0, BUFFER_LEN); 2]);
}

#[test]
fn a_datagram_that_nothing_lets_in_is_counted() {
    for host in hosts() {
        let mut rig = Rig::new(host, |_| ());
        rig.guest.lets_in_nothing = true;
        rig.peer.send(&[7; 100]).unwrap();
        rig.receive();
        let lost = rig
            .guest
            .lost
            .iter()
            .map(|(reason, each, _)| (*reason, *each));
        assert!(lost.eq([(DropReason::NoFlow, 0)]), "{:?}", rig.guest.lost);
    }
}

#[test]
fn datagrams_of_one_length_come_as_one_frame_and_too_long_ones_by_themselves() {
    for host in hosts() {
        let joins = |socket: &UdpSocket| setsockopt(socket, sockopt::UdpGroSegment, &true).unwrap();
        let mut rig = Rig::new(host, joins);
        for _ in 0..3 {
            rig.peer.send(&[5; 100]).unwrap();
        }
        rig.receive();
        assert_eq!(rig.guest.frames, [(vec![5; 300], 100)]);
        rig.guest.frames.clear();
        // Joined by the kernel, and each longer than the guest's link takes whole.
        setsockopt(&rig.peer, sockopt::UdpGsoSegment, &2_000).unwrap();
        rig.peer.send(&[6; 5_000]).unwrap();
        rig.receive();
        let each = [2_000, 2_000, 1_000].map(|len| (vec![6; len], 0));
        assert_eq!(rig.guest.frames, each);
    }
}

#[test]
fn datagrams_of_one_turn_leave_together_at_its_end() {
    for host in hosts() {
        let mut rig = Rig::new(host, |_| ());
        setsockopt(&rig.peer, sockopt::UdpGroSegment, &true).unwrap();
        for data in [&[1; 22][..], &[2; 22], &[3; 7]] {
            rig.take(data);
        }
        rig.peer.set_nonblocking(true).unwrap();
        assert!(rig.peer.recv(&mut [0; 99]).is_err(), "the turn goes on");
        rig.peer.set_nonblocking(false).unwrap();
        rig.work();
        assert_eq!(rig.read(), [&[1; 22][..], &[2; 22], &[3; 7]].concat());
    }
}

/// As where the path or the device does not take them: a socket without checksums.
fn refuses_joined(socket: &UdpSocket) {
    let one: libc::c_int = 1;
    // SAFETY: the option is an int, which outlives the call.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_NO_CHECK,
            (&raw const one).cast(),
            size_of_val(&one) as libc::socklen_t,
        )
    };
    assert_eq!(set, 0);
}

#[test]
fn where_the_kernel_does_not_join_them_each_leaves_by_itself_and_it_is_tried_again_later() {
    let mut rig = Rig::new(Ipv4Addr::LOCALHOST.into(), refuses_joined);
    rig.take(&[1; 22]);
    rig.take(&[2; 22]);
    rig.work();
    assert_eq!((rig.read(), rig.read()), (vec![1; 22], vec![2; 22]));
    // They wait for no end of the turn any more.
    for _ in 0..ALONE {
        rig.take(&[3; 22]);
        assert_eq!(rig.read(), [3; 22]);
    }
    rig.take(&[4; 22]);
    assert!(!rig.sockets.burst.is_empty(), "it is tried again");
    rig.work();
    assert_eq!(rig.read(), [4; 22]);
    assert!(rig.guest.frames.is_empty(), "no message about any");
}

#[test]
fn only_some_errors_may_be_of_joining() {
    let is = |errno| {
        is_of_joining(&NotSent {
            error: io::Error::from_raw_os_error(errno),
            mtu: None,
        })
    };
    use libc::{EACCES, ECONNREFUSED, EINVAL, EIO, EMSGSIZE, ENETUNREACH, ENOBUFS, EOPNOTSUPP};
    assert!([EINVAL, EIO, EMSGSIZE, EOPNOTSUPP].into_iter().all(is));
    assert!(
        ![EACCES, ECONNREFUSED, ENETUNREACH, ENOBUFS]
            .into_iter()
            .any(is)
    );
}

/// As where a link on the way has this MTU.
fn has_mtu(mtu: libc::c_int) -> impl FnOnce(&UdpSocket) {
    move |socket| {
        // SAFETY: the option is an int, which outlives the call.
        let set = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::IPPROTO_IPV6,
                libc::IPV6_MTU,
                (&raw const mtu).cast(),
                size_of_val(&mtu) as libc::socklen_t,
            )
        };
        assert_eq!(set, 0);
        errors::keep_for(&socket.as_fd().try_clone_to_owned().unwrap(), Version::V6);
    }
}

#[test]
fn of_several_only_what_is_too_long_is_lost_and_told_once() {
    let mut rig = Rig::new(Ipv6Addr::LOCALHOST.into(), has_mtu(1_300));
    // 48 bytes of headers; the last is the one that fits.
    for data in [&[1; 1_253][..], &[2; 1_253], &[3; 1_252]] {
        rig.take(data);
    }
    rig.work();
    assert_eq!(rig.read(), [3; 1_252]);
    assert_eq!(rig.guest.lost, [(DropReason::TooBig, 0, 1_301); 2]);
    let [(quoted, 0)] = &rig.guest.frames[..] else {
        panic!("{:?}", rig.guest.frames);
    };
    let quoted = Packet::parse(Ip::parse_truncated(quoted).unwrap()).unwrap();
    let ends = (quoted.ip.source, quoted.ip.destination);
    assert_eq!(ends, (rig.tuple.local, rig.tuple.remote));
    // Joining was not at fault.
    rig.take(&[4; 22]);
    rig.take(&[5; 22]);
    assert!(!rig.sockets.burst.is_empty());
    rig.work();
    assert_eq!((rig.read(), rig.read()), (vec![4; 22], vec![5; 22]));
}

#[test]
fn what_came_in_fragments_may_leave_in_some_and_the_next_one_may_not() {
    let mut rig = Rig::new(Ipv6Addr::LOCALHOST.into(), has_mtu(1_300));
    for came_in_fragments in [true, false, true] {
        rig.take_as(&[6; 1_400], came_in_fragments);
        rig.work();
        if came_in_fragments {
            assert_eq!(rig.read(), [6; 1_400]);
        }
    }
    assert_eq!(rig.guest.lost.len(), 1);
}
