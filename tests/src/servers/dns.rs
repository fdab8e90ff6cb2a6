use std::{
    collections::HashMap,
    io::{Read, Write},
    net::{IpAddr, Ipv4Addr, TcpListener, UdpSocket},
    os::fd::AsFd,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use super::{Address, Running, STOP_POLL};
use crate::{
    dns_wire::{Question, Record, Reply, types},
    error::{Result, Tried},
    netns::NetNs,
    sockets,
};

/// Answer of the server to questions for one name.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The records; those of the asked type, and CNAMEs, are sent.
    pub records: Vec<Record>,
    /// Response code; 0 is NOERROR, 2 SERVFAIL.
    pub code: u8,
    /// Delay of the answer. Other queries are not delayed.
    pub delay: Duration,
    /// Over UDP, send no records and the TC bit.
    pub truncate: bool,
    /// Whether the server stays silent.
    pub silent: bool,
}

impl Answer {
    /// These records, at once.
    pub fn records(records: Vec<Record>) -> Self {
        Answer {
            records,
            code: 0,
            delay: Duration::ZERO,
            truncate: false,
            silent: false,
        }
    }

    /// Makes an answer with one A record.
    pub fn a(address: Ipv4Addr, ttl: u32) -> Self {
        Self::records(vec![Record::a(address, ttl)])
    }

    /// Makes an answer with one A or AAAA record.
    pub fn address(address: impl Into<IpAddr>, ttl: u32) -> Self {
        Self::records(vec![Record::of_address(address, ttl)])
    }

    /// Returns an answer with a response code and no records.
    pub fn code(code: u8) -> Self {
        Answer {
            code,
            ..Self::records(Vec::new())
        }
    }

    /// Delays the answer by this time.
    pub fn delayed(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// Truncated over UDP, whole over TCP.
    pub fn truncated(mut self) -> Self {
        self.truncate = true;
        self
    }

    /// Makes no answer at all.
    pub fn silence() -> Self {
        Answer {
            silent: true,
            ..Self::code(0)
        }
    }
}

/// Names (lower case, no dot at the end) and their answers; any other name is NXDOMAIN.
pub type Zone = HashMap<String, Answer>;

/// Queries seen, by transport and name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Queries {
    udp: HashMap<String, u64>,
    tcp: HashMap<String, u64>,
    /// Source ports and transaction ids of UDP queries, in order.
    seen: Vec<(u16, u16)>,
}

struct Shared {
    zone: Mutex<Zone>,
    queries: Mutex<Queries>,
}

/// An authoritative-looking DNS server on UDP and TCP; stops on drop.
pub struct DnsServer<I: Address = Ipv4Addr> {
    address: I::Socket,
    shared: Arc<Shared>,
    _running: Running,
}

