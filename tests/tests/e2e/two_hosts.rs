//! Guests behind two slipgates, each on a host of its own, that reach each other with the help of a
//! server that both know.
//!
//! ```text
//!  guest ── host .2 [slipgate] ── world ── x0 ── world ── host .3 [slipgate] ── guest
//!                                 servers
//! ```

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    os::unix::fs::PermissionsExt as _,
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use slipgate_testbed::{
    Uplink, World, WorldConfig,
    clients::{stun, tcp},
    impairment::Impairment,
    servers::{StunServer, TcpServer, TcpService},
    world::{HOST, SERVER, SERVER_2, WORLD_LINK},
    world_ipv6::{self, HOST6, SERVER6, SERVER6_2},
};

use crate::{BRIEFLY, Cell, Stand, WAIT, eventually, matrix::matrix};

matrix! {
    guests_of_two_hosts_punch_a_hole_to_each_other: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    guests_of_two_hosts_connect_to_each_other_at_once: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "user mode has endpoint-independent mapping of UDP only (policy.md)";
}

/// A host beside [`HOST`], in a world of its own.
const OTHER_HOST: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 3);
const OTHER_HOST6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, 3);
/// Addresses of the worlds to each other.
const ENDS: [&str; 2] = ["192.0.2.1", "192.0.2.2"];
const ENDS6: [&str; 2] = ["2001:db8:2::1", "2001:db8:2::2"];
/// Each host may reach the other.
const PEERS: &str = "rules = [{ allow = \"198.18.0.0/24\" }, { allow = \"2001:db8:1::/64\" }]\n";
/// Port of both guests.
const PORT: u16 = 7_100;

/// Two hosts with a guest each. Fields go in order.
struct Hosts {
    stands: [Stand; 2],
    _policy: tempfile::NamedTempFile,
}

impl Hosts {
    /// Hosts whose guests have this policy. `delay`: the time that a packet takes from one to the other.
    fn new(cell: Cell, behaviour: &str, delay: Duration) -> Hosts {
        let policy = tempfile::NamedTempFile::new().unwrap();
        let text = format!("default = \"allow\"\n{PEERS}{behaviour}");
        fs::write(policy.path(), text).unwrap();
        // The user-mode engine is another user's.
        let readable = fs::Permissions::from_mode(0o644);
        policy.as_file().set_permissions(readable).unwrap();
        let path = policy.path().to_str().unwrap();
        let mut args = vec!["--policy", path];
        if behaviour.contains("[nat.") {
            args.extend(["--eim-ports", "20000-20999"]);
        }
        let far = Uplink::Impaired(Impairment {
            delay,
            ..Impairment::none(1)
        });
        let worlds = [
            WorldConfig::default(),
            WorldConfig {
                host_addresses: vec![OTHER_HOST],
                host_address6: OTHER_HOST6,
                server_addresses: Vec::new(),
                uplink: if delay.is_zero() { Uplink::Veth } else { far },
                ..WorldConfig::default()
            },
        ];
        let stands = worlds.map(|world| Stand::of_several(cell, world, &[], &[], &args));
        let [one, other] = &stands;
        join(cell, &one.world, &other.world);
        Hosts {
            stands,
            _policy: policy,
        }
    }

    fn cell(&self) -> Cell {
        self.stands[0].cell
    }

    /// Two guests send to the addresses that a STUN server saw of each other. Returns whether each
    /// receives from the other, within this time.
    fn punch(&self, server: SocketAddr, patience: Duration) -> bool {
        let ends = self.stands.each_ref().map(|stand| {
            let (socket, response) = stand.run(|| stun::bind(server, BRIEFLY)).unwrap();
            let wait = Some(Duration::from_millis(50));
            socket.set_read_timeout(wait).unwrap();
            (socket, response.mapped)
        });
        let hosts = self.hosts();
        assert_eq!(ends.each_ref().map(|(_, mapped)| mapped.ip()), hosts);
        let until = Instant::now() + patience;
        let mut received = [false; 2];
        while received != [true; 2] && Instant::now() < until {
            for at in [0, 1] {
                let (socket, theirs) = (&ends[at].0, ends[1 - at].1);
                let _ = socket.send_to(b"punch", theirs);
                let got = socket.recv_from(&mut [0; 16]);
                received[at] |= got.is_ok_and(|(_, from)| from == theirs);
            }
        }
        received == [true; 2]
    }

    /// The hosts' addresses.
    fn hosts(&self) -> [IpAddr; 2] {
        let family = self.cell().family;
        [
            family.choose(HOST, HOST6),
            family.choose(OTHER_HOST, OTHER_HOST6),
        ]
    }

    /// Has both guests connect to the other's address at the same moment, from the port by which they
    /// are connected to a server. Nobody listens. Returns the two ends of a connection, if one came
    /// about.
    fn connect(&self, theirs: [SocketAddr; 2]) -> Option<[TcpStream; 2]> {
        let together = Barrier::new(2);
        let (stands, together) = (&self.stands, &together);
        let streams = thread::scope(|scope| {
            let trying = [0, 1].map(|at| {
                scope.spawn(move || {
                    stands[at].run(|| {
                        together.wait();
                        tcp::connect_from(PORT, theirs[at], WAIT / 10)
                    })
                })
            });
            trying.map(|trying| trying.join().unwrap())
        });
        let [Ok(one), Ok(other)] = streams else {
            return None;
        };
        Some([one, other])
    }
}

