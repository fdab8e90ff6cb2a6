//! Packets that arrived in the world, as captured on its link.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::SocketAddr,
};

use slipgate_testbed::{
    CapturedFrame,
    frame::{self, tcp_flags},
};

use super::{Host, Service};
use crate::matrix::Family;

const TCP: u8 = 6;
const UDP: u8 = 17;

/// All frames on the world's link so far, in both directions.
pub(super) struct Arrivals {
    family: Family,
    frames: Vec<CapturedFrame>,
}

type Packet<'a> = frame::Packet<'a, SocketAddr>;

impl Arrivals {
    pub(super) fn new(family: Family, frames: Vec<CapturedFrame>) -> Arrivals {
        Arrivals { family, frames }
    }

    fn address(&self, service: Service) -> SocketAddr {
        SocketAddr::new(service.host.ip(self.family), service.port)
    }

    fn packets(&self) -> impl Iterator<Item = (&CapturedFrame, Packet<'_>)> {
        let frames = self.frames.iter();
        frames.filter_map(|frame| Some((frame, Packet::of_ethernet(&frame.bytes)?)))
    }

    /// Packets among the arrivals that a distant server would receive.
    fn received(&self) -> impl Iterator<Item = Packet<'_>> {
        let received = self.packets().filter(|(frame, packet)| gets(frame, packet));
        received.map(|(_, packet)| packet)
    }

    fn to(&self, server: Service, protocol: u8) -> impl Iterator<Item = Packet<'_>> {
        let server = self.address(server);
        self.received()
            .filter(move |packet| packet.destination == server && packet.protocol == protocol)
    }

    /// Packets to an address, of any protocol, fragments too.
    pub(super) fn at(&self, host: Host) -> usize {
        let address = host.ip(self.family);
        let to_it = |packet: &Packet<'_>| packet.destination.ip() == address;
        self.received().filter(to_it).count()
    }

    /// Echo requests to an address.
    pub(super) fn pings(&self, host: Host) -> usize {
        let address = host.ip(self.family);
        let asks =
            |packet: &Packet<'_>| packet.is_echo_request() && packet.destination.ip() == address;
        self.received().filter(asks).count()
    }

    /// TCP connections that a client opened.
    pub(super) fn opened(&self, server: Service) -> usize {
        let opens = |packet: &Packet<'_>| packet.tcp_flags().is_some_and(|f| f & 0x12 == 2);
        self.to(server, TCP).filter(opens).count()
    }

    /// Bytes of TCP payload, sent again or not.
    pub(super) fn tcp_bytes(&self, server: Service) -> usize {
        self.to(server, TCP)
            .map(|packet| packet.payload().len())
            .sum()
    }

    /// Payloads of the datagrams to `server`.
    pub(super) fn datagrams(&self, server: Service) -> Vec<Vec<u8>> {
        let payload = |packet: Packet<'_>| packet.payload().to_vec();
        self.to(server, UDP).map(payload).collect()
    }

    /// Whether any packet has the name in DNS wire form, in any case.
    pub(super) fn ask_for(&self, name: &str) -> bool {
        let wire: Vec<u8> = name
            .split('.')
            .flat_map(|label| [&[label.len() as u8], label.as_bytes()].concat())
            .collect();
        self.received().any(|packet| has(packet.payload(), &wire))
    }

    /// Whether a server at this address could have read the text in a client's data.
    pub(super) fn could_read(&self, server: Service, text: &str) -> bool {
        let read = |stream: &Vec<u8>| has(stream, text.as_bytes());
        self.streams(server).iter().any(read)
    }

    /// Whether any segment to a server contains the text, in any connection.
    pub(super) fn has_segment_with(&self, server: Service, text: &str) -> bool {
        let says = |packet: Packet<'_>| has(packet.payload(), text.as_bytes());
        self.to(server, TCP).any(says)
    }

    /// Whether a server has sent the text back: it has read it.
    pub(super) fn has_echo_of(&self, server: Service, text: &str) -> bool {
        let server = self.address(server);
        self.packets().any(|(frame, packet)| {
            frame.sent && packet.source == server && has(packet.payload(), text.as_bytes())
        })
    }

    /// Byte streams that a server at this address could reconstruct from each connection: where
    /// copies differ before the server has acknowledged one, both the first and the last of them.
    pub(super) fn streams(&self, server: Service) -> Vec<Vec<u8>> {
        let server = self.address(server);
        // By client, sequence number, and how often that came back after something was said.
        let mut connections: BTreeMap<(SocketAddr, u32, u32), Taken> = BTreeMap::new();
        let mut numbers: BTreeMap<SocketAddr, (u32, u32)> = BTreeMap::new();
        let mut spoken = BTreeSet::new();
        for (frame, packet) in self.packets() {
            let (Some(flags), Some((sequence, acknowledged))) =
                (packet.tcp_flags(), packet.tcp_numbers())
            else {
                continue;
            };
            if frame.sent && packet.source == server {
                let client = packet.destination;
                let known = numbers.get(&client).map(|at| (client, at.0, at.1));
                if let Some(taken) = known.and_then(|known| connections.get_mut(&known)) {
                    taken.acknowledge(acknowledged);
                }
            } else if packet.destination == server && gets(frame, &packet) {
                let client = packet.source;
                if flags & tcp_flags::SYN != 0 {
                    let mut key = (client, sequence, 0);
                    while spoken.contains(&key) {
                        key.2 += 1;
                    }
                    numbers.insert(client, (sequence, key.2));
                    connections
                        .entry(key)
                        .or_insert_with(|| Taken::new(sequence));
                }
                let known = numbers.get(&client).map(|at| (client, at.0, at.1));
                if !packet.payload().is_empty() {
                    spoken.extend(known);
                }
                let Some(taken) = known.and_then(|known| connections.get_mut(&known)) else {
                    panic!("{client} sent a segment to {server} without a SYN");
                };
                let behind_syn = sequence.wrapping_add(u32::from(flags & tcp_flags::SYN != 0));
                taken.segment(behind_syn, packet.payload());
            }
        }
        connections
            .into_values()
            .flat_map(Taken::readings)
            .collect()
    }
}

