//! UDP flows and ICMP echo: a connected socket each.
use std::{
    io::{self, IoSlice},
    net::SocketAddr,
    os::fd::{AsRawFd, OwnedFd},
};

use nix::{
    errno::Errno,
    sys::{
        epoll::{Epoll, EpollFlags},
        socket::{ControlMessage, MsgFlags, sendmsg, setsockopt, sockopt},
    },
};
use slipgate_abi::{DropReason, Protocol};
use slipgate_model::FlowTuple;

use super::{
    Delivered, Kind, L3_START, Sockets, ToGuest,
    burst::{Burst, Load},
    errors,
    inbox::{Inbox, Received},
    path_mtu::{self, IfTooLong},
    watch,
};
use crate::{
    packet::{Packet, Transport, Version, build, checksum::Sum, transport::UDP_HEADER_LEN},
    port::{ETHERNET_LEN, VirtioNetHdr},
};

/// The socket of a UDP or ICMP flow.
#[derive(Debug)]
pub(super) struct Datagrams {
    pub(super) socket: OwnedFd,
    /// Datagrams that leave by themselves before joining is tried again: the kernel has refused it.
    alone: u16,
    setting: path_mtu::Setting,
}

/// Why a load was not sent.
#[derive(Debug)]
struct NotSent {
    error: io::Error,
    /// MTU of the way, if the load is too long for it and the kernel says so.
    mtu: Option<u32>,
}

/// Datagrams after which a refusal to join them is forgotten: routes and their MTUs change.
const ALONE: u16 = 1_024;

impl Datagrams {
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            alone: 0,
            setting: None,
        }
    }
}

impl Sockets {
    pub(super) fn take_datagram(
        &mut self,
        tuple: FlowTuple,
        packet: &Packet<'_>,
        (vnet, if_too_long): (VirtioNetHdr, IfTooLong),
        epoll: &Epoll,
        guest: &mut impl ToGuest,
        now_ns: u64,
    ) {
        let key = match self.by_tuple.get(&tuple) {
            Some(key) => Ok(*key),
            None => self.open_datagrams(tuple, epoll),
        };
        let (payload, each) = payload_of(packet, vnet);
        let is_single = matches!(packet.transport, Transport::Udp(_)) && each.is_none();
        match key {
            Err(error) => self.unreachable(&tuple, &error, guest),
            Ok(key)
                if is_single
                    && Burst::is_for(packet.ip.version(), payload.len())
                    && self.may_join(key) =>
            {
                if !self.burst.takes(key, payload.len(), if_too_long) {
                    self.send_burst(guest, now_ns);
                }
                self.burst.push(key, tuple, payload, if_too_long);
            }
            Ok(key) => {
                self.send_burst(guest, now_ns);
                let load = Load {
                    key,
                    tuple,
                    payload,
                    each,
                    if_too_long,
                };
                self.send(load, guest, now_ns);
            }
        }
    }

    /// Sends the datagrams that wait.
    pub(super) fn send_burst(&mut self, guest: &mut impl ToGuest, now_ns: u64) {
        if self.burst.is_empty() {
            return;
        }
        let mut burst = std::mem::take(&mut self.burst);
        if let Some(load) = burst.waiting() {
            self.send(load, guest, now_ns);
        }
        burst.clear();
        self.burst = burst;
    }

    /// Sends a load at once, or one by one where the kernel does not join its datagrams, and tells the guest
    /// what was not sent.
    fn send(&mut self, load: Load<'_>, guest: &mut impl ToGuest, now_ns: u64) {
        let sent = self.send_by(load, guest);
        let each = load
            .each
            .filter(|_| sent.as_ref().is_err_and(is_of_joining));
        let Some(each) = each else {
            self.after_send(&load, (sent, false), guest, now_ns);
            return;
        };
        let mut is_told = false;
        for payload in load.payload.chunks(each.into()) {
            let single = Load {
                payload,
                each: None,
                ..load
            };
            let sent = self.send_by(single, guest);
            // Not joining was at fault, then, and not the length of each.
            if sent.is_ok()
                && payload.len() == usize::from(each)
                && let Some(Kind::Datagrams(it)) = self.kind(load.key)
            {
                it.alone = ALONE;
            }
            is_told = self.after_send(&single, (sent, is_told), guest, now_ns);
        }
    }

