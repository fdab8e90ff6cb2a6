//! IPv6 of a guest whose stack is Linux's: it configures itself, reaches the world over NAT, and is
//! held to the same rules. The servers' view decides.
mod addresses;
mod forwards;
mod fragments;
mod host;
mod own_ports;
mod processes;
mod routed;
mod scene;
mod single_address;
mod stock_client;
mod user_mode;

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
    world::{SERVER, UPLINK},
};

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
    assert!(begun.elapsed() < WAIT / 2, "{:?}", begun.elapsed());
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
