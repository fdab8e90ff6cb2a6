//! What the kernel cannot translate: connections that end here on both sides.
//!
//! # Theory of operation
//! Two things are relayed. A guest's *DNS over TCP*, whatever resolver it names, is ended here and
//! its questions go to the [proxy](crate::dns); the answers come back by [`Relay::answer`]. And a
//! *forward* from the host's own addresses or loopback, which no packet on the uplink stands for:
//! the broker binds the socket, the relay accepts on it and opens a connection from the gateway's
//! address to the guest (`stream`), or gives each client of a UDP port a port of the gateway
//! (`datagrams`).
//!
//! Toward the guest TCP is smoltcp's; each connection is a stack of its own (`link`), found by
//! VM, our address and port, and the guest's port, so that a packet costs the same however many
//! there are. A packet that belongs to none is handed back to be refused as any other.
//!
//! Nothing here waits. Work per event, and memory per VM, are bounded by [`Limits`]: what exceeds
//! them is refused with a reset, never at the cost of a connection that lives. Deadlines (smoltcp's
//! retransmissions, time-outs) are kept in order, one per connection. Relayed connections live and
//! die with the engine: there is no kernel flow that could outlive it.
use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    net::{Ipv4Addr, SocketAddrV4, TcpListener},
    os::fd::OwnedFd,
};

use slipgate_abi::{Protocol, segment::Segments};

use crate::{
    engine::Context,
    packet::{Ipv4, Packet, Transport, transport::UDP_HEADER_LEN},
    poll::Readiness,
    record::{RelayedEnd, RelayedFlow},
    vm::VmNet,
};

mod connections;
mod datagrams;
mod dns_stream;
mod forward;
mod journal;
mod limits;
mod link;
mod stream;

pub use limits::{Counts, Limits};

use datagrams::{Associations, DatagramSocket};
use dns_stream::DnsStream;
use journal::Journal;
use link::Packets;
use stream::Stream;

/// The well-known port of DNS.
pub const DNS_PORT: u16 = 53;

/// A socket of the host that leads to a guest. It is bound (and for TCP listening) already.
#[derive(Debug)]
pub struct Forward {
    /// The VM's id.
    pub vm: u32,
    /// TCP or UDP.
    pub protocol: Protocol,
    /// The guest's port.
    pub guest_port: u16,
    /// Its element of `RULES`.
    pub rule: u32,
    /// The socket.
    pub socket: OwnedFd,
}

/// A question that came over TCP.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Question {
    /// The VM's id.
    pub vm: u32,
    /// The connection, for [`Relay::answer`].
    pub connection: u64,
    /// The DNS message, without its length.
    pub message: Vec<u8>,
}

/// Whether a packet was the relay's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Taken {
    /// It was, and is dealt with.
    Yes,
    /// No connection has it and it opens none: it is to be refused.
    No,
    /// It opens a connection that is over the VM's limit: it is to be refused.
    OverLimit,
}

/// All relayed connections.
#[derive(Debug)]
pub struct Relay {
    limits: Limits,
    vms: HashMap<u32, Served>,
    entries: HashMap<u32, Entry>,
    /// Connections by what a guest's packet says of them.
    connections: HashMap<Name, u32>,
    associations: Associations,
    /// When each connection wants to be driven next, ns.
    deadlines: BTreeSet<(u64, u32)>,
    expire_at_ns: Option<u64>,
    next_key: u32,
    questions: VecDeque<Question>,
    packets: Packets,
    journal: Journal,
    /// Room for a datagram from the host.
    datagram: Vec<u8>,
}

/// A VM.
#[derive(Debug)]
struct Served {
    net: VmNet,
    next_port: u16,
    counts: Counts,
}

/// A connection with a guest.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Name {
    vm: u32,
    ours: SocketAddrV4,
    guest_port: u16,
}

#[derive(Debug)]
enum Entry {
    Listener {
        listener: TcpListener,
        vm: u32,
        guest_port: u16,
        rule: u32,
    },
    Datagrams(DatagramSocket),
    Connection(Box<Connection>),
}

#[derive(Debug)]
struct Connection {
    name: Name,
    flow: RelayedFlow,
    deadline_ns: u64,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Stream(Stream),
    Dns(DnsStream),
}

