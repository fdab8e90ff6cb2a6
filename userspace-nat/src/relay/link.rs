//! The guest's link for smoltcp: one packet in, packets out into a buffer.
use std::net::{IpAddr, SocketAddr};

use smoltcp::{
    iface::{Config, Interface, SocketHandle, SocketSet},
    phy::{self, Checksum, ChecksumCapabilities, DeviceCapabilities, Medium},
    socket::tcp,
    time::Instant,
    wire::{HardwareAddress, IpAddress, IpCidr},
};

use slipgate_abi::{
    segment::Segments,
    tcp::{Flags, Phase},
};

use crate::{
    gso,
    packet::{Ip, Packet, Transport, Version, transport::Tcp},
    port::VirtioNetHdr,
    vm::VmNet,
};

/// Most packets that one connection sends per poll. Otherwise a guest that announces a tiny MSS
/// could turn a buffer into tens of thousands.
const PACKETS_PER_POLL: usize = 64;
/// Time after which a connection that had more to send continues, ns.
const BREATHER_NS: u64 = 1_000_000;

/// IP packets for the guest, one after another in a reused buffer.
#[derive(Debug, Default)]
pub(super) struct Packets {
    bytes: Vec<u8>,
    ends: Vec<usize>,
    /// Buffer for a joined frame.
    frame: Vec<u8>,
}

impl Packets {
    pub(super) fn clear(&mut self) {
        self.bytes.clear();
        self.ends.clear();
    }

    /// Passes all packets to `send`, joined where possible, as [`gso::join`] does.
    pub(super) fn joined(&mut self, send: impl FnMut(VirtioNetHdr, &[u8], Segments)) {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        let packets = starts
            .zip(&self.ends)
            .map(|(start, end)| &self.bytes[start..*end]);
        gso::join(packets, &mut self.frame, send);
    }
}

/// Environment of a connection during a call.
#[derive(Debug)]
pub(super) struct Link<'a> {
    pub(super) out: &'a mut Packets,
    /// MTU of the guest's link, bytes.
    pub(super) mtu: usize,
    pub(super) now_ns: u64,
    /// Number of packets that may still be sent, in addition to those by which smoltcp answers at
    /// once.
    pub(super) may_send: usize,
    /// Whether more packets wait to be sent.
    pub(super) has_more: bool,
}

impl<'a> Link<'a> {
    /// The link of a VM, at this time.
    pub(super) fn to(vm: &VmNet, out: &'a mut Packets, now_ns: u64) -> Self {
        Self {
            out,
            mtu: usize::from(vm.mtu),
            now_ns,
            may_send: PACKETS_PER_POLL,
            has_more: false,
        }
    }
}

/// One TCP connection with a guest.
///
/// Each has an interface and a socket set of its own: smoltcp walks all sockets of a set for every
/// packet and poll, so a shared one would cost each connection the sum of all.
pub(super) struct Endpoint {
    interface: Interface,
    sockets: SocketSet<'static>,
    handle: SocketHandle,
    /// Time of the guest's last packet, ns.
    heard_ns: u64,
    /// Time since which an acknowledgement by the guest is due, ns.
    owed_since_ns: Option<u64>,
    /// The connection's state and the fill of its two buffers.
    condition: (tcp::State, usize, usize),
    condition_since_ns: u64,
    /// Last acknowledgement number of the guest, while only our FIN is unacknowledged.
    acknowledged: Option<u32>,
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let socket = self.sockets.get::<tcp::Socket<'_>>(self.handle);
        f.debug_struct("Endpoint")
            .field("state", &socket.state())
            .field("from_guest", &socket.recv_queue())
            .field("to_guest", &socket.send_queue())
            .field("owed_since_ns", &self.owed_since_ns)
            .finish_non_exhaustive()
    }
}

impl Endpoint {
    /// A connection that opens to the guest. The SYN is sent at the first poll. `buffer`: size of
    /// the buffer of each direction, bytes.
    pub(super) fn connect(
        local: SocketAddr,
        guest: SocketAddr,
        buffer: usize,
        link: &mut Link<'_>,
    ) -> Result<Self, tcp::ConnectError> {
        let mut endpoint = Self::new(local, buffer, link);
        let socket = endpoint.sockets.get_mut::<tcp::Socket<'_>>(endpoint.handle);
        socket.connect(
            endpoint.interface.context(),
            (IpAddress::from(guest.ip()), guest.port()),
            (IpAddress::from(local.ip()), local.port()),
        )?;
        Ok(endpoint)
    }

