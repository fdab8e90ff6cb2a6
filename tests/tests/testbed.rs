//! The testbed against a NAT that is known to work: nftables masquerade.

use std::time::Duration;

use slipgate_testbed::{
    baseline,
    clients::tcp,
    guest::{Guest, GuestConfig},
    pump::Direction,
    servers::{TcpServer, TcpService},
    world::{SERVER, World, WorldConfig},
};

const WAIT: Duration = Duration::from_secs(5);

#[test]
fn streams_pass_whole_with_gso_kept() {
    let world = World::with(WorldConfig {
        ip_forward: true,
        ..Default::default()
    })
    .unwrap();
    let guest = Guest::new(&world, GuestConfig::new("tap0")).unwrap();
    baseline::masquerade(&world, &guest).unwrap();
    let server = TcpServer::start(&world.net, (SERVER, 7000), TcpService::Streams).unwrap();
    for len in [0, 1, 100_000, 50_000_000] {
        let up = guest
            .run(|| tcp::upload(server.address(), len, 1, WAIT))
            .unwrap();
        let down = guest
            .run(|| tcp::download(server.address(), len, 2, WAIT))
            .unwrap();
        println!(
            "{len}: up {:.2} down {:.2} Gb/s",
            up.bits_per_second() / 1e9,
            down.bits_per_second() / 1e9
        );
    }
    for direction in [Direction::Out, Direction::In] {
        let flows = guest.flows(direction);
        assert!(
            flows.longest_bytes > 30_000,
            "{direction:?}: GSO kept: {flows:?}"
        );
        assert!(
            flows.longest_segment_bytes <= 1500,
            "{direction:?}: {flows:?}"
        );
    }
}
