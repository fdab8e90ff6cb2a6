//! Endpoint-independent mapping and filtering, as a STUN client behind slipgate finds them.

use std::{
    fs::Permissions,
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    os::unix::fs::PermissionsExt as _,
    time::{Duration, Instant},
};

use slipgate_testbed::{
    GuestConfig, World, WorldConfig,
    clients::stun::{self, Behaviour, Dependence},
    require_root_and_tun,
    servers::StunServer,
    world::{HOST, SERVER, SERVER_2},
    world_ipv6::{HOST6, SERVER6, SERVER6_2},
};

use crate::{
    BRIEFLY, Cell, Stand, WAIT, eventually,
    matrix::{cells, matrix},
};

matrix! {
    rfc5780_without_the_option_all_depends_on_address_and_port: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    rfc5780_stun_finds_no_hairpinning_where_the_policy_says_so: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "user mode has no endpoint-independent mapping, and refuses a policy that asks for it (policy.md)";
    rfc5780_stun_finds_the_mapping_and_filtering_that_the_policy_asks_for: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "user mode has no endpoint-independent mapping, and refuses a policy that asks for it (policy.md)";
    a_stranger_reaches_the_guest_by_the_kernel_after_its_first_datagram: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "user mode has no endpoint-independent mapping, and refuses a policy that asks for it (policy.md)";
}

const PORTS: [u16; 2] = [3_478, 3_479];
const EIM_PORTS: &str = "20000-20999";

/// A guest with this policy, and a server. Fields go in order.
struct Stage {
    stand: Stand,
    server: StunServer,
    _policy: tempfile::NamedTempFile,
}

impl Stage {
    fn new(cell: Cell, policy: &str) -> Stage {
        Self::made(policy, |args| Stand::of(cell, args))
    }

    fn of(policy: &str, world: WorldConfig) -> Stage {
        let guest = GuestConfig::new("tap0");
        Self::made(policy, |args| Stand::with(world, guest, args))
    }

    fn made(policy: &str, stand: impl FnOnce(&[&str]) -> Stand) -> Stage {
        let file = tempfile::NamedTempFile::new().unwrap();
        // The user-mode engine is another user's.
        let readable = Permissions::from_mode(0o644);
        file.as_file().set_permissions(readable).unwrap();
        std::fs::write(file.path(), policy).unwrap();
        let path = file.path().to_str().unwrap();
        let mut args = vec!["--policy", path];
        if policy.contains("[nat.") {
            args.extend(["--eim-ports", EIM_PORTS]);
        }
        let stand = stand(&args);
        let servers = servers(stand.cell);
        let server = StunServer::start(&stand.world.net, servers, PORTS).unwrap();
        Stage {
            stand,
            server,
            _policy: file,
        }
    }

    fn behaviour(&self) -> Behaviour {
        let server = self.server.address();
        self.stand
            .run(|| stun::behaviour(server, 2 * BRIEFLY))
            .unwrap()
    }
}

/// The server's addresses.
fn servers(cell: Cell) -> [IpAddr; 2] {
    [
        cell.family.choose(SERVER, SERVER6),
        cell.family.choose(SERVER_2, SERVER6_2),
    ]
}

fn asking_for(filtering: &str) -> String {
    format!(
        "default = \"allow\"\n[nat.udp]\nmapping = \"endpoint-independent\"\n\
         filtering = \"{filtering}\"\n"
    )
}

fn rfc5780_without_the_option_all_depends_on_address_and_port(cell: Cell) {
    let stage = Stage::new(cell, "default = \"allow\"\n");
    let found = stage.behaviour();
    assert_eq!(found.mapping, Dependence::AddressAndPortDependent);
    assert_eq!(found.filtering, Dependence::AddressAndPortDependent);
    assert!(!found.hairpinning);
}

fn rfc5780_stun_finds_no_hairpinning_where_the_policy_says_so(cell: Cell) {
    let policy = asking_for("endpoint-independent") + "hairpin = false\n";
    let stage = Stage::new(cell, &policy);
    let found = stage.behaviour();
    assert_eq!(found.mapping, Dependence::EndpointIndependent);
    assert!(!found.hairpinning);
}

fn rfc5780_stun_finds_the_mapping_and_filtering_that_the_policy_asks_for(cell: Cell) {
    for (filtering, found) in [
        ("endpoint-independent", Dependence::EndpointIndependent),
        ("address-dependent", Dependence::AddressDependent),
        (
            "address-and-port-dependent",
            Dependence::AddressAndPortDependent,
        ),
    ] {
        let stage = Stage::new(cell, &asking_for(filtering));
        let expected = Behaviour {
            mapping: Dependence::EndpointIndependent,
            filtering: found,
            hairpinning: true,
        };
        assert_eq!(stage.behaviour(), expected, "{filtering}");
        let server = stage.server.address().to_string();
        let (admitted, why) = stage.stand.slipgate.why("tap0", &server, "udp").unwrap();
        assert!(admitted);
        let says = format!("endpoint-independent mapping, {filtering} filtering, hairpinning");
        assert!(why.contains(&says), "{why}");
    }
}

