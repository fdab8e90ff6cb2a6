//! UDP through a contender: joined datagrams each way, small ones one way, and echoes.

use std::{
    io::IoSlice,
    net::{SocketAddr, UdpSocket},
    os::fd::AsRawFd as _,
    process::Command,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow, ensure};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg, setsockopt, sockopt};
use slipgate_testbed::{
    NetNs,
    world::{SERVER, UPLINK},
};

use super::{echo, footprint::Worker};
use crate::{
    contender::Stand,
    family::Family,
    workload::{Limits, Metric, Sample, Unit, Workload, small_packets},
};

const PORT: u16 = 7005;
/// Payload of a datagram that fills the MTU of all, bytes.
const DATAGRAM: u16 = 1_472;
/// Datagrams that are handed over in one call.
const JOINED: usize = 44;
/// Payload under way at most: less than what the TAP's queue holds.
const WINDOW_BYTES: u64 = 8 * JOINED as u64 * DATAGRAM as u64;
/// Time without an arrival after which what is under way counts as lost.
const LOST_AFTER: Duration = Duration::from_millis(2);
/// Time after which a receiver looks whether it is to end.
pub(super) const LOOK: Duration = Duration::from_millis(50);
const JOINED_UP: [Metric; 2] = [
    Unit::GigabitsPerSecond.of("rootless UDP GSO up"),
    Unit::Milliseconds.of("rootless UDP GSO up CPU per Gb"),
];
const JOINED_DOWN: [Metric; 2] = [
    Unit::GigabitsPerSecond.of("rootless UDP GSO down"),
    Unit::Milliseconds.of("rootless UDP GSO down CPU per Gb"),
];
const SMALL_UP: [Metric; 1] = [Unit::ThousandPerSecond.of("rootless UDP 64 B up")];
const ECHOES: [Metric; 2] = [
    Unit::ThousandPerSecond.of("rootless UDP 64 B echo"),
    Unit::Microseconds.of("rootless UDP 64 B echo CPU"),
];

pub(super) fn all() -> Vec<Box<dyn Workload>> {
    vec![
        Box::new(Udp::JoinedUp),
        Box::new(Udp::JoinedDown),
        Box::new(Udp::SmallUp),
        Box::new(Udp::Echoes),
    ]
}

enum Udp {
    JoinedUp,
    JoinedDown,
    SmallUp,
    Echoes,
}

impl Workload for Udp {
    fn name(&self) -> &'static str {
        self.metrics()[0].name
    }

    fn metrics(&self) -> &'static [Metric] {
        match self {
            Self::JoinedUp => &JOINED_UP,
            Self::JoinedDown => &JOINED_DOWN,
            Self::SmallUp => &SMALL_UP,
            Self::Echoes => &ECHOES,
        }
    }

    fn run(&self, stand: &Stand, limits: Limits) -> Result<Sample> {
        match self {
            Self::JoinedUp | Self::JoinedDown => self.joined(stand, limits),
            Self::SmallUp => {
                // Joined datagrams would be counted as one where they arrive: as on most cards, the
                // host's kernel makes single ones of them.
                let mut command = Command::new("ethtool");
                command.args(["-K", UPLINK, "tx-udp-segmentation", "off"]);
                stand.world.host.output(command)?;
                let small = small_packets::measure(stand, Family::Ipv4, limits)?;
                Ok(Sample::of(&[(SMALL_UP[0].name, small.thousand_per_second)]))
            }
            Self::Echoes => echoes(stand, limits),
        }
    }
}

impl Udp {
    /// Sends joined datagrams for a time, with so much under way. Measures what arrives.
    fn joined(&self, stand: &Stand, limits: Limits) -> Result<Sample> {
        let server = bound(&stand.world.net, Some((SERVER, PORT).into()))?;
        let client = bound(stand.guest_ns(), None)?;
        for end in [&server, &client] {
            setsockopt(end, sockopt::UdpGroSegment, &true)?;
        }
        client.connect((SERVER, PORT))?;
        server.connect(greeted(&client, &server)?)?;
        let (from, to) = match self {
            Self::JoinedUp => (client, server),
            _ => (server, client),
        };
        pour(&from, &to, limits.short / 10)?;
        let worker = Worker::of(stand)?;
        let before = worker.time()?;
        let (arrived, took) = pour(&from, &to, limits.short)?;
        let cpu = worker.time()?.saturating_sub(before);
        let gigabits = arrived as f64 * 8e-9;
        ensure!(arrived > 0, "nothing arrived");
        let [rate, of_cpu] = [self.metrics()[0].name, self.metrics()[1].name];
        Ok(Sample::of(&[
            (rate, gigabits / took.as_secs_f64()),
            (of_cpu, cpu.as_secs_f64() * 1e3 / gigabits),
        ]))
    }
}