    /// Whether the next datagram of a socket may wait for others.
    fn may_join(&mut self, key: u32) -> bool {
        let Some(Kind::Datagrams(it)) = self.kind(key) else {
            return false;
        };
        let may_join = it.alone == 0;
        it.alone = it.alone.saturating_sub(1);
        may_join
    }

    fn kind(&mut self, key: u32) -> Option<&mut Kind> {
        self.endpoints.get_mut(&key).map(|e| &mut e.socket)
    }

    /// Tells the guest why a load was not sent: of a length that is too long only once of each load, by
    /// `is_told`. Returns whether it has been told of that.
    fn after_send(
        &mut self,
        load: &Load<'_>,
        (sent, is_told): (Result<(), NotSent>, bool),
        guest: &mut impl ToGuest,
        now_ns: u64,
    ) -> bool {
        let Err(NotSent { error, mtu }) = sent else {
            return is_told;
        };
        match error.raw_os_error() {
            // The queue of the host's link: lost, as on any.
            Some(nix::libc::EAGAIN | nix::libc::ENOBUFS) => {}
            Some(nix::libc::EMSGSIZE) => {
                let told = (mtu, is_told);
                return self.too_long(&load.tuple, load.payload, told, guest, now_ns);
            }
            _ => self.unreachable(&load.tuple, &error, guest),
        }
        is_told
    }

    /// Sends a load, again if an error that waited was about another datagram: then this one is not
    /// sent.
    fn send_by(&mut self, load: Load<'_>, guest: &mut impl ToGuest) -> Result<(), NotSent> {
        let Err(error) = self.send_once(&load) else {
            return Ok(());
        };
        let mut heard = self.tell_messages(load.key, guest);
        let mut error = error;
        if heard.is_told {
            match self.send_once(&load) {
                Ok(()) => return Ok(()),
                Err(again) => error = again,
            }
            heard = self.tell_messages(load.key, guest);
        }
        let mtu = match path_mtu::is_too_long(&error) && heard.mtu.is_none() {
            true => self.path_mtu(load.key),
            false => heard.mtu,
        };
        Err(NotSent { error, mtu })
    }

    fn path_mtu(&self, key: u32) -> Option<u32> {
        let endpoint = self.endpoints.get(&key)?;
        let Kind::Datagrams(it) = &endpoint.socket else {
            return None;
        };
        path_mtu::mtu_of(&it.socket, Version::of(endpoint.tuple.remote))
    }

    fn send_once(&mut self, load: &Load<'_>) -> io::Result<()> {
        let Some(Kind::Datagrams(it)) = self.kind(load.key) else {
            return Ok(());
        };
        let longest = load.each.map_or(load.payload.len(), usize::from);
        let len = path_mtu::packet_len(&load.tuple, longest);
        let of = (Version::of(load.tuple.remote), len);
        path_mtu::set(&it.socket, &mut it.setting, load.if_too_long, of);
        send_one(&it.socket, load.payload, load.each)
    }

    fn open_datagrams(&mut self, tuple: FlowTuple, epoll: &Epoll) -> io::Result<u32> {
        let socket = self.host.open(&tuple)?;
        errors::keep_for(&socket, Version::of(tuple.remote));
        if tuple.protocol == Protocol::Udp as u8 && self.joins_datagrams {
            // Before Linux 5.0 each comes by itself.
            let _ = setsockopt(&socket, sockopt::UdpGroSegment, &true);
        }
        self.await_datagrams(tuple, socket, epoll)
    }

    /// Waits at the sockets of shared ports that were made.
    pub(super) fn await_strangers(&mut self, epoll: &Epoll) {
        while let Some((tuple, socket)) = self.host.shared.take_made() {
            let key = self.add(tuple, Kind::Datagrams(Datagrams::new(socket)));
            let Err(error) = self.watch_datagrams(key, epoll) else {
                continue;
            };
            // Until it is waited at, nobody but the flows' peers gets in; the port stays held.
            tracing::debug!("waiting at a translated port: {error}");
            if let Some(Kind::Datagrams(it)) = self.take_out(key) {
                self.host.shared.put_back(tuple, it.socket);
            }
            break;
        }
    }

