//! First packets of new flows at a pace, and the time that each takes into the world.
use std::{
    collections::HashMap,
    io,
    net::{Ipv4Addr, SocketAddrV4, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Context as _, Result};

use super::crowd::{Crowd, datagram, now, precede_others};

const PORT: u16 = 4_100;
/// Flows toward one destination: fewer than the ports that a VM may have for it.
const FLOWS_PER_SERVER: u64 = 2_000;
const SERVERS: u8 = 64;
const FIRST_GUEST_PORT: u16 = 20_000;
/// Time after which a first packet that has not arrived is lost.
const LOST_AFTER: Duration = Duration::from_secs(1);

/// Addresses of the world to which probes are sent.
pub(super) fn servers() -> impl Iterator<Item = Ipv4Addr> {
    (1..=SERVERS).map(|last| Ipv4Addr::new(203, 0, 114, last))
}

/// Sends probes until it is finished: the first packet of a flow of one VM after the other.
pub(super) struct Probes {
    stop: Arc<AtomicBool>,
    sender: JoinHandle<Result<Vec<Duration>>>,
    receiver: JoinHandle<Result<HashMap<u64, Duration>>>,
}

/// A first packet. Times are those of the monotonic clock.
#[derive(Clone, Copy, Debug)]
pub(super) struct Probe {
    pub(super) sent: Duration,
    /// `None`: it was lost.
    pub(super) arrived: Option<Duration>,
}

impl Probes {
    /// Sends a probe each `pace`, from these VMs in turn.
    pub(super) fn start(
        crowd: &Crowd,
        vms: std::ops::Range<usize>,
        pace: Duration,
    ) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let socket = crowd.world.net.run(|| UdpSocket::bind(("0.0.0.0", PORT)));
        let socket = socket.context("bind the probes' server")?;
        socket.set_read_timeout(Some(Duration::from_millis(50)))?;
        let injectors: Vec<_> = vms.map(|vm| crowd.injector(vm)).collect();
        let stopped = stop.clone();
        let send = move || {
            precede_others();
            let mut sent = Vec::new();
            let mut due = now()?;
            while !stopped.load(Relaxed) {
                std::thread::sleep(due.saturating_sub(now()?));
                due += pace;
                let number = sent.len() as u64;
                let server = number / FLOWS_PER_SERVER;
                let server = servers().nth(server as usize);
                let server = server.context("more probes than addresses of the world")?;
                let from = FIRST_GUEST_PORT + (number % FLOWS_PER_SERVER) as u16;
                let to = SocketAddrV4::new(server, PORT);
                let frame = datagram(from, to, &number.to_be_bytes());
                sent.push(now()?);
                injectors[number as usize % injectors.len()].write(&frame)?;
            }
            Ok(sent)
        };
        Ok(Self {
            sender: thread("probes", send)?,
            receiver: receive(socket, stop.clone())?,
            stop,
        })
    }

    /// Ends it. Returns all probes in the order in which they were sent.
    pub(super) fn finish(self) -> Result<Vec<Probe>> {
        std::thread::sleep(LOST_AFTER);
        self.stop.store(true, Relaxed);
        let sent = joined(self.sender)?;
        let arrived = joined(self.receiver)?;
        let probe = |(number, sent): (usize, Duration)| Probe {
            sent,
            arrived: arrived.get(&(number as u64)).copied(),
        };
        let mut all: Vec<_> = sent.into_iter().enumerate().map(probe).collect();
        // Those of the last moment may still be under way.
        if let Some(last) = all.last().map(|probe| probe.sent) {
            all.retain(|probe| probe.sent + LOST_AFTER <= last);
        }
        Ok(all)
    }
}

/// A sender or receiver that has ended early, like one that has not, is waited for.
fn joined<T>(thread: JoinHandle<Result<T>>) -> Result<T> {
    let ended = thread.join();
    ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn thread<T: Send + 'static>(
    name: &str,
    f: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>> {
    let thread = std::thread::Builder::new().name(name.to_owned());
    thread.spawn(f).context("start a thread")
}

fn receive(
    socket: UdpSocket,
    stop: Arc<AtomicBool>,
) -> Result<JoinHandle<Result<HashMap<u64, Duration>>>> {
    thread("arrivals", move || {
        precede_others();
        let mut arrived = HashMap::new();
        let mut buffer = [0; 64];
        while !stop.load(Relaxed) {
            match socket.recv(&mut buffer) {
                Ok(8..) => {
                    let number = buffer.first_chunk().copied().map(u64::from_be_bytes);
                    arrived.entry(number.unwrap_or(u64::MAX)).or_insert(now()?);
                }
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => return Err(e).context("receive probes"),
            }
        }
        Ok(arrived)
    })
}

/// Probes that were sent from one time on, and before the other.
pub(super) fn between(probes: &[Probe], from: Duration, until: Duration) -> &[Probe] {
    let place = |time| probes.partition_point(|probe| probe.sent < time);
    &probes[place(from)..place(until)]
}

/// Returns the times that probes took, in µs; those that were lost took no time.
pub(super) fn times_us(probes: &[Probe]) -> Vec<f64> {
    let took = |probe: &Probe| Some(probe.arrived? - probe.sent);
    let took = probes.iter().filter_map(took);
    took.map(|took| took.as_secs_f64() * 1e6).collect()
}

/// Returns the number of probes that were lost.
pub(super) fn lost(probes: &[Probe]) -> usize {
    let arrived = probes.iter().filter(|probe| probe.arrived.is_some());
    probes.len() - arrived.count()
}

/// Returns the end of the longest time without an arrival that begins or lies after `from`.
///
/// # Errors
/// Nothing arrives.
pub(super) fn end_of_outage(probes: &[Probe], from: Duration) -> Result<Duration> {
    let arrived = probes.iter().filter_map(|probe| probe.arrived);
    let mut arrived: Vec<Duration> = arrived.filter(|at| *at >= from).collect();
    arrived.sort_unstable();
    let before = [from].into_iter().chain(arrived.iter().copied());
    let gaps = before.zip(arrived.iter().copied());
    let longest = gaps.max_by_key(|(before, after)| *after - *before);
    longest
        .map(|(_, after)| after)
        .context("no flow was admitted any more")
}

#[cfg(test)]
#[path = "probes_test.rs"]
mod tests;
