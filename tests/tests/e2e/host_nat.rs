//! The host's own masquerading beside slipgate, on the same address and toward the same server.

use std::{
    net::{IpAddr, SocketAddr, TcpStream, UdpSocket},
    time::Duration,
};

use slipgate_testbed::{
    Guest, GuestConfig, NetNs, PinDir, Slipgate, World, WorldConfig,
    clients::tcp::{self, EchoSession},
    require_root_and_tun,
    servers::{TcpServer, TcpService, UdpServer, UdpService},
    world::{SERVER, UPLINK},
    world_ipv6,
};

use crate::{
    Cell, Stand, WAIT,
    matrix::{at, matrix},
};

matrix! {
    masqueraded_clients_and_guests_that_take_every_port_live_beside_each_other: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "flows are sockets of the host's, whose ports its own NAT knows";
}

/// Ports of guests' flows, as many as clients of the host try to get.
pub(crate) const PORTS: std::ops::RangeInclusive<u16> = 61_000..=61_015;
/// Masquerading that leaves these ports alone.
pub(crate) const BESIDE: &str = "masquerade to :1024-60999";

/// A client behind the host, which masquerades it by `masquerade`, in both families.
fn client_of(host: &NetNs, masquerade: &str) -> NetNs {
    let client = routed_client(host);
    masquerade_at(host, "own", UPLINK, masquerade);
    client
}

/// A client whose packets the host forwards as they are.
pub(crate) fn routed_client(host: &NetNs) -> NetNs {
    let client = NetNs::new("client").unwrap();
    host.ip(&format!(
        "link add c0 type veth peer name eth0 netns {}",
        client.path().display()
    ))
    .unwrap();
    world_ipv6::enable(host, &["c0"]).unwrap();
    host.sysctl("net.ipv6.conf.all.forwarding", "1").unwrap();
    world_ipv6::enable(&client, &["eth0"]).unwrap();
    for (ns, device, last) in [(host, "c0", 1), (&client, "eth0", 2)] {
        ns.ip(&format!("addr add 10.77.0.{last}/24 dev {device}"))
            .unwrap();
        ns.ip(&format!("addr add fd77::{last}/64 dev {device} nodad"))
            .unwrap();
        ns.ip(&format!("link set {device} up")).unwrap();
    }
    client.ip("route add default via 10.77.0.1").unwrap();
    client.ip("-6 route add default via fd77::1").unwrap();
    client
}

/// Has the host translate what leaves by a device in both families, by a chain `out` of these tables, which
/// must not be there.
pub(crate) fn masquerade_at(host: &NetNs, table: &str, device: &str, masquerade: &str) {
    for family in ["ip", "ip6"] {
        host.nft(&format!(
            "add table {family} {table}\n\
             add chain {family} {table} out {{ type nat hook postrouting priority 100 ; }}\n\
             add rule {family} {table} out oifname {device} meta l4proto tcp {masquerade}\n\
             add rule {family} {table} out oifname {device} meta l4proto udp {masquerade}"
        ))
        .unwrap();
    }
}

/// Removes these tables.
pub(crate) fn remove_tables(host: &NetNs, table: &str) {
    host.nft(&format!(
        "delete table ip {table}\ndelete table ip6 {table}"
    ))
    .unwrap();
}

fn masqueraded_clients_and_guests_that_take_every_port_live_beside_each_other(cell: Cell) {
    for guest_is_first in [true, false] {
        let world = WorldConfig {
            ip_forward: true,
            ..Default::default()
        };
        let ports = format!("{}-{}", PORTS.start(), PORTS.end());
        let stand = Stand::of_several(cell, world, &[], &[], &["--nat-ports", &ports]);
        let client = client_of(&stand.world.host, BESIDE);
        let server = at(cell.server(), 7000);
        let address = (cell.server(), 7000);
        let net = &stand.world.net;
        let _tcp = TcpServer::start(net, address, TcpService::Echo).unwrap();
        let _udp = UdpServer::start(net, address, UdpService::Echo).unwrap();
        let of_guest = || stand.run(|| Held::open(server, None));
        // From the very ports that guests' flows have at the uplink: masquerading would keep them.
        let of_client = || client.run(|| Held::open(server, Some(PORTS)));
        let mut held = match guest_is_first {
            true => [of_guest(), of_client()],
            false => [of_client(), of_guest()],
        };
        for _ in 0..2 {
            held.iter_mut().for_each(Held::lives);
        }
        // Every port was taken, by each protocol.
        assert_eq!(stand.slipgate.flows().unwrap().len(), 2 * PORTS.count());
        stand.run(|| tcp::expect_refused(server)).unwrap();
    }
}

