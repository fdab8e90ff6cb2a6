//! Many connections over a bad link, each with bytes of its own: opened by clients of forwards and by
//! the guest, with ends that are slow, that reset, and that are one too many.
//!
//! `SLIPGATE_STRESS_CONNECTIONS` is their number, 1,000 by default, and `SLIPGATE_STRESS_SEED` what the
//! first of them depend on.
use std::{
    net::{SocketAddr, TcpListener},
    sync::{
        Mutex,
        atomic::{AtomicU32, Ordering},
    },
};

use super::{
    super::*,
    guest::{Close, End, Guest},
    world::{Client, Impairment, MS, VM, World, bytes},
};

/// Loses, repeats and reorders.
pub(super) const BAD: Impairment = Impairment {
    loss: 3,
    duplicates: 3,
    jitter_ms: 5,
    garbled: 0,
};
/// Connections that share a world, and those of them that a limit refuses.
pub(super) const AT_ONCE: usize = 40;
const TOO_MANY: usize = 4;
/// Time on the clock within which the connections of a world end, ms.
pub(super) const PATIENCE_MS: u64 = 900_000;

/// Course that a connection of the test takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fate {
    /// Both ends send, and the first of them ends its side then.
    Whole,
    /// The guest reads nothing at first: its window closes.
    SlowGuest,
    SlowHost,
    /// The guest resets once it has read some.
    GuestResets,
    HostResets,
}

pub(super) const FATES: [Fate; 8] = [
    Fate::Whole,
    Fate::SlowGuest,
    Fate::Whole,
    Fate::SlowHost,
    Fate::Whole,
    Fate::GuestResets,
    Fate::Whole,
    Fate::HostResets,
];

/// One connection: the place of its ends, and what they are to see.
pub(super) struct Pair {
    pub(super) fate: Fate,
    pub(super) is_reset: bool,
    pub(super) port: u16,
    /// Index of the guest's end.
    pub(super) guest: usize,
    /// Index of the host's, once there is one.
    pub(super) host: Option<usize>,
    pub(super) listener: Option<TcpListener>,
    pub(super) to_guest: Vec<u8>,
    pub(super) to_host: Vec<u8>,
}

impl Pair {
    /// A pair whose bytes depend on `own`.
    pub(super) fn new(own: u32, fate: Fate, port: u16, guest: usize) -> Self {
        let size = |salt: u32| (own.wrapping_mul(salt) >> 7) as usize % 40_000;
        let to_guest = match fate {
            // More than its buffer takes.
            Fate::SlowGuest => 70_000,
            _ => 2_000 + size(2_654_435_761),
        };
        Self {
            fate,
            is_reset: false,
            port,
            guest,
            host: None,
            listener: None,
            to_guest: bytes(to_guest, own),
            to_host: bytes(2_000 + size(0x85eb_ca6b), own ^ 0xffff),
        }
    }

    /// Checks what both ends have. Adds to the counts of whole ones and of those reset.
    pub(super) fn check(&self, own: u32, guest: &End, host: &End, counts: &mut (usize, usize)) {
        let is_whole = matches!(self.fate, Fate::Whole | Fate::SlowGuest | Fate::SlowHost);
        assert!(
            self.to_guest.starts_with(&guest.received),
            "{own}: wrong bytes"
        );
        assert!(
            self.to_host.starts_with(&host.received),
            "{own}: wrong bytes"
        );
        if is_whole {
            let lens = (guest.received.len(), host.received.len());
            let expected = (self.to_guest.len(), self.to_host.len());
            assert_eq!(lens, expected, "{own}: {:?}", self.fate);
            counts.0 += 1;
        } else {
            counts.1 += usize::from(guest.reset || host.reset);
        }
    }

    /// Whether the host's end is the first that ends. Who reads late does not end first.
    fn is_ended_by_host(&self, seed: u32) -> bool {
        match self.fate {
            Fate::SlowGuest => true,
            Fate::SlowHost => false,
            _ => seed.is_multiple_of(2),
        }
    }

