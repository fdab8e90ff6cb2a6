//! Errors that the network answers to a guest's datagrams, and to its SYNs.
//!
//! # Theory of operation
//! The host's kernel finds the socket of the datagram that an ICMP message quotes. It keeps type and code,
//! who sent the message, and what it quotes of the datagram's payload in the socket's error queue
//! (ip(7), `IP_RECVERR`). From these the message is made again, about the packet as it left, and goes
//! the way of any message of the world: the engine finds the flow that it quotes, translates it and
//! delivers it. What a socket itself refuses has no such message, and becomes one of four codes of
//! "destination unreachable".
//!
//! A TCP socket keeps no messages (with `IP_RECVERR` each error of the network would end a connection
//! that stands, which RFC 1122 section 4.2.3.9 forbids). What the network answered to its SYN is known by
//! the error of the connection: no way to the network or to the host becomes the message again. A path
//! MTU is the socket's own kernel's to follow: the guest's segments end here.
use std::{io, io::IoSliceMut, net::IpAddr, os::fd::AsRawFd, os::fd::OwnedFd};

use nix::{
    cmsg_space, libc,
    sys::socket::{ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, setsockopt, sockopt},
};
use slipgate_abi::{Protocol, tcp::Flags};
use slipgate_model::FlowTuple;

use super::{FRAMES_PER_TURN, Kind, L3_START, Sockets, ToGuest, datagram::Datagrams};
use crate::{
    packet::{
        Version, build,
        icmp::{self, Unreachable},
        transport::TCP_HEADER_LEN,
    },
    port::VirtioNetHdr,
};

/// Most bytes of a datagram's payload that are quoted.
pub(super) const MOST_QUOTED: usize = 512;

/// An ICMP message about a datagram of a socket.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Message {
    pub(super) from: IpAddr,
    /// Type, code and second word, as in the message.
    pub(super) kind: (u8, u8, u32),
    /// The quoted part of the payload; for TCP, of the header behind the ports.
    pub(super) payload: Vec<u8>,
}

/// An entry of a socket's error queue.
#[derive(Debug)]
enum Entry {
    Message(Message),
    /// A datagram was not sent, since it is longer than this MTU, bytes.
    TooLong(u32),
    Other,
}

/// What a socket's error queue said.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Heard {
    /// Whether the network said anything: the guest was told.
    pub(super) is_told: bool,
    /// The MTU that the last datagram not sent was too long for.
    pub(super) mtu: Option<u32>,
}

/// A message that says that a flow's peer can't be reached.
fn unreachable(tuple: &FlowTuple, code: Unreachable, payload: Vec<u8>) -> Message {
    let version = Version::of(tuple.remote);
    let kind = match version {
        Version::V4 => icmp::v4::UNREACHABLE,
        Version::V6 => icmp::v6::UNREACHABLE,
    };
    Message {
        from: tuple.remote,
        kind: (kind, code.code(version), 0),
        payload,
    }
}

/// Has the kernel keep the messages about a socket's datagrams.
pub(super) fn keep_for(socket: &OwnedFd, version: Version) {
    // Without it, an error is one of the call that comes next.
    let _ = match version {
        Version::V4 => setsockopt(socket, sockopt::Ipv4RecvErr, &true),
        Version::V6 => setsockopt(socket, sockopt::Ipv6RecvErr, &true),
    };
}

/// Takes the next entry out of a socket's error queue.
///
/// # Errors
/// There is none.
fn next_of(socket: &OwnedFd) -> nix::Result<Entry> {
    let mut space = cmsg_space!(libc::sock_extended_err, libc::sockaddr_in6);
    let mut payload = vec![0; MOST_QUOTED];
    let mut parts = [IoSliceMut::new(&mut payload)];
    let flags = MsgFlags::MSG_ERRQUEUE | MsgFlags::MSG_DONTWAIT;
    let received =
        recvmsg::<SockaddrStorage>(socket.as_raw_fd(), &mut parts, Some(&mut space), flags)?;
    let entry = received.cmsgs()?.find_map(|message| match message {
        ControlMessageOwned::Ipv4RecvErr(error, from) => {
            let from =
                from.map(|from| IpAddr::from(u32::from_be(from.sin_addr.s_addr).to_be_bytes()));
            Some((error, from))
        }
        ControlMessageOwned::Ipv6RecvErr(error, from) => {
            let from = from.map(|from| IpAddr::from(from.sin6_addr.s6_addr));
            Some((error, from))
        }
        _ => None,
    });
    let len = received.bytes;
    payload.truncate(len);
    Ok(match entry {
        Some((error, Some(from)))
            if [libc::SO_EE_ORIGIN_ICMP, libc::SO_EE_ORIGIN_ICMP6].contains(&error.ee_origin) =>
        {
            Entry::Message(Message {
                from,
                kind: (error.ee_type, error.ee_code, error.ee_info),
                payload,
            })
        }
        Some((error, _))
            if error.ee_origin == libc::SO_EE_ORIGIN_LOCAL
                && error.ee_errno == libc::EMSGSIZE as u32 =>
        {
            Entry::TooLong(error.ee_info)
        }
        _ => Entry::Other,
    })
}

