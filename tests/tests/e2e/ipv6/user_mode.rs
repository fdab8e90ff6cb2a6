//! IPv6 of guests of the user-mode engine, whose user has no privilege.
use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{SocketAddr, TcpStream, ToSocketAddrs as _, UdpSocket},
    process::{Child, Stdio},
    time::Duration,
};

use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};
use slipgate_testbed::{
    GUEST_DEVICE, require_root_and_tun,
    servers::{Answer, DnsServer, Zone},
    world::SERVER,
};

use super::{NAME, aaaa, scene::*};
use crate::{
    WAIT,
    exec::await_word,
    unprivileged::{Attached, Place},
};

const ECHO: u16 = 7000;
const CLOSED: u16 = 7002;
const FORBIDDEN: u16 = 7100;
/// Exit status of the command.
const STATUS: i32 = 9;
/// Tells the command the largest datagram that its link carries, bytes of payload.
const LARGEST: &str = "LARGEST_DATAGRAM";
/// Bytes of a stream: many times every queue on the way.
const STREAM_BYTES: usize = 50_000_000;
/// The command's address, and what its packets leave from.
const COMMAND6: &str = "fd73:6c69:7067::2";

/// A user in a world with IPv6, whose kernel lets everybody ping.
fn place6() -> Place {
    let place = Place::new();
    give_world(&place.world);
    let everybody = "0 2147483647";
    place
        .world
        .host
        .sysctl("net.ipv4.ping_group_range", everybody)
        .unwrap();
    place
}

fn names(place: &Place) -> DnsServer {
    let zone = Zone::from([(NAME.to_owned(), Answer::records(vec![aaaa(SERVER6)]))]);
    DnsServer::start(&place.world.net, (SERVER, 53), zone).unwrap()
}

/// `slipgate exec` of the test `child` of this file, with these further flags.
fn exec(place: &Place, flags: &[&str], child: &str, largest: usize) -> Child {
    let command = place.file("tests");
    let resolver = SERVER.to_string();
    let child = format!("ipv6::user_mode::{child}");
    let mut args = vec!["exec", "--name", "job", "--dns", &resolver];
    args.extend(flags);
    args.extend(["--", command.to_str().unwrap(), &child]);
    args.extend(["--exact", "--ignored", "--nocapture"]);
    let mut exec = place.slipgate(&args);
    exec.stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .env(LARGEST, largest.to_string());
    place.world.host.spawn(exec).unwrap()
}

fn a_command_reaches_the_world(mtu: &str, mode: &str, largest: usize) {
    let place = place6();
    let _resolver = names(&place);
    let server = Echo::start(&place.world, SERVER6, ECHO);
    let forbidden = Echo::start(&place.world, SERVER6_2, FORBIDDEN);
    let rules = ["--default", "deny", "--allow", "six.example.test:7000-7003"];
    let ping = ["--allow", "2001:db8:ff::10/icmp"];
    let log = place.file("run/flows.jsonl");
    let log = ["--flow-log", log.to_str().unwrap()];
    let flags = [&["--ipv6", mode, "--mtu", mtu], &rules[..], &ping, &log].concat();
    let mut exec = exec(&place, &flags, "a_command_with_ipv6", largest);
    let guest = await_word(&mut exec, "held ");
    assert!(guest.starts_with(&format!("[{COMMAND6}]:")), "{guest}");
    assert!(server.peers().iter().all(|peer| *peer == super::host()));
    assert_eq!(forbidden.peers(), [] as [std::net::IpAddr; 0]);

    let flows: serde_json::Value =
        serde_json::from_str(&place.output(&["flows", "--json"])).unwrap();
    let flows = flows.as_array().unwrap();
    let flow = flows.iter().find(|flow| flow["guest"] == guest.as_str());
    let flow = flow.unwrap_or_else(|| panic!("{guest} is not in {flows:#?}"));
    assert_eq!(flow["dns_name"], NAME);
    assert_eq!(flow["path"], "sockets");
    let nat = flow["nat"].as_str().unwrap();
    assert!(nat.starts_with(&format!("[{HOST6}]:")), "{nat}");
    for key in ["rx_bytes", "tx_bytes"] {
        let bytes = flow[key].as_u64().unwrap();
        assert!(bytes > STREAM_BYTES as u64, "{flow:#}");
    }
    let protocols = |wanted: &str| flows.iter().any(|flow| flow["proto"] == wanted);
    assert!(protocols("udp") && protocols("icmp"), "{flows:#?}");
    let yes = place.output(&["why", "job", &format!("[{SERVER6}]:{ECHO}")]);
    assert!(yes.starts_with("yes: "), "{yes}");
    let no = place.output(&["why", "job", &format!("[{SERVER6_2}]:{FORBIDDEN}")]);
    assert!(no.starts_with("no: "), "{no}");
    place.output(&["cut", flow["id"].as_str().unwrap()]);
    exec.stdin.as_mut().unwrap().write_all(b"cut\n").unwrap();
    assert_eq!(exec.wait().unwrap().code(), Some(STATUS));
    assert!(place.user.has_nothing_left());
}