    pub(super) fn host_end(&self, seed: u32) -> End {
        let close = match self.is_ended_by_host(seed) {
            true => Close::WhenSent,
            false => Close::AfterPeer,
        };
        let mut end = End::new(self.to_guest.clone(), close);
        end.reads = self.fate != Fate::SlowHost;
        end
    }

    pub(super) fn guest_end(&self, seed: u32) -> End {
        let close = match self.is_ended_by_host(seed) {
            true => Close::AfterPeer,
            false => Close::WhenSent,
        };
        let mut end = End::new(self.to_host.clone(), close);
        end.reads = self.fate != Fate::SlowGuest;
        end
    }
}

/// Runs the connections of one world. Returns how many were whole, and how many were reset.
fn run(seed: u32) -> (usize, usize) {
    let limits = Limits {
        streams_per_vm: (AT_ONCE / 2) as u32,
        // smoltcp answers no SYN that comes again: when its SYN-ACK is lost a few times, the handshake
        // takes longer than most clients wait.
        connect_ns: 60_000 * MS,
        ..Limits::default()
    };
    let mut world = World::new(limits, BAD);
    world.reseed(u64::from(seed));
    world.most_jump_ns = 20 * MS;
    let (mut clients, mut pairs) = (Vec::new(), Vec::new());
    for nth in 0..AT_ONCE {
        let own = seed.wrapping_mul(AT_ONCE as u32).wrapping_add(nth as u32);
        let port = 1_000 + nth as u16;
        // Of each two, one is opened by each side.
        let fate = FATES[(own as usize / 2) % FATES.len()];
        let mut pair = Pair::new(own, fate, port, world.guest.ends.len());
        let guest_end = pair.guest_end(own);
        if nth % 2 == 0 {
            world.guest.listen(port, guest_end);
            let to = world.forward_tcp(port);
            pair.host = Some(clients.len());
            clients.push(Client::connect(to, pair.host_end(own)));
        } else {
            pair.listener = Some(world.lead(port));
            let gateway = SocketAddr::from(([10, 0, 2, 2], port));
            world.guest.connect(gateway, 40_000 + nth as u16, guest_end);
        }
        pairs.push((own, pair));
        // Below a listener's backlog at a time.
        world.step(&mut clients);
    }
    // All of the forwards' connections are under way: these are too many.
    let refused = world.forward_tcp(999);
    let first_refused = clients.len();
    clients.extend(
        (0..TOO_MANY).map(|_| Client::connect(refused, End::new(Vec::new(), Close::Never))),
    );
    let end_ns = world.now_ns + PATIENCE_MS * MS;
    let begun_ns = world.now_ns;
    while !is_over(&mut world, &mut clients, &mut pairs, begun_ns) {
        assert!(
            world.now_ns < end_ns,
            "seed {seed}: {:?}",
            world.relay.entries
        );
        world.step(&mut clients);
    }
    assert!(
        clients[first_refused..][..TOO_MANY]
            .iter()
            .all(|client| client.end.reset)
    );
    assert_eq!(world.relay.counts(VM).streams_refused, TOO_MANY as u64);
    let mut counts = (0, 0);
    for (own, pair) in &pairs {
        let guest = &world.guest.ends[pair.guest].1;
        let host = &clients[pair.host.unwrap()].end;
        pair.check(*own, guest, host, &mut counts);
    }
    let is_left = |world: &mut World, _: &[Client]| {
        let counts = world.relay.counts(VM);
        counts.streams + counts.loopback_streams == 0
    };
    world.run(&mut clients, 400_000, is_left);
    world.assert_empty();
    counts
}

/// What carries connections between a guest and the host's sockets.
pub(super) trait Carrier {
    fn guest(&mut self) -> &mut Guest;
    fn now_ns(&self) -> u64;
    /// Whether it has a connection of the pair.
    fn has_connection(&self, pair: &Pair) -> bool;
}

impl Carrier for World {
    fn guest(&mut self) -> &mut Guest {
        &mut self.guest
    }

    fn now_ns(&self) -> u64 {
        self.now_ns
    }