/// Whether a server behind one more router would get a packet and look at it.
fn gets(frame: &CapturedFrame, packet: &Packet<'_>) -> bool {
    let is_right = packet.is_fragment || packet.checksums_are_right(&frame.vnet);
    !frame.sent && packet.ttl > 1 && is_right
}

/// One connection's bytes, by their place in the stream.
struct Taken {
    begin: u32,
    acknowledged: u32,
    first: BTreeMap<u32, u8>,
    last: BTreeMap<u32, u8>,
}

impl Taken {
    fn new(isn: u32) -> Taken {
        Taken {
            begin: isn.wrapping_add(1),
            acknowledged: 0,
            first: BTreeMap::new(),
            last: BTreeMap::new(),
        }
    }

    fn acknowledge(&mut self, number: u32) {
        let to = number.wrapping_sub(self.begin);
        if to < 1 << 31 {
            self.acknowledged = self.acknowledged.max(to);
        }
    }

    fn segment(&mut self, sequence: u32, payload: &[u8]) {
        for (at, octet) in payload.iter().enumerate() {
            let at = sequence.wrapping_add(at as u32).wrapping_sub(self.begin);
            if at >= self.acknowledged && at < 1 << 31 {
                self.first.entry(at).or_insert(*octet);
                self.last.insert(at, *octet);
            }
        }
    }

    fn readings(self) -> Vec<Vec<u8>> {
        let whole = |bytes: &BTreeMap<u32, u8>| {
            let in_place = bytes
                .iter()
                .zip(0..)
                .take_while(|((at, _), place)| *at == place);
            in_place.map(|((_, octet), _)| *octet).collect::<Vec<u8>>()
        };
        let (first, last) = (whole(&self.first), whole(&self.last));
        match first == last {
            true => vec![first],
            false => vec![first, last],
        }
    }
}

fn has(bytes: &[u8], wanted: &[u8]) -> bool {
    let same = |part: &[u8]| part.eq_ignore_ascii_case(wanted);
    bytes.windows(wanted.len()).any(same)
}

/// One line a packet, for when a test fails.
impl fmt::Display for Arrivals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (frame, packet) in self.packets() {
            let (from, to) = (packet.source, packet.destination);
            let way = if frame.sent { "sent" } else { "got" };
            write!(f, "{way} {from} > {to} protocol {}", packet.protocol)?;
            if let (Some(flags), Some((sequence, ack))) = (packet.tcp_flags(), packet.tcp_numbers())
            {
                write!(f, " flags {flags:#04x} seq {sequence} ack {ack}")?;
            }
            let payload = packet.payload();
            let shown = &payload[..payload.len().min(120)];
            writeln!(f, " {}: {}", payload.len(), shown.escape_ascii())?;
        }
        Ok(())
    }
}