impl Sockets {
    /// Passes on what the network says about datagrams of a socket.
    pub(super) fn tell_messages(&mut self, key: u32, guest: &mut impl ToGuest) -> Heard {
        let mut heard = Heard::default();
        for _ in 0..FRAMES_PER_TURN {
            let Some(endpoint) = self.endpoints.get(&key) else {
                break;
            };
            let (Kind::Datagrams(Datagrams { socket, .. }), tuple) =
                (&endpoint.socket, endpoint.tuple)
            else {
                break;
            };
            match next_of(socket) {
                Ok(Entry::Message(message)) => {
                    heard.is_told = true;
                    self.tell(&tuple, &message, guest);
                }
                Ok(Entry::TooLong(mtu)) => heard.mtu = Some(mtu),
                Ok(Entry::Other) => {}
                Err(_) => break,
            }
        }
        heard
    }

    /// Tells the guest that a flow's packet could not be sent.
    pub(super) fn unreachable(
        &mut self,
        tuple: &FlowTuple,
        error: &io::Error,
        guest: &mut impl ToGuest,
    ) {
        let code = match error.raw_os_error() {
            Some(libc::ECONNREFUSED) => Unreachable::Port,
            Some(libc::ENETUNREACH) => Unreachable::Net,
            Some(libc::EACCES | libc::EPERM) => Unreachable::Prohibited,
            _ => Unreachable::Host,
        };
        self.tell(tuple, &unreachable(tuple, code, Vec::new()), guest);
    }

    /// Tells the guest that the network has no way to the server of its SYN, whose sequence number is
    /// `first`.
    pub(super) fn syn_unreachable(
        &mut self,
        tuple: &FlowTuple,
        first: u32,
        error: &io::Error,
        guest: &mut impl ToGuest,
    ) {
        let code = match error.raw_os_error() {
            Some(libc::ENETUNREACH) => Unreachable::Net,
            _ => Unreachable::Host,
        };
        let mut syn = vec![0; TCP_HEADER_LEN - 4];
        syn[..4].copy_from_slice(&first.to_be_bytes());
        syn[8] = (TCP_HEADER_LEN as u8 / 4) << 4;
        syn[9] = Flags::SYN;
        self.tell(tuple, &unreachable(tuple, code, syn), guest);
    }

    /// Sends a message about a packet of a flow, which it quotes as that left (RFC 792, RFC 4443).
    pub(super) fn tell(&mut self, tuple: &FlowTuple, message: &Message, guest: &mut impl ToGuest) {
        let version = Version::of(tuple.remote);
        let mut quoted = Vec::new();
        build::ip(
            &mut quoted,
            tuple.local,
            tuple.remote,
            tuple.protocol,
            |l4| match tuple.protocol() {
                Some(Protocol::Icmp | Protocol::Icmpv6) => {
                    // The kernel has the message's own header in the payload.
                    let sequence = message.payload.get(6..8).unwrap_or(&[0; 2]);
                    l4.extend_from_slice(&[icmp::echo_request(version), 0, 0, 0]);
                    l4.extend_from_slice(&tuple.local_port.to_be_bytes());
                    l4.extend_from_slice(sequence);
                }
                Some(Protocol::Tcp) => {
                    l4.extend_from_slice(&tuple.local_port.to_be_bytes());
                    l4.extend_from_slice(&tuple.remote_port.to_be_bytes());
                    l4.extend_from_slice(&message.payload);
                }
                _ => {
                    let len = 8 + message.payload.len() as u16;
                    l4.extend_from_slice(&tuple.local_port.to_be_bytes());
                    l4.extend_from_slice(&tuple.remote_port.to_be_bytes());
                    l4.extend_from_slice(&len.to_be_bytes());
                    l4.extend_from_slice(&[0; 2]);
                    l4.extend_from_slice(&message.payload);
                }
            },
        );
        let ends = (message.from, tuple.local);
        build::icmp_error(&mut self.error, ends, message.kind, &quoted);
        let end = L3_START + self.error.len();
        self.buffer[L3_START..end].copy_from_slice(&self.error);
        guest.deliver(VirtioNetHdr::default(), &mut self.buffer[..end]);
    }
}

#[cfg(test)]
#[path = "errors_test.rs"]
mod tests;