    fn await_datagrams(
        &mut self,
        tuple: FlowTuple,
        socket: OwnedFd,
        epoll: &Epoll,
    ) -> io::Result<u32> {
        let key = self.add(tuple, Kind::Datagrams(Datagrams::new(socket)));
        match self.watch_datagrams(key, epoll) {
            Ok(()) => Ok(key),
            Err(error) => {
                self.remove(key);
                Err(error)
            }
        }
    }

    fn watch_datagrams(&self, key: u32, epoll: &Epoll) -> io::Result<()> {
        match self.endpoints.get(&key).map(|e| &e.socket) {
            // Level-triggered: what is not read in this turn is reported in the next.
            Some(Kind::Datagrams(it)) => watch(epoll, &it.socket, key, EpollFlags::EPOLLIN),
            _ => Ok(()),
        }
    }

    pub(super) fn datagrams_ready(
        &mut self,
        key: u32,
        flags: EpollFlags,
        guest: &mut impl ToGuest,
    ) {
        let is_told =
            flags.contains(EpollFlags::EPOLLERR) && self.tell_messages(key, guest).is_told;
        let mut inbox = std::mem::take(&mut self.inbox);
        self.read_datagrams(key, is_told, &mut inbox, guest);
        self.inbox = inbox;
    }

    /// Delivers what waits at a socket, as much as one call takes: the rest is reported again.
    fn read_datagrams(
        &mut self,
        key: u32,
        is_told: bool,
        inbox: &mut Inbox,
        guest: &mut impl ToGuest,
    ) {
        let Some(endpoint) = self.endpoints.get(&key) else {
            return;
        };
        let (Kind::Datagrams(Datagrams { socket, .. }), tuple) = (&endpoint.socket, endpoint.tuple)
        else {
            return;
        };
        let is_udp = tuple.protocol == Protocol::Udp as u8;
        let headers_len =
            Version::of(tuple.remote).header_len() + if is_udp { UDP_HEADER_LEN } else { 0 };
        let start = L3_START + headers_len;
        match inbox.receive(socket, start) {
            Ok(_) => {}
            Err(Errno::EAGAIN | Errno::EINTR) => return,
            // What the messages were about, once more.
            Err(_) if is_told => return,
            Err(error) => return self.unreachable(&tuple, &error.into(), guest),
        }
        let most = usize::from(self.mtu).saturating_sub(headers_len);
        let joins = is_udp && self.joins_datagrams;
        let mut nth = 0;
        while let Some((received, count)) = inbox.joined(nth, start, |each| joins && each <= most) {
            // A socket has its port before it is connected, and anybody may send to it then.
            let sender = match is_of_peer(&received, &tuple) {
                true => Some(tuple),
                false => self.stranger(&tuple, &received),
            };
            if let Some(tuple) = sender {
                let place = inbox.place(nth);
                match received.is_cut {
                    false => self.deliver_received(&tuple, place, (start, &received), guest),
                    true => count_cut((start, &received), guest),
                }
            }
            nth += count;
        }
    }

    /// Returns the tuple of what came from another than the peer, if the port is shared.
    fn stranger(&self, tuple: &FlowTuple, received: &Received) -> Option<FlowTuple> {
        let from = received.from.filter(|_| self.host.shared.has(tuple))?;
        Some(FlowTuple {
            remote: from.ip(),
            remote_port: from.port(),
            ..*tuple
        })
    }

