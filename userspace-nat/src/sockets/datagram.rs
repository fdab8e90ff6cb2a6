//! UDP flows and ICMP echo: a connected socket each.
use std::{
    io::{self, IoSlice, IoSliceMut},
    net::{IpAddr, SocketAddr},
    os::fd::{AsRawFd, OwnedFd},
};

use nix::{
    cmsg_space,
    errno::Errno,
    sys::{
        epoll::{Epoll, EpollFlags},
        socket::{
            ControlMessage, ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, sendmsg,
            setsockopt, sockopt,
        },
    },
};
use slipgate_abi::Protocol;
use slipgate_model::FlowTuple;

use super::{FRAMES_PER_TURN, Kind, L3_START, Sockets, ToGuest, system, watch};
use crate::{
    packet::{Packet, Transport, Version, checksum::Sum, ipv4, ipv6, transport::UDP_HEADER_LEN},
    port::{ETHERNET_LEN, VirtioNetHdr},
};

/// Reads of one socket in a turn, whatever they give.
const READS: usize = FRAMES_PER_TURN;

/// The socket of a UDP or ICMP flow.
#[derive(Debug)]
pub(super) struct Datagrams {
    socket: OwnedFd,
}

impl Sockets {
    pub(super) fn take_datagram(
        &mut self,
        tuple: FlowTuple,
        packet: &Packet<'_>,
        vnet: VirtioNetHdr,
        epoll: &Epoll,
        guest: &mut impl ToGuest,
    ) {
        let key = match self.by_tuple.get(&tuple) {
            Some(key) => Ok(*key),
            None => self.open_datagrams(tuple, epoll),
        };
        let sent = key.and_then(|key| {
            let endpoint = self.endpoints.get(&key);
            let Some(Kind::Datagrams(Datagrams { socket })) = endpoint.map(|e| &e.socket) else {
                return Ok(());
            };
            send_one(socket, packet, vnet)
        });
        match sent.map_err(|error| (error.raw_os_error(), error)) {
            Ok(()) => {}
            // The queue of the host's link: lost, as on any.
            Err((Some(nix::libc::EAGAIN | nix::libc::ENOBUFS), _)) => {}
            Err((_, error)) => self.unreachable(&tuple, error, guest),
        }
    }

    fn open_datagrams(&mut self, tuple: FlowTuple, epoll: &Epoll) -> io::Result<u32> {
        let socket = system::open(&tuple)?;
        if tuple.protocol == Protocol::Udp as u8 && self.joins_datagrams {
            // Before Linux 5.0 each comes by itself.
            let _ = setsockopt(&socket, sockopt::UdpGroSegment, &true);
        }
        let key = self.add(tuple, Kind::Datagrams(Datagrams { socket }));
        let watched = match self.endpoints.get(&key).map(|e| &e.socket) {
            // Level-triggered: what is not read in this turn is reported in the next.
            Some(Kind::Datagrams(it)) => watch(epoll, &it.socket, key, EpollFlags::EPOLLIN),
            _ => Ok(()),
        };
        match watched {
            Ok(()) => Ok(key),
            Err(error) => {
                self.remove(key);
                Err(error)
            }
        }
    }

    pub(super) fn datagrams_ready(&mut self, key: u32, guest: &mut impl ToGuest) {
        for _ in 0..READS {
            let Some(endpoint) = self.endpoints.get(&key) else {
                return;
            };
            let (Kind::Datagrams(Datagrams { socket }), tuple) = (&endpoint.socket, endpoint.tuple)
            else {
                return;
            };
            let is_udp = tuple.protocol == Protocol::Udp as u8;
            let version = Version::of(tuple.remote);
            let headers = version.header_len() + if is_udp { UDP_HEADER_LEN } else { 0 };
            let start = L3_START + headers;
            let received = receive(socket, &tuple, &mut self.buffer[start..]);
            match received {
                Ok(None) => {}
                Ok(Some((len, segment_len))) => {
                    let end = start + len;
                    let l3 = &mut self.buffer[L3_START..end];
                    let vnet = write_headers(l3, &tuple, is_udp, segment_len);
                    guest.deliver(vnet, &mut self.buffer[..end]);
                }
                Err(Errno::EAGAIN) => return,
                Err(Errno::EINTR) => {}
                Err(error) => return self.unreachable(&tuple, error.into(), guest),
            }
        }
    }
}

