//! What is asked: names that are known already, or names that nobody asked for yet.

use std::{
    net::{Ipv4Addr, SocketAddrV4, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use slipgate_testbed::world::SERVER;

use crate::{
    contender::Stand,
    cpu_time::CpuTime,
    workload::{Limits, Metric, Sample, Workload, rates},
};

/// The gateway of the guest.
const ASKED: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(10, 0, 2, 2), 53);
/// Questions on their way.
const WINDOW: u16 = 32;
/// Names that are asked for again and again.
const KNOWN: u32 = 256;
/// A question without an answer for so long is lost.
const LOST_AFTER: Duration = Duration::from_millis(200);
const ANSWER: [u8; 4] = [203, 0, 113, 20];

pub(super) fn all() -> Vec<Box<dyn Workload>> {
    vec![Box::new(Questions::Known), Box::new(Questions::New)]
}

enum Questions {
    Known,
    New,
}

const KNOWN_METRICS: [Metric; 2] = rates("dns-known", "dns-known per CPU second");
const NEW_METRICS: [Metric; 2] = rates("dns-new", "dns-new per CPU second");

impl Workload for Questions {
    fn name(&self) -> &'static str {
        self.metrics()[0].name
    }

    fn metrics(&self) -> &'static [Metric] {
        match self {
            Self::Known => &KNOWN_METRICS,
            Self::New => &NEW_METRICS,
        }
    }

    fn run(&self, stand: &Stand, limits: Limits) -> Result<Sample> {
        let upstream = Upstream::start(stand)?;
        let client = stand.in_guest(Client::new)?;
        // Known from here on; and the resolver is up.
        client.warm_up()?;
        let asked_before = upstream.asked();
        let cpu = CpuTime::now(stand)?;
        let done = client.ask(limits.short, |count| match self {
            Self::Known => format!("n{}", count % KNOWN),
            // Of this run only: a cache lives on between them.
            Self::New => format!("x{count}-{}", std::process::id()),
        })?;
        let decider = cpu.decider_since(stand)?;
        let asked = upstream.asked() - asked_before;
        match self {
            Self::Known => ensure!(asked < done.answered / 100, "{asked} were asked upstream"),
            Self::New => ensure!(asked >= done.answered, "only {asked} were asked upstream"),
        }
        let rate = done.answered as f64 / done.took.as_secs_f64() / 1e3;
        let per_core = done.answered as f64 / decider.ran.as_secs_f64() / 1e3;
        let [first, second] = self.metrics() else {
            unreachable!("two metrics each")
        };
        Ok(Sample::of(&[(first.name, rate), (second.name, per_core)])
            .with("answered", done.answered as f64)
            .with("lost", done.lost as f64))
    }
}

/// Answers every question at once, with one address.
struct Upstream {
    stop: Arc<AtomicBool>,
    asked: Arc<std::sync::atomic::AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Upstream {
    fn start(stand: &Stand) -> Result<Self> {
        let socket = stand
            .world
            .net
            .run(|| UdpSocket::bind((SERVER, 53)))
            .context("bind the upstream resolver's socket")?;
        socket.set_read_timeout(Some(Duration::from_millis(50)))?;
        let stop = Arc::new(AtomicBool::new(false));
        let asked = Arc::new(std::sync::atomic::AtomicU64::new(0));
        let (stopped, count) = (stop.clone(), asked.clone());
        let thread = std::thread::spawn(move || {
            let mut message = [0; 1_500];
            while !stopped.load(Relaxed) {
                let Ok((len, from)) = socket.recv_from(&mut message) else {
                    continue;
                };
                count.fetch_add(1, Relaxed);
                if let Some(len) = answer(&mut message, len) {
                    let _ = socket.send_to(&message[..len], from);
                }
            }
        });
        Ok(Self {
            stop,
            asked,
            thread: Some(thread),
        })
    }

    fn asked(&self) -> u64 {
        self.asked.load(Relaxed)
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Turns a query into its answer; its length.
fn answer(message: &mut [u8], len: usize) -> Option<usize> {
    let end = question_end(message.get(..len)?)?;
    message[2] = 0x81;
    message[3] = 0x80;
    message[4..12].copy_from_slice(&[0, 1, 0, 1, 0, 0, 0, 0]);
    let record = [0xc0, 12, 0, 1, 0, 1, 0, 0, 0x0e, 0x10, 0, 4];
    let record = [&record[..], &ANSWER].concat();
    message
        .get_mut(end..end + record.len())?
        .copy_from_slice(&record);
    Some(end + record.len())
}

fn question_end(message: &[u8]) -> Option<usize> {
    let mut at = 12;
    loop {
        match usize::from(*message.get(at)?) {
            0 => return Some(at + 5),
            len => at += 1 + len,
        }
    }
}

struct Client(UdpSocket);

struct Done {
    answered: u64,
    lost: u64,
    took: Duration,
}

impl Client {
    fn new() -> Result<Self> {
        let socket = UdpSocket::bind("0.0.0.0:0").context("bind the client's socket")?;
        socket.connect(ASKED).context("connect to the resolver")?;
        socket.set_read_timeout(Some(LOST_AFTER))?;
        Ok(Self(socket))
    }

    /// Asks for what is known later, each until it is answered.
    fn warm_up(&self) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(10);
        for name in 0..KNOWN {
            let query = query(0, &format!("n{name}"));
            let mut buffer = [0; 1_500];
            loop {
                ensure!(Instant::now() < deadline, "the resolver does not answer");
                let _ = self.0.send(&query);
                match self.0.recv(&mut buffer) {
                    Ok(len) if is_answer(&buffer[..len]) => break,
                    // Not up yet.
                    _ => std::thread::sleep(Duration::from_millis(5)),
                }
            }
        }
        // Late answers to what was asked twice.
        self.0.set_nonblocking(true)?;
        std::thread::sleep(Duration::from_millis(20));
        while self.0.recv(&mut [0; 1_500]).is_ok() {}
        self.0.set_nonblocking(false)?;
        Ok(())
    }

    /// Keeps [`WINDOW`] questions on their way.
    fn ask(&self, limit: Duration, name: impl Fn(u32) -> String) -> Result<Done> {
        let started = Instant::now();
        let (mut count, mut answered, mut lost) = (0_u32, 0, 0);
        let mut buffer = [0; 1_500];
        let mut send = |id: u16| {
            let query = query(id, &name(count));
            count = count.wrapping_add(1);
            self.0.send(&query).context("ask")
        };
        for id in 0..WINDOW {
            send(id)?;
        }
        while started.elapsed() < limit {
            match self.0.recv(&mut buffer) {
                Ok(len) if is_answer(&buffer[..len]) => {
                    answered += 1;
                    send(u16::from_be_bytes([buffer[0], buffer[1]]))?;
                }
                Ok(_) => anyhow::bail!("an answer that is none: code {}", buffer[3] & 15),
                Err(_) => {
                    // All that were on their way.
                    lost += u64::from(WINDOW);
                    for id in 0..WINDOW {
                        send(id)?;
                    }
                }
            }
        }
        Ok(Done {
            answered,
            lost,
            took: started.elapsed(),
        })
    }
}

fn query(id: u16, label: &str) -> Vec<u8> {
    let mut query = id.to_be_bytes().to_vec();
    query.extend([1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    for label in [label, "bench", "test"] {
        query.push(label.len() as u8);
        query.extend(label.bytes());
    }
    query.extend([0, 0, 1, 0, 1]);
    query
}

fn is_answer(message: &[u8]) -> bool {
    message.len() > 12 && message[3] & 15 == 0 && message[6..8] == [0, 1]
}
