//! Ifindexes, guests' addresses and flows' tuples repeat across network namespaces: pins of one
//! namespace have no effect in another.

use std::{
    fs::{self, File},
    net::IpAddr,
    path::Path,
};

use slipgate_testbed::{
    Guest, PinDir, Slipgate, World,
    clients::tcp::{self, EchoSession},
    servers::{TcpServer, TcpService},
    world::UPLINK,
};

use crate::{Cell, WAIT, matrix::matrix};

matrix! {
    two_hosts_with_the_same_indexes_are_apart: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "it pins nothing";
    what_the_dead_left_of_locks_is_removed_by_the_next_start: [hybrid_ipv4],
        without [hybrid_ipv6]: "no packet of the guest's is part of it",
        without [user_ipv4, user_ipv6]: "it pins nothing";
    pins_of_a_namespace_that_is_gone_go_with_the_next_start_in_another: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "it pins nothing";
}

const PORTS: &str = "net.ipv4.ip_local_port_range";

/// A host of its own, with the same names, indexes and addresses as the others.
struct Host {
    slipgate: Slipgate,
    guest: Guest,
    server: TcpServer<IpAddr>,
    world: World,
}

impl Host {
    fn new(cell: Cell, pins: &PinDir) -> Host {
        let world = World::new().unwrap();
        let ipv6 = cell.give(&world);
        let server = TcpServer::start(&world.net, (cell.server(), 7), TcpService::Echo).unwrap();
        let guest = cell.guest_at(&world, "tap0");
        guest.ns.sysctl(PORTS, "40000 40000").unwrap();
        let args = [&["--tap", "tap0", "--uplink", UPLINK], ipv6].concat();
        Host {
            slipgate: Slipgate::attach(&world.host, pins, &args).unwrap(),
            guest,
            server,
            world,
        }
    }

    /// Indexes of TAP, uplink and engine port.
    fn indexes(&self) -> [Option<u32>; 3] {
        ["tap0", UPLINK, self.slipgate.engine_port()].map(|name| self.world.host.ifindex(name))
    }

    fn packets(&self) -> Vec<u64> {
        let flows = self.slipgate.flows().unwrap();
        flows.iter().map(|flow| flow.tx_packets).collect()
    }
}

fn two_hosts_with_the_same_indexes_are_apart(cell: Cell) {
    // One --pin-dir for both, as by default.
    let pins = PinDir::new().unwrap();
    let [mut one, mut other] = [Host::new(cell, &pins), Host::new(cell, &pins)];
    assert_eq!(one.indexes(), other.indexes());
    assert!(one.indexes().iter().all(Option::is_some));

    let connect = |host: &Host| host.guest.run(|| tcp::connect(host.server.address(), WAIT));
    let mut stream = connect(&one).unwrap();
    EchoSession::new(&mut stream).round(1_000).unwrap();
    // Nothing of it is the other's.
    assert_eq!(other.packets(), [] as [u64; 0]);
    let nothing = other.slipgate.stats().unwrap()["total"]["kernel"]["tx_packets"].take();
    assert_eq!(nothing, 0);
    assert_eq!(other.server.accepted(), 0);

    // The very same tuple, there.
    let mut there = connect(&other).unwrap();
    let mut session = EchoSession::new(&mut there);
    for _ in 0..20 {
        session.round(1_000).unwrap();
    }
    assert_eq!((one.server.accepted(), other.server.accepted()), (1, 1));
    let (few, many) = (one.packets(), other.packets());
    assert!(few.len() == 1 && many.len() == 1, "{few:?} {many:?}");
    assert!(few[0] < 12 && many[0] >= 21, "{few:?} {many:?}");

    // One's orderly stop takes nothing of the other's away; nor does its death.
    assert!(one.slipgate.stop().unwrap().success());
    session.round(1_000).unwrap();
    assert!(!pins.pins().is_empty());
    one.slipgate = one.slipgate.again().unwrap();
    one.slipgate.kill_both().unwrap();
    session.round(1_000).unwrap();
    let more = connect(&other);
    // Its only port is taken by the session.
    assert!(more.is_err());
    assert!(other.slipgate.stop().unwrap().success());
}

fn what_the_dead_left_of_locks_is_removed_by_the_next_start(cell: Cell) {
    // Named as for pins that are nowhere, in a namespace that never was; they don't say where.
    let left = |number: u32| {
        let name = format!("1-{:08x}{number:08x}", std::process::id());
        let dir = Path::new("/run/slipgate").join(name);
        fs::create_dir_all(&dir).unwrap();
        for file in ["lock", "owner-0.lock", "0.sock", "netns-cookie"] {
            fs::write(dir.join(file), "").unwrap();
        }
        dir
    };
    let (dead, lives) = (left(1), left(2));
    let living = File::open(lives.join("owner-0.lock")).unwrap();
    living.lock().unwrap();
    let pins = PinDir::new().unwrap();
    let start = || drop(Host::new(cell, &pins));
    start();
    assert!(!dead.exists() && lives.exists());
    drop(living);
    start();
    assert!(!lives.exists());
}

fn pins_of_a_namespace_that_is_gone_go_with_the_next_start_in_another(cell: Cell) {
    let pins = PinDir::new().unwrap();
    let sets = || {
        let all = pins.pins();
        all.iter().filter(|pin| pin.ends_with("SLOTS")).count()
    };
    let [mut dies, mut lives] = [Host::new(cell, &pins), Host::new(cell, &pins)];
    let mut streams = [&dies, &lives].map(|host| {
        let stream = host.guest.run(|| tcp::connect(host.server.address(), WAIT));
        stream.unwrap()
    });
    // All are killed. One's namespace goes, the other's flow goes on.
    dies.slipgate.kill_both().unwrap();
    lives.slipgate.kill_both().unwrap();
    drop(dies);
    assert_eq!(sets(), 2);
    // The kernel takes a namespace's interfaces down some time after its last process.
    crate::eventually("the dead one's pins are gone", || {
        let starts = Host::new(cell, &pins);
        let left = sets();
        drop(starts.slipgate);
        (left == 2).then_some(())
    });
    let [_, stream] = &mut streams;
    EchoSession::new(stream).round(1_000).unwrap();
    lives.slipgate = lives.slipgate.again().unwrap();
    EchoSession::new(stream).round(1_000).unwrap();
    assert_eq!(lives.packets().len(), 1, "it was adopted");
    assert!(lives.slipgate.stop().unwrap().success());
}
