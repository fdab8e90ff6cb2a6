//! A world, a host and a guest with IPv6, and what runs in them.
//!
//! ```text
//!  guest ns                host ns                          world ns
//!  eth0 (by SLAAC) ── tap0 [slipgate] up0 ───────────── w0 ── lo: 2001:db8:ff::10, ::20
//!                          2001:db8:1::2/64      2001:db8:1::1/64
//! ```
use std::{
    io::{ErrorKind, Read, Write},
    net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6, TcpListener, TcpStream, UdpSocket},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use nix::{
    net::if_::if_nametoindex,
    sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket},
};
use slipgate_testbed::{GUEST_DEVICE, GuestConfig, NetNs, World, WorldConfig, tls, world_ipv6};

use crate::{Stand, WAIT, eventually};

pub(super) const HOST6: &str = "2001:db8:1::2";
pub(super) const SERVER6: &str = "2001:db8:ff::10";
pub(super) const SERVER6_2: &str = "2001:db8:ff::20";
/// The prefix of guests by default, and the gateway in it.
pub(super) const PREFIX: &str = "fd73:6c69:7067::";
pub(super) const GATEWAY6: &str = "fd73:6c69:7067::1";
/// The time that a guest's kernel takes to find a router and to be sure of its address.
const CONFIGURED_WITHIN: Duration = Duration::from_secs(10);

pub(super) fn ip6(text: &str) -> Ipv6Addr {
    text.parse().unwrap()
}

pub(super) fn at6(address: &str, port: u16) -> SocketAddr {
    SocketAddr::new(IpAddr::V6(ip6(address)), port)
}

pub(super) fn enable(ns: &NetNs, devices: &[&str]) {
    world_ipv6::enable(ns, devices).unwrap();
}

/// Gives host and world IPv6, with a route between them.
pub(super) fn give_world(world: &World) {
    world.give_ipv6().unwrap();
}

pub(super) fn add_route(world: &World) {
    world.add_ipv6_route().unwrap();
}

pub(super) fn remove_route(world: &World) {
    world.host.ip("-6 route del default").unwrap();
}

/// A stand whose host and guest have IPv6; the guest has configured itself.
pub(super) fn stand6(args: &[&str]) -> Stand {
    configured6(WorldConfig::default(), args)
}

/// The same with an uplink that carries less than the guest's link, 1,300 bytes.
pub(super) fn narrow6() -> Stand {
    let world = WorldConfig {
        mtu: 1_300,
        ..WorldConfig::default()
    };
    configured6(world, &[])
}

fn configured6(world: WorldConfig, args: &[&str]) -> Stand {
    let stand = unconfigured6(world, args);
    give_world(&stand.world);
    configure(&stand);
    stand
}

/// The same before anything has IPv6 but slipgate.
pub(super) fn unconfigured6(world: WorldConfig, args: &[&str]) -> Stand {
    let args = [&["--ipv6", "nat"], args].concat();
    Stand::with(world, GuestConfig::new("tap0"), &args)
}

/// Lets the guest's kernel have IPv6.
pub(super) fn enable_guest(stand: &Stand) {
    enable(&stand.guest.ns, &[GUEST_DEVICE]);
}

/// Lets the guest's kernel configure itself. Returns its address of the prefix.
pub(super) fn configure(stand: &Stand) -> Ipv6Addr {
    enable_guest(stand);
    let end = Instant::now() + CONFIGURED_WITHIN;
    loop {
        // Unsolicited advertisements may have given it an address before its link-local one is sure.
        if let Some(address) = address_of(stand)
            && has_link_local(&stand.guest.ns)
        {
            return address;
        }
        let shown = stand.guest.ns.ip("-6 addr").unwrap();
        assert!(
            Instant::now() < end,
            "the guest has no address: {shown}\n{}",
            stand.total()
        );
        thread::sleep(Duration::from_millis(50));
    }
}

/// The guest's address of a prefix that it made itself and is sure of.
pub(super) fn address_of(stand: &Stand) -> Option<Ipv6Addr> {
    address_in(&stand.guest.ns)
}

/// The same of a guest's namespace.
pub(super) fn address_in(ns: &NetNs) -> Option<Ipv6Addr> {
    let shown = ns.ip(&format!(
        "-6 -o addr show dev {GUEST_DEVICE} scope global -tentative"
    ));
    let shown = shown.unwrap();
    let line = shown.lines().find(|line| line.contains("dynamic"))?;
    let prefix = line.split_whitespace().find(|word| word.ends_with("/64"))?;
    prefix.trim_end_matches("/64").parse().ok()
}

/// Whether a guest is sure of its link-local address.
pub(super) fn has_link_local(ns: &NetNs) -> bool {
    let shown = ns.ip(&format!(
        "-6 -o addr show dev {GUEST_DEVICE} scope link -tentative"
    ));
    shown.unwrap().contains("fe80::")
}