/// As many connections as there are ports, and sockets that sent datagrams.
pub(crate) struct Held {
    tcp: Vec<TcpStream>,
    udp: Vec<UdpSocket>,
}

impl Held {
    /// `from`: their ports; otherwise any.
    pub(crate) fn open(to: SocketAddr, from: Option<std::ops::RangeInclusive<u16>>) -> Held {
        match from {
            Some(ports) => Held::from_ports(to, &ports.collect::<Vec<_>>()),
            None => Held::from_ports(to, &vec![0; PORTS.count()]),
        }
    }

    /// Opens a connection and a socket from each of these ports; 0: any.
    pub(crate) fn from_ports(to: SocketAddr, ports: &[u16]) -> Held {
        let any: IpAddr = match to {
            SocketAddr::V4(_) => "0.0.0.0".parse().unwrap(),
            SocketAddr::V6(_) => "::".parse().unwrap(),
        };
        let tcp = |port: &u16| tcp::connect_from(*port, to, WAIT).unwrap();
        let udp = |port: &u16| {
            let socket = UdpSocket::bind((any, *port)).unwrap();
            socket.connect(to).unwrap();
            socket
                .set_read_timeout(Some(Duration::from_secs(5)))
                .unwrap();
            socket
        };
        let mut held = Held {
            tcp: ports.iter().map(tcp).collect(),
            udp: ports.iter().map(udp).collect(),
        };
        held.lives();
        held
    }

    /// Sends something by each and gets it back.
    pub(crate) fn lives(&mut self) {
        live(&mut self.tcp);
        for (number, socket) in self.udp.iter().enumerate() {
            let sent = [number as u8; 100];
            socket.send(&sent).unwrap();
            let mut got = [0; 200];
            let len = socket.recv(&mut got).unwrap();
            assert_eq!(got[..len], sent, "datagram {number}");
        }
    }
}

struct Scene {
    slipgate: Slipgate,
    guest: Guest,
    client: NetNs,
    _world: World,
    server: TcpServer,
}

fn scene(masquerade: &str, flags: &[&str]) -> slipgate_testbed::Result<Scene> {
    let world = World::with(WorldConfig {
        ip_forward: true,
        ..Default::default()
    })?;
    let client = client_of(&world.host, masquerade);
    let guest = Guest::new(&world, GuestConfig::new("tap0"))?;
    let server = TcpServer::start(&world.net, (SERVER, 7000), TcpService::Echo)?;
    let pins = PinDir::new()?;
    let ports = format!("{}-{}", PORTS.start(), PORTS.end());
    let args = ["--tap", "tap0", "--uplink", UPLINK, "--nat-ports", &ports];
    let slipgate = Slipgate::attach(&world.host, &pins, &[&args, flags].concat())?;
    Ok(Scene {
        slipgate,
        guest,
        client,
        _world: world,
        server,
    })
}

impl Scene {
    fn of_guest(&self) -> Vec<TcpStream> {
        let connect = |_| self.guest.run(|| tcp::connect(self.server.address(), WAIT));
        PORTS.map(connect).map(Result::unwrap).collect()
    }
}

fn live(streams: &mut [TcpStream]) {
    for stream in streams {
        EchoSession::new(stream).round(1_000).unwrap();
    }
}

/// The reason for the refusal: sharing breaks the client's connections.
#[test]
fn an_address_is_not_shared_with_masquerading_to_the_same_ports_unless_asked() {
    require_root_and_tun!();
    let refused = scene("masquerade", &[]).err().unwrap().to_string();
    for part in ["--host-nat", "own out", "masquerade to :1024-60999"] {
        assert!(refused.contains(part), "{refused}\n  not {part}");
    }
    let scene = scene("masquerade", &["--host-nat", "share"]).unwrap();
    let said = scene.slipgate.stderr();
    assert!(said.contains("own out"), "{said}");
    let mut guests = scene.of_guest();
    let to = at(SERVER, 7000);
    let taken = scene
        .client
        .run(|| tcp::connect_from(*PORTS.start(), to, crate::BRIEFLY));
    assert!(taken.is_err(), "the tuple was a guest's: {taken:?}");
    live(&mut guests);
}