/// Sends a packet's payload: a GSO frame's segments at once.
fn send_one(socket: &OwnedFd, packet: &Packet<'_>, vnet: VirtioNetHdr) -> io::Result<()> {
    let l4 = packet.ip.payload();
    let payload = match packet.transport {
        Transport::Udp(udp) => {
            let end = UDP_HEADER_LEN + udp.payload_len;
            l4.get(UDP_HEADER_LEN..end).unwrap_or_default()
        }
        _ => l4,
    };
    let segment_len = vnet.gso_size;
    let segments = [ControlMessage::UdpGsoSegments(&segment_len)];
    let is_gso = vnet.gso_type != VirtioNetHdr::GSO_NONE && payload.len() > segment_len.into();
    let control = if is_gso { &segments[..] } else { &[] };
    let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
    let parts = [IoSlice::new(payload)];
    sendmsg::<()>(socket.as_raw_fd(), &parts, control, flags, None)?;
    Ok(())
}

/// Receives a datagram, or several of the same length joined; returns the length of all and of each.
/// `None`: of another sender. A socket has its port before it is connected, and anybody may send to it
/// then.
fn receive(
    socket: &OwnedFd,
    tuple: &FlowTuple,
    into: &mut [u8],
) -> nix::Result<Option<(usize, Option<u16>)>> {
    let mut space = cmsg_space!(i32);
    let mut parts = [IoSliceMut::new(into)];
    let received = recvmsg::<SockaddrStorage>(
        socket.as_raw_fd(),
        &mut parts,
        Some(&mut space),
        MsgFlags::MSG_DONTWAIT,
    )?;
    let is_peer = received.address.is_some_and(|from| {
        let from = socket_addr(&from);
        let is_port = |from: SocketAddr| {
            tuple.protocol != Protocol::Udp as u8 || from.port() == tuple.remote_port
        };
        from.is_some_and(|from| is_port(from) && from.ip() == tuple.remote)
    });
    if !is_peer {
        return Ok(None);
    }
    let segment_len = received.cmsgs()?.find_map(|message| match message {
        ControlMessageOwned::UdpGroSegments(len) => u16::try_from(len).ok(),
        _ => None,
    });
    Ok(Some((received.bytes, segment_len)))
}

fn socket_addr(from: &SockaddrStorage) -> Option<SocketAddr> {
    let v4 = from
        .as_sockaddr_in()
        .map(|from| SocketAddr::V4((*from).into()));
    v4.or_else(|| Some(SocketAddr::V6((*from.as_sockaddr_in6()?).into())))
}

/// Writes the headers before a payload from the peer.
fn write_headers(
    l3: &mut [u8],
    tuple: &FlowTuple,
    is_udp: bool,
    segment_len: Option<u16>,
) -> VirtioNetHdr {
    let version = Version::of(tuple.remote);
    let total = l3.len();
    let (ip, l4) = l3.split_at_mut(version.header_len());
    match (tuple.remote, tuple.local) {
        (IpAddr::V4(remote), IpAddr::V4(local)) => {
            // DF unset: what is longer than the guest's MTU comes to it in fragments.
            ip[..12].copy_from_slice(&[0x45, 0, 0, 0, 0, 0, 0, 0, 64, tuple.protocol, 0, 0]);
            ip[2..4].copy_from_slice(&(total as u16).to_be_bytes());
            ip[4..6].copy_from_slice(&rand::random::<[u8; 2]>());
            ip[12..16].copy_from_slice(&remote.octets());
            ip[16..20].copy_from_slice(&local.octets());
            ipv4::fill_checksum(ip, ipv4::HEADER_LEN);
        }
        (IpAddr::V6(remote), IpAddr::V6(local)) => {
            ipv6::write_header(ip, remote, local, tuple.protocol, l4.len());
        }
        // No flow has both.
        _ => return VirtioNetHdr::default(),
    }
    if !is_udp {
        // The kernel gave the message as it came, with its checksum.
        return VirtioNetHdr::default();
    }
    let len = l4.len();
    l4[..2].copy_from_slice(&tuple.remote_port.to_be_bytes());
    l4[2..4].copy_from_slice(&tuple.local_port.to_be_bytes());
    l4[4..6].copy_from_slice(&(len as u16).to_be_bytes());
    let sum = Sum::default().pseudo(tuple.remote, tuple.local, 17, len);
    l4[6..8].copy_from_slice(&sum.folded().to_be_bytes());
    let joined = segment_len.filter(|each| len - UDP_HEADER_LEN > usize::from(*each));
    VirtioNetHdr {
        flags: VirtioNetHdr::NEEDS_CSUM,
        gso_type: match joined {
            Some(_) => VirtioNetHdr::GSO_UDP_L4,
            None => VirtioNetHdr::GSO_NONE,
        },
        hdr_len: (ETHERNET_LEN + version.header_len() + UDP_HEADER_LEN) as u16,
        gso_size: joined.unwrap_or(0),
        csum_start: (ETHERNET_LEN + version.header_len()) as u16,
        csum_offset: 6,
    }
}
