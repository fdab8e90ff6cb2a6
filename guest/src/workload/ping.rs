//! `ping`: ICMP echo (RFC 792, RFC 4443), one request after the other.

use alloc::vec;
use core::net::{IpAddr, Ipv6Addr};

use smoltcp::{
    phy::ChecksumCapabilities,
    socket::icmp,
    wire::{Icmpv4Packet, Icmpv4Repr, Icmpv6Packet, Icmpv6Repr},
};

use crate::{
    histogram::Histogram,
    net::{Stack, Turn},
    platform::{Nic, Platform},
};

/// Longest time for an answer, ns.
const TIMEOUT_NS: u64 = 1_000_000_000;
const DATA: [u8; 56] = *b"0123456789abcdefghijklmnopqrstuvwxyz0123456789abcdefghij";

/// Result of a series of requests.
#[derive(Clone, Debug, Default)]
pub struct Pinged {
    /// Round-trip times of the answered requests.
    pub latency: Histogram,
    /// Number of requests without an answer.
    pub lost: u64,
}

/// Sends requests from CPU 0, to which echo replies are steered.
pub(crate) fn ping<P: Platform, N: Nic>(
    stack: &mut Stack<'_, P, N>,
    to: IpAddr,
    count: u32,
) -> Pinged {
    let buffer = || icmp::PacketBuffer::new(vec![icmp::PacketMetadata::EMPTY; 4], vec![0; 1024]);
    let mut socket = icmp::Socket::new(buffer(), buffer());
    let mut ident = [0; 2];
    stack.platform.random(&mut ident);
    let ident = u16::from_le_bytes(ident);
    // It is not bound yet.
    let _ = socket.bind(icmp::Endpoint::Ident(ident));
    let handle = stack.sockets.add(socket);
    let mut pinged = Pinged::default();
    for seq_no in 0..count {
        let seq_no = seq_no as u16;
        let sent_ns = stack.now_ns();
        send(stack.sockets.get_mut(handle), to, ident, seq_no);
        let took_ns = stack.drive(|stack| {
            let socket = stack.sockets.get_mut::<icmp::Socket>(handle);
            while let Ok((packet, _)) = socket.recv() {
                if is_answer(packet, to, ident, seq_no) {
                    return Turn::Done(Some(stack.now_ns() - sent_ns));
                }
            }
            match stack.now_ns() - sent_ns {
                TIMEOUT_NS.. => Turn::Done(None),
                _ => Turn::Waiting(Some(sent_ns + TIMEOUT_NS)),
            }
        });
        match took_ns {
            Some(took_ns) => pinged.latency.record(took_ns),
            None => pinged.lost += 1,
        }
    }
    stack.sockets.remove(handle);
    pinged
}

fn send(socket: &mut icmp::Socket<'_>, to: IpAddr, ident: u16, seq_no: u16) {
    let data = &DATA;
    // The request before was answered or given up: there is room. The stack completes the sums.
    match to {
        IpAddr::V4(_) => {
            let request = Icmpv4Repr::EchoRequest {
                ident,
                seq_no,
                data,
            };
            if let Ok(room) = socket.send(request.buffer_len(), to.into()) {
                let mut packet = Icmpv4Packet::new_unchecked(room);
                request.emit(&mut packet, &ChecksumCapabilities::default());
            }
        }
        IpAddr::V6(to) => {
            let request = Icmpv6Repr::EchoRequest {
                ident,
                seq_no,
                data,
            };
            if let Ok(room) = socket.send(request.buffer_len(), to.into()) {
                let mut packet = Icmpv6Packet::new_unchecked(room);
                let sums = ChecksumCapabilities::ignored();
                request.emit(&Ipv6Addr::UNSPECIFIED, &to, &mut packet, &sums);
            }
        }
    }
}

fn is_answer(packet: &[u8], from: IpAddr, ident: u16, seq_no: u16) -> bool {
    let data = &DATA;
    // The stack has checked the sums.
    let sums = ChecksumCapabilities::ignored();
    match from {
        IpAddr::V4(_) => {
            let due = Icmpv4Repr::EchoReply {
                ident,
                seq_no,
                data,
            };
            let packet = Icmpv4Packet::new_checked(packet);
            packet.is_ok_and(|packet| Icmpv4Repr::parse(&packet, &sums) == Ok(due))
        }
        IpAddr::V6(from) => {
            let due = Icmpv6Repr::EchoReply {
                ident,
                seq_no,
                data,
            };
            let packet = Icmpv6Packet::new_checked(packet);
            packet.is_ok_and(|packet| Icmpv6Repr::parse(&from, &from, &packet, &sums) == Ok(due))
        }
    }
}
