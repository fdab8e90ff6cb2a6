//! Another policy under 10,000 live flows whose senders keep sending: a random half is denied.
//! Counted at the uplink, none is wrongly cut, none wrongly left, and nothing of a denied one
//! leaves after `slipgate policy apply` has returned.
//!
//! Each flow has a server's address of its own, half of them of each family, of which the deny file then
//! has a random half.

use std::{
    collections::{HashMap, HashSet},
    io::{ErrorKind, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    thread::JoinHandle,
    time::{Duration, Instant, SystemTime},
};

use slipgate_testbed::{NetNs, clients::tcp, world::UPLINK};

use super::{WAIT, allow_descriptors, at, below, eventually, random, scene::Scene};

/// Number of flows of each protocol.
const FLOWS: usize = 5_000;
const TCP_PORT: u16 = 7_000;
const UDP_PORT: u16 = 7_001;
/// Servers' addresses are the elements of these networks.
const SERVERS: Ipv4Addr = Ipv4Addr::new(203, 0, 128, 0);
const SERVERS_PREFIX: u8 = 17;
const SERVERS6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0x80, 0, 0, 0, 0, 0);
const SERVERS6_PREFIX: u8 = 64;
/// Between two rounds of a sender.
const PAUSE: Duration = Duration::from_millis(50);
/// Rounds between two tries of a flow that was told that it may not be.
const TOLD_TRY_EVERY: usize = 16;

/// Who has a flow: the address it goes to, of each family in turn.
fn server(flow: usize) -> IpAddr {
    match flow % 2 {
        0 => Ipv4Addr::from_bits(SERVERS.to_bits() + 1 + flow as u32).into(),
        _ => Ipv6Addr::from_bits(SERVERS6.to_bits() + 1 + flow as u128).into(),
    }
}

fn is_tcp(flow: usize) -> bool {
    flow < FLOWS
}

fn to(flow: usize) -> SocketAddr {
    at(server(flow), if is_tcp(flow) { TCP_PORT } else { UDP_PORT })
}

/// Answers every connection with more bytes, for as long as it lasts.
struct Peers {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Peers {
    fn start(net: &NetNs) -> Peers {
        let stop = Arc::new(AtomicBool::new(false));
        let their_stop = stop.clone();
        let (listener, sink) = net.run(|| {
            // Of both families.
            let any = Ipv6Addr::UNSPECIFIED;
            let listener = TcpListener::bind((any, TCP_PORT)).unwrap();
            // A round over all connections takes longer than 128 more need to come.
            // SAFETY: takes numbers only.
            let rc = unsafe { libc::listen(listener.as_raw_fd(), 4_096) };
            assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
            (listener, UdpSocket::bind((any, UDP_PORT)).unwrap())
        });
        listener.set_nonblocking(true).unwrap();
        let thread = net.thread("peers", move || {
            let _sink = sink;
            let mut open: Vec<TcpStream> = Vec::new();
            while !their_stop.load(SeqCst) {
                while let Ok((stream, _)) = listener.accept() {
                    stream.set_nonblocking(true).unwrap();
                    open.push(stream);
                }
                open.retain_mut(exchange);
                std::thread::sleep(PAUSE);
            }
        });
        Peers { stop, thread }
    }