fn a_stranger_reaches_the_guest_by_the_kernel_after_its_first_datagram(cell: Cell) {
    let mut stage = Stage::new(cell, &asking_for("endpoint-independent"));
    let server = stage.server.address();
    let [_, other] = servers(cell);
    let from = SocketAddr::new(other, 7_777);
    let stand = &mut stage.stand;
    let (socket, response) = stand.run(|| stun::bind(server, BRIEFLY)).unwrap();
    assert_eq!(response.mapped.ip(), cell.family.choose(HOST, HOST6));
    socket.set_read_timeout(Some(WAIT)).unwrap();
    let stranger = stand.world.net.run(|| UdpSocket::bind(from)).unwrap();
    let mut buffer = [0; 16];
    let send = |stand: &Stand, number: u8| {
        let before = stand.port_frames();
        stranger.send_to(&[number], response.mapped).unwrap();
        assert_eq!(socket.recv_from(&mut [0; 16]).unwrap(), (1, from));
        stand.port_frames() - before
    };
    assert!(send(stand, 0) >= 1, "the engine decides");
    assert_eq!(send(stand, 1), 0, "the kernel translates");
    stranger.set_read_timeout(Some(WAIT)).unwrap();
    socket.send_to(b"answer", from).unwrap();
    let answered = stranger.recv_from(&mut buffer).unwrap();
    assert_eq!(answered, (6, response.mapped));
    let flow = stand.flow_to(from);
    assert_eq!(flow.nat, response.mapped.to_string());
    // A crash keeps the port and who may send to it.
    stand.slipgate.kill_engine().unwrap();
    eventually("another stranger to get through", || {
        let other = stand
            .world
            .net
            .run(|| UdpSocket::bind((server.ip(), 0)))
            .unwrap();
        other.send_to(b"more", response.mapped).unwrap();
        socket
            .set_read_timeout(Some(Duration::from_millis(100)))
            .unwrap();
        let got = socket.recv_from(&mut buffer).ok()?;
        (got.0 == 4).then_some(())
    });
}

/// A host beside [`HOST`], in a world of its own.
const OTHER_HOST: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 3);

/// Joins two worlds: the host of each is the other's neighbour.
fn join(one: &World, other: &World) {
    let peer = other.net.path();
    let link = format!(
        "link add x0 type veth peer name x0 netns {}",
        peer.display()
    );
    one.net.ip(&link).unwrap();
    for (world, own, gateway, theirs) in [
        (one, "192.0.2.1", "192.0.2.2", OTHER_HOST),
        (other, "192.0.2.2", "192.0.2.1", HOST),
    ] {
        world.net.ip(&format!("addr add {own}/30 dev x0")).unwrap();
        world.net.ip("link set x0 up").unwrap();
        let route = format!("route add {theirs}/32 via {gateway} dev x0");
        world.net.ip(&route).unwrap();
        for (key, value) in [
            ("net.ipv4.ip_forward", "1"),
            ("net.ipv4.conf.w0.proxy_arp", "1"),
            ("net.ipv4.neigh.w0.proxy_delay", "0"),
        ] {
            world.net.sysctl(key, value).unwrap();
        }
    }
}

/// Two guests send to the addresses that a STUN server saw of each other. Returns whether each
/// receives from the other, within this time.
fn punch(one: &Stage, other: &Stage, patience: Duration) -> bool {
    let ends = [one, other].map(|stage| {
        let server = stage.server.address();
        stage.stand.run(|| stun::bind(server, BRIEFLY)).unwrap()
    });
    let until = Instant::now() + patience;
    let mut received = [false; 2];
    while received != [true; 2] && Instant::now() < until {
        for at in [0, 1] {
            let (socket, theirs) = (&ends[at].0, ends[1 - at].1.mapped);
            let _ = socket.send_to(b"punch", theirs);
            socket
                .set_read_timeout(Some(Duration::from_millis(50)))
                .unwrap();
            let got = socket.recv_from(&mut [0; 16]);
            received[at] |= got.is_ok_and(|(_, from)| from == theirs);
        }
    }
    received == [true; 2]
}

#[test]
fn guests_of_two_hosts_punch_a_hole_to_each_other() {
    require_root_and_tun!();
    let others = || WorldConfig {
        host_addresses: vec![OTHER_HOST],
        ..WorldConfig::default()
    };
    let peers = "rules = [{ allow = \"198.18.0.0/24\" }]\n";
    for (asked, may_meet) in [(true, true), (false, false)] {
        // With the strictest filtering: each has sent to the other.
        let behaviour = match asked {
            true => "[nat.udp]\nmapping = \"endpoint-independent\"\n",
            false => "",
        };
        let policy = format!("default = \"allow\"\n{peers}{behaviour}");
        let (one, other) = (
            Stage::new(cells::hybrid_ipv4, &policy),
            Stage::of(&policy, others()),
        );
        join(&one.stand.world, &other.stand.world);
        let patience = if may_meet { WAIT } else { 2 * BRIEFLY };
        assert_eq!(punch(&one, &other, patience), may_meet, "{policy}");
    }
}
