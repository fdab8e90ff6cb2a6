//! Relayed connections, which the kernel cannot translate: slipgate terminates both of their sides.
//!
//! # Theory of operation
//! Three kinds of traffic are relayed. First, a guest's *DNS over TCP* to any resolver: the relay
//! terminates it and passes the questions to the [proxy](crate::dns); the answers return by
//! [`Relay::answer`]. Second, a *forward* from the host's own addresses or loopback, whose packets
//! never cross the uplink: the broker binds the socket, the relay accepts on it and opens a
//! connection from the gateway's address to the guest (`stream`), or assigns a port of the gateway
//! to each client of a UDP port (`datagrams`). If the guest is a network namespace of this host, a
//! connection is continued by a socket there, and its bytes are spliced (`spliced`). Third, *ports of the gateway* that a policy maps to
//! the host's loopback (`loopback`, `exchanges`): the guest opens the connection, and the relay
//! makes the host's socket.
//!
//! TCP on the guest's side is [`crate::tcp`]'s, in both modes: it buffers no stream. A connection is
//! found by the VM, the relay's address and port, and the guest's address and port. A packet of no
//! connection is returned, and refused as any other.
//!
//! No call blocks. The packets sent in one turn of the engine are bounded (`turns`), and [`Limits`]
//! bound the connections per VM, and with them the memory of their sockets: a connection beyond them is
//! refused with a reset, and never replaces a live one. Deadlines (retransmissions, time-outs) are kept
//! in order, one per connection. Relayed connections end with the engine: there is no kernel flow that could outlive
//! it.
use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    net::{IpAddr, SocketAddr, TcpListener},
    os::fd::OwnedFd,
};

use slipgate_abi::{Protocol, RuleIndex, Vm6Ref, VmId, VmRow, segment::Segments, tcp::Phase};
use slipgate_model::GuestTcpCounts;

use crate::{
    packet::{
        Ip, Ipv4, Packet, Transport, Version,
        ip::version_of,
        transport::{UDP_HEADER_LEN, Udp},
    },
    poll::{Context, Readiness},
    record::{RelayedEnd, RelayedFlow},
    tcp::EarlyRoom,
    vm::VmNet,
};

mod connections;
mod datagrams;
mod dns_stream;
mod exchanges;
mod forward;
mod host_socket;
mod journal;
mod limits;
mod link;
mod loopback;
mod namespace;
mod pipe;
mod spliced;
mod stream;
mod turns;

pub use limits::{Counts, Limits};
pub use loopback::{Judges, Opening, Rejudged, Standing};
pub use namespace::{NamespaceSockets, NoneReady};

use datagrams::{Associations, DatagramSocket};
use dns_stream::DnsStream;
use exchanges::Exchange;
use journal::Journal;
use link::Packets;
use loopback::Connecting;
use pipe::Pipes;
use spliced::Spliced;
use stream::Stream;
use turns::Turn;

/// Interval at which the deadlines of a paused VM are checked again, ns.
const PAUSED_CHECK_NS: u64 = 1_000_000_000;

/// A socket of the host that is forwarded to a guest. It is already bound, and listening if it is
/// TCP.
#[derive(Debug)]
pub struct Forward {
    /// Id of the VM.
    pub vm: VmId,
    /// Protocol of the socket: TCP or UDP.
    pub protocol: Protocol,
    /// Port of the guest.
    pub guest_port: u16,
    /// Index into `RULES` of the forward's rule.
    pub rule: RuleIndex,
    /// The bound socket, owned by the relay.
    pub socket: OwnedFd,
}

/// A DNS question that came over TCP.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Question {
    /// Id of the VM.
    pub vm: VmId,
    /// Identifier of the connection, for [`Relay::answer`].
    pub connection: u64,
    /// The DNS message, without its length prefix.
    pub message: Vec<u8>,
}

/// Port of a guest to which a forward leads.
#[derive(Clone, Copy, Debug)]
struct Target {
    vm: VmId,
    guest_port: u16,
    rule: RuleIndex,
}

/// Result of offering a packet to the relay.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Taken {
    /// The relay processed the packet.
    Yes,
    /// The packet belongs to no connection and opens none: the caller refuses it.
    No,
    /// The packet opens a connection above the VM's limit: the caller refuses it.
    OverLimit,
    /// The packet goes to a port of the host's loopback at which no service listens.
    Refused,
}

