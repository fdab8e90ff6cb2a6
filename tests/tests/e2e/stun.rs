//! Endpoint-independent mapping and filtering, as a STUN client behind slipgate finds them.

use std::{
    fs::Permissions,
    net::{IpAddr, SocketAddr, UdpSocket},
    os::unix::fs::PermissionsExt as _,
    time::Duration,
};

use slipgate_testbed::{
    clients::{
        nat_discovery::NatDiscovery,
        stun::{self, Behaviour, Dependence},
    },
    servers::StunServer,
    skipped,
    world::{HOST, SERVER, SERVER_2},
    world_ipv6::{HOST6, SERVER6, SERVER6_2},
};

use crate::{BRIEFLY, Cell, Stand, WAIT, eventually, matrix::matrix};

matrix! {
    rfc5780_without_the_option_all_depends_on_address_and_port: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    rfc5780_stun_finds_no_hairpinning_where_the_policy_says_so: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    rfc5780_stun_finds_the_mapping_and_filtering_that_the_policy_asks_for: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    coturns_stun_client_finds_that_all_depends_on_address_and_port: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    coturns_stun_client_finds_the_behaviour_that_the_policy_asks_for: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_stranger_reaches_the_guest_by_the_kernel_after_its_first_datagram: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "it is about the kernel's programs and an engine's successor, and user mode has neither (policy.md)";
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
        let stand = Stand::of(cell, &args);
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

/// Has coturn's client say how the NAT behaves, up to three times until it says what is expected: it
/// gives each response 3 s, which a loaded machine may need. `None`: the client is not here.
fn said_by_coturn(stage: &Stage, expected: Behaviour) -> Option<Behaviour> {
    let Some(client) = NatDiscovery::find() else {
        skipped!("`cargo xtask test` could not fetch coturn, a Debian package");
        return None;
    };
    let (guest, own) = (&stage.stand.guest, stage.stand.cell.guest());
    let server = stage.server.address();
    let ask = || client.behaviour(&guest.ns, own, server).unwrap();
    let mut found = ask();
    for _ in 0..2 {
        if found != expected {
            found = ask();
        }
    }
    Some(found)
}

fn coturns_stun_client_finds_that_all_depends_on_address_and_port(cell: Cell) {
    let stage = Stage::new(cell, "default = \"allow\"\n");
    let expected = Behaviour {
        mapping: Dependence::AddressAndPortDependent,
        filtering: Dependence::AddressAndPortDependent,
        hairpinning: false,
    };
    if let Some(found) = said_by_coturn(&stage, expected) {
        assert_eq!(found, expected);
    }
}

fn coturns_stun_client_finds_the_behaviour_that_the_policy_asks_for(cell: Cell) {
    let all = Dependence::EndpointIndependent;
    let some = Dependence::AddressDependent;
    let one = Dependence::AddressAndPortDependent;
    // It finds hairpinning only where strangers get in.
    for (filtering, more, found, hairpinning) in [
        ("endpoint-independent", "", all, true),
        ("endpoint-independent", "hairpin = false\n", all, false),
        ("address-dependent", "", some, false),
        ("address-and-port-dependent", "", one, false),
    ] {
        let stage = Stage::new(cell, &(asking_for(filtering) + more));
        let expected = Behaviour {
            mapping: Dependence::EndpointIndependent,
            filtering: found,
            hairpinning,
        };
        let Some(found) = said_by_coturn(&stage, expected) else {
            return;
        };
        assert_eq!(found, expected, "{filtering} {more}");
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
