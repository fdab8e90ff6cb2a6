//! DNS questions from the guest to its gateway, and an upstream resolver in the world.

use std::{
    net::{Ipv4Addr, SocketAddrV4, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use slipgate_testbed::{NetNs, world::SERVER};

/// Address and port of the guest's gateway.
const ASKED: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(10, 0, 2, 2), 53);
/// Number of questions in flight.
const WINDOW: u16 = 32;
/// Time after which an unanswered question counts as lost.
const LOST_AFTER: Duration = Duration::from_millis(200);
/// Interval at which a resolver that has just started is asked again.
const AGAIN_AFTER: Duration = Duration::from_millis(5);
const DEADLINE: Duration = Duration::from_secs(30);
/// Time for which answers may be cached, seconds.
const TTL_S: u32 = 3_600;

/// Upstream resolver that answers every question at once, with the one address of the name.
pub(crate) struct Upstream {
    stop: Arc<AtomicBool>,
    asked: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Upstream {
    /// Starts the resolver on port 53 of the world's first server. `address` maps a name, in lower
    /// case and without the final dot, to its address; for `None` the resolver does not answer.
    pub(crate) fn start(
        world: &NetNs,
        address: impl Fn(&str) -> Option<Ipv4Addr> + Send + 'static,
    ) -> Result<Self> {
        let socket = world
            .run(|| UdpSocket::bind((SERVER, 53)))
            .context("bind the upstream resolver's socket")?;
        socket.set_read_timeout(Some(Duration::from_millis(50)))?;
        let stop = Arc::new(AtomicBool::new(false));
        let asked = Arc::new(AtomicU64::new(0));
        let (stopped, count) = (stop.clone(), asked.clone());
        let thread = std::thread::spawn(move || {
            let mut message = [0; 1_500];
            while !stopped.load(Relaxed) {
                let Ok((len, from)) = socket.recv_from(&mut message) else {
                    continue;
                };
                count.fetch_add(1, Relaxed);
                if let Some(len) = answer(&mut message, len, &address) {
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

    /// Returns the number of questions received so far.
    pub(crate) fn asked(&self) -> u64 {
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

/// Turns a query into its answer, in place. Returns the answer's length.
fn answer(
    message: &mut [u8],
    len: usize,
    address: impl Fn(&str) -> Option<Ipv4Addr>,
) -> Option<usize> {
    let query = message.get(..len)?;
    let end = question_end(query)?;
    let address = address(&name(query)?)?.octets();
    message[2] = 0x81;
    message[3] = 0x80;
    message[4..12].copy_from_slice(&[0, 1, 0, 1, 0, 0, 0, 0]);
    let record = [0xc0, 12, 0, 1, 0, 1];
    let record = [&record[..], &TTL_S.to_be_bytes(), &[0, 4], &address].concat();
    message
        .get_mut(end..end + record.len())?
        .copy_from_slice(&record);
    Some(end + record.len())
}

/// Returns the name asked for, in lower case: resolvers send it in random case.
fn name(message: &[u8]) -> Option<String> {
    let (mut at, mut labels) = (12, Vec::new());
    loop {
        let len = usize::from(*message.get(at)?);
        if len == 0 {
            return Some(labels.join("."));
        }
        let label = message.get(at + 1..at + 1 + len)?;
        labels.push(std::str::from_utf8(label).ok()?.to_ascii_lowercase());
        at += 1 + len;
    }
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

/// Client in the network namespace in which it was created. Sends questions to the gateway.
pub(crate) struct Client(UdpSocket);

/// Results of a series of questions.
pub(crate) struct Done {
    pub(crate) answered: u64,
    pub(crate) lost: u64,
    pub(crate) took: Duration,
}

impl Client {
    pub(crate) fn new() -> Result<Self> {
        let socket = UdpSocket::bind("0.0.0.0:0").context("bind the client's socket")?;
        socket.connect(ASKED).context("connect to the resolver")?;
        Ok(Self(socket))
    }

    /// Resolves each name. Repeats each question until it is answered, because the resolver may
    /// have just started.
    pub(crate) fn ask_each(&self, names: impl Iterator<Item = String>) -> Result<()> {
        self.0.set_read_timeout(Some(AGAIN_AFTER))?;
        let deadline = Instant::now() + DEADLINE;
        for (count, name) in names.enumerate() {
            // An answer to what was asked twice must not pass for the next one.
            let id = count as u16;
            let query = query(id, &name);
            let mut buffer = [0; 1_500];
            let mut heard = "nothing".to_owned();
            loop {
                if Instant::now() > deadline {
                    bail!("the resolver did not answer for {name}: {heard}");
                }
                let _ = self.0.send(&query);
                match self.0.recv(&mut buffer) {
                    Ok(len) if buffer[..2] != id.to_be_bytes() || len < 12 => {}
                    Ok(len) if is_answer(&buffer[..len]) => break,
                    Ok(_) => {
                        heard = format!("code {}", buffer[3] & 15);
                        std::thread::sleep(AGAIN_AFTER);
                    }
                    Err(error) => {
                        // Nobody listens yet, or an answer was lost.
                        if error.kind() == std::io::ErrorKind::ConnectionRefused {
                            std::thread::sleep(AGAIN_AFTER);
                        }
                    }
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

    /// Sends questions until the time limit, with [`WINDOW`] in flight.
    pub(crate) fn ask(&self, limit: Duration, name: impl Fn(u32) -> String) -> Result<Done> {
        self.0.set_read_timeout(Some(LOST_AFTER))?;
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
                Ok(_) => bail!("an answer that is none: code {}", buffer[3] & 15),
                Err(_) => {
                    // All that were on their way.
                    lost += u64::from(WINDOW);
                    for id in 0..WINDOW {
                        send(id)?;
                    }
                }
            }
        }
        ensure!(answered > 0, "no question was answered");
        Ok(Done {
            answered,
            lost,
            took: started.elapsed(),
        })
    }
}

fn query(id: u16, name: &str) -> Vec<u8> {
    let mut query = id.to_be_bytes().to_vec();
    query.extend([1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    for label in name.split('.') {
        query.push(label.len() as u8);
        query.extend(label.bytes());
    }
    query.extend([0, 0, 1, 0, 1]);
    query
}

fn is_answer(message: &[u8]) -> bool {
    message.len() > 12 && message[3] & 15 == 0 && message[6..8] == [0, 1]
}

#[cfg(test)]
#[path = "dns_exchange_test.rs"]
mod tests;
