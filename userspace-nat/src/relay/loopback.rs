//! Ports of the gateway that lead to the host's 127.0.0.1: connections.
//!
//! # Theory of operation
//! The guest's SYN is kept, and unanswered, until the host's service has accepted or refused
//! ([`Connecting`]): what is refused there is refused here by RST, and nothing looks open that is
//! not. An accepted one gets an endpoint that is given the SYN, and from then on is a [`Stream`]
//! like a forward's.
//!
//! Whether a connection may be is decided by whoever calls [`Relay::open_loopback`]; here is only
//! how many there may be. When rules change each is asked for again ([`Relay::rejudge`]).
use std::{net::SocketAddrV4, net::TcpStream, os::fd::AsFd, rc::Rc};

use slipgate_abi::{Protocol, segment::Segments};

use super::{
    Connection, Entry, Event, Kind, Name, Relay, Served, Taken,
    connections::tell,
    forward::relay_token,
    host_socket,
    journal::{By, Ends, Held},
    link::{Buffers, Endpoint, Link, tcp_of},
    stream::Stream,
};
use crate::{
    context::Context,
    packet::{Ipv4, Packet, Transport, transport::Tcp},
    poll::Interest,
    vm::VmNet,
};
use slipgate_policy::Destination;

/// A SYN that is kept is no longer than its headers can be.
const LONGEST_SYN: usize = 120;

/// What a guest's first packet to a port of the host's loopback is to lead to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Opening {
    /// The port of 127.0.0.1.
    pub host_port: u16,
    /// What listed it, for the records.
    pub rule: Rc<str>,
}

/// How many live on after a change of rules.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Rejudged {
    /// All that lived.
    pub live: usize,
    /// Those that were ended.
    pub cut: usize,
    /// Those that would not be admitted now and go on.
    pub left: usize,
}

/// What the rules of now say of a connection or exchange that lives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Standing {
    /// It would be admitted.
    Stands,
    /// It would not, and is to end.
    Cut,
    /// It would not, and goes on.
    Left,
}

/// Who knows the rules: asked of which VM, where to, and the host's port that it has led to.
pub type Judges<'j> = &'j dyn Fn(&VmNet, Destination, u16) -> Standing;

/// A connection whose other end has not answered yet.
#[derive(Debug)]
pub(super) struct Connecting {
    host: TcpStream,
    host_port: u16,
    syn: Vec<u8>,
    began_ns: u64,
}

/// Where a connection stands.
enum Progress {
    Waits,
    Accepted,
    Refused,
    /// The guest gave up.
    Reset,
}

impl Connecting {
    /// Until when it may take, ns.
    pub(super) fn deadline_ns(&self, connect_ns: u64) -> u64 {
        self.began_ns + connect_ns
    }

    /// Its time begins anew.
    pub(super) fn begin_timers(&mut self, now_ns: u64) {
        self.began_ns = now_ns;
    }

    /// Refuses what the guest asked for.
    pub(super) fn refuse(&self, ours: SocketAddrV4, link: &mut Link<'_>) {
        Endpoint::refuse(ours, &self.syn, link);
    }

    fn progress(&mut self, incoming: Option<&[u8]>, due: bool) -> Progress {
        match incoming.and_then(tcp_of) {
            Some(tcp) if tcp.has(slipgate_abi::tcp::Flags::RST) => return Progress::Reset,
            // The guest's port, used again.
            Some(tcp) if tcp.is_opening_syn() && tcp.payload_len == 0 => {
                self.syn = incoming.unwrap_or_default().to_vec();
            }
            _ => {}
        }
        match host_socket::is_connected(&self.host, self.host_port) {
            Ok(true) => Progress::Accepted,
            Ok(false) if !due => Progress::Waits,
            Ok(false) | Err(_) => Progress::Refused,
        }
    }
}

impl Relay {
    /// A guest's packet that [`Relay::packet`] did not take, to a port that leads to the host's
    /// loopback, was let in: opens what it asks for.
    pub fn open_loopback(
        &mut self,
        vm: u32,
        packet: &[u8],
        segments: Segments,
        opening: &Opening,
        cx: &mut Context<'_>,
    ) -> Taken {
        let Ok(ip) = Ipv4::parse(packet) else {
            return Taken::No;
        };
        let to = ip.destination.into();
        match Packet::parse(ip).map(|packet| packet.transport) {
            Ok(Transport::Tcp(tcp)) if opens(&tcp, ip.bytes) => {
                let name = Name {
                    vm,
                    ours: SocketAddrV4::new(to, tcp.destination),
                    guest_port: tcp.source,
                };
                self.open_connection(name, (ip.bytes, segments), opening, cx)
            }
            Ok(Transport::Udp(udp)) => {
                let name = Name {
                    vm,
                    ours: SocketAddrV4::new(to, udp.destination),
                    guest_port: udp.source,
                };
                let payload = super::payload(&ip, &udp);
                self.open_exchange(name, (payload, segments), opening, cx)
            }
            _ => Taken::No,
        }
    }