/// A server that returns what it gets, by TCP and UDP. To a ClientHello it says a ServerHello.
pub(super) struct Echo {
    address: SocketAddr,
    peers: Arc<Mutex<Vec<IpAddr>>>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Echo {
    pub(super) fn start(world: &World, address: &str, port: u16) -> Echo {
        Self::start_in(&world.net, at6(address, port))
    }

    /// The same in any namespace.
    pub(super) fn start_in(ns: &NetNs, address: SocketAddr) -> Echo {
        let (peers, stop) = (Arc::new(Mutex::default()), Arc::new(AtomicBool::new(false)));
        let (listener, socket) = ns.run(|| {
            (
                TcpListener::bind(address).unwrap(),
                UdpSocket::bind(address).unwrap(),
            )
        });
        listener.set_nonblocking(true).unwrap();
        socket
            .set_read_timeout(Some(Duration::from_millis(20)))
            .unwrap();
        let by_tcp = {
            let (peers, stop) = (peers.clone(), stop.clone());
            move || accept(&listener, &peers, &stop)
        };
        let by_udp = {
            let (peers, stop) = (peers.clone(), stop.clone());
            move || answer(&socket, &peers, &stop)
        };
        Echo {
            address,
            peers,
            stop,
            threads: vec![thread::spawn(by_tcp), thread::spawn(by_udp)],
        }
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Addresses from which connections and datagrams came, in order.
    pub(super) fn peers(&self) -> Vec<IpAddr> {
        self.peers.lock().unwrap().clone()
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn accept(listener: &TcpListener, peers: &Mutex<Vec<IpAddr>>, stop: &Arc<AtomicBool>) {
    while !stop.load(Ordering::Relaxed) {
        let Ok((stream, peer)) = listener.accept() else {
            thread::sleep(Duration::from_millis(5));
            continue;
        };
        peers.lock().unwrap().push(peer.ip());
        let stop = stop.clone();
        thread::spawn(move || echo(stream, &stop));
    }
}

fn echo(mut stream: TcpStream, stop: &AtomicBool) {
    let _ = stream.set_nonblocking(false);
    let _ = stream.set_read_timeout(Some(Duration::from_millis(50)));
    let mut buffer = [0; 65_536];
    let mut answer = tls::Answer::default();
    while !stop.load(Ordering::Relaxed) {
        match stream.read(&mut buffer) {
            Ok(0) => return,
            Ok(len) => {
                answer.to(&mut buffer[..len]);
                if stream.write_all(&buffer[..len]).is_err() {
                    return;
                }
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(_) => return,
        }
    }
}

fn answer(socket: &UdpSocket, peers: &Mutex<Vec<IpAddr>>, stop: &AtomicBool) {
    let mut buffer = [0; 65_536];
    while !stop.load(Ordering::Relaxed) {
        if let Ok((len, peer)) = socket.recv_from(&mut buffer) {
            peers.lock().unwrap().push(peer.ip());
            let _ = socket.send_to(&buffer[..len], peer);
        }
    }
}

/// Connects from the guest.
pub(super) fn connect(stand: &Stand, to: SocketAddr) -> std::io::Result<TcpStream> {
    let stream = connect_from(&stand.guest.ns, to)?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Connects from a namespace.
pub(super) fn connect_from(ns: &NetNs, to: SocketAddr) -> std::io::Result<TcpStream> {
    let stream = ns.run(|| TcpStream::connect_timeout(&to, WAIT))?;
    stream.set_read_timeout(Some(WAIT))?;
    Ok(stream)
}

/// Sends this over a connection and returns what comes back, as much.
pub(super) fn round(stream: &mut TcpStream, sent: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut writer = stream.try_clone()?;
    thread::scope(|scope| {
        let written = scope.spawn(move || writer.write_all(sent));
        let mut got = vec![0; sent.len()];
        let read = stream.read_exact(&mut got);
        written.join().unwrap()?;
        read.map(|()| got)
    })
}

/// Sends a datagram from the guest and returns the answer.
pub(super) fn datagram_to(
    stand: &Stand,
    to: SocketAddr,
    payload: &[u8],
) -> std::io::Result<Vec<u8>> {
    datagram_from(&stand.guest.ns, to, payload)
}

/// The same from a namespace.
pub(super) fn datagram_from(
    ns: &NetNs,
    to: SocketAddr,
    payload: &[u8],
) -> std::io::Result<Vec<u8>> {
    let socket = ns.run(|| UdpSocket::bind("[::]:0"))?;
    socket.set_read_timeout(Some(Duration::from_secs(2)))?;
    socket.connect(to)?;
    socket.send(payload)?;
    let mut buffer = vec![0; 65_536];
    let len = socket.recv(&mut buffer)?;
    buffer.truncate(len);
    Ok(buffer)
}

/// A raw socket of ICMPv6 in this thread's namespace; the calls of a datagram socket are its.
pub(super) fn raw_socket() -> UdpSocket {
    let icmp = SockProtocol::IcmpV6;
    let raw = socket(AddressFamily::Inet6, SockType::Raw, SockFlag::empty(), icmp);
    UdpSocket::from(raw.unwrap())
}

/// An address on the guest's link, in the thread's namespace.
pub(super) fn on_link(address: &str, port: u16) -> SocketAddr {
    let index = if_nametoindex(GUEST_DEVICE).unwrap();
    SocketAddrV6::new(ip6(address), port, 0, index).into()
}

/// Sends an echo request with this payload from the guest and returns the payload of the reply.
pub(super) fn ping(stand: &Stand, to: &str, payload: &[u8]) -> Option<Vec<u8>> {
    const REQUEST: u8 = 128;
    const REPLY: u8 = 129;
    let socket = stand.run(raw_socket);
    socket.connect(at6(to, 0)).unwrap();
    socket
        .set_read_timeout(Some(Duration::from_secs(2)))
        .unwrap();
    let header = [REQUEST, 0, 0, 0, 0x5a, 0x5a, 0, 7];
    socket.send(&[&header, payload].concat()).unwrap();
    let mut buffer = [0; 65_536];
    let end = Instant::now() + Duration::from_secs(2);
    while Instant::now() < end {
        let len = socket.recv(&mut buffer).ok()?;
        if buffer[0] == REPLY && buffer[4..8] == header[4..] {
            return Some(buffer[8..len].to_vec());
        }
    }
    None
}

/// Waits until this holds.
pub(super) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    eventually(what, || holds().then_some(()));
}
