//! IPv6 of a guest whose stack is Linux's: it configures itself, reaches the world over NAT, and is
//! held to the same rules. The servers' view decides.
mod addresses;
mod forwards;
mod fragments;
mod host;
mod routed;
mod scene;
mod user_mode;
mod user_mode_forwards;

use std::{
    fs,
    net::{IpAddr, UdpSocket},
    thread,
    time::Duration,
};

use slipgate_testbed::{
    GUEST_DEVICE, Slipgate, WorldConfig,
    clients::dns,
    dns_wire::{Record, types},
    require_root_and_tun,
    servers::{Answer, DnsServer, Zone},
    tls,
    world::{SERVER, UPLINK},
};
use userspace_nat::fake::hellos;

use self::scene::*;
use crate::{BRIEFLY, DNS, Stand, WAIT, at};

const RESOLVER: [&str; 2] = ["--dns", "203.0.113.10"];
const NAME: &str = "six.example.test";

fn aaaa(address: &str) -> Record {
    Record::new(types::AAAA, ip6(address).octets().to_vec(), 300)
}

/// A resolver of the world's that knows [`NAME`] with IPv6 alone.
fn names(stand: &Stand) -> DnsServer {
    let zone = Zone::from([
        (NAME.to_owned(), Answer::records(vec![aaaa(SERVER6)])),
        (
            "other.test".to_owned(),
            Answer::records(vec![aaaa(SERVER6_2)]),
        ),
    ]);
    DnsServer::start(&stand.world.net, (SERVER, 53), zone).unwrap()
}

fn host() -> IpAddr {
    ip6(HOST6).into()
}

#[test]
fn ipv6_guest_configures_itself_by_its_own_means() {
    require_root_and_tun!();
    let stand = unconfigured6(WorldConfig::default(), &["--mtu", "1400"]);
    give_world(&stand.world);
    let address = configure(&stand);
    assert_eq!(address.octets()[..8], ip6(GATEWAY6).octets()[..8]);
    let routes = stand.guest.ns.ip("-6 route show default").unwrap();
    // The gateway's MAC makes its link-local address.
    assert!(routes.contains("via fe80::53:4cff:fe47:1"), "{routes}");
    let file = format!("/proc/sys/net/ipv6/conf/{GUEST_DEVICE}/mtu");
    let mtu = stand.run(|| fs::read_to_string(&file)).unwrap();
    assert_eq!(mtu.trim(), "1400", "as the advertisement says");

    // Flag O: the rest by DHCPv6. The client is ours, the stack is not.
    let request = [11, 1, 2, 3, 0, 6, 0, 2, 0, 23];
    let reply = stand.run(|| {
        let socket = UdpSocket::bind("[::]:546").unwrap();
        socket.set_read_timeout(Some(WAIT)).unwrap();
        socket.send_to(&request, on_link("ff02::1:2", 547)).unwrap();
        let mut buffer = [0; 1_500];
        let (len, from) = socket.recv_from(&mut buffer).unwrap();
        assert_eq!(from.port(), 547);
        buffer[..len].to_vec()
    });
    assert_eq!(reply[..4], [7, 1, 2, 3]);
    assert!(reply.ends_with(&ip6(GATEWAY6).octets()), "{reply:?}");

    let total = stand.total();
    assert!(
        total["router_advertisements"].as_u64() >= Some(1),
        "{total}"
    );
    assert_eq!(
        ping(&stand, GATEWAY6, b"hello").as_deref(),
        Some(&b"hello"[..])
    );
}

#[test]
fn ipv6_tcp_udp_and_ping_reach_the_world_from_the_hosts_address() {
    require_root_and_tun!();
    let mut stand = stand6(&[]);
    let server = Echo::start(&stand.world, SERVER6, 7000);
    let mut stream = connect(&stand, server.address()).unwrap();
    let sent: Vec<u8> = (0..2_000_000_u32).map(|at| (at ^ at >> 8) as u8).collect();
    assert!(
        round(&mut stream, &sent).unwrap() == sent,
        "what comes back is what was sent"
    );
    assert_eq!(
        datagram_to(&stand, server.address(), b"datagram").unwrap(),
        b"datagram"
    );
    let payload: Vec<u8> = (0..1_000_u16).map(|at| at as u8).collect();
    assert_eq!(ping(&stand, SERVER6, &payload), Some(payload));
    assert_eq!(server.peers(), [host(), host()]);

    let flows = stand.slipgate.flows().unwrap();
    let to = server.address().to_string();
    let tcp = flows
        .iter()
        .find(|flow| flow.proto == "tcp" && flow.remote == to);
    let tcp = tcp.unwrap_or_else(|| panic!("{flows:?}"));
    assert!(tcp.nat.starts_with(&format!("[{HOST6}]:")), "{tcp:?}");
    assert!(
        tcp.tx_bytes > 2_000_000 && tcp.rx_bytes > 2_000_000,
        "{tcp:?}"
    );
    // Established packets pass the kernel alone: the engine has seen few of these frames.
    assert!(stand.port_frames() < 200, "{}", stand.port_frames());
    assert!(stand.slipgate.stop().unwrap().success());
    let records = stand.records();
    for proto in ["tcp", "udp", "icmp"] {
        let is_recorded = records
            .iter()
            .any(|end| end["proto"] == proto && end.to_string().contains(SERVER6));
        assert!(is_recorded, "{proto}: {records:#?}");
    }
}

