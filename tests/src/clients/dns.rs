//! A DNS client: one question, over UDP or TCP, no retries.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr},
    time::{Duration, Instant},
};

use super::tcp;
use crate::{
    dns_wire::{Question, Reply, types},
    error::{Error, Result, Tried},
    impairment::SplitMix64,
    sockets,
};

/// An answer, and how long it took.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolved {
    /// The answer as it came.
    pub reply: Reply,
    /// Time from the query to the answer.
    pub took: Duration,
}

impl Resolved {
    /// The addresses of its A records.
    pub fn addresses(&self) -> Vec<Ipv4Addr> {
        self.reply
            .records
            .iter()
            .filter_map(|record| record.address())
            .collect()
    }
}

/// Asks `server` for the A records of `name` over UDP.
///
/// # Errors
/// As [`ask_udp`].
pub fn query_udp(server: impl Into<SocketAddr>, name: &str, timeout: Duration) -> Result<Resolved> {
    ask_udp(server, &question(name, types::A), timeout)
}

/// Sends exactly this question (id included) to `server` over UDP. Answers with another id or
/// question are ignored.
///
/// # Errors
/// No answer came within `timeout`, or it cannot be parsed.
pub fn ask_udp(
    server: impl Into<SocketAddr>,
    question: &Question,
    timeout: Duration,
) -> Result<Resolved> {
    let server = server.into();
    let what = || format!("ask {server} for {} over UDP", question.name);
    let socket = sockets::udp_toward(server).tried(what())?;
    socket.connect(server).tried(what())?;
    let started = Instant::now();
    socket.send(&question.to_bytes()).tried(what())?;
    let mut buffer = [0; 4096];
    loop {
        let left = timeout
            .saturating_sub(started.elapsed())
            .max(Duration::from_millis(1));
        socket.set_read_timeout(Some(left)).tried(what())?;
        let len = socket.recv(&mut buffer).tried(what())?;
        match Reply::parse(&buffer[..len]) {
            Some(reply) if reply.question == *question => {
                return Ok(Resolved {
                    reply,
                    took: started.elapsed(),
                });
            }
            _ if started.elapsed() > timeout => {
                return Err(Error::unexpected(format!(
                    "{}: only unfitting answers",
                    what()
                )));
            }
            _ => {}
        }
    }
}

/// Asks `server` for the A records of `name` over TCP.
///
/// # Errors
/// As [`ask_tcp`].
pub fn query_tcp(server: impl Into<SocketAddr>, name: &str, timeout: Duration) -> Result<Resolved> {
    ask_tcp(server, &question(name, types::A), timeout)
}

/// Sends this question to `server` over TCP.
///
/// # Errors
/// The connection fails, or no valid answer came within `timeout`.
pub fn ask_tcp(
    server: impl Into<SocketAddr>,
    question: &Question,
    timeout: Duration,
) -> Result<Resolved> {
    let server = server.into();
    let name = &question.name;
    let what = || format!("ask {server} for {name} over TCP");
    let started = Instant::now();
    let mut stream = tcp::connect(server, timeout)?;
    let query = question.to_bytes();
    let framed = [&(query.len() as u16).to_be_bytes()[..], &query].concat();
    stream.write_all(&framed).tried(what())?;
    let reply = read_reply(&mut stream)?;
    match reply.question == *question {
        true => Ok(Resolved {
            reply,
            took: started.elapsed(),
        }),
        false => Err(Error::unexpected(format!("{}: got {reply:?}", what()))),
    }
}

/// Reads the next answer of a connection.
///
/// # Errors
/// The stream ends or fails, or the answer cannot be parsed.
pub fn read_reply(stream: &mut impl Read) -> Result<Reply> {
    let what = "read an answer over TCP";
    let mut len = [0; 2];
    stream.read_exact(&mut len).tried(what)?;
    let mut message = vec![0; u16::from_be_bytes(len).into()];
    stream.read_exact(&mut message).tried(what)?;
    let cut = || Error::unexpected(format!("{what}: it is none, or cut short"));
    Reply::parse(&message).ok_or_else(cut)
}

/// A question with an id of its own.
pub fn question(name: &str, kind: u16) -> Question {
    static ASKED: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let count = ASKED.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let id = SplitMix64(count ^ u64::from(std::process::id()) << 32).next() as u16;
    Question {
        id,
        name: name.to_lowercase(),
        kind,
    }
}