/// All relayed connections of all VMs.
#[derive(Debug, Default)]
pub struct Relay {
    limits: Limits,
    vms: HashMap<VmId, Served, foldhash::fast::RandomState>,
    entries: HashMap<u32, Entry>,
    /// Connections by the addresses and ports in a guest's packet.
    connections: HashMap<Name, u32>,
    associations: Associations,
    /// Exchanges with the host's loopback, by the addresses and ports in a guest's datagram.
    exchanges: HashMap<Name, u32>,
    /// Time at which each connection is driven next, ns.
    deadlines: BTreeSet<(u64, u32)>,
    expire_at_ns: Option<u64>,
    next_key: u32,
    /// Number of the engine's turn.
    turn: u64,
    /// VMs with connections that wait for their turn.
    queue: VecDeque<VmId>,
    questions: VecDeque<Question>,
    packets: Packets,
    journal: Journal,
    /// The one guest that is a network namespace of this host, and sockets in it.
    namespace: Option<(VmId, NamespaceSockets)>,
    pipes: Pipes,
    /// Whether somebody wants to see packets.
    is_watched: bool,
    /// Buffer for a datagram from the host.
    datagram: Vec<u8>,
}

/// A VM that the relay serves.
#[derive(Debug)]
struct Served {
    net: VmNet,
    row6: Option<Vm6Ref>,
    next_port: u16,
    counts: Counts,
    turn: Turn,
    /// Room for its guest's segments that came early.
    early: EarlyRoom,
    /// Keys of its forwards' sockets, by protocol and address of the host.
    forwards: HashMap<(Protocol, SocketAddr), u32>,
    /// Numbers of its live flows.
    live: BTreeSet<u64>,
}

/// Identity of a connection with a guest.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Name {
    vm: VmId,
    ours: SocketAddr,
    guest: SocketAddr,
}

impl Name {
    const fn new(vm: VmId, ours: SocketAddr, guest: SocketAddr) -> Self {
        Self { vm, ours, guest }
    }

    /// Both ends, for a frame.
    const fn ends(&self) -> link::Ends {
        link::Ends {
            ours: self.ours,
            guest: self.guest,
        }
    }

    /// Name of the connection of a guest's packet, by its addresses and ports.
    const fn of(vm: VmId, ip: &Ip<'_>, (from, to): (u16, u16)) -> Self {
        Self {
            vm,
            ours: SocketAddr::new(ip.destination, to),
            guest: SocketAddr::new(ip.source, from),
        }
    }
}

#[derive(Debug)]
enum Entry {
    Listener(TcpListener, Target),
    Datagrams(DatagramSocket),
    Connection(Box<Connection>),
    Exchange(Box<Exchange>),
    Spliced(Box<Spliced>),
    /// The socket inside of a spliced connection, whose key this is.
    Inside(u32),
}

impl Entry {
    fn flow(&self) -> Option<&RelayedFlow> {
        match self {
            Self::Connection(connection) => Some(&connection.flow),
            Self::Exchange(exchange) => Some(&exchange.flow),
            Self::Spliced(spliced) => Some(&spliced.flow),
            Self::Listener(..) | Self::Datagrams(_) | Self::Inside(_) => None,
        }
    }

    /// Phase of a connection.
    fn phase(&self) -> Option<Phase> {
        if let Self::Spliced(spliced) = self {
            return Some(spliced.phase());
        }
        let Self::Connection(connection) = self else {
            return None;
        };
        Some(match &connection.kind {
            Kind::Stream(stream) | Kind::Loopback { stream, .. } => stream.phase(),
            Kind::Dns(stream) => stream.phase(),
            Kind::Connecting(_) => Phase::Opening,
        })
    }
}

#[derive(Debug)]
struct Connection {
    name: Name,
    flow: RelayedFlow,
    deadline_ns: u64,
    /// Whether it waits for its turn.
    is_waiting: bool,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    /// A connection of a forward.
    Stream(Stream),
    Dns(DnsStream),
    /// A connection to the host's loopback that the host has not answered yet.
    Connecting(Connecting),
    /// A connection to the host's loopback.
    Loopback {
        stream: Stream,
        service: SocketAddr,
    },
}

/// Reason for which a connection is driven.
#[derive(Clone, Copy, Debug)]
enum Event<'a> {
    Packet(&'a [u8], Segments),
    Ready(Readiness),
    Answer(&'a [u8]),
    Timer,
    /// It may send data that was held back by the limit per turn.
    Turn,
}

impl Served {
    /// Returns the guest's packet that an event brings, counted in its flow.
    fn incoming<'e>(
        &mut self,
        event: Event<'e>,
        flow: &mut RelayedFlow,
        now_ns: u64,
    ) -> Option<&'e [u8]> {
        let Event::Packet(packet, segments) = event else {
            return None;
        };
        self.counts.sent(flow, segments, now_ns);
        Some(packet)
    }
}