#[test]
fn ipv6_packets_are_as_large_as_the_path_allows() {
    require_root_and_tun!();
    let stand = narrow6();
    let server = Echo::start(&stand.world, SERVER6, 7000);
    let mut stream = connect(&stand, server.address()).unwrap();
    let sent = vec![7; 500_000];
    assert!(round(&mut stream, &sent).unwrap() == sent);
    // Of a datagram that does not fit, the guest's kernel is told.
    let socket = stand.run(|| UdpSocket::bind("[::]:0")).unwrap();
    socket.connect(server.address()).unwrap();
    socket
        .set_read_timeout(Some(Duration::from_secs(2)))
        .unwrap();
    socket.send(&[7; 1_400]).unwrap();
    until("Packet Too Big", || {
        let route = stand
            .guest
            .ns
            .ip(&format!("-6 route get {SERVER6}"))
            .unwrap();
        route.contains("mtu 1300")
    });
    assert_eq!(
        datagram_to(&stand, server.address(), &[7; 1_200])
            .unwrap()
            .len(),
        1_200
    );
}

#[test]
fn ipv6_rules_by_prefix_hold_for_the_family_they_name() {
    require_root_and_tun!();
    let stand = stand6(&[
        "--default",
        "deny",
        "--allow",
        "[2001:db8:ff::10/128]:7000/tcp",
    ]);
    let [allowed, other_port] = [7000, 7001].map(|port| Echo::start(&stand.world, SERVER6, port));
    let denied = Echo::start(&stand.world, SERVER6_2, 7000);
    assert!(connect(&stand, allowed.address()).is_ok());
    for server in [&other_port, &denied] {
        assert!(connect(&stand, server.address()).is_err());
        assert!(server.peers().is_empty());
    }
    // Space of the host and of links is protected, whatever the rules say.
    for protected in [HOST6, ROUTER6] {
        let (admitted, said) = stand
            .slipgate
            .why("tap0", &format!("[{protected}]:22"), "tcp")
            .unwrap();
        assert!(!admitted, "{said}");
    }
    let (admitted, said) = stand
        .slipgate
        .why("tap0", &format!("[{SERVER6}]:7000"), "tcp")
        .unwrap();
    assert!(admitted && said.contains(HOST6), "{said}");
}

#[test]
fn ipv6_addresses_of_allowed_names_open() {
    require_root_and_tun!();
    let deny = ["--default", "deny", "--allow", "*.example.test:7000/tcp"];
    let stand = stand6(&[&RESOLVER[..], &deny].concat());
    let _names = names(&stand);
    let [server, other] = [SERVER6, SERVER6_2].map(|at| Echo::start(&stand.world, at, 7000));
    assert!(
        connect(&stand, server.address()).is_err(),
        "nobody has asked for its name"
    );
    let reply = ask(&stand, NAME, types::AAAA);
    assert_eq!(reply.records.len(), 1, "{reply:?}");
    assert_eq!(reply.records[0].data, ip6(SERVER6).octets());
    let mut stream = connect(&stand, server.address()).unwrap();
    assert_eq!(round(&mut stream, b"by name").unwrap(), b"by name");
    assert_eq!(ask(&stand, "other.test", types::AAAA).code, 5, "refused");
    assert!(connect(&stand, other.address()).is_err());
    assert!(other.peers().is_empty());
}