    fn open_connection(
        &mut self,
        name: Name,
        (syn, segments): (&[u8], Segments),
        opening: &Opening,
        cx: &mut Context<'_>,
    ) -> Taken {
        let has_socket = self.has_socket_for(name.vm);
        let Some(served) = self.vms.get_mut(&name.vm) else {
            return Taken::No;
        };
        if !has_socket || served.counts.loopback_streams >= self.limits.loopback_streams_per_vm {
            served.counts.loopback_refused += 1;
            return Taken::OverLimit;
        }
        let guest = SocketAddrV4::new(served.net.guest, name.guest_port);
        let Ok(host) = host_socket::tcp(opening.host_port) else {
            served.counts.loopback_refused += 1;
            return Taken::Refused;
        };
        let key = self.fresh_key();
        if cx
            .poller
            .add(host.as_fd(), relay_token(key), Interest::Write)
            .is_err()
        {
            return Taken::OverLimit;
        }
        let Some(served) = self.vms.get_mut(&name.vm) else {
            return Taken::No;
        };
        served.counts.loopback_streams += 1;
        let ends = Ends {
            vm: name.vm,
            protocol: Protocol::Tcp,
            guest,
            remote: name.ours,
            by: By::Loopback {
                from: super::forward::v4(host.local_addr()),
                to: host_socket::at(opening.host_port),
                rule: opening.rule.clone(),
            },
        };
        let held = Held::Entry(key);
        let flow = self.journal.begin(ends, held, served, cx.now_ns);
        let connecting = Connecting {
            host,
            host_port: opening.host_port,
            syn: syn.to_vec(),
            began_ns: cx.now_ns,
        };
        self.insert(key, name, flow, Kind::Connecting(connecting));
        self.drive(key, Event::Packet(syn, segments), cx);
        Taken::Yes
    }

    /// Goes on with a connection whose other end has not answered yet; `false`: it is none.
    pub(super) fn connect_on(&mut self, key: u32, event: Event<'_>, cx: &mut Context<'_>) -> bool {
        let Some(Entry::Connection(connection)) = self.entries.get_mut(&key) else {
            return false;
        };
        let Kind::Connecting(connecting) = &mut connection.kind else {
            return false;
        };
        let incoming = match event {
            Event::Packet(packet, segments) => {
                if let Some(Served { counts, .. }) = self.vms.get_mut(&connection.name.vm) {
                    counts.sent(&mut connection.flow, segments, cx.now_ns);
                }
                Some(packet)
            }
            Event::Ready(_) | Event::Answer(_) | Event::Timer | Event::Turn => None,
        };
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

    /// The service has accepted: now the guest may be answered.
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
        let mut link = Link::to(&served.net, &mut self.packets, cx.now_ns);
        let buffers = Buffers {
            from_guest: self.limits.stream_buffer,
            to_guest: self.limits.stream_buffer,
        };
        let Connecting {
            host,
            host_port,
            syn,
            ..
        } = connecting;
        // The stream has it waited on in its own way.
        let stream = cx.poller.remove(&host).ok().and_then(|()| {
            let endpoint = Endpoint::listen(name.ours, buffers, &mut link).ok()?;
            let token = relay_token(key);
            Stream::new(host, endpoint, token, cx.poller, cx.now_ns).ok()
        });
        let Some(stream) = stream else {
            // Out of memory or descriptors: refused like any other that is one too many.
            served.counts.loopback_streams -= 1;
            served.counts.loopback_refused += 1;
            Endpoint::refuse(name.ours, &syn, &mut link);
            tell(&mut self.packets, &mut flow, served, cx);
            return self.journal.end(&flow, "refused", served, cx.now_ns);
        };
        self.insert(key, name, flow, Kind::Loopback { stream, host_port });
        // It was counted when it came.
        let counted = Segments {
            packets: 0,
            bytes: 0,
        };
        self.drive(key, Event::Packet(&syn, counted), cx);
    }

    /// How many connections and exchanges with the host's loopback a VM has.
    pub fn loopback_flows(&self, vm: u32) -> u32 {
        let counts = self.vms.get(&vm).map(|served| served.counts);
        counts.map_or(0, |c| c.loopback_streams + c.loopback_exchanges)
    }

    /// Ends the connections and exchanges with the host's loopback that may not be any more.
    pub fn rejudge(&mut self, judges: Judges<'_>, cx: &mut Context<'_>) -> Rejudged {
        let mut rejudged = Rejudged::default();
        let mut refused = Vec::new();
        for (key, entry) in &self.entries {
            let (name, protocol, host_port) = match entry {
                Entry::Connection(connection) => match &connection.kind {
                    Kind::Connecting(c) => (&connection.name, Protocol::Tcp, c.host_port),
                    Kind::Loopback { host_port, .. } => {
                        (&connection.name, Protocol::Tcp, *host_port)
                    }
                    Kind::Stream(_) | Kind::Dns(_) => continue,
                },
                Entry::Exchange(exchange) => (&exchange.name, Protocol::Udp, exchange.host_port),
                Entry::Listener { .. } | Entry::Datagrams(_) => continue,
            };
            let Some(served) = self.vms.get(&name.vm) else {
                continue;
            };
            rejudged.live += 1;
            let to = Destination {
                addr: *name.ours.ip(),
                port: name.ours.port(),
                protocol,
            };
            match judges(&served.net, to, host_port) {
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

/// Whether a segment opens a connection; one with data is none that anybody sends uninvited
/// (RFC 7413 needs a cookie of ours).
fn opens(tcp: &Tcp, packet: &[u8]) -> bool {
    tcp.is_opening_syn() && tcp.payload_len == 0 && packet.len() <= LONGEST_SYN
}
