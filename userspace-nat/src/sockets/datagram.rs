//! UDP flows and ICMP echo: a connected socket each.
use std::{
    io::{self, IoSlice, IoSliceMut},
    net::SocketAddr,
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

use super::{FRAMES_PER_TURN, Kind, L3_START, Sockets, ToGuest, errors, system, watch};
use crate::{
    inet,
    packet::{Packet, Transport, Version, build, checksum::Sum, transport::UDP_HEADER_LEN},
    port::{ETHERNET_LEN, VirtioNetHdr},
};

/// Reads of one socket in a turn, whatever they give.
const READS: usize = FRAMES_PER_TURN;

/// The socket of a UDP or ICMP flow.
#[derive(Debug)]
pub(super) struct Datagrams {
    pub(super) socket: OwnedFd,
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
        let mut sent = key
            .as_ref()
            .map_err(copy_of)
            .and_then(|key| self.send_by(*key, packet, vnet));
        // An error that waited was about another datagram, and this one is not sent.
        if let (Err(_), Ok(key)) = (&sent, &key)
            && self.tell_messages(*key, guest)
        {
            sent = self.send_by(*key, packet, vnet);
        }
        match sent.map_err(|error| (error.raw_os_error(), error)) {
            Ok(()) => {}
            // The queue of the host's link: lost, as on any.
            Err((Some(nix::libc::EAGAIN | nix::libc::ENOBUFS), _)) => {}
            Err((_, error)) => self.unreachable(&tuple, &error, guest),
        }
    }

    fn send_by(&self, key: u32, packet: &Packet<'_>, vnet: VirtioNetHdr) -> io::Result<()> {
        let endpoint = self.endpoints.get(&key);
        let Some(Kind::Datagrams(Datagrams { socket })) = endpoint.map(|e| &e.socket) else {
            return Ok(());
        };
        send_one(socket, packet, vnet)
    }

    fn open_datagrams(&mut self, tuple: FlowTuple, epoll: &Epoll) -> io::Result<u32> {
        let socket = system::open(&tuple)?;
        errors::keep_for(&socket, Version::of(tuple.remote));
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

    pub(super) fn datagrams_ready(
        &mut self,
        key: u32,
        flags: EpollFlags,
        guest: &mut impl ToGuest,
    ) {
        let is_told = flags.contains(EpollFlags::EPOLLERR) && self.tell_messages(key, guest);
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
                    self.deliver_received(&tuple, (start, len), segment_len, guest);
                }
                Err(Errno::EAGAIN) => return,
                Err(Errno::EINTR) => {}
                // What the messages were about, once more.
                Err(_) if is_told => return,
                Err(error) => return self.unreachable(&tuple, &error.into(), guest),
            }
        }
    }
}

impl Sockets {
    /// Delivers what was received into the buffer at `start`: joined, unless each of the datagrams is
    /// too long for the guest's link. Those leave by themselves, each in fragments.
    fn deliver_received(
        &mut self,
        tuple: &FlowTuple,
        (start, len): (usize, usize),
        segment_len: Option<u16>,
        guest: &mut impl ToGuest,
    ) {
        let is_udp = tuple.protocol == Protocol::Udp as u8;
        let headers_len = start - L3_START;
        let each = usize::from(segment_len.unwrap_or(0));
        let is_joined = each > 0 && len > each;
        if !is_joined || headers_len + each <= usize::from(self.mtu) {
            let end = start + len;
            let l3 = &mut self.buffer[L3_START..end];
            let vnet = write_headers(l3, tuple, is_udp, segment_len);
            guest.deliver(vnet, &mut self.buffer[..end]);
            return;
        }
        let joined = self.buffer[start..start + len].to_vec();
        for datagram in joined.chunks(each) {
            let end = start + datagram.len();
            self.buffer[start..end].copy_from_slice(datagram);
            let l3 = &mut self.buffer[L3_START..end];
            let vnet = write_headers(l3, tuple, is_udp, None);
            guest.deliver(vnet, &mut self.buffer[..end]);
        }
    }
}

fn copy_of(error: &io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(code) => io::Error::from_raw_os_error(code),
        None => error.kind().into(),
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
        let from = inet::address_of(&from);
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

/// Writes the headers before a payload from the peer.
fn write_headers(
    l3: &mut [u8],
    tuple: &FlowTuple,
    is_udp: bool,
    segment_len: Option<u16>,
) -> VirtioNetHdr {
    let version = Version::of(tuple.remote);
    let (ip, l4) = l3.split_at_mut(version.header_len());
    // Not atomic: what is longer than the guest's MTU comes to it in fragments. Those of IPv6 have one of
    // their own.
    let identification = (version == Version::V4).then(rand::random);
    let ends = (tuple.remote, tuple.local);
    if !build::write_header(ip, ends, tuple.protocol, identification, l4.len()) {
        // No flow has both.
        return VirtioNetHdr::default();
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
