//! Ports of the host that lead to guests of user-mode engines, and ports of the gateway that lead to
//! the host's loopback, by IPv6 and side by side with IPv4. The guest is a Linux stack behind the
//! stream socket.
use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket},
    thread,
};

use slipgate_testbed::{NetNs, SocketGuest, require_root_and_tun, signal, world::HOST};

use super::scene::*;
use crate::{
    WAIT, at, eventually,
    unprivileged::{Attached, Place},
};

/// The guest's address by its own choice: the prefix and this.
const GUEST6: &str = "fd73:6c69:7067::15";
/// Bytes of a stream: many times every queue on the way.
const BYTES: usize = 20_000_000;
const FLAGS: [&str; 10] = [
    "--ipv6",
    "nat",
    "--forward",
    "tcp:8080:80",
    "--forward",
    "tcp:8081:81",
    "--forward",
    "udp:5353:5300",
    "--host-loopback",
    "9000:7000",
];

struct Scene {
    place: Place,
    attached: Attached,
    guest: SocketGuest,
}

impl Scene {
    fn new() -> Self {
        let place = Place::new();
        give_world(&place.world);
        let attached = Attached::start(&place, &FLAGS);
        let guest = attached.guest();
        guest.dhcp(WAIT).unwrap();
        let device = slipgate_testbed::GUEST_DEVICE;
        let ns = &guest.ns;
        // One address: with two, the guest's answer to a datagram may come from the other.
        for of in ["default", device] {
            ns.sysctl(&format!("net.ipv6.conf.{of}.accept_ra"), "0")
                .unwrap();
        }
        enable(ns, &[device]);
        ns.ip(&format!("-6 addr add {GUEST6}/64 dev {device} nodad"))
            .unwrap();
        // The engine answers for the gateway, and has heard of the guest's address then.
        eventually("the gateway is a neighbour", || {
            connect_from(ns, at6(GATEWAY6, 1))
                .err()
                .filter(|error| error.kind() == ErrorKind::ConnectionRefused)
        });
        Self {
            place,
            attached,
            guest,
        }
    }

    fn host(&self) -> &NetNs {
        &self.place.world.host
    }

    fn end(self) {
        drop(self.guest);
        signal(self.attached.child.id(), libc::SIGTERM);
        assert_eq!(self.attached.end(&self.place), Some(0));
    }

    /// Where clients come from, and what they connect to for a port of the host.
    fn ways(&self, port: u16) -> [(&NetNs, SocketAddr); 5] {
        let world = &self.place.world;
        [
            (&world.host, at(Ipv4Addr::LOCALHOST, port).into()),
            (&world.host, at6("::1", port)),
            (&world.host, at6(HOST6, port)),
            (&world.net, at(HOST, port).into()),
            (&world.net, at6(HOST6, port)),
        ]
    }
}

fn pattern(seed: usize) -> Vec<u8> {
    let byte = |at: usize| (at ^ at >> 8 ^ at >> 16 ^ seed) as u8;
    (0..BYTES).map(byte).collect()
}

/// Serves connections of the guest at a port of both families, each by `f` in a thread.
fn serve(ns: &NetNs, port: u16, f: impl Fn(TcpStream) + Send + Sync + Clone + 'static) {
    let listener = ns.run(|| TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).unwrap());
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let f = f.clone();
            thread::spawn(move || f(stream));
        }
    });
}

/// Answers what a client sent once it has ended its side: half-closed.
fn answer_at_the_end(mut stream: TcpStream) {
    stream.set_read_timeout(Some(WAIT * 6)).unwrap();
    let mut all = Vec::new();
    if stream.read_to_end(&mut all).is_ok() {
        let _ = stream.write_all(&all);
    }
}

fn exchange(from: &NetNs, to: SocketAddr, sent: &[u8]) {
    let mut stream = connect_from(from, to).unwrap();
    stream.set_read_timeout(Some(WAIT * 6)).unwrap();
    stream.write_all(sent).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut got = Vec::new();
    stream.read_to_end(&mut got).unwrap();
    assert!(got == sent, "{to}: {} bytes of {}", got.len(), sent.len());
}