    fn has_connection(&self, pair: &Pair) -> bool {
        let own = |name: &Name| [name.guest.port(), name.ours.port()].contains(&pair.port);
        self.relay.connections.keys().any(own)
    }
}

/// Lets things happen, and says whether every connection has come to its end.
pub(super) fn is_over(
    carrier: &mut impl Carrier,
    clients: &mut Vec<Client>,
    pairs: &mut [(u32, Pair)],
    begun_ns: u64,
) -> bool {
    const SLOW_MS: u64 = 3_000;
    let at_ms = (carrier.now_ns() - begun_ns) / MS;
    let is_late = carrier.now_ns() > begun_ns + SLOW_MS * MS;
    let mut all = true;
    for (own, pair) in pairs {
        if let Some(listener) = &pair.listener
            && pair.host.is_none()
        {
            let accepted = Client::accept(listener, pair.host_end(*own));
            pair.host = accepted.as_ref().map(|_| clients.len());
            clients.extend(accepted);
        }
        let Some(at) = pair.host else {
            all = false;
            continue;
        };
        let host = &mut clients[at];
        let guest = &mut carrier.guest().ends[pair.guest].1;
        host.end.reads |= is_late;
        guest.reads |= is_late;
        let has_some = guest.received.len() > 500 && host.end.received.len() > 500;
        all &= match pair.fate {
            Fate::GuestResets if has_some && !pair.is_reset => {
                pair.is_reset = true;
                carrier.guest().abort(pair.guest);
                false
            }
            Fate::HostResets if has_some && !pair.is_reset => {
                pair.is_reset = true;
                let copy = host.stream.try_clone().unwrap();
                stream::reset_host(copy);
                // The last descriptor's close resets.
                host.close();
                false
            }
            Fate::GuestResets => {
                // The reset may be lost: then it takes a segment to the guest to find out.
                let is_idle = host.end.sent == host.end.send.len();
                if pair.is_reset && is_idle && !host.end.reset {
                    host.end.send.push(0);
                }
                host.end.reset || guest.eof && host.end.eof
            }
            // The one to the guest may be lost too: there is no connection then, which a guest that
            // says something is told.
            Fate::HostResets => pair.is_reset && !carrier.has_connection(pair),
            Fate::Whole | Fate::SlowGuest | Fate::SlowHost => {
                let is_reset = (guest.reset, host.end.reset);
                let got = (guest.received.len(), host.end.received.len());
                let fate = pair.fate;
                assert_eq!(
                    is_reset,
                    (false, false),
                    "{own}: {fate:?}, {at_ms} ms, {got:?}"
                );
                guest.eof && host.end.eof
            }
        };
    }
    all
}

#[test]
fn each_of_many_connections_over_a_bad_link_has_its_own_bytes() {
    run_worlds(run);
}

/// Runs as many worlds as the variables ask for, on all CPUs. `run` returns how many connections of a seed's
/// world were whole, and how many were reset.
pub(super) fn run_worlds(run: impl Fn(u32) -> (usize, usize) + Sync) {
    let wanted = std::env::var("SLIPGATE_STRESS_CONNECTIONS");
    let wanted: usize = wanted.map_or(1_000, |text| text.parse().expect("a number"));
    let first = std::env::var("SLIPGATE_STRESS_SEED");
    let first: u32 = first.map_or(0, |text| text.parse().expect("a number"));
    let next = AtomicU32::new(first);
    let end = first + wanted.div_ceil(AT_ONCE) as u32;
    let counts = Mutex::new((0, 0));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end {
                        break;
                    }
                    let (whole, reset) = run(seed);
                    let mut counts = counts.lock().unwrap();
                    counts.0 += whole;
                    counts.1 += reset;
                }
            });
        }
    });
    let (whole, reset) = counts.into_inner().unwrap();
    println!("{whole} connections whole, {reset} reset in the middle, none with a wrong byte");
    assert!(
        whole > 2 * reset && reset > 0,
        "{whole} whole, {reset} reset"
    );
}
