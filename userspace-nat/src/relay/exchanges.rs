//! Ports of the gateway that are mapped to the host's loopback: UDP datagrams.
//!
//! Each guest port that uses such a port has a host socket of its own, by which the service's
//! answers are matched to it. The exchange ends after the idle timeout of a UDP flow (RFC 4787
//! REQ-5), or if no service has the port.
use std::{
    io,
    net::{SocketAddr, UdpSocket},
    os::fd::AsFd,
};

use slipgate_abi::{Direction, Protocol, segment::Segments};

use super::{
    Entry, Name, Relay, Served, Taken,
    connections::send,
    forward::{BATCH, local_of, relay_token},
    host_socket,
    journal::Held,
    loopback::Opening,
};
use crate::{
    datagram::{Datagram, headers_len},
    packet::Version,
    poll::{Context, Interest},
    port::single,
    record::RelayedFlow,
};

/// Exchange of datagrams between a guest's port and a port of the host's loopback.
#[derive(Debug)]
pub(super) struct Exchange {
    pub(super) name: Name,
    socket: UdpSocket,
    /// Address of the host's service.
    pub(super) service: SocketAddr,
    pub(super) active_ns: u64,
    pub(super) deadline_ns: u64,
    pub(super) flow: RelayedFlow,
}

/// Result of sending a datagram to the host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Sent {
    Yes,
    /// The socket's buffer is full, so the datagram is lost, as on a full link.
    Lost,
    /// No service has the port.
    Refused,
}

impl Exchange {
    /// Sends a datagram. A pending error belongs to an earlier datagram; that of this one is
    /// available when it is sent, because loopback answers at once.
    fn send(socket: &UdpSocket, payload: &[u8]) -> Sent {
        let refused = |error: &io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
        let mut sent = socket.send(payload);
        if sent.as_ref().is_err_and(refused) {
            sent = socket.send(payload);
        }
        match (sent, socket.take_error()) {
            (Err(error), _) if refused(&error) => Sent::Refused,
            (_, Ok(Some(error))) if refused(&error) => Sent::Refused,
            (Ok(_), _) => Sent::Yes,
            (Err(_), _) => Sent::Lost,
        }
    }
}

impl Relay {
    /// Processes a guest's first datagram to a port that is mapped to the host's loopback.
    pub(super) fn open_exchange(
        &mut self,
        name: Name,
        (payload, segments): (&[u8], Segments),
        opening: &Opening,
        cx: &mut Context<'_>,
    ) -> Taken {
        let (key, has_socket) = (self.fresh_key(), self.has_socket_for(name.vm));
        let Some(served) = self.vms.get_mut(&name.vm) else {
            return Taken::No;
        };
        if !has_socket || served.counts.loopback_exchanges >= self.limits.loopback_exchanges_per_vm
        {
            served.counts.loopback_refused += 1;
            return Taken::OverLimit;
        }
        let service = opening.service(name);
        let Ok(socket) = host_socket::udp(service) else {
            served.counts.loopback_refused += 1;
            return Taken::Refused;
        };
        if Exchange::send(&socket, payload) == Sent::Refused {
            return Taken::Refused;
        }
        if cx
            .poller
            .add(socket.as_fd(), relay_token(key), Interest::Read)
            .is_err()
        {
            return Taken::OverLimit;
        }
        served.counts.loopback_exchanges += 1;
        served.counts.bytes_from_guest += payload.len() as u64;
        let ends = opening.ends(Protocol::Udp, name, local_of(socket.local_addr()));
        let held = Held::Entry(key);
        let mut flow = self.journal.begin(ends, held, served, cx.now_ns);
        served.counts.sent(&mut flow, segments, cx.now_ns);
        let deadline_ns = cx.now_ns + self.limits.association_idle_ns;
        self.exchanges.insert(name, key);
        self.deadlines.insert((deadline_ns, key));
        let exchange = Exchange {
            name,
            socket,
            service,
            active_ns: cx.now_ns,
            deadline_ns,
            flow,
        };
        self.entries
            .insert(key, Entry::Exchange(Box::new(exchange)));
        Taken::Yes
    }

    /// Processes a guest's datagram that belongs to an exchange; [`Taken::No`] if there is none.
    pub(super) fn exchange(
        &mut self,
        name: Name,
        payload: &[u8],
        segments: Segments,
        now_ns: u64,
    ) -> Taken {
        let key = self.exchanges.get(&name).copied();
        let Some((key, Some(Entry::Exchange(exchange)))) =
            key.map(|key| (key, self.entries.get_mut(&key)))
        else {
            return Taken::No;
        };
        let sent = Exchange::send(&exchange.socket, payload);
        if sent == Sent::Refused {
            self.over(key, "refused", now_ns);
            return Taken::Refused;
        }
        exchange.active_ns = now_ns;
        if let Some(Served { counts, .. }) = self.vms.get_mut(&name.vm) {
            counts.sent(&mut exchange.flow, segments, now_ns);
            if sent == Sent::Yes {
                counts.bytes_from_guest += payload.len() as u64;
            }
        }
        Taken::Yes
    }

    /// Receives datagrams of the host's service.
    pub(super) fn take_exchange(&mut self, key: u32, cx: &mut Context<'_>) {
        let mut buffer = std::mem::take(&mut self.datagram);
        buffer.resize(usize::from(u16::MAX), 0);
        for _ in 0..BATCH {
            let Some(Entry::Exchange(exchange)) = self.entries.get_mut(&key) else {
                break;
            };
            let Some(served) = self.vms.get_mut(&exchange.name.vm) else {
                break;
            };
            let service = exchange.service;
            let payload = match host_socket::receive(&exchange.socket, service, &mut buffer) {
                Ok(Some(len)) => &buffer[..len],
                Ok(None) => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                // The service is gone.
                Err(_) => {
                    self.over(key, "refused", cx.now_ns);
                    break;
                }
            };
            let Name { ours, guest, .. } = exchange.name;
            let len = headers_len(Version::of(ours.ip())) + payload.len();
            exchange.active_ns = cx.now_ns;
            let datagram = Datagram {
                from: ours,
                to: guest,
                payload,
            };
            if send(datagram.emit(), &served.net, cx.out) {
                let counts = &mut served.counts;
                counts.received(&mut exchange.flow, single(len), cx.now_ns);
                counts.bytes_to_guest += payload.len() as u64;
                served.net.stats.saw(Direction::Rx, cx.now_ns);
            }
        }
        self.datagram = buffer;
    }

    /// Ends an exchange that was silent for too long, else sets its next deadline.
    pub(super) fn examine_exchange(&mut self, key: u32, now_ns: u64) {
        let Some(Entry::Exchange(exchange)) = self.entries.get_mut(&key) else {
            return;
        };
        let due_ns = exchange.active_ns + self.limits.association_idle_ns;
        if now_ns >= due_ns {
            return self.over(key, "idle", now_ns);
        }
        exchange.deadline_ns = due_ns;
        self.deadlines.insert((due_ns, key));
    }
}