#[test]
fn ipv6_user_mode_command_reaches_the_world_by_its_policy() {
    require_root_and_tun!();
    a_command_reaches_the_world("1500", "nat", 1_452);
}

#[test]
fn ipv6_user_mode_command_with_large_packets_reaches_the_world() {
    require_root_and_tun!();
    a_command_reaches_the_world("65520", "auto", 60_000);
}

/// The command of the tests above. Nothing is waited for: its first packet is a connection's.
#[test]
#[ignore = "the child of ipv6_user_mode_command_reaches_the_world_by_its_policy"]
fn a_command_with_ipv6() {
    let largest: usize = std::env::var(LARGEST).unwrap().parse().unwrap();
    let connect = |to: SocketAddr| TcpStream::connect_timeout(&to, WAIT);
    let kind = |error: std::io::Error| error.kind();
    let early = connect(at6(SERVER6, ECHO)).map(drop).map_err(kind);
    assert_eq!(
        early,
        Err(ErrorKind::ConnectionRefused),
        "nobody has asked for its name"
    );
    let echo = (NAME, ECHO).to_socket_addrs().unwrap().next().unwrap();
    assert_eq!(echo, at6(SERVER6, ECHO));
    let mut stream = connect(echo).unwrap();
    stream.set_read_timeout(Some(WAIT)).unwrap();
    let sent: Vec<u8> = (0..STREAM_BYTES)
        .map(|at| (at ^ at >> 8 ^ at >> 16) as u8)
        .collect();
    assert!(
        round(&mut stream, &sent).unwrap() == sent,
        "what comes back is what was sent"
    );
    for refused in [at6(SERVER6, CLOSED), at6(SERVER6_2, FORBIDDEN)] {
        let error = connect(refused).map(drop).map_err(kind);
        assert_eq!(error, Err(ErrorKind::ConnectionRefused), "{refused}");
    }

    let udp = UdpSocket::bind("[::]:0").unwrap();
    udp.set_read_timeout(Some(WAIT)).unwrap();
    udp.connect(echo).unwrap();
    for size in [1, 1_000, 1_452, largest] {
        let sent: Vec<u8> = (0..size).map(|at| (at ^ at >> 8) as u8).collect();
        let mut answer = vec![0; 65_536];
        let mut exchange = || {
            udp.send(&sent)?;
            udp.recv(&mut answer)
        };
        // The first that is longer than the path is lost, and its length told. The command's kernel cuts
        // the next.
        let len = match exchange() {
            Err(error) if size > 1_452 && error.raw_os_error() == Some(libc::EMSGSIZE) => {
                exchange()
            }
            other => other,
        };
        let len = len.unwrap();
        assert!(answer[..len] == sent, "{size}");
    }
    let nobody = UdpSocket::bind("[::]:0").unwrap();
    nobody.set_read_timeout(Some(WAIT)).unwrap();
    nobody.connect(at6(SERVER6, CLOSED)).unwrap();
    nobody.send(b"anybody?").unwrap();
    let refused = nobody.recv(&mut [0; 8]).map_err(kind);
    assert_eq!(
        refused,
        Err(ErrorKind::ConnectionRefused),
        "the ICMPv6 error comes through"
    );

    let (icmp, flags) = (SockProtocol::IcmpV6, SockFlag::empty());
    let ping = socket(AddressFamily::Inet6, SockType::Datagram, flags, icmp).unwrap();
    let ping = UdpSocket::from(ping);
    ping.set_read_timeout(Some(WAIT)).unwrap();
    ping.connect(at6(SERVER6, 0)).unwrap();
    ping.send(&[128, 0, 0, 0, 0, 0, 0, 7, 1, 2, 3]).unwrap();
    let mut reply = [0; 64];
    let len = ping.recv(&mut reply).unwrap();
    assert_eq!((reply[0], &reply[6..len]), (129, &[0, 7, 1, 2, 3][..]));

    println!("held {}", stream.local_addr().unwrap());
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    assert_eq!(line, "cut\n");
    stream
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    let cut = stream.read(&mut [0; 8]).map_err(kind);
    assert_eq!(cut, Err(ErrorKind::ConnectionReset));
    std::process::exit(STATUS);
}

