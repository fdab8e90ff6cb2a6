//! What keeps a VM busy, and what does not.
use std::{
    io::{Read as _, Write as _},
    net::{TcpStream, UdpSocket},
    os::fd::AsRawFd as _,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use slipgate_testbed::{
    clients::{tcp, tcp::ConnectOutcome},
    servers::{TcpServer, TcpService},
};

use crate::{
    BRIEFLY, Cell, WAIT,
    api::{Events, Stand},
    matrix::{at, matrix, pings},
};

matrix! {
    keep_alives_of_linux_keep_a_vm_busy_unless_its_policy_ignores_them: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    what_a_guest_refuses_to_the_world_keeps_it_idle: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "clients of forwards are relayed: the gateway connects to the guest (exec.md)";
}

const VM: &str = "/v1/vms/tap0";

/// Seconds of silence after which a VM is idle.
const AFTER: u64 = 4;

fn stand(cell: Cell) -> Stand {
    match cell.is_hybrid() {
        true => Stand::of(cell, &["--idle-after", &AFTER.to_string()]),
        false => Stand::of(cell, &[]),
    }
}

/// Gives the VM this definition, with its TAP, or in user mode with the silence that has no flag there.
fn put(stand: &Stand, mut body: Value, status: u16) {
    let (key, value) = match stand.cell.is_hybrid() {
        true => ("tap", json!("tap0")),
        false => ("idle_after", json!(AFTER)),
    };
    body[key] = value;
    let (got, vm) = stand.ask("PUT", VM, Some(body));
    let status = if stand.cell.is_hybrid() { status } else { 200 };
    assert_eq!(got, status, "{vm}");
}

/// Has Linux send keep-alives, one a second.
fn keep_alive(stream: &TcpStream) {
    for (level, option) in [
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
        (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE),
        (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL),
    ] {
        let one = 1_i32;
        // SAFETY: the option's value is an int, which lives during the call.
        let result = unsafe {
            libc::setsockopt(
                stream.as_raw_fd(),
                level,
                option,
                (&raw const one).cast(),
                size_of::<i32>() as u32,
            )
        };
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    }
}

fn activity(stand: &Stand) -> Value {
    stand.ask("GET", VM, None).1["activity"].clone()
}

fn sent_packets(stand: &Stand) -> u64 {
    let (_, flows) = stand.ask("GET", "/v1/flows?vm=tap0", None);
    flows[0]["tx_packets"].as_u64().unwrap()
}

/// As long as it takes to be idle, thrice.
fn stays_busy(stand: &Stand) {
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(3 * AFTER) {
        let (_, vm) = stand.ask("GET", VM, None);
        assert_eq!(vm["idle"], false, "{vm}");
        std::thread::sleep(BRIEFLY);
    }
}

fn keep_alives_of_linux_keep_a_vm_busy_unless_its_policy_ignores_them(cell: Cell) {
    let stand = stand(cell);
    let net = &stand.world().net;
    let echo = TcpServer::start(net, (cell.server(), 7000), TcpService::Echo).unwrap();
    let guest = stand.guest("tap0");
    let quiet = "default = \"allow\"\n[idle]\nignores = [\"keepalive\"]";
    assert_eq!(stand.put_policy("/v1/policies/quiet", quiet), 200);
    put(&stand, json!({}), 201);
    let mut events = Events::read(&stand, "/v1/events?after=0&kind=vm_idle,vm_busy");
    let mut stream = guest.run(|| tcp::connect(echo.address(), WAIT)).unwrap();
    keep_alive(&stream);
    stays_busy(&stand);

    put(&stand, json!({ "policy": "quiet" }), 200);
    let idle = events.next();
    assert_eq!(
        (&idle["event"], &idle["flows"]),
        (&json!("vm_idle"), &json!(1))
    );
    for way in ["last_from_guest_ms", "last_to_guest_ms"] {
        assert!(idle[way].as_u64() >= Some(1_000 * AFTER), "{idle}");
    }
    // They go on all the while.
    let before = sent_packets(&stand);
    crate::eventually("two more keep-alives are sent", || {
        (sent_packets(&stand) >= before + 2).then_some(())
    });
    assert_eq!(stand.ask("GET", VM, None).1["idle"], true);
    let silent = activity(&stand);
    assert!(
        silent["last_from_guest_ms"].as_u64() > Some(1_000 * AFTER),
        "{silent}"
    );
    assert_eq!(silent["flows"], 1);
    let metrics = stand.metrics();
    let line = "slipgate_last_packet_timestamp_seconds{vm=\"tap0\",direction=\"tx\"}";
    assert!(metrics.contains(line), "{metrics}");

    // A byte is no keep-alive, though it is one octet, too.
    let mut back = [0];
    stream.write_all(b"x").unwrap();
    stream.read_exact(&mut back).unwrap();
    let moved = activity(&stand);
    assert!(
        moved["last_from_guest_ms"].as_u64() < silent["last_from_guest_ms"].as_u64(),
        "{moved}"
    );
    assert_eq!(events.next()["event"], "vm_busy");
    assert_eq!(events.next()["event"], "vm_idle");
}

/// Of a forward whose port the guest has closed, and of UDP without a socket.
fn what_a_guest_refuses_to_the_world_keeps_it_idle(cell: Cell) {
    let stand = stand(cell);
    let guest = stand.guest("tap0");
    // Linux refuses a datagram a second to a peer; one that nobody refuses may have been accepted.
    let limits = ["net.ipv4.icmp_ratelimit", "net.ipv6.icmp.ratelimit"];
    let limit = limits[usize::from(cell.is_ipv6())];
    guest.ns.sysctl(limit, "0").unwrap();
    let body = json!({ "tap": "tap0", "forwards": ["tcp:8080:80", "udp:5353:53"] });
    assert_eq!(stand.ask("PUT", VM, Some(body)).0, 201);
    // It shows its address, to which the forwards lead.
    assert!(pings(&guest, cell.gateway(), WAIT));
    let mut events = Events::read(&stand, "/v1/events?after=0&kind=vm_idle,vm_busy");
    let net = &stand.world().net;
    let address = at(cell.host(), 8080);
    let knock = || {
        let outcome = net.run(|| tcp::connect_outcome(address, WAIT));
        assert!(matches!(outcome.unwrap(), ConnectOutcome::Refused(_)));
        net.run(|| {
            let socket = UdpSocket::bind(at(cell.family.unspecified(), 0)).unwrap();
            socket.connect(at(cell.host(), 5353)).unwrap();
            socket.send(b"x").unwrap();
        });
    };
    let idle = std::thread::scope(|scope| {
        let waits = scope.spawn(|| events.next());
        let begun = Instant::now();
        while !waits.is_finished() && begun.elapsed() < WAIT {
            knock();
            std::thread::sleep(BRIEFLY);
        }
        waits.join().unwrap()
    });
    assert_eq!(idle["event"], "vm_idle");
    for _ in 0..8 {
        knock();
        std::thread::sleep(BRIEFLY);
    }
    assert_eq!(stand.ask("GET", VM, None).1["idle"], true);
    // One that it accepts.
    let echo = TcpServer::start(&guest.ns, (cell.guest(), 80), TcpService::Echo).unwrap();
    let live = net.run(|| tcp::connect(address, WAIT)).unwrap();
    assert_eq!(events.next()["event"], "vm_busy");
    drop((live, echo));
    assert_eq!(events.next()["event"], "vm_idle");
    assert!(pings(&guest, cell.server(), WAIT));
    assert_eq!(events.next()["event"], "vm_busy");
}
