//! The guest: a second TCP stack, and what both ends of a connection do and see.
use std::{
    collections::{HashSet, VecDeque},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
};

use smoltcp::{
    iface::{Config, Interface, SocketHandle, SocketSet},
    phy::{self, Checksum, DeviceCapabilities, Medium},
    socket::tcp,
    time::Instant,
    wire::{HardwareAddress, IpAddress, IpCidr},
};

use crate::packet::{Ip, Packet, Transport};

/// When one end of a connection shuts its direction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Close {
    WhenSent,
    AfterPeer,
    Never,
}

/// One end of a connection, and what it saw.
#[derive(Debug)]
pub(super) struct End {
    pub(super) send: Vec<u8>,
    pub(super) sent: usize,
    close: Close,
    pub(super) closed: bool,
    pub(super) reads: bool,
    pub(super) received: Vec<u8>,
    pub(super) eof: bool,
    pub(super) reset: bool,
}

impl End {
    pub(super) fn new(send: Vec<u8>, close: Close) -> Self {
        Self {
            send,
            sent: 0,
            close,
            closed: false,
            reads: true,
            received: Vec::new(),
            eof: false,
            reset: false,
        }
    }

    pub(super) fn is_to_close(&self) -> bool {
        let due = match self.close {
            Close::WhenSent => true,
            Close::AfterPeer => self.eof,
            Close::Never => false,
        };
        due && !self.closed && self.sent == self.send.len()
    }
}

/// The guest's address of IPv6.
pub(super) const GUEST6: Ipv6Addr = Ipv6Addr::new(0xfd00, 1, 2, 3, 0, 0, 0, 0x15);

/// A guest with a TCP stack of its own.
pub(super) struct Guest {
    interface: Interface,
    sockets: SocketSet<'static>,
    pub(super) ends: Vec<(SocketHandle, End)>,
    inbox: VecDeque<Vec<u8>>,
    pub(super) outbox: Vec<Vec<u8>>,
    waiting: Vec<(u16, End)>,
    opened: HashSet<u16>,
}

impl Guest {
    pub(super) fn new() -> Self {
        let mut config = Config::new(HardwareAddress::Ip);
        config.random_seed = 42;
        let mut queues = (VecDeque::new(), Vec::new());
        let mut device = Nic(&mut queues.0, &mut queues.1);
        let mut interface = Interface::new(config, &mut device, Instant::ZERO);
        interface.update_ip_addrs(|addrs| {
            addrs
                .push(IpCidr::new(IpAddress::v4(10, 0, 2, 15), 24))
                .unwrap();
            addrs
                .push(IpCidr::new(IpAddress::Ipv6(GUEST6), 64))
                .unwrap();
        });
        let router = Ipv4Addr::new(10, 0, 2, 2);
        interface
            .routes_mut()
            .add_default_ipv4_route(router)
            .unwrap();
        interface
            .routes_mut()
            .add_default_ipv6_route(Ipv6Addr::new(0xfd00, 1, 2, 3, 0, 0, 0, 1))
            .unwrap();
        Self {
            interface,
            sockets: SocketSet::new(Vec::new()),
            ends: Vec::new(),
            inbox: VecDeque::new(),
            outbox: Vec::new(),
            waiting: Vec::new(),
            opened: HashSet::new(),
        }
    }

    fn add(&mut self, end: End) -> SocketHandle {
        let buffer = || tcp::SocketBuffer::new(vec![0; 32_768]);
        let handle = self.sockets.add(tcp::Socket::new(buffer(), buffer()));
        self.ends.push((handle, end));
        handle
    }

    /// Serves one of many connections to `port`. It listens only when its SYN comes: smoltcp gives
    /// a repeated SYN to whoever listens, before the socket whose connection it is.
    pub(super) fn serve(&mut self, port: u16, end: End) {
        self.waiting.push((port, end));
    }

    pub(super) fn arrive(&mut self, packet: Vec<u8>) {
        let transport = Ip::parse(&packet).and_then(Packet::parse);
        if let Ok(Transport::Tcp(tcp)) = transport.map(|packet| packet.transport)
            && tcp.is_opening_syn()
            && let Some(index) = self
                .waiting
                .iter()
                .position(|(port, _)| *port == tcp.destination)
            && self.opened.insert(tcp.source)
        {
            let (port, end) = self.waiting.remove(index);
            self.listen(port, end);
        }
        self.inbox.push_back(packet);
    }

