//! The connections, between the driver's packets and the sockets of the host's programs. It knows
//! no rings and waits for nothing.
use std::{
    collections::{HashMap, VecDeque},
    io::{self, ErrorKind},
    os::fd::{AsRawFd, OwnedFd},
    os::unix::net::UnixListener,
    rc::Rc,
    sync::Arc,
    time::Instant,
};

use libc::iovec;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use super::{
    MAX_CONNECTIONS, MAX_RESETS, VsockCounters,
    connection::{Connection, End, Ports},
    counters::count,
    packet::{HEADER_BYTES, HOST_CID, Header, STREAM, operation},
    requests::{Answer, Refusal, Requests},
    sockets,
};
use crate::virtio::pieces;

/// First port of the host's ends: what the guest's programs choose for themselves is lower.
const FIRST_HOST_PORT: u32 = 1 << 30;
/// Longest line that says where to: `CONNECT 4294967295`, with the end of the line.
const LINE_BYTES: usize = 32;

/// All connections of the device.
pub(super) struct Switch<'a> {
    cid: u32,
    epoll: &'a Epoll,
    counters: Arc<VsockCounters>,
    /// Sockets by the number with which they are signalled.
    slots: Vec<Slot>,
    by_ports: HashMap<Ports, usize>,
    requests: Rc<Requests>,
    /// Requests of the guest without an answer, oldest first.
    pending: VecDeque<Pending>,
    next_host_port: u32,
    /// Connections that may have a packet for the guest, in order, each once.
    ready: VecDeque<usize>,
    is_ready: [bool; MAX_CONNECTIONS],
    /// RSTs for the guest.
    resets: VecDeque<Header>,
    /// Buffer for the pieces of a packet's payload, reused.
    scratch: Vec<iovec>,
}

#[derive(Debug)]
enum Slot {
    Free,
    /// A program of the host did not say yet where to.
    Greeting {
        socket: OwnedFd,
        line: Vec<u8>,
    },
    /// The guest has asked for it by this packet, and there is no answer yet.
    Pending(Header),
    Connection(Box<Connection>),
}

/// A request of the guest without an answer.
#[derive(Debug)]
struct Pending {
    id: u32,
    slot: usize,
    /// When it is refused.
    until: Instant,
}

