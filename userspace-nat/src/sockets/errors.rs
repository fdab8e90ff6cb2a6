//! Errors that the network answers to a guest's datagrams.
//!
//! # Theory of operation
//! The host's kernel finds the socket of the datagram that an ICMP message quotes. It keeps type and code,
//! who sent the message, and what it quotes of the datagram's payload in the socket's error queue
//! (ip(7), `IP_RECVERR`). From these the message is made again, about the packet as it left, and goes
//! the way of any message of the world: the engine finds the flow that it quotes, translates it and
//! delivers it. What a socket itself refuses has no such message, and becomes one of four codes of
//! "destination unreachable".
use std::{io, io::IoSliceMut, net::IpAddr, os::fd::AsRawFd, os::fd::OwnedFd};

use nix::{
    cmsg_space, libc,
    sys::socket::{ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, setsockopt, sockopt},
};
use slipgate_abi::Protocol;
use slipgate_model::FlowTuple;

use super::{FRAMES_PER_TURN, Kind, L3_START, Sockets, ToGuest, datagram::Datagrams};
use crate::{
    packet::{
        Version, build,
        icmp::{self, Unreachable},
    },
    port::VirtioNetHdr,
};

/// Most bytes of a datagram's payload that are quoted.
const MOST_QUOTED: usize = 512;

/// An ICMP message about a datagram of a socket.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Message {
    from: IpAddr,
    /// Type, code and second word, as in the message.
    kind: (u8, u8, u32),
    /// What it quotes of the payload.
    payload: Vec<u8>,
}

/// Has the kernel keep the messages about a socket's datagrams.
pub(super) fn keep_for(socket: &OwnedFd, version: Version) {
    // Without it, an error is one of the call that comes next.
    let _ = match version {
        Version::V4 => setsockopt(socket, sockopt::Ipv4RecvErr, &true),
        Version::V6 => setsockopt(socket, sockopt::Ipv6RecvErr, &true),
    };
}

/// Takes the next entry out of a socket's error queue. `None`: it is of no message.
///
/// # Errors
/// There is none.
fn next_of(socket: &OwnedFd) -> nix::Result<Option<Message>> {
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
            (error.ee_origin == libc::SO_EE_ORIGIN_ICMP).then_some((error, from))
        }
        ControlMessageOwned::Ipv6RecvErr(error, from) => {
            let from = from.map(|from| IpAddr::from(from.sin6_addr.s6_addr));
            (error.ee_origin == libc::SO_EE_ORIGIN_ICMP6).then_some((error, from))
        }
        _ => None,
    });
    let len = received.bytes;
    payload.truncate(len);
    Ok(entry.and_then(|(error, from)| {
        Some(Message {
            from: from?,
            kind: (error.ee_type, error.ee_code, error.ee_info),
            payload,
        })
    }))
}

impl Sockets {
    /// Passes on what the network says about datagrams of a socket. Returns whether it said anything.
    pub(super) fn tell_messages(&mut self, key: u32, guest: &mut impl ToGuest) -> bool {
        let mut is_told = false;
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
                Ok(Some(message)) => {
                    is_told = true;
                    self.tell(&tuple, &message, guest);
                }
                Ok(None) => {}
                Err(_) => break,
            }
        }
        is_told
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
        let version = Version::of(tuple.remote);
        let kind = match version {
            Version::V4 => icmp::v4::UNREACHABLE,
            Version::V6 => icmp::v6::UNREACHABLE,
        };
        let message = Message {
            from: tuple.remote,
            kind: (kind, code.code(version), 0),
            payload: Vec::new(),
        };
        self.tell(tuple, &message, guest);
    }

    /// Sends a message about a packet of a flow, which it quotes as that left (RFC 792, RFC 4443).
    fn tell(&mut self, tuple: &FlowTuple, message: &Message, guest: &mut impl ToGuest) {
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