    fn stop(self) {
        self.stop.store(true, SeqCst);
        self.thread.join().unwrap();
    }
}

/// Sends a few bytes and takes what came; whether the connection lives.
fn exchange(stream: &mut TcpStream) -> bool {
    let lives = |result: std::io::Result<usize>| match result {
        Ok(_) => true,
        Err(error) => error.kind() == ErrorKind::WouldBlock,
    };
    let mut bytes = [0; 4_096];
    let read = match stream.read(&mut bytes) {
        Ok(0) => return false,
        other => other,
    };
    lives(read) && lives(stream.write(b"more"))
}

/// The guest's ends, which keep sending.
struct Senders {
    stop: Arc<AtomicBool>,
    /// Rounds over all of them so far.
    rounds: Arc<AtomicUsize>,
    /// Connections that were broken so far.
    broken: Arc<AtomicUsize>,
    thread: JoinHandle<HashSet<usize>>,
}

impl Senders {
    fn start(guest: &NetNs) -> Senders {
        let (stop, rounds) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let (their_stop, their_rounds): (_, Arc<AtomicUsize>) = (stop.clone(), Arc::clone(&rounds));
        let broken: Arc<AtomicUsize> = Arc::default();
        let their_broken = Arc::clone(&broken);
        let mut streams: Vec<Option<TcpStream>> = guest.run(|| {
            let connect = |flow| {
                let stream = tcp::connect(to(flow), WAIT).unwrap();
                stream.set_nonblocking(true).unwrap();
                Some(stream)
            };
            (0..FLOWS).map(connect).collect()
        });
        let sockets: Vec<UdpSocket> = guest.run(|| {
            let open = |flow| {
                let any = match server(flow) {
                    IpAddr::V4(_) => IpAddr::from(Ipv4Addr::UNSPECIFIED),
                    IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
                };
                let socket = UdpSocket::bind((any, 0)).unwrap();
                socket.connect(to(flow)).unwrap();
                socket.set_nonblocking(true).unwrap();
                socket
            };
            (FLOWS..2 * FLOWS).map(open).collect()
        });
        let mut told = vec![false; FLOWS];
        let thread = guest.thread("senders", move || {
            while !their_stop.load(SeqCst) {
                for stream in &mut streams {
                    if stream.as_mut().is_some_and(|stream| !exchange(stream)) {
                        *stream = None;
                        their_broken.fetch_add(1, SeqCst);
                    }
                }
                let round = their_rounds.load(SeqCst);
                for (n, socket) in sockets.iter().enumerate() {
                    // Who was told tries now and then: thousands that never cease would have all of
                    // the VM's credits, and its connections' segments none.
                    if told[n] && round % TOLD_TRY_EVERY != n % TOLD_TRY_EVERY {
                        continue;
                    }
                    // What is denied is told by ICMP, which the next call returns.
                    told[n] |= socket.send(b"datagram").is_err();
                    // First packets all at once would find no credit.
                    if round == 0 && n % 100 == 0 {
                        std::thread::sleep(Duration::from_millis(2));
                    }
                }
                their_rounds.fetch_add(1, SeqCst);
                std::thread::sleep(PAUSE);
            }
            let broken =
                |(flow, stream): (usize, &Option<TcpStream>)| stream.is_none().then_some(flow);
            streams.iter().enumerate().filter_map(broken).collect()
        });
        Senders {
            stop,
            rounds,
            broken,
            thread,
        }
    }

    /// Waits until everybody has sent again, twice.
    fn await_rounds(&self) {
        let beyond = self.rounds.load(SeqCst) + 2;
        eventually("two more rounds", || self.rounds.load(SeqCst) >= beyond);
    }