    /// Delivers what was received into `place` at `start`: joined, unless each of the datagrams is
    /// too long for the guest's link. Those leave by themselves, each in fragments.
    fn deliver_received(
        &mut self,
        tuple: &FlowTuple,
        place: &mut [u8],
        (start, received): (usize, &Received),
        guest: &mut impl ToGuest,
    ) {
        let is_udp = tuple.protocol == Protocol::Udp as u8;
        let headers_len = start - L3_START;
        let (len, segment_len) = (received.len, received.segment_len);
        let each = usize::from(segment_len.unwrap_or(0));
        let is_joined = each > 0 && len > each;
        if !is_joined || headers_len + each <= usize::from(self.mtu) {
            let end = start + len;
            let vnet = write_headers(&mut place[L3_START..end], tuple, is_udp, segment_len);
            deliver_or_count(vnet, &mut place[..end], guest);
            return;
        }
        for datagram in place[start..start + len].chunks(each) {
            let end = start + datagram.len();
            self.buffer[start..end].copy_from_slice(datagram);
            let l3 = &mut self.buffer[L3_START..end];
            let vnet = write_headers(l3, tuple, is_udp, None);
            deliver_or_count(vnet, &mut self.buffer[..end], guest);
        }
    }
}

/// Delivers a datagram. One that nothing lets in has been read from its socket: the host won't answer it, so
/// it is dropped here.
fn deliver_or_count(vnet: VirtioNetHdr, frame: &mut [u8], guest: &mut impl ToGuest) {
    if guest.deliver(vnet, frame) == Delivered::Passed {
        guest.lost(DropReason::NoFlow, vnet, frame.len());
    }
}

/// Counts a datagram that did not fit: a frame's buffer has room for 65,535 bytes with the IP header, and
/// IPv6 does not count its own header among these.
fn count_cut((start, received): (usize, &Received), guest: &mut impl ToGuest) {
    let each = received.segment_len;
    let vnet = VirtioNetHdr {
        gso_type: each.map_or(VirtioNetHdr::GSO_NONE, |_| VirtioNetHdr::GSO_UDP_L4),
        hdr_len: (ETHERNET_LEN + start - L3_START) as u16,
        gso_size: each.unwrap_or(0),
        ..VirtioNetHdr::default()
    };
    guest.lost(DropReason::TooBig, vnet, start + received.len);
}

/// Whether it came from the flow's peer.
fn is_of_peer(received: &Received, tuple: &FlowTuple) -> bool {
    let is_port = |from: SocketAddr| {
        tuple.protocol != Protocol::Udp as u8 || from.port() == tuple.remote_port
    };
    received
        .from
        .is_some_and(|from| is_port(from) && from.ip() == tuple.remote)
}

/// Whether a send may have failed only because it was of several datagrams: each is longer than the path
/// takes whole, or the kernel has no checksum for them.
fn is_of_joining(sent: &NotSent) -> bool {
    use nix::libc::{EINVAL, EIO, EMSGSIZE, EOPNOTSUPP};
    matches!(
        sent.error.raw_os_error(),
        Some(EINVAL | EIO | EMSGSIZE | EOPNOTSUPP)
    )
}

/// Returns what a packet carries, and the length of each datagram if it is several.
fn payload_of<'p>(packet: &Packet<'p>, vnet: VirtioNetHdr) -> (&'p [u8], Option<u16>) {
    let l4 = packet.ip.payload();
    let payload = match packet.transport {
        Transport::Udp(udp) => {
            let end = UDP_HEADER_LEN + udp.payload_len;
            l4.get(UDP_HEADER_LEN..end).unwrap_or_default()
        }
        _ => l4,
    };
    let is_gso = vnet.gso_type != VirtioNetHdr::GSO_NONE && payload.len() > vnet.gso_size.into();
    (payload, is_gso.then_some(vnet.gso_size))
}

/// Sends a payload: its segments at once.
fn send_one(socket: &OwnedFd, payload: &[u8], segment_len: Option<u16>) -> io::Result<()> {
    let segments = segment_len
        .as_ref()
        .map(|len| [ControlMessage::UdpGsoSegments(len)]);
    let control = segments.as_ref().map_or(&[][..], |segments| segments);
    let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
    let parts = [IoSlice::new(payload)];
    sendmsg::<()>(socket.as_raw_fd(), &parts, control, flags, None)?;
    Ok(())
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

#[cfg(test)]
#[path = "datagram_test.rs"]
mod tests;