#[test]
fn ipv6_user_mode_guest_of_a_socket_configures_itself_once_the_uplink_leads_there() {
    require_root_and_tun!();
    let place = place6();
    remove_route(&place.world);
    let server = Echo::start(&place.world, SERVER6, ECHO);
    let attached = Attached::start(&place, &["--ipv6", "auto"]);
    let guest = attached.guest();
    enable(&guest.ns, &[GUEST_DEVICE]);
    guest.dhcp(WAIT).unwrap();
    assert_eq!(address_in(&guest.ns), None);
    add_route(&place.world);
    until("the guest has an address", || {
        address_in(&guest.ns).is_some()
    });
    let routes = guest.ns.ip("-6 route show default").unwrap();
    assert!(routes.contains("via fe80::53:4cff:fe47:1"), "{routes}");

    let to = server.address();
    let mut stream = guest.run(|| TcpStream::connect_timeout(&to, WAIT)).unwrap();
    stream.set_read_timeout(Some(WAIT)).unwrap();
    let sent: Vec<u8> = (0..5_000_000_u32).map(|at| (at ^ at >> 8) as u8).collect();
    assert!(round(&mut stream, &sent).unwrap() == sent);
    let udp = guest.run(|| UdpSocket::bind("[::]:0")).unwrap();
    udp.set_read_timeout(Some(WAIT)).unwrap();
    udp.connect(to).unwrap();
    udp.send(&[7; 1_452]).unwrap();
    let mut answer = [0; 2_000];
    assert_eq!(udp.recv(&mut answer).unwrap(), 1_452);
    let closed = at6(SERVER6, CLOSED);
    let refused = guest.run(|| TcpStream::connect_timeout(&closed, WAIT));
    assert_eq!(
        refused.map(drop).map_err(|error| error.kind()),
        Err(ErrorKind::ConnectionRefused)
    );
    assert!(server.peers().iter().all(|peer| *peer == super::host()));
}

/// A command without IPv6 sees no address of it on its link.
#[test]
fn ipv6_user_mode_command_without_it_has_no_address() {
    require_root_and_tun!();
    let place = place6();
    remove_route(&place.world);
    for mode in ["off", "auto"] {
        let exec = place.slipgate(&["exec", "--ipv6", mode, "--", "cat", "/proc/net/if_inet6"]);
        let output = place.world.host.output(exec).unwrap();
        let shown = String::from_utf8(output.stdout).unwrap();
        assert!(!shown.contains("tap0"), "{mode}: {shown}");
    }
}
