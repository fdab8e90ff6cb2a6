//! The host's own masquerading beside slipgate, on the same address and toward the same server.

use std::net::{SocketAddrV4, TcpStream};

use slipgate_testbed::{
    Guest, GuestConfig, NetNs, PinDir, Slipgate, World, WorldConfig,
    clients::tcp::{self, EchoSession},
    require_root_and_tun,
    servers::{TcpServer, TcpService},
    world::{SERVER, UPLINK},
};

use crate::{WAIT, at};

/// Ports of guests' flows, as many as clients of the host try to get.
const PORTS: std::ops::RangeInclusive<u16> = 61_000..=61_015;

/// A client behind the host, which masquerades it by `masquerade`.
fn client_of(host: &NetNs, masquerade: &str) -> NetNs {
    let client = NetNs::new("client").unwrap();
    host.ip(&format!(
        "link add c0 type veth peer name eth0 netns {}",
        client.path().display()
    ))
    .unwrap();
    host.ip("addr add 10.77.0.1/24 dev c0").unwrap();
    host.ip("link set c0 up").unwrap();
    client.ip("addr add 10.77.0.2/24 dev eth0").unwrap();
    client.ip("link set eth0 up").unwrap();
    client.ip("route add default via 10.77.0.1").unwrap();
    host.nft(&format!(
        "add table ip own\n\
         add chain ip own out {{ type nat hook postrouting priority 100 ; }}\n\
         add rule ip own out oifname {UPLINK} meta l4proto tcp {masquerade}"
    ))
    .unwrap();
    client
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

    /// Connections of the client's from the very ports that guests' flows have at the uplink: the
    /// ones that masquerading would keep.
    fn of_client(&self) -> Vec<TcpStream> {
        let to: SocketAddrV4 = self.server.address();
        let connect = |port| self.client.run(|| tcp::connect_from(port, to, WAIT));
        PORTS.map(connect).map(Result::unwrap).collect()
    }
}

fn live(streams: &mut [TcpStream]) {
    for stream in streams {
        EchoSession::new(stream).round(1_000).unwrap();
    }
}

#[test]
fn masqueraded_clients_and_guests_that_take_every_port_live_beside_each_other() {
    require_root_and_tun!();
    for guest_is_first in [true, false] {
        let scene = scene("masquerade to :1024-60999", &[]).unwrap();
        let (mut guests, mut clients) = match guest_is_first {
            true => {
                let guests = scene.of_guest();
                (guests, scene.of_client())
            }
            false => {
                let clients = scene.of_client();
                (scene.of_guest(), clients)
            }
        };
        for _ in 0..2 {
            live(&mut guests);
            live(&mut clients);
        }
        // Every port was taken.
        assert_eq!(scene.slipgate.flows().unwrap().len(), PORTS.count());
        scene
            .guest
            .run(|| tcp::expect_refused(scene.server.address()))
            .unwrap();
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