    /// A connection that accepts the guest's SYN to `local`.
    pub(super) fn listen(
        local: SocketAddr,
        buffer: usize,
        link: &mut Link<'_>,
    ) -> Result<Self, tcp::ListenError> {
        let mut endpoint = Self::new(local, buffer, link);
        endpoint
            .socket()
            .listen((IpAddress::from(local.ip()), local.port()))?;
        Ok(endpoint)
    }

    /// Answers a guest's SYN with RST, as a closed port does.
    pub(super) fn refuse(local: SocketAddr, syn: &[u8], link: &mut Link<'_>) {
        Self::new(local, 1, link).poll(Some(syn), link);
    }

    /// Starts its timeouts again, after a time in which no packets could pass.
    pub(super) fn begin_timers(&mut self, now_ns: u64) {
        self.heard_ns = now_ns;
        self.condition_since_ns = now_ns;
    }

    fn new(local: SocketAddr, buffer: usize, link: &mut Link<'_>) -> Self {
        let mut config = Config::new(HardwareAddress::Ip);
        config.random_seed = rand::random();
        let now = instant(link.now_ns);
        let mut interface = Interface::new(config, &mut Wire::new(None, link), now);
        interface.update_ip_addrs(|addrs| {
            // An interface has room for two, and has none yet.
            let _ = addrs.push(host_prefix(local.ip()));
        });
        let mut socket = tcp::Socket::new(
            tcp::SocketBuffer::new(vec![0; buffer]),
            tcp::SocketBuffer::new(vec![0; buffer]),
        );
        socket.set_nagle_enabled(false);
        let mut sockets = SocketSet::new(Vec::with_capacity(1));
        let handle = sockets.add(socket);
        Self {
            interface,
            sockets,
            handle,
            heard_ns: link.now_ns,
            owed_since_ns: None,
            condition: (tcp::State::Closed, 0, 0),
            condition_since_ns: link.now_ns,
            acknowledged: None,
        }
    }

    pub(super) fn socket(&mut self) -> &mut tcp::Socket<'static> {
        self.sockets.get_mut(self.handle)
    }

    /// Ends the connection with a reset, which is sent despite any limit.
    pub(super) fn abort(&mut self, link: &mut Link<'_>) {
        link.may_send = link.may_send.max(1);
        self.socket().abort();
        self.poll(None, link);
    }

    /// Processes a packet of the guest, if one is given, and sends packets that are due.
    pub(super) fn poll(&mut self, incoming: Option<&[u8]>, link: &mut Link<'_>) {
        let now = instant(link.now_ns);
        if incoming.is_some() {
            self.heard_ns = link.now_ns;
        }
        let incoming = incoming.filter(|packet| !self.repeats_for_nothing(packet));
        self.interface
            .poll(now, &mut Wire::new(incoming, link), &mut self.sockets);
        self.owed_since_ns = match (self.is_owed(), self.owed_since_ns) {
            (true, None) => Some(link.now_ns),
            (true, since) => since,
            (false, _) => None,
        };
        let socket = self.socket();
        let condition = (socket.state(), socket.recv_queue(), socket.send_queue());
        if condition != self.condition {
            self.condition = condition;
            self.condition_since_ns = link.now_ns;
        }
    }

    /// Phase of the connection, as for flows.
    pub(super) fn phase(&self) -> Phase {
        use tcp::State as S;
        match self.sockets.get::<tcp::Socket<'_>>(self.handle).state() {
            S::Listen | S::SynSent | S::SynReceived => Phase::Opening,
            S::Established | S::FinWait1 | S::FinWait2 | S::CloseWait => Phase::Established,
            S::Closing | S::LastAck => Phase::Closing,
            S::TimeWait | S::Closed => Phase::Closed,
        }
    }

    /// Time since which no data was moved or acknowledged, ns. Packets alone are not progress.
    pub(super) fn idle_since_ns(&self) -> u64 {
        self.condition_since_ns
    }

    /// Time since which a packet of the guest is overdue, ns; `None` if none is. smoltcp's own
    /// time-out does not serve, because it also ends idle connections.
    pub(super) fn silent_since_ns(&self) -> Option<u64> {
        self.owed_since_ns.map(|since| since.max(self.heard_ns))
    }

    fn is_owed(&mut self) -> bool {
        self.fin_is_out() || self.socket().send_queue() > 0
    }

    fn fin_is_out(&mut self) -> bool {
        matches!(
            self.socket().state(),
            tcp::State::FinWait1 | tcp::State::Closing | tcp::State::LastAck
        )
    }

    /// Whether a packet only repeats the guest's acknowledgement, while only our FIN is
    /// unacknowledged. At the third such packet smoltcp 0.14 would stop its FIN's retransmission
    /// timer in order to send data at once, of which there is none.
    fn repeats_for_nothing(&mut self, packet: &[u8]) -> bool {
        if !self.fin_is_out() || self.socket().send_queue() > 0 {
            return false;
        }
        let Some(tcp) = tcp_of(packet) else {
            return false;
        };
        let before = self.acknowledged.replace(tcp.acknowledgement);
        tcp.flags == Flags::ACK && tcp.payload_len == 0 && before == Some(tcp.acknowledgement)
    }

    /// Whether nothing is left to be sent in TIME-WAIT: smoltcp delays an ACK by 10 ms, and waits
    /// for 10 s after the last one.
    pub(super) fn has_acknowledged(&mut self, now_ns: u64) -> bool {
        const SOON_NS: u64 = 1_000_000_000;
        self.next_poll_ns(now_ns)
            .is_none_or(|at| at > now_ns + SOON_NS)
    }

    /// Time of the next poll, ns; `None` if none is due.
    pub(super) fn next_poll_ns(&mut self, now_ns: u64) -> Option<u64> {
        let at = self.interface.poll_at(instant(now_ns), &self.sockets)?;
        let at_ns = u64::try_from(at.total_micros()).unwrap_or(0) * 1_000;
        Some(at_ns.max(now_ns + BREATHER_NS))
    }
}