    /// Ends them; the connections that were broken.
    fn stop(self) -> HashSet<usize> {
        self.stop.store(true, SeqCst);
        self.thread.join().unwrap()
    }
}

/// Packets that left by the uplink for each server.
#[derive(Clone, Copy, Debug)]
struct Sent {
    packets: u64,
    /// When the last one left that was not a bare RST, as the kernel stamped it.
    last: Option<SystemTime>,
}

type AllSent = HashMap<IpAddr, Sent>;

/// An independent count of what leaves by the uplink, with times.
struct Watcher {
    stop: Arc<AtomicBool>,
    sent: Arc<Mutex<AllSent>>,
    thread: JoinHandle<u32>,
}

impl Watcher {
    fn start(host: &NetNs) -> Watcher {
        let ifindex = host.ifindex(UPLINK).unwrap();
        let socket = host.run(|| packet_socket(ifindex));
        let (stop, sent) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let (their_stop, their_sent): (_, Arc<Mutex<AllSent>>) = (stop.clone(), Arc::clone(&sent));
        let thread = host.thread("watcher", move || {
            loop {
                let last = their_stop.load(SeqCst);
                while take_one(&socket, &mut their_sent.lock().unwrap()) {}
                if last {
                    return missed(&socket);
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        Watcher { stop, sent, thread }
    }

    /// Whether all of these flows have sent since.
    fn all_since(&self, flows: &[usize], since: SystemTime) -> bool {
        let sent = self.sent.lock().unwrap();
        let last = |flow: &usize| sent.get(&server(*flow))?.last;
        flows.iter().all(|flow| last(flow) > Some(since))
    }

    fn finish(self) -> AllSent {
        self.stop.store(true, SeqCst);
        let missed = self.thread.join().unwrap();
        assert_eq!(missed, 0, "packets that the watcher itself missed");
        std::mem::take(&mut self.sent.lock().unwrap())
    }
}

fn option<T>(socket: &OwnedFd, level: i32, name: i32, value: T) {
    let len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the value is readable for the length given.
    let rc = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            name,
            (&raw const value).cast(),
            len,
        )
    };
    assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
}

fn packet_socket(ifindex: u32) -> OwnedFd {
    let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: takes numbers and returns a descriptor or -1.
    let fd = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
    assert!(fd >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: a fresh descriptor that nothing else owns.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    option(
        &socket,
        libc::SOL_SOCKET,
        libc::SO_RCVBUFFORCE,
        512i32 << 20,
    );
    option(&socket, libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, 1i32);
    // SAFETY: plain data, for which zeroes are valid.
    let mut to: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    to.sll_family = libc::AF_PACKET as u16;
    to.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
    to.sll_ifindex = ifindex as i32;
    let len = size_of_val(&to) as libc::socklen_t;
    // SAFETY: the address is readable for the length given.
    let rc = unsafe { libc::bind(socket.as_raw_fd(), (&raw const to).cast(), len) };
    assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
    socket
}

/// Counts one packet; `false` when there is none.
fn take_one(socket: &OwnedFd, sent: &mut AllSent) -> bool {
    let (mut packet, mut control) = ([0u8; 128], [0u64; 16]);
    // SAFETY: plain data, for which zeroes are valid.
    let mut from: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    let mut part = libc::iovec {
        iov_base: packet.as_mut_ptr().cast(),
        iov_len: packet.len(),
    };
    // SAFETY: as above.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_name = (&raw mut from).cast();
    message.msg_namelen = size_of_val(&from) as u32;
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    // SAFETY: all that the message names is writable for the lengths given.
    let len = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, 0) };
    if len < 0 {
        return false;
    }
    let packet = &packet[..(len as usize).min(packet.len())];
    if from.sll_pkttype == libc::PACKET_OUTGOING
        && let Some((to, bare_reset)) = read(packet)
    {
        let entry = sent.entry(to).or_insert(Sent {
            packets: 0,
            last: None,
        });
        entry.packets += 1;
        if !bare_reset {
            entry.last = entry.last.max(Some(stamp(&message)));
        }
    }
    true
}

/// The destination of a TCP segment or a datagram, and whether it is a RST without options: the host's
/// own answer to a segment of a connection that it does not know.
fn read(packet: &[u8]) -> Option<(IpAddr, bool)> {
    const RST: u8 = 4;
    let (to, protocol, header_len, total_len) = match packet.first()? {
        0x45 => {
            let to: [u8; 4] = packet.get(16..20)?.try_into().ok()?;
            let total_len = u16::from_be_bytes([packet[2], packet[3]]);
            (IpAddr::from(to), packet[9], 20, total_len)
        }
        0x60..=0x6f => {
            let to: [u8; 16] = packet.get(24..40)?.try_into().ok()?;
            let payload_len = u16::from_be_bytes([packet[4], packet[5]]);
            (IpAddr::from(to), packet[6], 40, 40 + payload_len)
        }
        _ => return None,
    };
    let transport = packet.get(header_len..)?;
    match protocol {
        6 => {
            let is_bare = usize::from(total_len) == header_len + 20;
            Some((to, is_bare && transport.get(13)? & RST != 0))
        }
        17 => Some((to, false)),
        _ => None,
    }
}

fn stamp(message: &libc::msghdr) -> SystemTime {
    // SAFETY: the kernel filled the control buffer in, and says how far.
    unsafe {
        let header = libc::CMSG_FIRSTHDR(message);
        assert!(!header.is_null(), "a packet without its time");
        assert_eq!((*header).cmsg_type, libc::SCM_TIMESTAMPNS);
        let time = libc::CMSG_DATA(header)
            .cast::<libc::timespec>()
            .read_unaligned();
        SystemTime::UNIX_EPOCH + Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    }
}

fn missed(socket: &OwnedFd) -> u32 {
    // struct tpacket_stats: packets, drops
    let mut stats = [0u32; 2];
    let mut len = size_of_val(&stats) as libc::socklen_t;
    // SAFETY: writable for the length given.
    let rc = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_PACKET,
            libc::PACKET_STATISTICS,
            stats.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
    stats[1]
}

/// Flow by the server's address, as `flows` and records show it.
fn flow_of(remote: &str) -> usize {
    let remote: SocketAddr = remote.parse().unwrap();
    match remote.ip() {
        IpAddr::V4(ip) => (ip.to_bits() - SERVERS.to_bits() - 1) as usize,
        IpAddr::V6(ip) => (ip.to_bits() - SERVERS6.to_bits() - 1) as usize,
    }
}

#[test]
fn a_policy_that_denies_half_of_ten_thousand_flows_ends_just_these() {
    begin!();
    let mut random = random();
    // Both ends of the connections are in this process, and the guest's end of the rest.
    allow_descriptors(3 * FLOWS as u64 + 1_000);
    let files = tempfile::tempdir().unwrap();
    let list = files.path().join("deny.txt");
    std::fs::write(&list, "# nobody yet\n").unwrap();
    let mut scene = Scene::new(&[
        "--deny-file",
        list.to_str().unwrap(),
        "--max-flows",
        "20000",
        "--new-flows-per-second",
        "100000",
    ]);
    let net = &scene.world.net;
    net.ip(&format!(
        "route add local {SERVERS}/{SERVERS_PREFIX} dev lo"
    ))
    .unwrap();
    net.ip(&format!(
        "-6 route add local {SERVERS6}/{SERVERS6_PREFIX} dev lo"
    ))
    .unwrap();
    let watcher = Watcher::start(&scene.world.host);
    let peers = Peers::start(net);
    let began = Instant::now();
    let senders = Senders::start(&scene.guest.ns);
    let live = || scene.slipgate.flows().unwrap().len();
    eventually("all flows", || live() == 2 * FLOWS);
    senders.await_rounds();
    println!("{} flows live after {:?}", 2 * FLOWS, began.elapsed());

    let mut flows: Vec<usize> = (0..2 * FLOWS).collect();
    for n in (1..flows.len()).rev() {
        flows.swap(n, below(&mut random, n as u64 + 1) as usize);
    }
    let denied: HashSet<usize> = flows[..FLOWS].iter().copied().collect();
    let mut text = String::new();
    for flow in &denied {
        text.push_str(&format!("{}\n", server(*flow)));
    }
    std::fs::write(&list, text).unwrap();
    let asked = Instant::now();
    let output = scene.slipgate.run(&["policy", "apply"]).unwrap();
    let returned = SystemTime::now();
    println!("applied in {:?}", asked.elapsed());
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(
        said,
        format!("in force: {FLOWS} flows cut, {FLOWS} go on\n")
    );

    // They keep sending: what is allowed goes on, be it after a loss, and what is denied is tried.
    let allowed = &flows[FLOWS..];
    let all_go_on = || watcher.all_since(allowed, returned);
    eventually("a packet of every flow that is allowed", all_go_on);
    let told = denied.iter().filter(|flow| is_tcp(**flow)).count();
    eventually("an RST for each connection that is denied", || {
        senders.broken.load(SeqCst) >= told
    });
    senders.await_rounds();
    let left: HashSet<usize> = {
        let flows = scene.slipgate.flows().unwrap();
        flows.iter().map(|flow| flow_of(&flow.remote)).collect()
    };
    let broken = senders.stop();
    peers.stop();
    let stats = scene.slipgate.stats().unwrap();
    let drops = &stats["total"]["drops"];
    println!("drops: {drops}");
    let sent = watcher.finish();
    let is_denied = |flow: &usize| denied.contains(flow);
    let wrongly_left: Vec<_> = left.iter().copied().filter(is_denied).collect();
    assert_eq!(wrongly_left, Vec::<usize>::new(), "denied, and lives");
    assert_eq!(left.len(), FLOWS, "a flow that is allowed is gone");
    let (mut after, mut silent) = (Vec::new(), Vec::new());
    for flow in 0..2 * FLOWS {
        let sent = sent.get(&server(flow)).expect("it has sent before");
        let last = sent.last.expect("it has sent before");
        match denied.contains(&flow) {
            true if last > returned => {
                after.push((flow, last.duration_since(returned).unwrap_or_default()))
            }
            false if last <= returned => silent.push(flow),
            _ => {}
        }
    }
    assert!(
        after.is_empty(),
        "a packet of a denied flow left after the call returned: {after:?}"
    );
    assert_eq!(silent, Vec::<usize>::new(), "allowed, and nothing leaves");
    let should_break: HashSet<usize> = denied.iter().copied().filter(|f| is_tcp(*f)).collect();
    let broken: Vec<_> = broken.difference(&should_break).collect();
    assert!(broken.is_empty(), "allowed, and broken: {broken:?}");
    let mut ends: HashMap<usize, String> = HashMap::new();
    for record in scene.records() {
        ends.insert(flow_of(&record.remote), record.end);
    }
    assert_eq!(ends.len(), FLOWS, "records");
    for (flow, end) in ends {
        assert!(denied.contains(&flow) && end == "policy", "{flow}: {end}");
    }
    scene.detach();
}
