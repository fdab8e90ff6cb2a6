//! A broker that serves, on a host that is short of something, or whose other processes hang.

use std::{
    fs,
    fs::File,
    path::PathBuf,
    time::{Duration, Instant},
};

use slipgate_testbed::{
    Capture, Slipgate,
    clients::tcp,
    servers::{TcpServer, TcpService},
    turns,
    world::UPLINK,
};

use crate::{BRIEFLY, Cell, Stand, WAIT, matrix::matrix};

matrix! {
    a_broker_without_descriptors_lives_and_follows_the_network: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host's kernel routes its sockets";
    a_broker_that_serves_does_not_wait_for_who_holds_the_lock: [hybrid_ipv4],
        without [hybrid_ipv6]: "no packet of the guest's is part of it",
        without [user_ipv4, user_ipv6]: "it pins nothing";
}

/// Half of the time after which `why` gives up.
const AT_ONCE: Duration = Duration::from_millis(2_500);

/// The number that its next descriptor would have: with that limit it can have none.
pub(crate) fn next_descriptor(slipgate: &Slipgate) -> libc::rlim_t {
    let fds = format!("/proc/{}/fd", slipgate.broker_pid());
    let is_free = |number: &u64| fs::symlink_metadata(format!("{fds}/{number}")).is_err();
    (0..).find(is_free).expect("one that is free")
}

/// Lets the broker have so many descriptors; how many it might have before.
pub(crate) fn limit_descriptors(slipgate: &Slipgate, most: libc::rlim_t) -> libc::rlim_t {
    let pid = slipgate.broker_pid() as libc::pid_t;
    // SAFETY: structs of integers, alive during the calls.
    unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        let none = std::ptr::null();
        assert_eq!(
            libc::prlimit(pid, libc::RLIMIT_NOFILE, none, &raw mut limit),
            0
        );
        let before = std::mem::replace(&mut limit.rlim_cur, most);
        let nowhere = std::ptr::null_mut();
        assert_eq!(
            libc::prlimit(pid, libc::RLIMIT_NOFILE, &raw const limit, nowhere),
            0
        );
        before
    }
}

fn a_broker_without_descriptors_lives_and_follows_the_network(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let host = &stand.world.host;
    let address = (cell.server(), 7000);
    let server = TcpServer::start(&stand.world.net, address, TcpService::Streams).unwrap();
    let before = limit_descriptors(&stand.slipgate, next_descriptor(&stand.slipgate));
    // Its links, addresses and routes change.
    host.ip("tuntap add other0 mode tap").unwrap();
    let other = match cell.is_ipv6() {
        false => "172.31.0.1/24",
        true => "fd31::1/64",
    };
    host.ip(&format!("addr add {other} dev other0")).unwrap();
    host.ip("link set other0 up").unwrap();
    host.ip(&format!("link set {UPLINK} mtu 1400")).unwrap();
    host.ip("link del other0").unwrap();
    std::thread::sleep(2 * BRIEFLY);
    assert!(stand.slipgate.broker_runs(), "{}", stand.slipgate.stderr());
    limit_descriptors(&stand.slipgate, before);
    let largest = || {
        let capture = Capture::start(host, UPLINK).unwrap();
        let sent = stand.run(|| tcp::upload(server.address(), 1 << 20, 1, WAIT));
        sent.unwrap();
        capture.finish().unwrap().sent.longest_segment_bytes
    };
    let deadline = Instant::now() + WAIT;
    while largest() != 1400 {
        assert!(Instant::now() < deadline, "{}", stand.slipgate.stderr());
    }
}

/// The lock of a process's pins.
pub(crate) fn lock_of(slipgate: &Slipgate) -> PathBuf {
    slipgate.run_dir().unwrap().join("lock")
}

fn a_broker_that_serves_does_not_wait_for_who_holds_the_lock(cell: Cell) {
    let _turn = turns::alone("it compares an answer's time with a promise");
    let stand = Stand::of(cell, &[]);
    let host = &stand.world.host;
    let lock = File::options()
        .write(true)
        .open(lock_of(&stand.slipgate))
        .unwrap();
    lock.lock().unwrap();
    // A TAP of another's that goes leaves pins to be looked for.
    host.ip("tuntap add other0 mode tap").unwrap();
    host.ip("link del other0").unwrap();
    std::thread::sleep(BRIEFLY);
    let asked = Instant::now();
    let (admitted, _) = stand
        .slipgate
        .why("tap0", "203.0.113.9:443", "tcp")
        .unwrap();
    assert!(admitted);
    assert!(asked.elapsed() < AT_ONCE, "{:?}", asked.elapsed());
    lock.unlock().unwrap();
}