#[test]
fn ipv6_addresses_are_not_told_while_the_uplink_leads_nowhere() {
    require_root_and_tun!();
    let stand = stand6(&RESOLVER);
    let names = names(&stand);
    let count = || {
        let question = dns::question(NAME, types::AAAA);
        let reply = stand
            .run(|| dns::ask_udp(at(DNS, 53), &question, WAIT))
            .unwrap()
            .reply;
        assert_eq!(reply.code, 0);
        reply.records.len()
    };
    assert_eq!(count(), 1);
    remove_route(&stand.world);
    until("no address", || count() == 0);
    let asked = names.udp_queries(NAME);
    assert_eq!(count(), 0);
    assert_eq!(names.udp_queries(NAME), asked, "no resolver is asked");
    // What has no route is refused at once.
    let server = Echo::start(&stand.world, SERVER6, 7000);
    let begun = std::time::Instant::now();
    assert!(connect(&stand, server.address()).is_err());
    assert!(
        begun.elapsed() < Duration::from_secs(1),
        "{:?}",
        begun.elapsed()
    );
    add_route(&stand.world);
    until("the address again", || count() == 1);
    assert!(connect(&stand, server.address()).is_ok());
}

#[test]
fn ipv6_auto_waits_for_the_uplink() {
    require_root_and_tun!();
    let stand = Stand::new(&["--ipv6", "auto"]);
    enable_guest(&stand);
    thread::sleep(Duration::from_secs(2));
    assert_eq!(address_of(&stand), None);
    assert_eq!(stand.total()["router_advertisements"], 0);
    give_world(&stand.world);
    stand.says("has IPv6 now");
    configure(&stand);
    let server = Echo::start(&stand.world, SERVER6, 7000);
    assert!(connect(&stand, server.address()).is_ok());
}

#[test]
fn ipv6_flows_and_neighbours_outlive_the_engine_and_its_successor_adopts() {
    require_root_and_tun!();
    let mut stand = stand6(&[]);
    let server = Echo::start(&stand.world, SERVER6, 7000);
    let mut stream = connect(&stand, server.address()).unwrap();
    assert_eq!(round(&mut stream, b"before").unwrap(), b"before");
    let id = |stand: &Stand| {
        let flows = stand.slipgate.flows().unwrap();
        let flow = flows
            .iter()
            .find(|flow| flow.remote == server.address().to_string());
        flow.map(|flow| (flow.id.clone(), flow.nat.clone()))
    };
    let before = id(&stand);
    assert!(before.is_some());
    stand.slipgate.kill_both().unwrap();
    // The guest has to ask for the gateway's MAC again, and the program answers.
    stand
        .guest
        .ns
        .ip(&format!("-6 neigh flush dev {GUEST_DEVICE}"))
        .unwrap();
    assert_eq!(
        round(&mut stream, b"without an engine").unwrap(),
        b"without an engine"
    );
    let neighbours = stand.guest.ns.ip("-6 neigh show").unwrap();
    assert!(neighbours.contains("02:53:4c:47:00:01"), "{neighbours}");
    stand.again();
    assert_eq!(
        round(&mut stream, b"with another").unwrap(),
        b"with another"
    );
    assert_eq!(id(&stand), before);
    assert!(connect(&stand, server.address()).is_ok());
}

#[test]
fn ipv6_flows_end_with_a_start_without_it() {
    require_root_and_tun!();
    let mut stand = stand6(&[]);
    let server = Echo::start(&stand.world, SERVER6, 7000);
    let mut stream = connect(&stand, server.address()).unwrap();
    assert_eq!(round(&mut stream, b"before").unwrap(), b"before");
    stand.slipgate.kill_both().unwrap();
    let log = stand.log_path().display().to_string();
    let args = ["--tap", "tap0", "--uplink", UPLINK, "--flow-log", &log];
    stand.slipgate = Slipgate::attach(&stand.world.host, stand.slipgate.pins(), &args).unwrap();
    until("no flow of IPv6", || {
        stand.slipgate.flows().unwrap().is_empty()
    });
    stream.set_read_timeout(Some(BRIEFLY)).unwrap();
    assert!(round(&mut stream, b"after").is_err());
    assert!(stand.dropped("ipv6") > 0, "{}", stand.total());
}

#[test]
fn ipv6_connections_are_inspected() {
    require_root_and_tun!();
    for (said, is_let_through) in [(NAME, true), ("evil.test", false)] {
        let inspect = ["--default", "deny", "--inspect", "*.example.test"];
        let stand = stand6(&[&RESOLVER[..], &inspect].concat());
        let _names = names(&stand);
        let server = Echo::start(&stand.world, SERVER6, 443);
        assert_eq!(ask(&stand, NAME, types::AAAA).records.len(), 1);
        let mut stream = connect(&stand, server.address()).unwrap();
        let hello = hellos::records(&hellos::client_hello(said), 1_000);
        let back = round(&mut stream, &hello);
        assert_eq!(
            back.is_ok_and(|back| back == tls::answer_to(&hello)),
            is_let_through,
            "{said}"
        );
        if is_let_through {
            assert_eq!(
                round(&mut stream, b"then the kernel").unwrap(),
                b"then the kernel"
            );
        }
    }
}