#[test]
fn ipv6_user_mode_forward_is_whole_both_ways_half_closed_and_refused() {
    require_root_and_tun!();
    let scene = Scene::new();
    serve(&scene.guest.ns, 80, answer_at_the_end);
    for (seed, (from, to)) in scene.ways(8080).into_iter().enumerate() {
        exchange(from, to, &pattern(seed));
    }
    // Nobody listens at the guest's port: the client, which the kernel has accepted, is reset.
    for (from, to) in scene.ways(8081) {
        let read = connect_from(from, to).and_then(|mut stream| stream.read(&mut [0; 1]));
        let kind = read.map_err(|error| error.kind());
        let refused = [ErrorKind::ConnectionReset, ErrorKind::ConnectionRefused];
        assert!(
            kind.is_err_and(|kind| refused.contains(&kind)),
            "{to}: {kind:?}"
        );
    }
    let udp = scene
        .guest
        .run(|| UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 5300)).unwrap());
    thread::spawn(move || {
        let mut buffer = [0; 2_000];
        while let Ok((len, from)) = udp.recv_from(&mut buffer) {
            let _ = udp.send_to(&buffer[..len], from);
        }
    });
    for (from, to) in scene.ways(5353).into_iter().filter(|(_, to)| to.is_ipv6()) {
        assert_eq!(datagram_from(from, to, b"a word").unwrap(), b"a word");
    }
    let flows: serde_json::Value =
        serde_json::from_str(&scene.place.output(&["flows", "--json"])).unwrap();
    let flows = flows.as_array().unwrap();
    let six = |flow: &&serde_json::Value| flow["guest"] == format!("[{GUEST6}]:5300");
    let flow = flows
        .iter()
        .find(six)
        .unwrap_or_else(|| panic!("{flows:#?}"));
    assert_eq!(
        (&flow["path"], &flow["proto"]),
        (&"relay".into(), &"udp".into())
    );
    scene.end();
}

#[test]
fn ipv6_user_mode_forward_carries_many_a_slow_reader_and_resets() {
    const AT_ONCE: usize = 64;
    require_root_and_tun!();
    let scene = Scene::new();
    serve(&scene.guest.ns, 80, answer_at_the_end);
    // A client that reads nothing for now, of more than all queues hold.
    let mut slow = connect_from(scene.host(), at6("::1", 8080)).unwrap();
    let sent = pattern(9);
    slow.write_all(&sent).unwrap();
    slow.shutdown(Shutdown::Write).unwrap();
    // And many at once beside it, of both families.
    thread::scope(|scope| {
        for nth in 0..AT_ONCE {
            let (from, to) = scene.ways(8080)[nth % 5];
            scope.spawn(move || exchange(from, to, &vec![nth as u8; 100_000 + nth]));
        }
    });
    slow.set_read_timeout(Some(WAIT * 6)).unwrap();
    let mut got = Vec::new();
    slow.read_to_end(&mut got).unwrap();
    assert!(got == sent, "{} bytes of {}", got.len(), sent.len());
    // A guest that resets in the middle: its client is reset, and nobody else.
    serve(&scene.guest.ns, 81, |mut stream| {
        let mut some = [0; 1_000];
        stream.read_exact(&mut some).unwrap();
        let at_once = libc::linger {
            l_onoff: 1,
            l_linger: 0,
        };
        nix::sys::socket::setsockopt(&stream, nix::sys::socket::sockopt::Linger, &at_once).unwrap();
    });
    let mut other = connect_from(scene.host(), at6("::1", 8080)).unwrap();
    for (from, to) in scene.ways(8081) {
        let mut stream = connect_from(from, to).unwrap();
        stream.write_all(&[1; 1_000]).unwrap();
        let read = stream.read(&mut [0; 1]).map_err(|error| error.kind());
        assert_eq!(read, Err(ErrorKind::ConnectionReset), "{to}");
    }
    other.write_all(b"still here").unwrap();
    other.shutdown(Shutdown::Write).unwrap();
    let mut said = String::new();
    other.read_to_string(&mut said).unwrap();
    assert_eq!(said, "still here");
    scene.end();
}

#[test]
fn ipv6_user_mode_port_of_the_gateway_leads_to_the_hosts_loopback() {
    require_root_and_tun!();
    let scene = Scene::new();
    let guest = &scene.guest.ns;
    let gateways: [SocketAddr; 2] = [at(crate::GATEWAY, 9000).into(), at6(GATEWAY6, 9000)];
    for gateway in gateways {
        let refused = connect_from(guest, gateway).map(drop);
        let kind = refused.map_err(|error| error.kind());
        assert_eq!(kind, Err(ErrorKind::ConnectionRefused), "{gateway}");
    }
    for (seed, (gateway, service)) in gateways.into_iter().zip(["127.0.0.1", "::1"]).enumerate() {
        let listener = scene
            .host()
            .run(|| TcpListener::bind((service, 7000)).unwrap());
        let served = thread::spawn(move || {
            let (stream, peer) = listener.accept().unwrap();
            answer_at_the_end(stream);
            peer
        });
        exchange(guest, gateway, &pattern(seed));
        let peer = served.join().unwrap();
        assert_eq!(peer.ip().to_string(), service);
    }
    // A port that is not listed.
    assert!(connect_from(guest, at6(GATEWAY6, 7000)).is_err());
    scene.end();
}