/// Why a connection is driven.
#[derive(Clone, Copy, Debug)]
enum Event<'a> {
    Packet(&'a [u8], Segments),
    Ready(Readiness),
    Answer(&'a [u8]),
    Timer,
}

impl Relay {
    /// A relay without VMs.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            vms: HashMap::new(),
            entries: HashMap::new(),
            connections: HashMap::new(),
            associations: Associations::default(),
            deadlines: BTreeSet::new(),
            expire_at_ns: None,
            next_key: 0,
            questions: VecDeque::new(),
            packets: Packets::default(),
            journal: Journal::default(),
            datagram: Vec::new(),
        }
    }

    /// Keeps starts and ends of flows from now on, for [`Relay::next_record`].
    pub fn keep_records(&mut self) {
        self.journal.open();
    }

    /// The next flow that has begun, or ended.
    pub fn next_record(&mut self) -> Option<(RelayedFlow, Option<RelayedEnd>)> {
        self.journal.next()
    }

    /// Records the end of every flow: the engine ends, and they with it.
    pub fn end_records(&mut self, now_ns: u64) {
        for entry in self.entries.values() {
            if let Entry::Connection(connection) = entry
                && let Some(served) = self.vms.get(&connection.name.vm)
            {
                let stats = served.net.stats;
                self.journal
                    .end(&connection.flow, "detached", stats, now_ns);
            }
        }
        for flow in self.associations.flows() {
            if let Some(served) = self.vms.get(&flow.vm) {
                self.journal.end(flow, "detached", served.net.stats, now_ns);
            }
        }
    }

    /// Serves a VM from now on, or follows a change of its network.
    pub fn add_vm(&mut self, net: VmNet) {
        let next_port = forward::FIRST_PORT + rand::random::<u16>() % forward::PORTS;
        self.vms
            .entry(net.id)
            .and_modify(|served| served.net = net.clone())
            .or_insert_with(|| Served {
                net,
                next_port,
                counts: Counts::default(),
            });
    }

    /// Ends everything of a VM: sockets are closed, connections reset.
    pub fn remove_vm(&mut self, vm: u32, cx: &mut Context<'_>) {
        let of_vm = |entry: &Entry| match entry {
            Entry::Listener { vm: of, .. } => *of == vm,
            Entry::Datagrams(socket) => socket.vm == vm,
            Entry::Connection(connection) => connection.name.vm == vm,
        };
        let keys: Vec<u32> = self
            .entries
            .iter()
            .filter(|(_, entry)| of_vm(entry))
            .map(|(key, _)| *key)
            .collect();
        for key in keys {
            match self.entries.remove(&key) {
                Some(Entry::Connection(connection)) => self.end(key, *connection, cx),
                // The broker may hold the same socket: closing ours would not end the waiting.
                // An error means that it is not waited on any more.
                Some(Entry::Listener { listener, .. }) => drop(cx.poller.remove(&listener)),
                Some(Entry::Datagrams(socket)) => drop(cx.poller.remove(socket.socket())),
                None => {}
            }
        }
        for port in self.associations.of_vm(vm) {
            if let Some(gone) = self.associations.remove(vm, port)
                && let Some(served) = self.vms.get(&vm)
            {
                let stats = served.net.stats;
                self.journal.end(&gone.flow, "vm-removed", stats, cx.now_ns);
            }
        }
        self.questions.retain(|question| question.vm != vm);
        self.vms.remove(&vm);
    }

    /// What was relayed for a VM so far.
    pub fn counts(&self, vm: u32) -> Counts {
        self.vms
            .get(&vm)
            .map(|served| served.counts)
            .unwrap_or_default()
    }

    /// Takes a packet of a guest: TCP to port 53 of any address, TCP and UDP to the gateway's.
    /// `segments`: what it counts as.
    pub fn packet(
        &mut self,
        vm: u32,
        packet: &[u8],
        segments: Segments,
        cx: &mut Context<'_>,
    ) -> Taken {
        let Some(served) = self.vms.get(&vm) else {
            return Taken::No;
        };
        let Ok(ip) = Ipv4::parse(packet) else {
            return Taken::No;
        };
        if ip.is_fragment() || Ipv4Addr::from(ip.source) != served.net.guest {
            return Taken::No;
        }
        let to = Ipv4Addr::from(ip.destination);
        match Packet::parse(ip).map(|packet| packet.transport) {
            Ok(Transport::Tcp(tcp)) => self.segment(vm, to, tcp, (ip.bytes, segments), cx),
            Ok(Transport::Udp(udp)) if to == served.net.gateway => {
                let payload = ip.payload().get(UDP_HEADER_LEN..).unwrap_or_default();
                let payload = &payload[..udp.payload_len.min(payload.len())];
                let ports = (udp.destination, udp.source);
                self.answer_client(vm, ports, payload, segments, cx.now_ns)
            }
            _ => Taken::No,
        }
    }

    /// The next question that came over TCP.
    pub fn next_question(&mut self) -> Option<Question> {
        self.questions.pop_front()
    }

    /// Answers a question, if its connection is still there.
    pub fn answer(&mut self, connection: u64, message: &[u8], cx: &mut Context<'_>) {
        if let Ok(key) = u32::try_from(connection) {
            self.drive(key, Event::Answer(message), cx);
        }
    }

    /// Goes on with a socket that is ready (a [`Relay`](crate::poll::Subsystem::Relay) token).
    pub fn on_ready(&mut self, readiness: Readiness, cx: &mut Context<'_>) {
        let key = readiness.token.key;
        match self.entries.get(&key) {
            Some(Entry::Listener { .. }) => self.accept(key, cx),
            Some(Entry::Datagrams(_)) => self.take_datagrams(key, cx),
            Some(Entry::Connection(_)) => self.drive(key, Event::Ready(readiness), cx),
            None => {}
        }
    }

    /// When [`Relay::on_timer`] is due, `CLOCK_MONOTONIC` ns.
    pub fn next_deadline_ns(&self) -> Option<u64> {
        let first = self.deadlines.first().map(|(at, _)| *at);
        match (first, self.expire_at_ns) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// Does what is due.
    pub fn on_timer(&mut self, cx: &mut Context<'_>) {
        while let Some((at, key)) = self.deadlines.first().copied() {
            if at > cx.now_ns {
                break;
            }
            self.deadlines.remove(&(at, key));
            match self.entries.get(&key) {
                Some(Entry::Listener { .. }) => self.resume(key, cx),
                _ => self.drive(key, Event::Timer, cx),
            }
        }
        self.expire_associations(cx.now_ns);
    }
}

#[cfg(test)]
mod tests;