impl Relay {
    /// A relay that serves no VM yet.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            ..Self::default()
        }
    }

    /// Starts or stops keeping a record of each flow's start and end for [`Relay::next_record`].
    pub fn keep_records(&mut self, keep: bool) {
        self.journal.set_open(keep);
    }

    /// Record of the next flow that began or ended; `None` if there is none.
    pub fn next_record(&mut self) -> Option<(RelayedFlow, Option<RelayedEnd>)> {
        self.journal.next()
    }

    /// Records the end of every flow, because the engine ends.
    pub fn end_records(&mut self, now_ns: u64) {
        let flows = self.entries.values().filter_map(Entry::flow);
        for flow in flows.chain(self.associations.flows()) {
            if let Some(served) = self.vms.get_mut(&flow.vm) {
                self.journal.end(flow, "detached", served, now_ns);
            }
        }
    }

    /// Begins to serve a VM, or adopts a change of its network. `row6`: its row of `VMS6`, with the
    /// addresses that the guest has.
    pub fn add_vm(&mut self, net: VmNet, row6: Option<Vm6Ref>) {
        let next_port = forward::FIRST_PORT + rand::random::<u16>() % forward::PORTS;
        self.vms
            .entry(net.id)
            .and_modify(|served| (served.net, served.row6) = (net.clone(), row6))
            .or_insert_with(|| Served {
                net,
                row6,
                next_port,
                counts: Counts::default(),
                turn: Turn::default(),
                early: EarlyRoom::default(),
                forwards: HashMap::new(),
                live: BTreeSet::new(),
            });
    }

    /// Ends all connections of a VM with a reset, and closes its sockets.
    pub fn remove_vm(&mut self, vm: VmId, cx: &mut Context<'_>) {
        let Some(served) = self.vms.get(&vm) else {
            return;
        };
        let forwards: Vec<_> = served.forwards.keys().copied().collect();
        let live: Vec<u64> = served.live.iter().copied().collect();
        for (protocol, host) in forwards {
            self.close_forward(vm, protocol, host, cx);
        }
        for number in live {
            self.end_flow(number, "vm-removed", cx);
        }
        self.questions.retain(|question| question.vm != vm);
        self.vms.remove(&vm);
    }

    /// Sets that a VM is a network namespace of this host, and where sockets in it come from.
    pub fn set_namespace(&mut self, vm: VmId, sockets: NamespaceSockets) {
        self.namespace = Some((vm, sockets));
    }

    /// Sets whether somebody wants to see the guests' packets: connections that begin meanwhile consist
    /// of packets.
    pub(crate) const fn set_watched(&mut self, is_watched: bool) {
        self.is_watched = is_watched;
    }

    /// Counters of a VM's relayed traffic.
    pub fn counts(&self, vm: VmId) -> Counts {
        self.vms
            .get(&vm)
            .map(|served| served.counts)
            .unwrap_or_default()
    }

    /// What a VM's relayed connections keep of its segments, and counts of them.
    pub fn tcp_counts(&self, vm: VmId) -> GuestTcpCounts {
        let served = self.vms.get(&vm);
        served
            .map(|served| served.early.counts())
            .unwrap_or_default()
    }

    /// Processes a packet of a guest: TCP to port 53 of any address, TCP and UDP to one of the
    /// relay's. Packets that open a connection to the host's loopback are not taken; they go to
    /// [`Relay::open_loopback`]. `segments` is the packet's count after segmentation.
    pub fn packet(
        &mut self,
        vm: VmId,
        packet: &[u8],
        segments: Segments,
        cx: &mut Context<'_>,
    ) -> Taken {
        let Some(served) = self.vms.get(&vm) else {
            return Taken::No;
        };
        let Some(ip) = parse(packet) else {
            return Taken::No;
        };
        // Which addresses of IPv6 the guest has, the caller knows.
        let is_its = match ip.source {
            IpAddr::V4(source) => source == served.net.guest,
            IpAddr::V6(_) => served.net.ipv6.is_some(),
        };
        if !is_its {
            return Taken::No;
        }
        let is_to_gateway = served.net.gateway_of(ip.source) == Some(ip.destination);
        match Packet::parse(ip).map(|packet| packet.transport) {
            Ok(Transport::Tcp(tcp)) => {
                let name = Name::of(vm, &ip, (tcp.source, tcp.destination));
                self.segment(name, tcp, (ip.bytes, segments), cx)
            }
            Ok(Transport::Udp(udp)) => {
                let payload = payload(&ip, &udp);
                let name = Name::of(vm, &ip, (udp.source, udp.destination));
                if is_to_gateway {
                    let taken = self.answer_client(name, payload, segments, cx.now_ns);
                    if taken != Taken::No {
                        return taken;
                    }
                }
                self.exchange(name, payload, segments, cx.now_ns)
            }
            _ => Taken::No,
        }
    }

    /// The next DNS question that came over TCP; `None` if there is none.
    pub fn next_question(&mut self) -> Option<Question> {
        self.questions.pop_front()
    }

    /// Sends the answer to a question, if its connection still exists.
    pub fn answer(&mut self, connection: u64, message: &[u8], cx: &mut Context<'_>) {
        if let Ok(key) = u32::try_from(connection) {
            self.drive(key, Event::Answer(message), cx);
        }
    }

    /// Continues with a socket that is ready (a [`Relay`](crate::poll::Subsystem::Relay) token).
    pub fn on_ready(&mut self, readiness: Readiness, cx: &mut Context<'_>) {
        let key = readiness.token.key;
        match self.entries.get(&key) {
            Some(Entry::Listener(..)) => self.accept(key, cx),
            Some(Entry::Datagrams(_)) => self.take_datagrams(key, cx),
            Some(Entry::Connection(_)) => self.drive(key, Event::Ready(readiness), cx),
            Some(Entry::Exchange(_)) => self.take_exchange(key, cx),
            Some(Entry::Spliced(_)) => self.spliced_ready(key, readiness),
            Some(Entry::Inside(of)) => self.spliced_ready(*of, readiness),
            None => {}
        }
    }

    /// Time at which [`Relay::on_timer`] is due, `CLOCK_MONOTONIC` ns; `None` if no deadline is
    /// set. Connections that wait for their turn go on at once, unless the port is full
    /// (`is_port_full`): its event leads there.
    pub fn next_deadline_ns(&self, is_port_full: bool) -> Option<u64> {
        if !self.queue.is_empty() && !is_port_full {
            return Some(0);
        }
        let first = self.deadlines.first().map(|(at, _)| *at);
        match (first, self.expire_at_ns) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// Processes the deadlines that have come, while there is room for packets. Returns whether all
    /// were processed in this turn. `is_paused` tells, by row, whether a VM is frozen or sleeps: its
    /// connections do not time out.
    pub fn on_timer(&mut self, is_paused: &dyn Fn(VmRow) -> bool, cx: &mut Context<'_>) -> bool {
        while let Some((at, key)) = self.deadlines.first().copied() {
            if at > cx.now_ns {
                break;
            }
            if cx.out.is_half_full() {
                return false;
            }
            self.deadlines.remove(&(at, key));
            if self.waits_for_vm(key, is_paused, cx.now_ns) {
                continue;
            }
            match self.entries.get(&key) {
                Some(Entry::Listener(..)) => self.resume(key, cx),
                Some(Entry::Exchange(_)) => self.examine_exchange(key, cx.now_ns),
                Some(Entry::Spliced(_)) => self.examine_spliced(key, cx),
                _ => self.drive(key, Event::Timer, cx),
            }
        }
        self.expire_associations(cx.now_ns);
        self.take_turns(is_paused, cx)
    }

    /// Whether the deadline belongs to a VM that is frozen or sleeps. If so, its timers start again.
    fn waits_for_vm(&mut self, key: u32, is_paused: &dyn Fn(VmRow) -> bool, now_ns: u64) -> bool {
        let vms = &self.vms;
        let paused = |vm| vms.get(&vm).is_some_and(|served| is_paused(served.net.row));
        let later_ns = now_ns + PAUSED_CHECK_NS;
        match self.entries.get_mut(&key) {
            Some(Entry::Connection(connection)) if paused(connection.name.vm) => {
                match &mut connection.kind {
                    Kind::Stream(stream) | Kind::Loopback { stream, .. } => {
                        stream.begin_timers(now_ns);
                    }
                    Kind::Connecting(connecting) => connecting.begin_timers(now_ns),
                    // Its questions are not answered either: the guest will ask again.
                    Kind::Dns(_) => return false,
                }
                connection.deadline_ns = later_ns;
            }
            Some(Entry::Spliced(spliced)) if paused(spliced.flow.vm) => {
                spliced.begin_timers(now_ns);
                spliced.deadline_ns = later_ns;
            }
            Some(Entry::Exchange(exchange)) if paused(exchange.name.vm) => {
                exchange.active_ns = now_ns;
                exchange.deadline_ns = later_ns;
            }
            _ => return false,
        }
        self.deadlines.insert((later_ns, key));
        true
    }
}

/// Parses a packet that is whole; `None` if it is not.
fn parse(packet: &[u8]) -> Option<Ip<'_>> {
    match version_of(packet)? {
        Version::V4 => {
            let ip = Ipv4::parse(packet).ok()?;
            (!ip.is_fragment()).then(|| ip.into())
        }
        // A fragment has no transport header at its place, and is not parsed further.
        Version::V6 => Ip::parse(packet).ok(),
    }
}

/// Payload of a UDP datagram.
fn payload<'p>(ip: &Ip<'p>, udp: &Udp) -> &'p [u8] {
    let payload = ip.payload().get(UDP_HEADER_LEN..).unwrap_or_default();
    &payload[..udp.payload_len.min(payload.len())]
}

#[cfg(test)]
mod tests;
