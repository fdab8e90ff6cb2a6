//! What forwards by IPv6 have of their own: which addresses they are of, and the guest's address.
//! What they share with IPv4's is in `forwards`.
use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    thread::{self, JoinHandle},
    time::Duration,
};

use slipgate_testbed::{GuestConfig, NetNs, WorldConfig, pump::SeenFrame, require_root_and_tun};

use super::scene::*;
use crate::{GUEST_MAC, Stand, WAIT};

/// A connection that a namespace's thread accepts, and from whom it came.
fn accepting(ns: &NetNs, address: &str, port: u16) -> JoinHandle<(TcpStream, SocketAddr)> {
    let listener = ns.run(|| TcpListener::bind(at6(address, port)).unwrap());
    thread::spawn(move || {
        let (stream, peer) = listener.accept().unwrap();
        stream.set_read_timeout(Some(WAIT)).unwrap();
        (stream, peer)
    })
}

#[test]
fn ipv6_forward_of_no_address_is_of_both_families_and_of_one_of_that_alone() {
    require_root_and_tun!();
    let ours = format!("tcp:[{HOST6}]:8081:80");
    let stand = stand6(&["--forward", "tcp:8080:80"]);
    let listening = stand.world.host.run(|| {
        let four = TcpListener::bind("0.0.0.0:8080").is_err();
        let six = TcpListener::bind("[::1]:8080").is_err();
        (four, six)
    });
    assert_eq!(listening, (true, true), "both are held");
    drop(stand);
    let stand = stand6_with_address(&ours);
    let accepted = accepting(&stand.guest.ns, "::", 80);
    let mut client = connect_from(&stand.world.net, at6(HOST6, 8081)).unwrap();
    let (mut server, _) = accepted.join().unwrap();
    client.write_all(b"x").unwrap();
    server.read_exact(&mut [0]).unwrap();
    let is_free = stand
        .world
        .host
        .run(|| TcpListener::bind("0.0.0.0:8081").is_ok());
    assert!(is_free, "its port by IPv4 is nobody's");
}

/// A stand whose host has its address before slipgate starts, which takes a port of it.
fn stand6_with_address(forward: &str) -> Stand {
    let mut stand = stand6(&[]);
    stand.slipgate.kill_both().unwrap();
    stand.slipgate = stand.slipgate.again_with(&["--forward", forward]).unwrap();
    stand
}

#[test]
fn ipv6_forward_waits_for_an_address_of_the_guest() {
    require_root_and_tun!();
    let stand = unconfigured6(Default::default(), &["--forward", "tcp:8080:80"]);
    give_world(&stand.world);
    let to = at6(HOST6, 8080);
    let brief = Duration::from_millis(500);
    let refused = stand
        .world
        .net
        .run(|| TcpStream::connect_timeout(&to, brief));
    assert!(refused.is_err());
    assert!(stand.refused("no_address") > 0, "{}", stand.total());
    configure(&stand);
    let accepted = accepting(&stand.guest.ns, "::", 80);
    connect_from(&stand.world.net, to).unwrap();
    accepted.join().unwrap();
}

/// It answers no ARP, and needs none: the message by which the engine knows its address shows its MAC. A
/// segment that goes to all is taken by no stack.
#[test]
fn ipv6_guest_that_only_waits_gets_its_first_connection_at_its_own_mac() {
    require_root_and_tun!();
    let guest = GuestConfig::new("tap0").unconfigured();
    let args = ["--ipv6", "nat", "--forward", "tap0=tcp:8080:80"];
    let stand = Stand::with(WorldConfig::default(), guest, &args);
    give_world(&stand.world);
    configure(&stand);
    let frames = stand.guest.frames().unwrap();
    let accepted = accepting(&stand.guest.ns, "::", 80);
    connect_from(&stand.world.net, at6(HOST6, 8080)).unwrap();
    accepted.join().unwrap();
    let seen = frames.drain();
    let to_port = |frame: &&SeenFrame| {
        let bytes = &frame.bytes;
        bytes[12..14] == [0x86, 0xdd] && bytes[20] == 6 && bytes[56..58] == 80_u16.to_be_bytes()
    };
    let segments: Vec<_> = seen.iter().filter(to_port).collect();
    assert!(!segments.is_empty());
    assert!(segments.iter().all(|frame| frame.bytes[..6] == GUEST_MAC));
}
