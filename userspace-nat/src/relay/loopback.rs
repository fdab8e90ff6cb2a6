//! Ports of the gateway that are mapped to the host's loopback: TCP connections. By IPv4 they lead to
//! 127.0.0.1, by IPv6 to ::1.
//!
//! # Theory of operation
//! The guest's SYN is kept unanswered until the host's service accepts or refuses the connection
//! ([`Connecting`]). If the service refuses, the guest receives a RST, so no closed port looks
//! open. If it accepts, the SYN is answered, and the connection is a [`Stream`] like a forward's.
//!
//! The caller of [`Relay::open_loopback`] decides whether a connection is allowed. This module only
//! limits their number. When rules change, each connection is judged again ([`Relay::rejudge`]).
use std::{
    collections::HashSet,
    net::{SocketAddr, TcpStream},
    os::fd::AsFd,
    rc::Rc,
};

use slipgate_abi::{Protocol, VmId, segment::Segments};

use super::{
    Connection, Entry, Event, Kind, Name, Relay, Taken,
    connections::tell,
    forward::{local_of, relay_token},
    host_socket,
    journal::{By, Ends, Held},
    link::{Link, segment_of},
    parse,
    stream::Stream,
};
use crate::{
    packet::{Packet, Transport, Version, transport::Tcp},
    poll::{Context, Interest},
    tcp::{self, Segment},
    vm::VmNet,
};
use slipgate_policy::Destination;

/// Longest SYN that is kept, bytes: the longest headers of IPv4 and TCP. Those of IPv6 are 20 less.
const LONGEST_SYN: usize = 120;

/// Service on the host's loopback to which a guest's first packet leads.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Opening {
    /// Port of the service on the host's loopback.
    pub host_port: u16,
    /// Rule that listed the port, for the records.
    pub rule: Rc<str>,
}

impl Opening {
    /// Address of the service, of the family by which the guest comes.
    pub(super) fn service(&self, name: Name) -> SocketAddr {
        host_socket::at(Version::of(name.ours.ip()), self.host_port)
    }

    /// Endpoints of the flow of this name that is relayed from the host's address `from`.
    pub(super) fn ends(&self, protocol: Protocol, name: Name, from: SocketAddr) -> Ends {
        Ends {
            protocol,
            guest: name.guest,
            remote: name.ours,
            by: By::Loopback {
                from,
                to: self.service(name),
                rule: self.rule.clone(),
            },
        }
    }
}

/// Counts of connections and exchanges after a change of rules.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Rejudged {
    /// Number that were live.
    pub live: usize,
    /// Number that were ended.
    pub cut: usize,
    /// Number that would not be admitted now, and continue.
    pub left: usize,
}

/// Judgement of the present rules on a live connection or exchange.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Standing {
    /// The rules would admit it.
    Stands,
    /// The rules would not admit it, and it must end.
    Cut,
    /// The rules would not admit it, and it continues.
    Left,
}

/// Function that judges a live connection by the rules. Its arguments are the VM, the destination,
/// and the host's port to which the connection leads.
pub type Judges<'j> = &'j dyn Fn(&VmNet, Destination, u16) -> Standing;

/// A connection that the host has not answered yet.
#[derive(Debug)]
pub(super) struct Connecting {
    host: TcpStream,
    service: SocketAddr,
    /// The guest's side, with its SYN.
    connection: tcp::Connection,
    began_ns: u64,
}

/// State of such a connection.
enum Progress {
    Waits,
    Accepted,
    Refused,
    /// The guest gave up.
    Reset,
}

impl Connecting {
    /// Time until which the host may answer, ns.
    pub(super) fn deadline_ns(&self, connect_ns: u64) -> u64 {
        self.began_ns + connect_ns
    }

    /// Starts the timeout again.
    pub(super) fn begin_timers(&mut self, now_ns: u64) {
        self.began_ns = now_ns;
    }

    /// Refuses the guest's SYN with RST.
    pub(super) fn refuse(&mut self, link: &mut Link<'_>) {
        let header = self.connection.reset();
        link.tell(&header);
    }

