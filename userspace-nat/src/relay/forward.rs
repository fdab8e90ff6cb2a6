//! The host's side of forwards: accepts connections and receives datagrams.
use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    os::fd::AsFd,
};

use slipgate_abi::{Direction, Protocol, VmId, segment::Segments};

use super::{
    Entry, Event, Forward, Kind, Name, Relay, Taken, Target,
    connections::send,
    datagrams::{Association, Client, DatagramSocket},
    journal::{By, Ends, Held},
    link::Link,
    stream::{self, Stream},
};
use crate::{
    datagram::{Datagram, headers_len},
    inet::keep_urgent_in_place,
    ndp::addresses,
    packet::Version,
    poll::{Context, Interest, Subsystem, Token},
    port::single,
};

/// First of the gateway's ports that relayed connections use as source.
pub(super) const FIRST_PORT: u16 = 32_768;
/// Number of these ports.
pub(super) const PORTS: u16 = 28_232;

/// Most connections accepted, or datagrams received, per event.
pub(super) const BATCH: usize = 64;
/// Time for which a listener is paused if no descriptor is free, ns.
const PAUSE_NS: u64 = 100_000_000;

impl Relay {
    /// Begins to serve a forward.
    ///
    /// # Errors
    /// If the socket cannot be used or added to the poller.
    pub fn add_forward(&mut self, forward: Forward, cx: &mut Context<'_>) -> io::Result<()> {
        let key = self.fresh_key();
        let token = relay_token(key);
        let (vm, protocol) = (forward.vm, forward.protocol);
        let target = Target {
            vm,
            guest_port: forward.guest_port,
            rule: forward.rule,
        };
        let (entry, host) = match protocol {
            Protocol::Tcp => {
                let listener = TcpListener::from(forward.socket);
                listener.set_nonblocking(true)?;
                // Whoever made it: a predecessor's may not have it.
                keep_urgent_in_place(&listener);
                let host = local_of(listener.local_addr());
                cx.poller.add(listener.as_fd(), token, Interest::Read)?;
                (Entry::Listener(listener, target), host)
            }
            Protocol::Udp => {
                let socket = DatagramSocket::new(forward.socket.into(), target)?;
                cx.poller
                    .add(socket.socket().as_fd(), token, Interest::Read)?;
                let host = local_of(socket.socket().local_addr());
                (Entry::Datagrams(socket), host)
            }
            Protocol::Icmp | Protocol::Icmpv6 => {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidInput,
                    "ICMP has no ports to forward: tcp or udp would do",
                ));
            }
        };
        self.entries.insert(key, entry);
        if let Some(served) = self.vms.get_mut(&vm) {
            served.forwards.insert((protocol, host), key);
        }
        Ok(())
    }

    /// Stops serving a forward of a VM: no client gets in by it any more. Those that are in stay.
    pub fn close_forward(
        &mut self,
        vm: VmId,
        protocol: Protocol,
        host: SocketAddr,
        cx: &mut Context<'_>,
    ) {
        let served = self.vms.get_mut(&vm);
        let key = served.and_then(|served| served.forwards.remove(&(protocol, host)));
        match key.and_then(|key| self.entries.remove(&key)) {
            // The broker may hold the same socket: closing ours would not end the waiting. An
            // error means that it is not waited on any more.
            Some(Entry::Listener(listener, _)) => drop(cx.poller.remove(&listener)),
            Some(Entry::Datagrams(socket)) => drop(cx.poller.remove(socket.socket())),
            Some(
                Entry::Connection(_) | Entry::Exchange(_) | Entry::Spliced(_) | Entry::Inside(_),
            )
            | None => {}
        }
    }

    /// Ends the connections and clients that came by a forward of a VM. Returns their number.
    pub fn cut_forward(
        &mut self,
        vm: VmId,
        protocol: Protocol,
        host: SocketAddr,
        cx: &mut Context<'_>,
    ) -> usize {
        let live = self.vms.get(&vm).map(|served| served.live.clone());
        let came_by = |number: &u64| {
            let flow = self.flow(*number).filter(|flow| flow.inbound);
            let at = flow.filter(|flow| flow.protocol == protocol)?.nat?;
            let is_same_family = host.is_ipv4() == at.is_ipv4();
            let is_host = host.ip().is_unspecified() && is_same_family || host.ip() == at.ip();
            Some(at.port() == host.port() && is_host)
        };
        let mut cut = live.unwrap_or_default();
        cut.retain(|number| came_by(number).unwrap_or(false));
        for number in &cut {
            self.end_flow(*number, "policy", cx);
        }
        cut.len()
    }

    /// Accepts connections that wait on a listener.
    pub(super) fn accept(&mut self, key: u32, cx: &mut Context<'_>) {
        for _ in 0..BATCH {
            let Some(Entry::Listener(listener, target)) = self.entries.get(&key) else {
                return;
            };
            match listener.accept() {
                Ok(accepted) => self.open(accepted, *target, cx),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // The client gave up meanwhile, or a signal came: the next one may be well.
                Err(error) if is_passing(&error) => {}
                Err(_) => return self.pause(key, cx),
            }
        }
    }

    /// Opens a connection to the guest for an accepted connection.
    fn open(
        &mut self,
        (host, client): (TcpStream, SocketAddr),
        target: Target,
        cx: &mut Context<'_>,
    ) {
        let Target {
            vm,
            guest_port,
            rule,
        } = target;
        let guest = self.guest_of(vm, client.ip(), guest_port);
        if let Some(guest) = guest
            && self.may_splice(vm)
            && host.set_nonblocking(true).is_ok()
        {
            // What the service sends leaves at once, however small; without it the connection works, too.
            let _ = host.set_nodelay(true);
            let at = local_of(host.local_addr());
            return self.splice((host, client, at), (target, guest), cx);
        }
        let ours = guest.and_then(|guest| self.free_port(vm, guest, Protocol::Tcp));
        let (key, has_socket) = (self.fresh_key(), self.has_socket_for(vm));
        let Some(served) = self.vms.get_mut(&vm) else {
            return stream::reset_host(host);
        };
        let room = has_socket && served.counts.streams < self.limits.streams_per_vm;
        let Some((ours, guest)) = ours.zip(guest).filter(|_| room) else {
            served.counts.streams_refused += 1;
            return stream::reset_host(host);
        };
        let at = local_of(host.local_addr());
        let name = Name::new(vm, ours, guest);
        let link = Link::to(
            (&served.net, &served.early),
            &mut self.packets,
            name.ends(),
            0,
            cx.now_ns,
        );
        let prepared = host.set_nonblocking(true);
        let token = relay_token(key);
        let Ok(stream) = prepared.and_then(|()| Stream::open(host, token, cx.poller, &link)) else {
            served.counts.streams_refused += 1;
            return;
        };
        served.counts.streams += 1;
        served.counts.streams_accepted += 1;
        let ends = Ends {
            protocol: Protocol::Tcp,
            guest,
            remote: client,
            by: By::Forward { at, rule },
        };
        let held = Held::Entry(key);
        let flow = self.journal.begin(ends, held, served, cx.now_ns);
        self.insert(key, name, flow, Kind::Stream(stream));
        self.drive(key, Event::Timer, cx);
    }

    /// Receives clients' datagrams that wait on a socket.
    pub(super) fn take_datagrams(&mut self, key: u32, cx: &mut Context<'_>) {
        let mut buffer = std::mem::take(&mut self.datagram);
        buffer.resize(usize::from(u16::MAX), 0);
        for _ in 0..BATCH {
            let Some(Entry::Datagrams(socket)) = self.entries.get(&key) else {
                break;
            };
            let target = socket.target;
            match socket.receive(key, &mut buffer) {
                Ok(Some((len, client))) => {
                    self.relay_datagram(target, client, &buffer[..len], cx);
                }
                Ok(None) => {}
                Err(_) => break,
            }
        }
        self.datagram = buffer;
    }

    fn relay_datagram(
        &mut self,
        target: Target,
        client: Client,
        payload: &[u8],
        cx: &mut Context<'_>,
    ) {
        let vm = target.vm;
        let port = self.associations.port_of(&client);
        let port = port.or_else(|| self.associate(target, client, cx.now_ns));
        let Some(served) = self.vms.get_mut(&vm) else {
            return;
        };
        let Some(port) = port else {
            served.counts.associations_refused += 1;
            return;
        };
        let guest = self.associations.get(vm, port).map(|known| known.guest);
        let ours = guest.and_then(|guest| served.net.gateway_of(guest.ip()));
        let Some((guest, ours)) = guest.zip(ours) else {
            return;
        };
        let len = headers_len(Version::of(ours)) + payload.len();
        let datagram = Datagram {
            from: SocketAddr::new(ours, port),
            to: guest,
            payload,
        };
        let is_sent = send(datagram.emit(), &served.net, cx.out);
        if let Some(association) = self.associations.get_mut(vm, port) {
            association.active_ns = cx.now_ns;
            if is_sent {
                let flow = &mut association.flow;
                served.counts.received(flow, single(len), cx.now_ns);
                served.counts.bytes_to_guest += payload.len() as u64;
                served.net.stats.saw(Direction::Rx, cx.now_ns);
            }
        }
    }

    /// Processes a guest's datagram to the gateway.
    pub(super) fn answer_client(
        &mut self,
        name: Name,
        payload: &[u8],
        segments: Segments,
        now_ns: u64,
    ) -> Taken {
        let Name { vm, ours, guest } = name;
        let Some(association) = self.associations.get_mut(vm, ours.port()) else {
            return Taken::No;
        };
        if association.guest != guest {
            return Taken::No;
        }
        let client = association.client;
        let (Some(Entry::Datagrams(socket)), Some(served)) =
            (self.entries.get(&client.socket), self.vms.get_mut(&vm))
        else {
            return Taken::No;
        };
        association.active_ns = now_ns;
        served.counts.sent(&mut association.flow, segments, now_ns);
        if socket.send(&client, payload).is_ok() {
            served.counts.bytes_from_guest += payload.len() as u64;
        }
        Taken::Yes
    }

    fn associate(&mut self, target: Target, client: Client, now_ns: u64) -> Option<u16> {
        let Target {
            vm,
            guest_port,
            rule,
        } = target;
        let served = self.vms.get(&vm)?;
        if served.counts.associations >= self.limits.associations_per_vm {
            return None;
        }
        let guest = self.guest_of(vm, client.addr.ip(), guest_port)?;
        let port = self.free_port(vm, guest, Protocol::Udp)?.port();
        let Some(Entry::Datagrams(socket)) = self.entries.get(&client.socket) else {
            return None;
        };
        let host_port = local_of(socket.socket().local_addr()).port();
        let served = self.vms.get_mut(&vm)?;
        let ends = Ends {
            protocol: Protocol::Udp,
            guest,
            remote: client.addr,
            by: By::Forward {
                at: SocketAddr::new(client.host, host_port),
                rule,
            },
        };
        served.counts.associations += 1;
        let held = Held::Association(vm, port);
        let association = Association {
            client,
            guest,
            active_ns: now_ns,
            flow: self.journal.begin(ends, held, served, now_ns),
        };
        self.associations.insert(vm, port, association);
        let expiry_ns = now_ns + self.limits.association_idle_ns;
        self.expire_at_ns.get_or_insert(expiry_ns);
        Some(port)
    }

    /// Removes silent clients. All are examined a few times per idle timeout.
    pub(super) fn expire_associations(&mut self, now_ns: u64) {
        if self.expire_at_ns.is_none_or(|at| at > now_ns) {
            return;
        }
        let idle_ns = self.limits.association_idle_ns;
        for gone in self
            .associations
            .expire((now_ns + 1).saturating_sub(idle_ns))
        {
            self.association_over(gone, "idle", now_ns);
        }
        self.expire_at_ns = (!self.associations.is_empty()).then(|| now_ns + idle_ns / 8);
    }

    /// Ends a client's association. `reason` is the word for records.
    pub(super) fn end_association(
        &mut self,
        vm: VmId,
        port: u16,
        reason: &'static str,
        now_ns: u64,
    ) {
        if let Some(gone) = self.associations.remove(vm, port) {
            self.association_over(gone, reason, now_ns);
        }
    }

    fn association_over(&mut self, gone: Association, reason: &'static str, now_ns: u64) {
        if let Some(served) = self.vms.get_mut(&gone.flow.vm) {
            served.counts.associations -= 1;
            self.journal.end(&gone.flow, reason, served, now_ns);
        }
    }

    /// Address and port of the guest to which a client of this address is relayed
    /// ([`addresses::guest_for`]).
    fn guest_of(&self, vm: VmId, client: IpAddr, port: u16) -> Option<SocketAddr> {
        let served = self.vms.get(&vm)?;
        let guest = addresses::guest_for(&served.net, client, || served.row6)?;
        Some(SocketAddr::new(guest, port))
    }

    /// A port of the gateway that is free toward the guest's port; `None` if there is none. Ports
    /// are used in turn, so that one is not reused soon.
    pub(super) fn free_port(
        &mut self,
        vm: VmId,
        guest: SocketAddr,
        protocol: Protocol,
    ) -> Option<SocketAddr> {
        let served = self.vms.get_mut(&vm)?;
        let gateway = served.net.gateway_of(guest.ip())?;
        for _ in 0..PORTS {
            let ours = SocketAddr::new(gateway, served.next_port);
            served.next_port = match served.next_port {
                last if last == FIRST_PORT + PORTS - 1 => FIRST_PORT,
                port => port + 1,
            };
            let name = Name::new(vm, ours, guest);
            let taken = match protocol {
                Protocol::Tcp => self.connections.contains_key(&name),
                _ => {
                    self.associations.has_port(vm, ours.port())
                        || self.exchanges.contains_key(&name)
                }
            };
            if !taken {
                return Some(ours);
            }
        }
        None
    }

    /// Pauses a listener, which the poller would otherwise report repeatedly.
    fn pause(&mut self, key: u32, cx: &mut Context<'_>) {
        if self.wait_on_listener(key, Interest::None, cx) == Some(true) {
            self.deadlines.insert((cx.now_ns + PAUSE_NS, key));
        }
    }

    pub(super) fn resume(&mut self, key: u32, cx: &mut Context<'_>) {
        // If that fails, trying again later does no harm.
        if self.wait_on_listener(key, Interest::Read, cx) == Some(false) {
            self.deadlines.insert((cx.now_ns + PAUSE_NS, key));
        }
    }

    /// Whether the poller took the change; `None` if there is no such listener.
    fn wait_on_listener(&self, key: u32, on: Interest, cx: &Context<'_>) -> Option<bool> {
        let Some(Entry::Listener(listener, _)) = self.entries.get(&key) else {
            return None;
        };
        let changed = cx.poller.modify(listener.as_fd(), relay_token(key), on);
        Some(changed.is_ok())
    }
}

/// Address of a socket. A socket that was closed meanwhile has none.
pub(super) fn local_of(address: io::Result<SocketAddr>) -> SocketAddr {
    address.unwrap_or(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0))
}

pub(super) fn relay_token(key: u32) -> Token {
    Token {
        subsystem: Subsystem::Relay,
        key,
    }
}

fn is_passing(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::Interrupted
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
    )
}