/// TCP header of a packet; `None` if it has none.
pub(super) fn tcp_of(packet: &[u8]) -> Option<Tcp> {
    match Packet::parse(Ip::parse(packet).ok()?).ok()?.transport {
        Transport::Tcp(tcp) => Some(tcp),
        _ => None,
    }
}

/// Prefix of one address.
fn host_prefix(address: IpAddr) -> IpCidr {
    let bits = match Version::of(address) {
        Version::V4 => 32,
        Version::V6 => 128,
    };
    IpCidr::new(address.into(), bits)
}

fn instant(now_ns: u64) -> Instant {
    Instant::from_micros(i64::try_from(now_ns / 1_000).unwrap_or(i64::MAX))
}

/// smoltcp's device during one poll.
struct Wire<'p, 'l, 'a> {
    incoming: Option<&'p [u8]>,
    link: &'l mut Link<'a>,
    sent: usize,
}

impl<'p, 'l, 'a> Wire<'p, 'l, 'a> {
    fn new(incoming: Option<&'p [u8]>, link: &'l mut Link<'a>) -> Self {
        Self {
            incoming,
            link,
            sent: 0,
        }
    }
}

impl<'p> phy::Device for Wire<'p, '_, '_> {
    type RxToken<'t>
        = Received<'p>
    where
        Self: 't;
    type TxToken<'t>
        = Slot<'t>
    where
        Self: 't;

    fn receive(&mut self, _: Instant) -> Option<(Received<'p>, Slot<'_>)> {
        let packet = self.incoming.take()?;
        Some((Received(packet), Slot(self.link.out)))
    }

    fn transmit(&mut self, _: Instant) -> Option<Slot<'_>> {
        if self.sent == PACKETS_PER_POLL {
            return None;
        }
        if self.link.may_send == 0 {
            self.link.has_more = true;
            return None;
        }
        self.sent += 1;
        self.link.may_send -= 1;
        Some(Slot(self.link.out))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = self.link.mtu;
        // A guest that offloads leaves its checksum partial; from its memory to here nothing can
        // garble a packet.
        capabilities.checksum = ChecksumCapabilities::default();
        capabilities.checksum.tcp = Checksum::Tx;
        capabilities.checksum.udp = Checksum::Tx;
        capabilities
    }
}

struct Received<'p>(&'p [u8]);

impl phy::RxToken for Received<'_> {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, read: F) -> R {
        read(self.0)
    }
}

struct Slot<'t>(&'t mut Packets);

impl phy::TxToken for Slot<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, write: F) -> R {
        let start = self.0.bytes.len();
        self.0.bytes.resize(start + len, 0);
        let result = write(&mut self.0.bytes[start..]);
        self.0.ends.push(start + len);
        result
    }
}