/// Whether what each end sends is what the other one receives.
fn is_whole(streams: &mut [TcpStream; 2]) -> bool {
    let said: [&[u8; 8]; 2] = [b"from one", b"to one.."];
    let mut heard = [[0; 8]; 2];
    let sent = [0, 1].map(|at| streams[at].write_all(said[at]).is_ok());
    let came = [0, 1].map(|at| streams[at].read_exact(&mut heard[at]).is_ok());
    sent == [true; 2] && came == [true; 2] && [&heard[1], &heard[0]] == said
}

/// Joins two worlds, so that the host of each is the other's neighbour and the servers of the first
/// are there for both.
fn join(cell: Cell, one: &World, other: &World) {
    let peer = other.net.path();
    let link = format!(
        "link add x0 type veth peer name x0 netns {}",
        peer.display()
    );
    one.net.ip(&link).unwrap();
    let (ends, len, hosts, flags) = match cell.is_ipv6() {
        false => (ENDS, 30, [HOST.into(), OTHER_HOST.into()], ""),
        true => (
            ENDS6,
            64,
            [IpAddr::from(HOST6), OTHER_HOST6.into()],
            "nodad",
        ),
    };
    for (at, world) in [one, other].into_iter().enumerate() {
        let net = &world.net;
        let (own, gateway, theirs) = (ends[at], ends[1 - at], hosts[1 - at]);
        if cell.is_ipv6() {
            world_ipv6::enable(net, &["x0"]).unwrap();
        }
        let add = format!("addr add {own}/{len} dev x0 {flags}");
        net.ip(&add).unwrap();
        net.ip("link set x0 up").unwrap();
        net.ip(&format!("route add {theirs} via {gateway} dev x0"))
            .unwrap();
        let keys: &[[&str; 2]] = match cell.is_ipv6() {
            false => &[
                ["net.ipv4.ip_forward", "1"],
                ["net.ipv4.conf.w0.proxy_arp", "1"],
                ["net.ipv4.neigh.w0.proxy_delay", "0"],
            ],
            true => &[
                ["net.ipv6.conf.all.forwarding", "1"],
                ["net.ipv6.conf.w0.proxy_ndp", "1"],
                ["net.ipv6.neigh.w0.proxy_delay", "0"],
            ],
        };
        for [key, value] in keys {
            net.sysctl(key, value).unwrap();
        }
        if cell.is_ipv6() {
            let proxy = format!("-6 neigh add proxy {theirs} dev {WORLD_LINK}");
            net.ip(&proxy).unwrap();
        }
    }
    let servers: [IpAddr; 2] = match cell.is_ipv6() {
        false => [SERVER.into(), SERVER_2.into()],
        true => [SERVER6.into(), SERVER6_2.into()],
    };
    for server in servers {
        if cell.is_ipv6() {
            other
                .net
                .ip(&format!("addr del {server}/128 dev lo"))
                .unwrap();
        }
        let route = format!("route add {server} via {} dev x0", ends[0]);
        other.net.ip(&route).unwrap();
    }
}

fn guests_of_two_hosts_punch_a_hole_to_each_other(cell: Cell) {
    // With the strictest filtering: each has sent to the other.
    let asking = "[nat.udp]\nmapping = \"endpoint-independent\"\n";
    for (behaviour, may_meet) in [(asking, true), ("", false)] {
        let hosts = Hosts::new(cell, behaviour, Duration::ZERO);
        let servers: [IpAddr; 2] = [
            cell.family.choose(SERVER, SERVER6),
            cell.family.choose(SERVER_2, SERVER6_2),
        ];
        let net = &hosts.stands[0].world.net;
        let server = StunServer::start(net, servers, [3_478, 3_479]).unwrap();
        let patience = if may_meet { WAIT } else { 2 * BRIEFLY };
        assert_eq!(
            hosts.punch(server.address(), patience),
            may_meet,
            "{behaviour}"
        );
    }
}

fn guests_of_two_hosts_connect_to_each_other_at_once(cell: Cell) {
    let asking = "[nat.tcp]\nmapping = \"endpoint-independent\"\n";
    // Long enough for a SYN of each to be under way at the same time, where the machine is busy too.
    let delay = Duration::from_millis(200);
    for (behaviour, may_meet) in [(asking, true), ("", false)] {
        let hosts = Hosts::new(cell, behaviour, delay);
        let net = &hosts.stands[0].world.net;
        let place: IpAddr = cell.family.choose(SERVER, SERVER6);
        let server = TcpServer::start(net, (place, 7_000), TcpService::Hold).unwrap();
        let mut kept = Vec::new();
        let mapped = [0, 1].map(|at| {
            let connect = || tcp::connect_from(PORT, server.address(), WAIT);
            kept.push(hosts.stands[at].run(connect).unwrap());
            eventually("the server to see it", || server.peers().get(at).copied())
        });
        assert_eq!(mapped.map(|mapped| mapped.ip()), hosts.hosts());
        let [one, other] = mapped;
        let meet = || {
            let mut streams = hosts.connect([other, one])?;
            is_whole(&mut streams).then_some(())
        };
        if !may_meet {
            assert!((0..3).all(|_| meet().is_none()));
            continue;
        }
        eventually("a connection", meet);
        for (at, theirs) in [(0, other), (1, one)] {
            let flow = hosts.stands[at].flow_to(theirs);
            assert_eq!(flow.nat, mapped[at].to_string());
            assert_eq!(flow.path, "kernel");
        }
    }
}
