//! `slipgate events`: what happens to VMs and flows, from the API of the daemon.
//!
//! The request is HTTP/1.0, so that the events come as they are until the daemon ends the response.
//! The command does not connect again: then it would miss events without saying so.
use std::{
    io::{self, Read as _, Write},
    os::{fd::AsFd as _, unix::net::UnixStream},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, bail};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde_json::{Map, Value};
use slipgate_ipc::client::{ClientAnswer, ClientRequest};

use crate::{
    args::EventsArgs,
    brokers::{ANOTHER_ANSWER, ask_daemon},
    control::stop_signals,
};

/// Time within which the daemon begins to answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(15);
/// Longest head of a response, or description of a problem, bytes.
const MOST_HEAD: usize = 64 << 10;
/// Fields that have a place of their own in a line of text.
const IN_FRONT: [&str; 3] = ["seq", "event", "vm"];

/// Prints events until ^C, or until nobody reads what is printed.
pub(crate) fn run(args: &EventsArgs) -> anyhow::Result<()> {
    let path = match &args.api {
        Some(path) => path.clone(),
        None => daemons_socket(&args.pin_dir)?,
    };
    let signals = stop_signals().context("waiting for signals")?;
    let mut stream = UnixStream::connect(&path).with_context(|| {
        let path = path.display();
        format!("connecting to {path}: is it the socket of a `slipgate serve` that runs?")
    })?;
    stream.set_read_timeout(Some(ANSWER_WITHIN))?;
    let request = format!("GET {} HTTP/1.0\r\nHost: slipgate\r\n\r\n", target(args));
    let asked = stream.write_all(request.as_bytes());
    asked.context("asking the daemon for events")?;
    let mut waiting = read_head(&mut stream)?;
    let mut out = io::stdout().lock();
    loop {
        let whole = waiting
            .iter()
            .rposition(|byte| *byte == b'\n')
            .map_or(0, |at| at + 1);
        match print(&waiting[..whole], args.json, &mut out) {
            Ok(()) => drop(waiting.drain(..whole)),
            // Who reads has seen enough.
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
            Err(e) => return Err(e).context("printing events"),
        }
        let mut fds = [
            PollFd::new(stream.as_fd(), PollFlags::POLLIN),
            PollFd::new(signals.as_fd(), PollFlags::POLLIN),
        ];
        match poll(&mut fds, PollTimeout::NONE) {
            Err(nix::Error::EINTR) => continue,
            other => other.context("waiting for events")?,
        };
        if fds[1].any().unwrap_or(true) {
            return Ok(());
        }
        let mut bytes = [0; 1 << 14];
        match stream.read(&mut bytes).context("reading events")? {
            0 => {
                bail!("the daemon has ended the stream of events: it was stopped, or started again")
            }
            n => waiting.extend_from_slice(&bytes[..n]),
        }
    }
}

/// Path of a socket on which the daemon of this network namespace answers.
fn daemons_socket(pin_dir: &Path) -> anyhow::Result<PathBuf> {
    match ask_daemon(pin_dir, ClientRequest::ApiSockets)? {
        ClientAnswer::ApiSockets { paths } => paths.into_iter().next().context(
            "the daemon answers no API: start `slipgate serve` with --api-read PATH or --api PATH",
        ),
        _ => bail!(ANOTHER_ANSWER),
    }
}

/// Path and parameters of the request.
fn target(args: &EventsArgs) -> String {
    let mut target = "/v1/events?".to_owned();
    let mut add = |name: &str, value: &str| {
        target.push_str(&format!("{name}="));
        for byte in value.bytes() {
            match byte {
                b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' => {
                    target.push(byte.into());
                }
                byte => target.push_str(&format!("%{byte:02X}")),
            }
        }
        target.push('&');
    };
    if let Some(vm) = &args.vm {
        add("vm", vm);
    }
    if !args.kind.is_empty() {
        add("kind", &args.kind.join(","));
    }
    if let Some(after) = args.after {
        add("after", &after.to_string());
    }
    target.pop();
    target
}

/// Reads the head of the response. Returns what came behind it.
///
/// # Errors
/// It says that there are no events, and why.
fn read_head(stream: &mut UnixStream) -> anyhow::Result<Vec<u8>> {
    let mut read = Vec::new();
    let mut bytes = [0; 4_096];
    loop {
        let n = stream.read(&mut bytes);
        let n = n.context(
            "the daemon does not answer; its API has all the clients it takes, or hangs",
        )?;
        read.extend_from_slice(&bytes[..n]);
        let mut headers = [httparse::EMPTY_HEADER; 32];
        let mut response = httparse::Response::new(&mut headers);
        let parsed = response
            .parse(&read)
            .context("the daemon's answer is no HTTP")?;
        match (parsed, response.code) {
            (httparse::Status::Complete(head), Some(200)) => return Ok(read.split_off(head)),
            (httparse::Status::Complete(head), code) if n == 0 => {
                let problem: Value = serde_json::from_slice(&read[head..]).unwrap_or_default();
                let detail = problem["detail"].as_str();
                bail!(
                    "{}",
                    detail.map_or(format!("the daemon answers {code:?}"), str::to_owned)
                );
            }
            _ if n == 0 => bail!("the daemon has ended the connection without an answer"),
            _ if read.len() > MOST_HEAD => bail!("the daemon's answer is too long"),
            _ => {}
        }
    }
}

fn print(lines: &[u8], json: bool, out: &mut impl Write) -> io::Result<()> {
    for line in lines.split_inclusive(|byte| *byte == b'\n') {
        match serde_json::from_slice::<Map<String, Value>>(line) {
            Ok(event) if !json => writeln!(out, "{}", text(&event))?,
            _ => out.write_all(line)?,
        }
    }
    out.flush()
}

/// An event as a line of text: number, kind, VM, and the other fields by name.
fn text(event: &Map<String, Value>) -> String {
    let front = IN_FRONT.map(|field| event.get(field).map(shown));
    let rest = event
        .iter()
        .filter(|(field, _)| !IN_FRONT.contains(&field.as_str()))
        .map(|(field, value)| format!("{field}={}", shown(value)));
    let parts: Vec<_> = front.into_iter().flatten().chain(rest).collect();
    parts.join(" ")
}

/// A value without quotes where it can be told without them.
fn shown(value: &Value) -> String {
    match value {
        Value::String(text)
            if !text.is_empty() && text.chars().all(|c| c.is_ascii_graphic() && c != '"') =>
        {
            text.clone()
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
#[path = "events_test.rs"]
mod tests;