impl<I: Address> DnsServer<I> {
    /// Serves `zone` on port `address.1` (0: any) of `address.0` in `ns`.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub fn start(ns: &NetNs, address: (I, u16), zone: Zone) -> Result<Self> {
        let what = || format!("serve DNS on {}:{} in {ns:?}", address.0, address.1);
        let listener = ns
            .run(|| TcpListener::bind((address.0.into(), address.1)))
            .tried(what())?;
        let address = address.0.at(listener.local_addr().tried(what())?.port());
        let socket = ns.run(|| UdpSocket::bind(address.into())).tried(what())?;
        socket.set_read_timeout(Some(STOP_POLL)).tried(what())?;
        let shared = Arc::new(Shared {
            zone: Mutex::new(zone),
            queries: Mutex::default(),
        });
        let mut running = Running::default();
        let (stop, theirs) = (running.stop.clone(), shared.clone());
        running
            .threads
            .push(ns.thread("dns-udp", move || serve_udp(&socket, &theirs, &stop)));
        let (stop, theirs) = (running.stop.clone(), shared.clone());
        running
            .threads
            .push(ns.thread("dns-tcp", move || serve_tcp(&listener, &theirs, &stop)));
        Ok(DnsServer {
            address,
            shared,
            _running: running,
        })
    }

    /// The address it listens on.
    pub fn address(&self) -> I::Socket {
        self.address
    }

    /// Changes the answer to a name.
    pub fn set(&self, name: &str, answer: Answer) {
        let mut zone = self
            .shared
            .zone
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        zone.insert(name.to_lowercase(), answer);
    }

    /// Queries for `name` that came over UDP.
    pub fn udp_queries(&self, name: &str) -> u64 {
        self.queries().udp.get(name).copied().unwrap_or(0)
    }

    /// Queries for `name` that came over TCP.
    pub fn tcp_queries(&self, name: &str) -> u64 {
        self.queries().tcp.get(name).copied().unwrap_or(0)
    }

    /// Source port and transaction id of each UDP query, in order.
    pub fn udp_sources(&self) -> Vec<(u16, u16)> {
        self.queries().seen
    }

    fn queries(&self) -> Queries {
        self.shared
            .queries
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

impl Shared {
    fn queries(&self) -> std::sync::MutexGuard<'_, Queries> {
        self.queries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(&self, name: &str) -> Answer {
        let zone = self.zone.lock().unwrap_or_else(PoisonError::into_inner);
        zone.get(name).cloned().unwrap_or_else(|| Answer::code(3))
    }
}

fn reply(question: Question, answer: &Answer, truncate: bool) -> Vec<u8> {
    let fitting = |record: &&Record| [question.kind, types::CNAME].contains(&record.kind);
    let records = match truncate {
        true => Vec::new(),
        false => answer.records.iter().filter(fitting).cloned().collect(),
    };
    Reply {
        question,
        code: answer.code,
        truncated: truncate,
        records,
    }
    .to_bytes()
}

fn serve_udp(socket: &UdpSocket, shared: &Shared, stop: &AtomicBool) {
    let mut buffer = [0; 4096];
    while !stop.load(Ordering::SeqCst) {
        let Ok((len, peer)) = socket.recv_from(&mut buffer) else {
            continue;
        };
        let Some(question) = Question::parse(&buffer[..len]) else {
            continue;
        };
        {
            let mut queries = shared.queries();
            *queries.udp.entry(question.name.to_lowercase()).or_default() += 1;
            queries.seen.push((peer.port(), question.id));
        }
        let answer = shared.answer(&question.name.to_lowercase());
        let message = reply(question, &answer, answer.truncate);
        match answer {
            Answer { silent: true, .. } => {}
            Answer {
                delay: Duration::ZERO,
                ..
            } => drop(socket.send_to(&message, peer)),
            Answer { delay, .. } => {
                let Ok(socket) = socket.try_clone() else {
                    continue;
                };
                std::thread::spawn(move || {
                    std::thread::sleep(delay);
                    let _ = socket.send_to(&message, peer);
                });
            }
        }
    }
}

fn serve_tcp(listener: &TcpListener, shared: &Arc<Shared>, stop: &AtomicBool) {
    while !stop.load(Ordering::SeqCst) {
        let ready = sockets::poll(
            &listener.as_fd(),
            libc::POLLIN,
            STOP_POLL.as_millis() as i32,
        );
        if !matches!(ready, Ok(events) if events & libc::POLLIN != 0) {
            continue;
        }
        let Ok((mut stream, _)) = listener.accept() else {
            continue;
        };
        let shared = shared.clone();
        // Ends with the client, or when it is silent for 10 s.
        std::thread::spawn(move || -> std::io::Result<()> {
            stream.set_read_timeout(Some(Duration::from_secs(10)))?;
            loop {
                let mut len = [0; 2];
                stream.read_exact(&mut len)?;
                let mut message = vec![0; u16::from_be_bytes(len).into()];
                stream.read_exact(&mut message)?;
                let Some(question) = Question::parse(&message) else {
                    return Ok(());
                };
                *shared
                    .queries()
                    .tcp
                    .entry(question.name.to_lowercase())
                    .or_default() += 1;
                let answer = shared.answer(&question.name.to_lowercase());
                std::thread::sleep(answer.delay);
                if !answer.silent {
                    let message = reply(question, &answer, false);
                    let len = (message.len() as u16).to_be_bytes();
                    stream.write_all(&[&len[..], &message].concat())?;
                }
            }
        });
    }
}
