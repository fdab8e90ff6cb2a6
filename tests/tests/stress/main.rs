//! slipgate under stress: its processes killed, restarted and replaced under traffic, a bad link,
//! verdicts changed under way, a host that changes, guests that flood, tables that are full, a
//! million messages to a guest of slipgate's VMM.
//!
//! Guests have IPv4 and IPv6, and traffic goes by both at once ([`BOTH_SERVERS`]), but where a test is about
//! one family's addresses.
//!
//! Each test keeps [books](books::Books): what the guest's link and the uplink carried, counted
//! independently, against what slipgate says of each flow. They must agree to the packet and byte.
//!
//! Moments and victims are random. The seed is printed; set `SLIPGATE_STRESS_SEED` to repeat it.
//!
//! | variable | says | default |
//! | --- | --- | --- |
//! | `SLIPGATE_STRESS_ROUNDS` | kills, upgrades and restarts per test | 3 |
//! | `SLIPGATE_STRESS_OUTAGE` | seconds without slipgate per kill | 3 |
//! | `SLIPGATE_STRESS_CHURN` | seconds in which VMs, policies and forwards come and go | 12 |
//! | `SLIPGATE_STRESS_CONNECTIONS` | streams over the bad link | 10000 |
//! | `SLIPGATE_STRESS_MESSAGES` | messages each way over vsock | 1000000 |
//! | `SLIPGATE_STRESS_KNOCKS` | connects to a VM that sleeps now and then | 1000 |
//!
//! The long form, about two hours:
//! ```text
//! SLIPGATE_STRESS_ROUNDS=50 SLIPGATE_STRESS_OUTAGE=100 SLIPGATE_STRESS_CHURN=600 \
//!     cargo test --release -p slipgate-testbed --test stress -- --test-threads=1 --nocapture
//! ```

/// Begins a test: it needs root and `/dev/net/tun`, and the machine for itself, since it loads every CPU.
macro_rules! begin {
    () => {
        slipgate_testbed::require_root_and_tun!();
        let _turn = slipgate_testbed::turns::alone("it loads every CPU");
    };
}

mod bad_link;
mod books;
mod churn;
mod crash;
mod fleet;
mod flips;
mod hand_over;
mod host_changes;
mod layout;
mod limits;
mod neighbours;
mod reload;
mod scene;
mod sleep;
mod store;
mod traffic;
mod upgrade;
mod vsock;

use std::{
    env,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::{Duration, Instant, SystemTime},
};

use slipgate_testbed::{
    impairment::SplitMix64,
    world::{HOST, SERVER},
    world_ipv6::{HOST6, SERVER6},
};

/// Long enough for anything that will ever happen, on a machine busy with other things.
const WAIT: Duration = Duration::from_secs(60);
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);

/// The first server of the world, and the host, by each family. Half of what is sent in a test goes by
/// each, beside the other.
const BOTH_SERVERS: [IpAddr; 2] = [IpAddr::V4(SERVER), IpAddr::V6(SERVER6)];
const BOTH_HOSTS: [IpAddr; 2] = [IpAddr::V4(HOST), IpAddr::V6(HOST6)];

fn at(address: impl Into<IpAddr>, port: u16) -> SocketAddr {
    SocketAddr::new(address.into(), port)
}

/// One of two, in turn: what a family has, by a number.
fn in_turn<T>(both: &[T; 2], number: usize) -> &T {
    &both[number % 2]
}

/// A number from the environment.
fn knob(name: &str, default: u64) -> u64 {
    let Ok(text) = env::var(name) else {
        return default;
    };
    let number = text.parse();
    number.unwrap_or_else(|_| panic!("{name}={text}: it takes a whole number"))
}

fn rounds() -> u64 {
    knob("SLIPGATE_STRESS_ROUNDS", 3)
}

/// The test's random sequence; its seed is printed.
fn random() -> SplitMix64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let fresh = since.unwrap_or_default().subsec_nanos().into();
    let seed = knob("SLIPGATE_STRESS_SEED", fresh);
    println!("SLIPGATE_STRESS_SEED={seed}");
    SplitMix64(seed)
}

/// A random number below `end`.
fn below(random: &mut SplitMix64, end: u64) -> u64 {
    random.next() % end
}

/// Lets this process have so many descriptors.
fn allow_descriptors(wanted: u64) {
    // SAFETY: plain data; both calls get a pointer to it.
    let (limit, rc) = unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit);
        limit.rlim_cur = limit.rlim_cur.max(wanted);
        limit.rlim_max = limit.rlim_max.max(wanted);
        (
            limit,
            libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit),
        )
    };
    assert_eq!(
        rc, 0,
        "{wanted} descriptors are needed, see `ulimit -Hn`: {limit:?}"
    );
}

/// Waits until `done`, looking often.
fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let until = Instant::now() + WAIT;
    while !done() {
        assert!(Instant::now() < until, "{what} did not happen in {WAIT:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
