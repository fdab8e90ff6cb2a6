//! `dns`, `dns6`: looks up A or AAAA records by UDP (RFC 1035, RFC 3596).

use alloc::{vec, vec::Vec};
use core::net::IpAddr;

use smoltcp::wire::{DnsOpcode, DnsQuestion};
use smoltcp::{
    iface::SocketHandle,
    socket::udp,
    wire::{DnsFlags, DnsPacket, DnsQueryType, DnsRcode, DnsRecord, DnsRecordData, DnsRepr},
};

use crate::{
    command::Family,
    net::{Stack, Turn},
    platform::{Nic, Platform},
};

/// Largest number of questions, and the time for an answer to each.
const TRIES: u64 = 4;
const TRY_NS: u64 = 1_000_000_000;
const PORT: u16 = 53;

/// Answer to a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Addresses of the records.
    pub addresses: Vec<IpAddr>,
    /// Time from the first question to the answer, ns.
    pub ttfb_ns: u64,
    /// Number of questions sent.
    pub questions: u64,
}

/// Reason why there is no address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DnsError {
    /// The lease has no resolver.
    NoResolver,
    /// No local port is free.
    NoPort,
    /// No answer came in time.
    TimedOut,
    /// The response code is not NOERROR: 2 is SERVFAIL, 3 NXDOMAIN, 5 REFUSED.
    Code(u8),
    /// The answer has no record of this family.
    NoRecord(Family),
    /// The answer is truncated (TC bit); the question would have to be sent by TCP.
    Truncated,
}

impl core::fmt::Display for DnsError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            DnsError::NoResolver => f.write_str("the network has no resolver"),
            DnsError::NoPort => f.write_str("no local port is free"),
            DnsError::TimedOut => f.write_str("no answer"),
            DnsError::Code(2) => f.write_str("SERVFAIL"),
            DnsError::Code(3) => f.write_str("NXDOMAIN"),
            DnsError::Code(5) => f.write_str("REFUSED"),
            DnsError::Code(code) => write!(f, "response code {code}"),
            DnsError::NoRecord(Family::Ipv4) => f.write_str("no A record"),
            DnsError::NoRecord(Family::Ipv6) => f.write_str("no AAAA record"),
            DnsError::Truncated => f.write_str("a truncated answer"),
        }
    }
}

impl core::error::Error for DnsError {}

/// Asks a resolver for the addresses of a name of valid labels.
///
/// # Errors
/// There is no resolver or no port, or the answer has no address.
pub(crate) fn resolve<P: Platform, N: Nic>(
    stack: &mut Stack<'_, P, N>,
    resolver: Option<IpAddr>,
    name: &str,
    family: Family,
) -> Result<Answer, DnsError> {
    let resolver = resolver.ok_or(DnsError::NoResolver)?;
    let now_ns = stack.now_ns();
    let port = stack.ports.take(now_ns).ok_or(DnsError::NoPort)?;
    let buffer = || udp::PacketBuffer::new(vec![udp::PacketMetadata::EMPTY; 4], vec![0; 4096]);
    let mut socket = udp::Socket::new(buffer(), buffer());
    // It is not bound yet, and the port is not 0.
    let _ = socket.bind(port);
    let handle = stack.sockets.add(socket);
    let answer = ask(stack, handle, resolver, (name, family));
    stack.sockets.remove(handle);
    stack.ports.give_back(port, 0);
    answer
}

fn ask<P: Platform, N: Nic>(
    stack: &mut Stack<'_, P, N>,
    handle: SocketHandle,
    resolver: IpAddr,
    (name, family): (&str, Family),
) -> Result<Answer, DnsError> {
    let mut id = [0; 2];
    stack.platform.random(&mut id);
    let id = u16::from_le_bytes(id);
    let question = question(id, name, family);
    let started_ns = stack.now_ns();
    let mut questions = 0;
    stack.drive(|stack| {
        let now_ns = stack.now_ns();
        let socket = stack.sockets.get_mut::<udp::Socket>(handle);
        while let Ok((data, from)) = socket.recv() {
            if from.endpoint != (resolver, PORT).into() {
                continue;
            }
            if let Some(read) = read(data, id, family) {
                return Turn::Done(read.map(|addresses| Answer {
                    addresses,
                    ttfb_ns: now_ns - started_ns,
                    questions,
                }));
            }
        }
        let due_ns = started_ns + questions * TRY_NS;
        if now_ns < due_ns {
            return Turn::Waiting(Some(due_ns));
        }
        if questions == TRIES {
            return Turn::Done(Err(DnsError::TimedOut));
        }
        questions += 1;
        // There is room for all tries.
        let _ = socket.send_slice(&question, (resolver, PORT));
        Turn::Waiting(Some(due_ns + TRY_NS))
    })
}

fn question(id: u16, name: &str, family: Family) -> Vec<u8> {
    let mut encoded = Vec::with_capacity(name.len() + 2);
    for label in name.split('.') {
        // A label has at most 63 bytes.
        encoded.push(label.len() as u8);
        encoded.extend_from_slice(label.as_bytes());
    }
    encoded.push(0);
    let repr = DnsRepr {
        transaction_id: id,
        flags: DnsFlags::RECURSION_DESIRED,
        opcode: DnsOpcode::Query,
        question: DnsQuestion {
            name: &encoded,
            type_: match family {
                Family::Ipv4 => DnsQueryType::A,
                Family::Ipv6 => DnsQueryType::Aaaa,
            },
        },
    };
    let mut message = vec![0; repr.buffer_len()];
    repr.emit(&mut DnsPacket::new_unchecked(&mut message));
    message
}

/// Returns the addresses of an answer to question `id`; `None` if it is no such answer. The resolver
/// follows CNAMEs, so every record of the family in the answer is one for the name.
fn read(data: &[u8], id: u16, family: Family) -> Option<Result<Vec<IpAddr>, DnsError>> {
    let packet = DnsPacket::new_checked(data).ok()?;
    if packet.transaction_id() != id || !packet.flags().contains(DnsFlags::RESPONSE) {
        return None;
    }
    if packet.rcode() != DnsRcode::NoError {
        return Some(Err(DnsError::Code(packet.rcode().into())));
    }
    let mut left = packet.payload();
    for _ in 0..packet.question_count() {
        (left, _) = DnsQuestion::parse(left).ok()?;
    }
    let mut addresses = Vec::new();
    for _ in 0..packet.answer_record_count() {
        let (rest, record) = DnsRecord::parse(left).ok()?;
        left = rest;
        match (record.data, family) {
            (DnsRecordData::A(address), Family::Ipv4) => addresses.push(address.into()),
            (DnsRecordData::Aaaa(address), Family::Ipv6) => addresses.push(address.into()),
            _ => {}
        }
    }
    Some(
        match (
            addresses.is_empty(),
            packet.flags().contains(DnsFlags::TRUNCATED),
        ) {
            (false, _) => Ok(addresses),
            (true, true) => Err(DnsError::Truncated),
            (true, false) => Err(DnsError::NoRecord(family)),
        },
    )
}