impl<'a> Switch<'a> {
    /// Sockets are watched by `epoll`, with numbers below [`MAX_CONNECTIONS`].
    pub(super) fn new(
        cid: u32,
        epoll: &'a Epoll,
        counters: Arc<VsockCounters>,
        requests: Rc<Requests>,
    ) -> Switch<'a> {
        Switch {
            cid,
            epoll,
            counters,
            slots: (0..MAX_CONNECTIONS).map(|_| Slot::Free).collect(),
            by_ports: HashMap::new(),
            requests,
            pending: VecDeque::new(),
            next_host_port: FIRST_HOST_PORT,
            ready: VecDeque::new(),
            is_ready: [false; MAX_CONNECTIONS],
            resets: VecDeque::new(),
            scratch: Vec::new(),
        }
    }

    /// Sets the next port of a host's end, that of a snapshot.
    pub(super) fn begin_at(&mut self, port: u32) {
        self.next_host_port = port.max(FIRST_HOST_PORT);
    }

    /// Returns the next port of a host's end.
    pub(super) fn next_port(&self) -> u32 {
        self.next_host_port
    }

    /// Returns whether the guest's next packet may be taken: there is room for an answer.
    pub(super) fn can_take(&self) -> bool {
        self.resets.len() < MAX_RESETS
    }

    /// Returns whether there may be a packet for the guest.
    pub(super) fn has_output(&self) -> bool {
        !self.resets.is_empty() || !self.ready.is_empty()
    }

    /// Counts what there is, and panics if it does not fit together.
    #[cfg(any(test, feature = "fake"))]
    pub(super) fn census(&self) -> super::stepped::Census {
        let mut census = super::stepped::Census {
            resets: self.resets.len(),
            ..Default::default()
        };
        for (number, slot) in self.slots.iter().enumerate() {
            let ports = match slot {
                Slot::Free => continue,
                Slot::Greeting { .. } => {
                    census.greetings += 1;
                    continue;
                }
                Slot::Pending(request) => {
                    census.pending += 1;
                    let mut all = self.pending.iter();
                    assert!(all.any(|pending| pending.slot == number));
                    Ports {
                        host: request.dst_port,
                        guest: request.src_port,
                    }
                }
                Slot::Connection(connection) => {
                    let ports = connection.ports;
                    census.connections += 1;
                    let held = connection.held();
                    if connection.is_open() {
                        census.open.insert((ports.host, ports.guest), held);
                    }
                    ports
                }
            };
            assert_eq!(self.by_ports.get(&ports), Some(&number));
        }
        assert_eq!(self.pending.len(), census.pending);
        assert_eq!(self.by_ports.len(), census.pending + census.connections);
        let ready = self.is_ready.iter().filter(|is_ready| **is_ready).count();
        assert_eq!(self.ready.len(), ready);
        census
    }

    /// Accepts those that wait at the listening socket.
    pub(super) fn accept(&mut self, listener: &UnixListener) {
        // When no descriptor is left, the rest wait for the next one that comes.
        while let Ok(socket) = sockets::accept(listener) {
            let watched = self
                .free_slot()
                .filter(|slot| self.watch(&socket, *slot).is_ok());
            match watched {
                Some(slot) => {
                    let line = Vec::new();
                    self.slots[slot] = Slot::Greeting { socket, line };
                }
                None => count(&self.counters.refused_host, 1),
            }
        }
    }

    fn free_slot(&self) -> Option<usize> {
        self.slots
            .iter()
            .position(|slot| matches!(slot, Slot::Free))
    }

    fn watch(&self, socket: &OwnedFd, slot: usize) -> io::Result<()> {
        let events = EventSet::IN | EventSet::OUT | EventSet::READ_HANG_UP;
        let event = EpollEvent::new(events | EventSet::EDGE_TRIGGERED, slot as u64);
        self.epoll
            .ctl(ControlOperation::Add, socket.as_raw_fd(), event)
    }

    /// A socket was signalled.
    pub(super) fn signalled(&mut self, slot: usize, events: EventSet) {
        if let Some(Slot::Greeting { .. }) = self.slots.get(slot) {
            self.greet(slot);
        }
        // Otherwise it says nothing yet, or was closed after the signal.
        if let Some(Slot::Connection(connection)) = self.slots.get_mut(slot) {
            let hung_up = events.intersects(EventSet::HANG_UP | EventSet::ERROR);
            let result = connection.signalled(hung_up, &self.counters);
            self.go_on(slot, result);
        }
    }

    /// Reads the line that says where to.
    fn greet(&mut self, slot: usize) {
        let Slot::Greeting { socket, line } = &mut self.slots[slot] else {
            return;
        };
        let port = loop {
            // What is behind the line is the guest's: it stays in the socket.
            match read_byte(socket) {
                Ok(Some(b'\n')) => break asked_port(line),
                Ok(Some(byte)) if line.len() < LINE_BYTES => line.push(byte),
                Ok(_) => break None,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => break None,
            }
        };
        let greeting = std::mem::replace(&mut self.slots[slot], Slot::Free);
        let (Slot::Greeting { socket, .. }, Some(guest)) = (greeting, port) else {
            count(&self.counters.refused_host, 1);
            return;
        };
        let ports = Ports {
            host: self.free_host_port(guest),
            guest,
        };
        self.by_ports.insert(ports, slot);
        let connection = Connection::asking(ports, socket);
        self.slots[slot] = Slot::Connection(Box::new(connection));
        self.make_ready(slot);
    }

    /// Returns a port for the host's end of a connection to this port.
    fn free_host_port(&mut self, guest: u32) -> u32 {
        loop {
            let host = self.next_host_port;
            // There are more ports than connections.
            self.next_host_port = host.checked_add(1).unwrap_or(FIRST_HOST_PORT);
            if !self.by_ports.contains_key(&Ports { host, guest }) {
                return host;
            }
        }
    }

    /// Takes a packet of the guest: buffers that the device reads.
    pub(super) fn take(&mut self, packet: &[iovec]) {
        let mut bytes = [0; HEADER_BYTES];
        // SAFETY: mapped memory of the guest.
        let whole = unsafe { pieces::read(packet, 0, &mut bytes) } == HEADER_BYTES;
        let header = Header::from_bytes(&bytes);
        let there = pieces::total(packet).saturating_sub(HEADER_BYTES);
        let len = header.len as usize;
        if !whole || len > there || header.src_cid != u64::from(self.cid) {
            count(&self.counters.dropped, 1);
            return;
        }
        let ports = Ports {
            host: header.dst_port,
            guest: header.src_port,
        };
        let is_ours = header.dst_cid == HOST_CID && header.kind == STREAM;
        let slot = self.by_ports.get(&ports).copied().filter(|_| is_ours);
        let Some(slot) = slot else {
            if is_ours && header.op == operation::REQUEST {
                self.request(ports, &header);
            } else if header.op != operation::RST {
                count(&self.counters.refused_guest, 1);
                self.resets.push_back(header.reset());
            }
            return;
        };
        if header.op == operation::RST {
            self.remove(slot);
            return;
        }
        let Slot::Connection(connection) = &mut self.slots[slot] else {
            // It has to wait for the answer.
            count(&self.counters.violations, 1);
            self.remove(slot);
            self.resets.push_back(header.reset());
            return;
        };
        let mut data = std::mem::take(&mut self.scratch);
        data.clear();
        pieces::append_part(packet, HEADER_BYTES, len, &mut data);
        let result = connection.take(&header, &data, &self.counters);
        self.scratch = data;
        self.go_on(slot, result);
    }

    /// The guest asks for a connection.
    fn request(&mut self, ports: Ports, header: &Header) {
        let free = self.free_slot().ok_or(Refusal::Full);
        let asked = free.and_then(|slot| Ok((slot, self.requests.ask(ports.host)?)));
        match asked {
            Ok((slot, (id, until))) => {
                self.by_ports.insert(ports, slot);
                self.slots[slot] = Slot::Pending(*header);
                self.pending.push_back(Pending { id, slot, until });
            }
            Err(refusal) => self.refuse(header, refusal),
        }
    }

    fn refuse(&mut self, request: &Header, refusal: Refusal) {
        let counter = match refusal {
            Refusal::Program => &self.counters.refused_requests,
            Refusal::Full => &self.counters.refused_requests_full,
            Refusal::Silence => &self.counters.refused_requests_silent,
        };
        count(counter, 1);
        self.resets.push_back(request.reset());
    }

    /// Takes the answers to the guest's requests. Those that can have none any more are refused.
    pub(super) fn answered(&mut self) {
        loop {
            match self.requests.next() {
                Ok(Some(Answer { id, socket })) => self.settle(id, socket),
                Ok(None) => return,
                Err(refusal) => {
                    while let Some(pending) = self.pending.pop_front() {
                        self.end_pending(pending.slot, Err(refusal));
                    }
                    return;
                }
            }
        }
    }

    fn settle(&mut self, id: u32, socket: Option<OwnedFd>) {
        // The socket is closed if the guest has given up, or was refused.
        let Some(at) = self.pending.iter().position(|pending| pending.id == id) else {
            return;
        };
        let Some(Pending { slot, .. }) = self.pending.remove(at) else {
            return;
        };
        let socket = socket.ok_or(Refusal::Program);
        let watched = socket.and_then(|socket| match self.watch(&socket, slot) {
            Ok(()) => Ok(socket),
            Err(_) => Err(Refusal::Full),
        });
        self.end_pending(slot, watched);
    }

    /// Refuses the requests that have waited too long. Answers are [taken](Switch::answered) before.
    pub(super) fn expire(&mut self, now: Instant) {
        while let Some(pending) = self.pending.pop_front_if(|pending| pending.until <= now) {
            self.end_pending(pending.slot, Err(Refusal::Silence));
        }
    }

    /// Returns when the next request will have waited too long.
    pub(super) fn next_expiry(&self) -> Option<Instant> {
        self.pending.front().map(|pending| pending.until)
    }

    /// A request has its socket, which is watched, or is refused.
    fn end_pending(&mut self, slot: usize, result: Result<OwnedFd, Refusal>) {
        let Slot::Pending(request) = std::mem::replace(&mut self.slots[slot], Slot::Free) else {
            return;
        };
        let ports = Ports {
            host: request.dst_port,
            guest: request.src_port,
        };
        match result {
            Ok(socket) => {
                let connection = Connection::accepted(ports, socket, &request);
                self.slots[slot] = Slot::Connection(Box::new(connection));
                count(&self.counters.opened_by_guest, 1);
                self.make_ready(slot);
            }
            Err(refusal) => {
                self.by_ports.remove(&ports);
                self.refuse(&request, refusal);
            }
        }
    }

    /// Writes the next packet for the guest into a buffer of the driver. Returns its length; `None`
    /// if there is none now.
    ///
    /// # Safety
    /// The buffer is mapped memory of the guest, which the driver gave to be written. It has room
    /// for a header.
    pub(super) unsafe fn next_packet(&mut self, buffer: &[iovec]) -> Option<usize> {
        loop {
            if let Some(reset) = self.resets.pop_front() {
                // SAFETY: as of this function.
                return Some(unsafe { pieces::write(buffer, 0, &reset.to_bytes()) });
            }
            let slot = self.ready.pop_front()?;
            self.is_ready[slot] = false;
            let Slot::Connection(connection) = &mut self.slots[slot] else {
                continue;
            };
            // SAFETY: as of this function.
            let packet = unsafe {
                connection.next_packet(self.cid, buffer, &mut self.scratch, &self.counters)
            };
            match packet {
                Ok(None) => {}
                Ok(Some(bytes)) => {
                    // Behind the others: each has its turn.
                    self.make_ready(slot);
                    return Some(bytes);
                }
                Err(end) => self.end(slot, &end),
            }
        }
    }

    fn go_on(&mut self, slot: usize, result: Result<(), End>) {
        match result {
            Ok(()) => self.make_ready(slot),
            Err(end) => self.end(slot, &end),
        }
    }

    fn make_ready(&mut self, slot: usize) {
        if !std::mem::replace(&mut self.is_ready[slot], true) {
            self.ready.push_back(slot);
        }
    }

    /// Ends a connection, with RST to the guest if it knows of it.
    fn end(&mut self, slot: usize, end: &End) {
        if *end == End::Violation {
            count(&self.counters.violations, 1);
        }
        let Some(connection) = self.remove(slot) else {
            return;
        };
        if connection.is_known() {
            self.resets.push_back(Header {
                src_cid: HOST_CID,
                dst_cid: self.cid.into(),
                src_port: connection.ports.host,
                dst_port: connection.ports.guest,
                kind: STREAM,
                op: operation::RST,
                ..Header::default()
            });
        }
    }

    fn remove(&mut self, slot: usize) -> Option<Box<Connection>> {
        match std::mem::replace(&mut self.slots[slot], Slot::Free) {
            Slot::Connection(connection) => {
                self.by_ports.remove(&connection.ports);
                unwatch(self.epoll, connection.socket());
                Some(connection)
            }
            Slot::Pending(request) => {
                self.by_ports.remove(&Ports {
                    host: request.dst_port,
                    guest: request.src_port,
                });
                self.pending.retain(|pending| pending.slot != slot);
                None
            }
            Slot::Free | Slot::Greeting { .. } => None,
        }
    }
}