    fn progress(&mut self, incoming: Option<&[u8]>, due: bool) -> Progress {
        match incoming.and_then(segment_of) {
            Some((tcp, ..)) if tcp.has(slipgate_abi::tcp::Flags::RST) => return Progress::Reset,
            // The guest's port, used again.
            Some((tcp, syn, payload)) if tcp.is_opening_syn() && payload.is_empty() => {
                let version = Version::of(self.service.ip());
                self.connection = opened_by(version, &syn);
            }
            _ => {}
        }
        match host_socket::is_connected(&self.host, self.service) {
            Ok(true) => Progress::Accepted,
            Ok(false) if !due => Progress::Waits,
            Ok(false) | Err(_) => Progress::Refused,
        }
    }
}

impl Relay {
    /// Opens a connection or an exchange for a guest's packet to a port that is mapped to the
    /// host's loopback. The caller has admitted the packet, which [`Relay::packet`] did not take.
    pub fn open_loopback(
        &mut self,
        vm: VmId,
        packet: &[u8],
        segments: Segments,
        opening: &Opening,
        cx: &mut Context<'_>,
    ) -> Taken {
        let Some(ip) = parse(packet) else {
            return Taken::No;
        };
        match Packet::parse(ip).map(|packet| packet.transport) {
            Ok(Transport::Tcp(tcp)) if opens(&tcp, ip.bytes) => {
                let name = Name::of(vm, &ip, (tcp.source, tcp.destination));
                let l4 = ip.payload();
                let syn = Segment::read(&tcp, l4);
                self.open_connection(name, (syn, segments), opening, cx)
            }
            Ok(Transport::Udp(udp)) => {
                let name = Name::of(vm, &ip, (udp.source, udp.destination));
                let payload = super::payload(&ip, &udp);
                self.open_exchange(name, (payload, segments), opening, cx)
            }
            _ => Taken::No,
        }
    }

    fn open_connection(
        &mut self,
        name: Name,
        (syn, segments): (Segment, Segments),
        opening: &Opening,
        cx: &mut Context<'_>,
    ) -> Taken {
        let (key, has_socket) = (self.fresh_key(), self.has_socket_for(name.vm));
        let Some(served) = self.vms.get_mut(&name.vm) else {
            return Taken::No;
        };
        if !has_socket || served.counts.loopback_streams >= self.limits.loopback_streams_per_vm {
            served.counts.loopback_refused += 1;
            return Taken::OverLimit;
        }
        let service = opening.service(name);
        let Ok(host) = host_socket::tcp(service) else {
            served.counts.loopback_refused += 1;
            return Taken::Refused;
        };
        if cx
            .poller
            .add(host.as_fd(), relay_token(key), Interest::Write)
            .is_err()
        {
            return Taken::OverLimit;
        }
        served.counts.loopback_streams += 1;
        let ends = opening.ends(Protocol::Tcp, name, local_of(host.local_addr()));
        let held = Held::Entry(key);
        let mut flow = self.journal.begin(ends, held, served, cx.now_ns);
        served.counts.sent(&mut flow, segments, cx.now_ns);
        let connecting = Connecting {
            host,
            service,
            connection: opened_by(Version::of(service.ip()), &syn),
            began_ns: cx.now_ns,
        };
        self.insert(key, name, flow, Kind::Connecting(connecting));
        self.drive(key, Event::Timer, cx);
        Taken::Yes
    }

    /// Continues with a connection that the host has not answered yet. Returns `false` if the key
    /// names none.
    pub(super) fn connect_on(&mut self, key: u32, event: Event<'_>, cx: &mut Context<'_>) -> bool {
        let Some(Entry::Connection(connection)) = self.entries.get_mut(&key) else {
            return false;
        };
        let Kind::Connecting(connecting) = &mut connection.kind else {
            return false;
        };
        let served = self.vms.get_mut(&connection.name.vm);
        let incoming =
            served.and_then(|served| served.incoming(event, &mut connection.flow, cx.now_ns));
        let deadline_ns = connecting.deadline_ns(self.limits.connect_ns);
        match connecting.progress(incoming, cx.now_ns >= deadline_ns) {
            Progress::Waits => {
                self.deadlines.remove(&(connection.deadline_ns, key));
                connection.deadline_ns = deadline_ns;
                self.deadlines.insert((deadline_ns, key));
            }
            Progress::Accepted => self.accepted(key, cx),
            Progress::Refused => self.cut_off(key, "refused", cx),
            Progress::Reset => self.over(key, "reset", cx.now_ns),
        }
        true
    }