pub(super) fn bound(ns: &NetNs, address: Option<SocketAddr>) -> Result<UdpSocket> {
    const BUFFER_BYTES: usize = 16 << 20;
    let any = SocketAddr::from(([0, 0, 0, 0], 0));
    let socket = ns.run(|| UdpSocket::bind(address.unwrap_or(any)))?;
    // Above the system's limit, as root.
    setsockopt(&socket, sockopt::RcvBufForce, &BUFFER_BYTES)?;
    socket.set_read_timeout(Some(LOOK))?;
    Ok(socket)
}

/// Has the client greet, with several attempts, and returns the address that the server sees.
///
/// What a contender still held of an earlier workload comes first, to the same port of the server.
pub(super) fn greeted(client: &UdpSocket, server: &UdpSocket) -> Result<SocketAddr> {
    const ATTEMPTS: usize = 40;
    let greeting = format!("hello from {}", client.local_addr()?);
    let mut buffer = vec![0; 65_536];
    for _ in 0..ATTEMPTS {
        client.send(greeting.as_bytes())?;
        while let Ok((len, from)) = server.recv_from(&mut buffer) {
            if buffer[..len] == *greeting.as_bytes() {
                return Ok(from);
            }
        }
    }
    Err(anyhow!("no datagram of the guest arrives"))
}

/// Sends and receives for `time`. Returns the bytes that arrived, and the time.
fn pour(from: &UdpSocket, to: &UdpSocket, time: Duration) -> Result<(u64, Duration)> {
    let (arrived, has_ended) = (AtomicU64::new(0), AtomicBool::new(false));
    let payload = vec![0x5a; JOINED * usize::from(DATAGRAM)];
    let started = Instant::now();
    let sent = thread::scope(|scope| {
        let sender = thread::current();
        let (arrived, has_ended) = (&arrived, &has_ended);
        scope.spawn(move || {
            let mut buffer = vec![0; 65_536];
            while !has_ended.load(Relaxed) {
                if let Ok(len) = to.recv(&mut buffer) {
                    arrived.fetch_add(len as u64, Relaxed);
                    sender.unpark();
                }
            }
        });
        let sent = send_windowed(from, &payload, arrived, started + time);
        has_ended.store(true, Relaxed);
        sent
    });
    sent?;
    Ok((arrived.load(Relaxed), started.elapsed().min(time + LOOK)))
}

/// Sends until `deadline`, with at most [`WINDOW_BYTES`] under way.
fn send_windowed(
    from: &UdpSocket,
    payload: &[u8],
    arrived: &AtomicU64,
    deadline: Instant,
) -> Result<()> {
    let segment = [ControlMessage::UdpGsoSegments(&DATAGRAM)];
    let parts = [IoSlice::new(payload)];
    let (mut sent, mut lost, mut seen) = (0, 0, (0, Instant::now()));
    while Instant::now() < deadline {
        let now = arrived.load(Relaxed);
        if now != seen.0 {
            seen = (now, Instant::now());
        }
        if sent - (now + lost).min(sent) < WINDOW_BYTES {
            match sendmsg::<()>(from.as_raw_fd(), &parts, &segment, MsgFlags::empty(), None) {
                Ok(len) => sent += len as u64,
                // A message about an earlier one, or no room.
                Err(_) => thread::park_timeout(LOST_AFTER),
            }
        } else if seen.1.elapsed() > LOST_AFTER {
            lost = sent - now;
            seen.1 = Instant::now();
        } else {
            thread::park_timeout(LOST_AFTER);
        }
    }
    Ok(())
}

fn echoes(stand: &Stand, limits: Limits) -> Result<Sample> {
    let echoes = echo::measure(stand, limits)?;
    Ok(Sample::of(&[
        (ECHOES[0].name, echoes.thousand_per_second),
        (ECHOES[1].name, echoes.cpu_us),
    ]))
}

#[cfg(test)]
#[path = "udp_test.rs"]
mod tests;