impl Drop for Switch<'_> {
    fn drop(&mut self) {
        for slot in &self.slots {
            if let Slot::Connection(connection) = slot {
                unwatch(self.epoll, connection.socket());
            }
        }
    }
}

/// Has a socket not be signalled any more. Its end alone would not do: the connector's copy of it may
/// live a moment longer.
fn unwatch(epoll: &Epoll, socket: &OwnedFd) {
    let none = EpollEvent::default();
    let _ = epoll.ctl(ControlOperation::Delete, socket.as_raw_fd(), none);
}

/// Reads one byte; `None` at the end.
fn read_byte(socket: &OwnedFd) -> io::Result<Option<u8>> {
    let mut byte = [0];
    let piece = iovec {
        iov_base: byte.as_mut_ptr().cast(),
        iov_len: 1,
    };
    // SAFETY: the piece is the byte's.
    let read = unsafe { sockets::read(socket, &[piece]) }?;
    Ok((read > 0).then_some(byte[0]))
}

/// Returns the port of a line `CONNECT <port>`, without its end.
fn asked_port(line: &[u8]) -> Option<u32> {
    let line = std::str::from_utf8(line).ok()?;
    let port = line.strip_prefix("CONNECT ")?;
    port.trim_end_matches('\r').parse().ok()
}

#[cfg(test)]
#[path = "switch_test.rs"]
mod tests;
