//! Guests that are clones of one another: one address, one MAC, one source port.

use std::collections::HashSet;

use slipgate_testbed::{
    PinDir, Slipgate, World,
    clients::tcp,
    servers::{TcpServer, TcpService},
    streams::Receipt,
    world::UPLINK,
};

use crate::{
    Cell, WAIT,
    matrix::{at, matrix},
};

matrix! {
    three_clones_talk_to_one_server_at_once_and_are_told_apart: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "each VM has an engine of its own";
}

const TAPS: [&str; 3] = ["tap0", "tap1", "tap2"];
const BYTES: u64 = 16 << 20;

fn three_clones_talk_to_one_server_at_once_and_are_told_apart(cell: Cell) {
    let world = World::new().unwrap();
    let mut args = vec!["--uplink", UPLINK];
    args.extend(cell.give(&world));
    let server = TcpServer::start(&world.net, (cell.server(), 7000), TcpService::Streams).unwrap();
    let guests = TAPS.map(|tap| cell.guest_at(&world, tap));
    let pins = PinDir::new().unwrap();
    args.extend(TAPS.iter().flat_map(|tap| ["--tap", *tap]));
    let slipgate = Slipgate::attach(&world.host, &pins, &args).unwrap();
    for guest in &guests {
        // One source port, so that all three have the very same tuple.
        guest
            .ns
            .sysctl("net.ipv4.ip_local_port_range", "40000 40000")
            .unwrap();
    }
    std::thread::scope(|scope| {
        let running: Vec<_> = guests
            .iter()
            .zip(1u64..)
            .map(|(guest, seed)| {
                let address = server.address();
                scope.spawn(move || {
                    let got = guest
                        .run(|| tcp::download(address, BYTES, seed, WAIT))
                        .unwrap();
                    println!("{}: {:.2} s", guest.config().tap, got.took.as_secs_f64());
                    (got.receipt, Receipt::expected(BYTES, seed))
                })
            })
            .collect();
        for transfer in running {
            let (got, expected) = transfer.join().unwrap();
            assert_eq!(got, expected);
        }
    });
    let flows = slipgate.flows().unwrap();
    let vms: HashSet<&str> = flows.iter().map(|flow| flow.vm.as_str()).collect();
    assert_eq!(vms, HashSet::from(TAPS), "{flows:?}");
    let guest = at(cell.guest(), 40_000).to_string();
    assert!(flows.iter().all(|flow| flow.guest == guest), "{flows:?}");
    let nats: HashSet<&str> = flows.iter().map(|flow| flow.nat.as_str()).collect();
    assert_eq!((flows.len(), nats.len()), (3, 3), "{flows:?}");
    assert!(flows.iter().all(|flow| flow.rx_bytes > BYTES), "{flows:?}");
    let stats = slipgate.stats().unwrap();
    for vm in stats["vms"].as_array().unwrap() {
        assert_eq!(vm["flows"], 1, "{vm}");
    }
}
