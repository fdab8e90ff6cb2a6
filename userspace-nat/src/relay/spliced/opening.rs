//! How a client is continued inside, or by the TAP.
use std::{
    io,
    net::{SocketAddr, TcpStream},
    os::fd::AsRawFd as _,
};

use nix::sys::socket::{SockaddrStorage, connect};
use slipgate_abi::{Protocol, VmId};

use super::{
    super::{
        Entry, Event, Kind, Name, Relay, Served, Target,
        forward::relay_token,
        host_socket,
        journal::{By, Ends, Held},
        link::Link,
        pipe::Direction,
        stream::{self, Stream},
    },
    Inside, MORE_SOCKETS, Spliced, State, count,
};
use crate::{
    packet::Version,
    poll::{Context, Interest},
    port::single,
    tcp::headers_len,
};

impl Relay {
    /// Whether a client of a forward of this VM is to be continued inside its namespace.
    pub(in crate::relay) fn may_splice(&self, vm: VmId) -> bool {
        let has_namespace = self.namespace.as_ref().is_some_and(|(of, _)| *of == vm);
        let has_room = |served: &Served| served.counts.streams < self.limits.streams_per_vm;
        let each = 1 + MORE_SOCKETS as usize;
        let spliced = |served: &Served| served.counts.spliced as usize;
        let taken = self.vms.values().map(spliced).sum::<usize>() * each;
        has_namespace
            && taken + each <= self.limits.sockets / 2
            && self.vms.get(&vm).is_some_and(has_room)
            && !self.is_watched
            && self.has_sockets_for(vm, each)
    }

    /// Begins to serve an accepted client, whose connection inside begins in its turn.
    pub(in crate::relay) fn splice(
        &mut self,
        (host, client, at): (TcpStream, SocketAddr, SocketAddr),
        (target, guest): (Target, SocketAddr),
        cx: &mut Context<'_>,
    ) {
        let key = self.fresh_key();
        let Some(served) = self.vms.get_mut(&target.vm) else {
            return stream::reset_host(host);
        };
        served.counts.streams += 1;
        served.counts.spliced += 1;
        served.counts.streams_accepted += 1;
        let ends = Ends {
            protocol: Protocol::Tcp,
            guest,
            remote: client,
            by: By::Forward {
                at,
                rule: target.rule,
            },
        };
        let flow = self
            .journal
            .begin(ends, Held::Entry(key), served, cx.now_ns);
        let deadline_ns = cx.now_ns + self.limits.connect_ns;
        let spliced = Spliced {
            flow,
            deadline_ns,
            is_waiting: false,
            host,
            state: State::Accepted,
            opened_ns: cx.now_ns,
            progress_ns: cx.now_ns,
            has_failed: false,
        };
        self.entries.insert(key, Entry::Spliced(Box::new(spliced)));
        self.deadlines.insert((deadline_ns, key));
        self.join(key);
    }

    pub(super) fn connect_inside(&mut self, key: u32, cx: &mut Context<'_>) {
        let inside_key = self.fresh_key();
        let (Some(Entry::Spliced(spliced)), Some((_, namespace))) =
            (self.entries.get_mut(&key), &mut self.namespace)
        else {
            return;
        };
        let guest = spliced.flow.guest;
        let Some(socket) = namespace.take(Version::of(guest.ip())) else {
            return self.continue_by_tap(key, cx);
        };
        let begun = connect(socket.as_raw_fd(), &SockaddrStorage::from(guest));
        let is_begun = matches!(begun, Ok(()) | Err(nix::Error::EINPROGRESS));
        let token = relay_token(inside_key);
        if !is_begun || cx.poller.add(&socket, token, Interest::Edges).is_err() {
            return self.continue_by_tap(key, cx);
        }
        spliced.state = State::Connecting(Inside {
            socket,
            key: inside_key,
        });
        self.entries.insert(inside_key, Entry::Inside(key));
        // Within one host it is accepted or refused by now, in most cases.
        self.connecting_inside(key, cx);
    }

    pub(super) fn connecting_inside(&mut self, key: u32, cx: &mut Context<'_>) {
        let Some(Entry::Spliced(spliced)) = self.entries.get_mut(&key) else {
            return;
        };
        let State::Connecting(inside) = &spliced.state else {
            return;
        };
        match host_socket::is_connected(&inside.socket, spliced.flow.guest) {
            Ok(false) => {}
            Ok(true) => self.connected_inside(key, cx),
            // Nobody listens there, or it met itself.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                self.continue_by_tap(key, cx);
            }
            // Who had accepted it, or the host, has ended it.
            Err(_) => self.reset_spliced(key, "reset", cx.now_ns),
        }
    }

    fn connected_inside(&mut self, key: u32, cx: &mut Context<'_>) {
        let Some(Entry::Spliced(spliced)) = self.entries.get_mut(&key) else {
            return;
        };
        let Some(served) = self.vms.get_mut(&spliced.flow.vm) else {
            return;
        };
        let token = relay_token(key);
        if cx
            .poller
            .add(&spliced.host, token, Interest::Edges)
            .is_err()
        {
            return self.reset_spliced(key, "reset", cx.now_ns);
        }
        let state = std::mem::replace(&mut spliced.state, State::Accepted);
        if let State::Connecting(inside) = state {
            spliced.state = State::Connected {
                inside,
                // The client's socket is waited on from now on. What the other had to say may have been
                // said while it was not connected.
                to_guest: Direction::new(false),
                from_guest: Direction::new(true),
            };
        }
        let took_us = cx.now_ns.saturating_sub(spliced.flow.opened_ns) / 1_000;
        spliced.flow.connect_us = u32::try_from(took_us).unwrap_or(u32::MAX).max(1);
        let segment = single(headers_len(Version::of(spliced.flow.guest.ip())));
        // SYN, its answer, and the acknowledgement.
        for is_to_guest in [true, false, true] {
            count(&mut spliced.flow, served, segment, is_to_guest, cx.now_ns);
        }
        spliced.progress_ns = cx.now_ns;
        let end_ns = spliced.end_ns(&self.limits);
        self.put_off(key, end_ns);
        self.join(key);
    }

    /// Continues a client's connection by the engine's own TCP and the TAP.
    fn continue_by_tap(&mut self, key: u32, cx: &mut Context<'_>) {
        let Some(Spliced { host, flow, .. }) = self.remove_spliced(key) else {
            return;
        };
        let (vm, guest) = (flow.vm, flow.guest);
        let ours = self.free_port(vm, guest, Protocol::Tcp);
        let Some(served) = self.vms.get_mut(&vm) else {
            return;
        };
        let opened = match ours {
            Some(ours) => {
                let name = Name::new(vm, ours, guest);
                let link = Link::to(
                    (&served.net, &served.early),
                    &mut self.packets,
                    name.ends(),
                    0,
                    cx.now_ns,
                );
                let stream = Stream::open(host, relay_token(key), cx.poller, &link);
                stream.ok().map(|stream| (name, stream))
            }
            None => {
                stream::reset_host(host);
                None
            }
        };
        let Some((name, stream)) = opened else {
            served.counts.streams_reset += 1;
            return self.journal.end(&flow, "reset", served, cx.now_ns);
        };
        served.counts.streams += 1;
        self.insert(key, name, flow, Kind::Stream(stream));
        self.drive(key, Event::Timer, cx);
    }
}