    /// Answers the guest after the service has accepted the connection.
    fn accepted(&mut self, key: u32, cx: &mut Context<'_>) {
        let Some(Entry::Connection(connection)) = self.entries.remove(&key) else {
            return;
        };
        let Connection {
            name,
            mut flow,
            deadline_ns,
            kind,
            ..
        } = *connection;
        self.deadlines.remove(&(deadline_ns, key));
        self.connections.remove(&name);
        let (Kind::Connecting(connecting), Some(served)) = (kind, self.vms.get_mut(&name.vm))
        else {
            return;
        };
        let took_us = cx.now_ns.saturating_sub(flow.opened_ns) / 1_000;
        flow.connect_us = u32::try_from(took_us).unwrap_or(0).max(1);
        let Connecting {
            host,
            service,
            connection,
            ..
        } = connecting;
        let refusal = connection.clone().reset();
        let (ends, now_ns) = (name.ends(), cx.now_ns);
        let mut link = Link::to(
            (&served.net, &served.early),
            &mut self.packets,
            ends,
            1,
            now_ns,
        );
        // The stream has it waited on in its own way.
        let stream = cx.poller.remove(&host).and_then(|()| {
            let token = relay_token(key);
            Stream::accepted(host, connection, token, cx.poller, &mut link)
        });
        let Ok(stream) = stream else {
            // Out of memory or descriptors, or the service has reset it by now: refused.
            link.tell(&refusal);
            served.counts.loopback_streams -= 1;
            served.counts.loopback_refused += 1;
            tell(&mut self.packets, &mut flow, served, cx);
            return self.journal.end(&flow, "refused", served, cx.now_ns);
        };
        tell(&mut self.packets, &mut flow, served, cx);
        self.insert(key, name, flow, Kind::Loopback { stream, service });
        self.drive(key, Event::Timer, cx);
    }

    /// Number of a VM's connections and exchanges with the host's loopback.
    pub fn loopback_flows(&self, vm: VmId) -> u32 {
        let counts = self.vms.get(&vm).map(|served| served.counts);
        counts.map_or(0, |c| c.loopback_streams + c.loopback_exchanges)
    }

    /// Judges all connections and exchanges of some VMs with the host's loopback, and ends those that
    /// are no longer allowed.
    pub fn rejudge(
        &mut self,
        concerned: &HashSet<VmId>,
        judges: Judges<'_>,
        cx: &mut Context<'_>,
    ) -> Rejudged {
        let mut rejudged = Rejudged::default();
        let mut refused = Vec::new();
        for (key, entry) in &self.entries {
            let (name, protocol, service) = match entry {
                Entry::Connection(connection) => match &connection.kind {
                    Kind::Connecting(c) => (&connection.name, Protocol::Tcp, c.service),
                    Kind::Loopback { service, .. } => (&connection.name, Protocol::Tcp, *service),
                    Kind::Stream(_) | Kind::Dns(_) => continue,
                },
                Entry::Exchange(exchange) => (&exchange.name, Protocol::Udp, exchange.service),
                Entry::Listener(..)
                | Entry::Datagrams(_)
                | Entry::Spliced(_)
                | Entry::Inside(_) => continue,
            };
            let served = self.vms.get(&name.vm);
            let Some(served) = served.filter(|_| concerned.contains(&name.vm)) else {
                continue;
            };
            rejudged.live += 1;
            let to = Destination {
                addr: name.ours.ip(),
                port: name.ours.port(),
                protocol,
            };
            match judges(&served.net, to, service.port()) {
                Standing::Stands => {}
                Standing::Cut => refused.push(*key),
                Standing::Left => rejudged.left += 1,
            }
        }
        rejudged.cut = refused.len();
        for key in refused {
            self.cut_off(key, "policy", cx);
        }
        rejudged
    }
}

/// The guest's side of a connection whose SYN this is.
fn opened_by(version: Version, syn: &Segment) -> tcp::Connection {
    tcp::Connection::new(version, syn, rand::random())
}

/// Whether a segment opens a connection. A SYN with data does not: no client sends one unasked (RFC
/// 7413 requires a cookie of the server).
fn opens(tcp: &Tcp, packet: &[u8]) -> bool {
    tcp.is_opening_syn() && tcp.payload_len == 0 && packet.len() <= LONGEST_SYN
}
