//! A thousand VMs with connections to one server, with what `docs/deploy/host.md` has an operator set.
//!
//! The test plays the guests at their TAPs, by IPv4: they all have the same address, and no stack that
//! would repeat a segment. So a segment that is lost on the way is found, and not made up for.
use std::{
    collections::{BTreeMap, BTreeSet},
    io::{ErrorKind, Read as _, Write as _},
    net::{SocketAddrV4, TcpListener},
    os::fd::AsRawFd as _,
    time::Instant,
};

use slipgate_testbed::{
    NetNs, PinDir, Slipgate, World,
    clients::api::ApiClient,
    frame::{FrameBuilder, Mac, Packet, tcp_flags, with_vnet},
    tap::{TapQueue, VNET_HDR_LEN},
    world::{GATEWAY_MAC, SERVER, UPLINK},
};

use super::{GUEST, WAIT, allow_descriptors};

const VMS: usize = 1_000;
const EACH: usize = 20;
/// VMs whose handshakes are under way at a time.
const AT_ONCE: usize = 10;
const SERVICE: SocketAddrV4 = SocketAddrV4::new(SERVER, 7000);
const GUEST_MAC: Mac = [0x02, 0, 0, 0, 0, 0x15];
const FIRST_PORT: u16 = 40_000;

/// One end of a connection, that of a guest.
#[derive(Clone, Copy, Default)]
struct End {
    /// The next number of the guest's, and of the server's.
    numbers: (u32, u32),
    is_connected: bool,
    /// What the server answered to the guest's number.
    answer: Option<u32>,
}

struct Guest {
    tap: TapQueue,
    ends: [End; EACH],
}

impl Guest {
    fn send(&self, end: usize, flags: u8, payload: &[u8]) {
        let source = SocketAddrV4::new(GUEST, FIRST_PORT + end as u16);
        let (seq, ack) = self.ends[end].numbers;
        let segment = FrameBuilder::tcp(source, SERVICE)
            .macs(GUEST_MAC, GATEWAY_MAC)
            .flags(flags)
            .numbers(seq, ack)
            .payload(payload);
        let (vnet, frame) = segment.build();
        self.tap.write(&with_vnet(vnet, &frame)).unwrap();
    }

    /// Takes in all that has come.
    fn receive(&mut self) {
        let mut buffer = [0; 4_096];
        loop {
            match self.tap.read(&mut buffer) {
                Ok(len) => self.take(&buffer[VNET_HDR_LEN..len]),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                Err(e) => panic!("{e}"),
            }
        }
    }

    fn take(&mut self, frame: &[u8]) {
        let Some(packet) = Packet::parse_ethernet(frame).filter(|it| it.source == SERVICE) else {
            return;
        };
        let at = usize::from(packet.destination.port() - FIRST_PORT);
        let (seq, ack) = packet.tcp_numbers().unwrap();
        let flags = packet.tcp_flags().unwrap();
        assert_eq!(flags & tcp_flags::RST, 0, "a connection was reset");
        let end = &mut self.ends[at];
        if flags & tcp_flags::SYN != 0 {
            end.numbers = (ack, seq.wrapping_add(1));
            end.is_connected = true;
        } else if let Ok(answer) = packet.payload().try_into() {
            // The server repeats what waits here for too long.
            if seq == end.numbers.1 {
                end.answer = Some(u32::from_be_bytes(answer));
                end.numbers.1 = seq.wrapping_add(4);
            }
        } else {
            return;
        }
        self.send(at, tcp_flags::ACK, &[]);
    }
}

/// Listens for all connections. Those that are not accepted live in the kernel, and need no descriptor.
fn listen(net: &NetNs) -> TcpListener {
    let most = VMS * EACH;
    net.sysctl("net.core.somaxconn", &most.to_string()).unwrap();
    let listener = net.run(|| TcpListener::bind(SERVICE)).unwrap();
    // SAFETY: a call without memory, about a socket that is open.
    let listens = unsafe { libc::listen(listener.as_raw_fd(), most as i32) };
    assert_eq!(listens, 0);
    listener
}

/// Waits until it is so of all connections of these guests.
fn settle(guests: &mut [Guest], is_so: impl Fn(&End) -> bool) {
    let until = Instant::now() + WAIT;
    while !guests.iter().all(|guest| guest.ends.iter().all(&is_so)) {
        assert!(Instant::now() < until, "a segment was lost");
        guests.iter_mut().for_each(Guest::receive);
    }
}

#[test]
fn a_thousand_vms_have_twenty_connections_each_to_one_server() {
    begin!();
    allow_descriptors(VMS as u64 + 500);
    let world = World::new().unwrap();
    let local = ("net.ipv4.ip_local_port_range", "10240 28671");
    world.host.sysctl(local.0, local.1).unwrap();
    let scratch = tempfile::tempdir().unwrap();
    let api = scratch.path().join("api.sock");
    let pins = PinDir::new().unwrap();
    let flags = ["--uplink", UPLINK, "--nat-ports", "28672-65535", "--api"];
    let flags = [&flags[..], &[api.to_str().unwrap()]].concat();
    let daemon = Slipgate::serve(&world.host, &pins, &flags).unwrap();
    let mut api = ApiClient::connect(&api).unwrap();
    let mut guests: Vec<Guest> = Vec::with_capacity(VMS);
    for number in 0..VMS {
        let name = format!("fleet{number}");
        let tap = TapQueue::alone(&world.host, &name).unwrap();
        let body = format!("{{\"tap\": \"{name}\"}}");
        let answer = api.ask("PUT", &format!("/v1/vms/{name}"), &body).unwrap();
        assert!(answer.is_success(), "{}", answer.body);
        guests.push(Guest {
            tap,
            ends: [End::default(); EACH],
        });
    }

    let service = listen(&world.net);
    for some in guests.chunks_mut(AT_ONCE) {
        for guest in &mut *some {
            (0..EACH).for_each(|end| guest.send(end, tcp_flags::SYN, &[]));
        }
        settle(some, |end| end.is_connected);
    }
    let mut of_vms: BTreeMap<String, usize> = BTreeMap::new();
    for flow in daemon.flows().unwrap() {
        assert_eq!(flow.remote, SERVICE.to_string());
        *of_vms.entry(flow.vm).or_default() += 1;
    }
    assert_eq!(of_vms.len(), VMS);
    assert!(of_vms.values().all(|flows| *flows == EACH), "{of_vms:?}");

    // All live at once, and each is its guest's own: it has the number back that it sent.
    let number = |vm: usize, end: usize| (vm * EACH + end) as u32;
    for (vm, guest) in guests.iter_mut().enumerate() {
        for end in 0..EACH {
            let number = number(vm, end).to_be_bytes();
            guest.send(end, tcp_flags::PSH | tcp_flags::ACK, &number);
            guest.ends[end].numbers.0 += number.len() as u32;
        }
    }
    let mut numbers = BTreeSet::new();
    for _ in 0..VMS * EACH {
        let (mut stream, _) = service.accept().unwrap();
        stream.set_read_timeout(Some(WAIT)).unwrap();
        let mut number = [0; 4];
        stream.read_exact(&mut number).unwrap();
        stream.write_all(&number).unwrap();
        assert!(numbers.insert(number));
    }
    settle(&mut guests, |end| end.answer.is_some());
    for (vm, guest) in guests.iter().enumerate() {
        for (at, end) in guest.ends.iter().enumerate() {
            assert_eq!(end.answer, Some(number(vm, at)));
        }
    }
}
