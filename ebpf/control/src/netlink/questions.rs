//! Questions to the kernel about single packets: which table has the route.
//!
//! The kernel answers while the question is sent, without a lock that others hold, so nobody waits.
//! No capability is needed, and the socket has no other use: whoever has it can list routes, links and
//! neighbours, and change none.
use std::{io, net::IpAddr, sync::atomic::AtomicU32, sync::atomic::Ordering::Relaxed};

use netlink_packet_core::{
    Emitable as _, NLM_F_REQUEST, NLMSG_ERROR, NetlinkBuffer, NetlinkHeader,
};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

use super::raw::{attributes, split};
use crate::{Error, Result};

/// Number of `linux/rtnetlink.h`.
const RTM_NEWROUTE: u16 = 24;
const RTM_GETROUTE: u16 = 26;
/// The answer is to name the table.
const RTM_F_LOOKUP_TABLE: u32 = 0x1000;
const RTA_DST: u16 = 1;
const RTA_SRC: u16 = 2;
const RTA_TABLE: u16 = 15;
const RTA_MARK: u16 = 16;
const RTA_UID: u16 = 25;
const RTA_IP_PROTO: u16 = 27;
const RTA_SPORT: u16 = 28;
const RTA_DPORT: u16 = 29;
const RTN_UNICAST: u8 = 1;
const RTN_LOCAL: u8 = 2;
const RTN_BROADCAST: u8 = 3;
/// Length of `struct rtmsg`, bytes.
const ROUTE_HEADER: usize = 12;
const LOCAL: u32 = 255;

/// Most datagrams that are passed over in search of an answer.
const MOST_OTHERS: usize = 4;

/// A packet that the host itself makes, of user 0 and bound to no device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Packet {
    /// Destination.
    pub to: IpAddr,
    /// Source address, if it has one.
    pub from: Option<IpAddr>,
    /// Mark; 0: none.
    pub mark: u32,
    /// Number of the protocol, TCP, UDP or the family's ICMP; `None`: not said.
    pub protocol: Option<u8>,
    /// Source port; 0: none.
    pub from_port: u16,
    /// Destination port; 0: none.
    pub to_port: u16,
}

/// What the kernel does with a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Routing {
    /// It takes a route of the table with this number.
    ByTable(u32),
    /// A rule or a route discards it.
    Blackhole,
    /// A route says that the destination is unreachable.
    Unreachable,
    /// A rule or a route forbids it.
    Prohibited,
    /// There is no route, or a rule says that there is none.
    NoRoute,
}

/// Socket for questions, one at a time.
#[derive(Debug)]
pub struct RouteQuestions {
    socket: Socket,
    sequence: AtomicU32,
}

impl RouteQuestions {
    /// Opens a socket in the calling thread's network namespace.
    ///
    /// # Errors
    /// The kernel gives no socket.
    pub fn open() -> Result<Self> {
        let socket = Socket::new(NETLINK_ROUTE).map_err(Error::os("open a netlink socket"))?;
        Ok(Self {
            socket,
            sequence: AtomicU32::new(1),
        })
    }

    /// Asks about a packet, without waiting.
    ///
    /// # Errors
    /// The kernel can't be asked, or its answer is not understood.
    pub fn ask(&self, packet: &Packet) -> io::Result<Routing> {
        let sequence = self.sequence.fetch_add(1, Relaxed);
        let kernel = SocketAddr::new(0, 0);
        let request = request(packet, sequence);
        self.socket.send_to(&request, &kernel, libc::MSG_DONTWAIT)?;
        for _ in 0..=MOST_OTHERS {
            let mut datagram = Vec::with_capacity(4_096);
            let (_, sender) = self.socket.recv_from(&mut datagram, libc::MSG_DONTWAIT)?;
            let mut messages = split(&datagram);
            let is_answer = |it: &NetlinkBuffer<&[u8]>| it.sequence_number() == sequence;
            // Nobody but the kernel answers.
            let answer = messages.find(is_answer).filter(|_| sender == kernel);
            if let Some(answer) = answer {
                return routing(&answer, packet);
            }
        }
        Err(io::ErrorKind::InvalidData.into())
    }
}

fn request(packet: &Packet, sequence: u32) -> Vec<u8> {
    let header = NetlinkHeader::default().buffer_len();
    let mut request = vec![0; header];
    let (family, bits) = match packet.to {
        IpAddr::V4(_) => (libc::AF_INET, 32),
        IpAddr::V6(_) => (libc::AF_INET6, 128),
    };
    let from_bits = if packet.from.is_some() { bits } else { 0 };
    request.extend([family as u8, bits, from_bits, 0, 0, 0, 0, 0]);
    request.extend(RTM_F_LOOKUP_TABLE.to_ne_bytes());
    let mut add = |kind: u16, value: &[u8]| {
        request.extend((4 + value.len() as u16).to_ne_bytes());
        request.extend(kind.to_ne_bytes());
        request.extend(value);
        request.resize(request.len().next_multiple_of(4), 0);
    };
    for (kind, address) in [(RTA_DST, Some(packet.to)), (RTA_SRC, packet.from)] {
        match address {
            Some(IpAddr::V4(address)) => add(kind, &address.octets()),
            Some(IpAddr::V6(address)) => add(kind, &address.octets()),
            None => {}
        }
    }
    add(RTA_MARK, &packet.mark.to_ne_bytes());
    add(RTA_UID, &0_u32.to_ne_bytes());
    if let Some(protocol) = packet.protocol {
        add(RTA_IP_PROTO, &[protocol]);
    }
    for (kind, port) in [(RTA_SPORT, packet.from_port), (RTA_DPORT, packet.to_port)] {
        if port != 0 {
            add(kind, &port.to_be_bytes());
        }
    }
    let length = request.len() as u32;
    let mut message = NetlinkBuffer::new(&mut request);
    message.set_length(length);
    message.set_message_type(RTM_GETROUTE);
    message.set_flags(NLM_F_REQUEST);
    message.set_sequence_number(sequence);
    request
}

fn routing(answer: &NetlinkBuffer<&[u8]>, packet: &Packet) -> io::Result<Routing> {
    let payload = answer.payload();
    let unknown = || io::Error::from(io::ErrorKind::InvalidData);
    if answer.message_type() == NLMSG_ERROR {
        let code = payload.first_chunk().map_or(0, |c| i32::from_ne_bytes(*c));
        return match -code {
            libc::ENETUNREACH => Ok(Routing::NoRoute),
            libc::EHOSTUNREACH => Ok(Routing::Unreachable),
            libc::EACCES => Ok(Routing::Prohibited),
            // It is also said of a source that is not the host's.
            libc::EINVAL if packet.from.is_none() => Ok(Routing::Blackhole),
            errno => Err(io::Error::from_raw_os_error(errno)),
        };
    }
    let Some((header, rest)) = payload.split_first_chunk::<ROUTE_HEADER>() else {
        return Err(unknown());
    };
    if answer.message_type() != RTM_NEWROUTE {
        return Err(unknown());
    }
    let [_, _, _, _, table, _, _, kind, ..] = *header;
    let named = attributes(rest).find(|(kind, _)| *kind == RTA_TABLE);
    let named = named.and_then(|(_, value)| Some(u32::from_ne_bytes(*value.first_chunk()?)));
    match kind {
        RTN_UNICAST => Ok(Routing::ByTable(named.unwrap_or(table.into()))),
        RTN_LOCAL | RTN_BROADCAST => Ok(Routing::ByTable(LOCAL)),
        _ => Err(unknown()),
    }
}

#[cfg(test)]
#[path = "questions_test.rs"]
mod tests;