    /// Serves one connection to `port`.
    pub(super) fn listen(&mut self, port: u16, end: End) {
        let handle = self.add(end);
        self.socket(handle).listen(port).unwrap();
    }

    pub(super) fn connect(&mut self, to: impl Into<SocketAddr>, from: u16, end: End) {
        let handle = self.add(end);
        let socket = self.sockets.get_mut::<tcp::Socket<'_>>(handle);
        let to = to.into();
        let remote = (IpAddress::from(to.ip()), to.port());
        socket
            .connect(self.interface.context(), remote, from)
            .unwrap();
    }

    pub(super) fn socket(&mut self, handle: SocketHandle) -> &mut tcp::Socket<'static> {
        self.sockets.get_mut(handle)
    }

    pub(super) fn abort(&mut self, index: usize) {
        let handle = self.ends[index].0;
        self.socket(handle).abort();
    }

    /// Time at which its stack has something to do, ns.
    pub(super) fn due_ns(&mut self, now_ns: u64) -> Option<u64> {
        let now = Instant::from_micros((now_ns / 1_000) as i64);
        let due = self.interface.poll_at(now, &self.sockets)?;
        Some(due.total_micros() as u64 * 1_000)
    }

    pub(super) fn step(&mut self, now_ns: u64) {
        let now = Instant::from_micros((now_ns / 1_000) as i64);
        let mut device = Nic(&mut self.inbox, &mut self.outbox);
        self.interface.poll(now, &mut device, &mut self.sockets);
        for (handle, end) in &mut self.ends {
            let socket = self.sockets.get_mut::<tcp::Socket<'_>>(*handle);
            let was_open = socket.is_active() || socket.is_listening();
            while end.sent < end.send.len() && socket.can_send() {
                end.sent += socket.send_slice(&end.send[end.sent..]).unwrap();
            }
            while end.reads && socket.can_recv() {
                let received = &mut end.received;
                let read = |bytes: &mut [u8]| {
                    received.extend_from_slice(bytes);
                    (bytes.len(), ())
                };
                socket.recv(read).unwrap();
            }
            end.eof |= !socket.can_recv()
                && matches!(socket.recv(|_| (0, ())), Err(tcp::RecvError::Finished));
            end.reset |= !was_open && !end.eof;
            // In LAST-ACK smoltcp 0.14.0 counts no duplicate acknowledgements, so each loss there takes
            // a retransmission timer, of up to 60 s: a guest that ends second does so once all is
            // acknowledged.
            let may_close = socket.state() != tcp::State::CloseWait || socket.send_queue() == 0;
            if end.is_to_close() && socket.may_send() && may_close {
                end.closed = true;
                socket.close();
            }
        }
        self.interface.poll(
            now,
            &mut Nic(&mut self.inbox, &mut self.outbox),
            &mut self.sockets,
        );
    }
}

struct Nic<'a>(&'a mut VecDeque<Vec<u8>>, &'a mut Vec<Vec<u8>>);
struct Arrived(Vec<u8>);
struct Leaving<'a>(&'a mut Vec<Vec<u8>>);

impl phy::Device for Nic<'_> {
    type RxToken<'t>
        = Arrived
    where
        Self: 't;
    type TxToken<'t>
        = Leaving<'t>
    where
        Self: 't;

    fn receive(&mut self, _: Instant) -> Option<(Arrived, Leaving<'_>)> {
        Some((Arrived(self.0.pop_front()?), Leaving(self.1)))
    }

    fn transmit(&mut self, _: Instant) -> Option<Leaving<'_>> {
        Some(Leaving(self.1))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = 1_500;
        // It verifies what the relay sends, and leaves its own to the device, as offloads do.
        capabilities.checksum.tcp = Checksum::Rx;
        capabilities
    }
}

impl phy::RxToken for Arrived {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, read: F) -> R {
        read(&self.0)
    }
}

impl phy::TxToken for Leaving<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, write: F) -> R {
        let mut packet = vec![0; len];
        let result = write(&mut packet);
        self.0.push(packet);
        result
    }
}
