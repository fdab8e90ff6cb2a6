//! The broker's control socket: JSON lines over a Unix stream, one answer per request.
//!
//! The socket is 0600 in a root-only directory, and every connection is checked by `SO_PEERCRED`
//! on top: root is *admin*, the user that started the broker is a *reader*, anybody else is sent
//! away. A client that sends too much, or does not read, is closed: it can't hold the broker up.
use std::{
    collections::BTreeMap,
    fs, io,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::{
            fs::PermissionsExt as _,
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, bail};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use serde::{Deserialize, Serialize};
use userspace_nat::engine::NamesPage;

use crate::channel::{WhyAnswer, WhyQuestion};

/// Longest request, bytes.
const MAX_REQUEST: usize = 4_096;
/// Most connections at once.
const MAX_CLIENTS: usize = 16;
/// How long a client waits for an answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// What can be asked.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "request")]
pub(crate) enum Request {
    /// What would become of a flow.
    Why(WhyQuestion),
    /// What the engine knows by name, from this place.
    Names { from: u64 },
    /// The counters of the machines that the broker runs.
    Machines,
    /// Stop in order, as by SIGTERM. `keep`: leave flows running for a successor.
    Stop { keep: bool },
}

/// What is answered.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "answer")]
pub(crate) enum Answer {
    Why(WhyAnswer),
    Names {
        page: NamesPage,
    },
    Machines {
        /// By the VM's name; none for a VM that is another's.
        machines: BTreeMap<String, serde_json::Value>,
    },
    /// No VM of that name is served here.
    UnknownVm {
        /// Those that are.
        served: Vec<String>,
    },
    /// Understood, and being done.
    Done,
    Error {
        error: String,
    },
}

/// What a peer may do.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Role {
    Reader,
    Admin,
}

impl Request {
    /// The least role that may ask this.
    fn needs(&self) -> Role {
        match self {
            Self::Why(_) | Self::Machines | Self::Names { .. } => Role::Reader,
            Self::Stop { .. } => Role::Admin,
        }
    }
}

impl Role {
    fn of(uid: u32, owner: u32) -> Option<Self> {
        match uid {
            0 => Some(Self::Admin),
            uid if uid == owner => Some(Self::Reader),
            _ => None,
        }
    }
}

/// A connection's number, never reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct ClientId(u64);

/// The listening side.
#[derive(Debug)]
pub(crate) struct ControlServer {
    listener: UnixListener,
    path: PathBuf,
    owner: u32,
    clients: Vec<Client>,
    next_id: u64,
}

#[derive(Debug)]
struct Client {
    id: ClientId,
    stream: UnixStream,
    role: Role,
    buffer: Vec<u8>,
}

impl ControlServer {
    /// Listens at `path`, in the place of what a dead predecessor left there. `owner`: the user
    /// that may read.
    pub(crate) fn bind(path: &Path, owner: u32) -> anyhow::Result<Self> {
        let what = || format!("listening on the control socket {}", path.display());
        match fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e).with_context(what),
            _ => {}
        }
        let listener = UnixListener::bind(path).with_context(what)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).with_context(what)?;
        listener.set_nonblocking(true).with_context(what)?;
        Ok(Self {
            listener,
            path: path.to_owned(),
            owner,
            clients: Vec::new(),
            next_id: 0,
        })
    }

    /// What to wait on, to be readable.
    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let clients = self.clients.iter().map(|client| client.stream.as_fd());
        std::iter::once(self.listener.as_fd()).chain(clients)
    }

    /// Takes connections and reads requests; returns those that may be asked. Waits for nothing.
    pub(crate) fn serve(&mut self) -> Vec<(ClientId, Request)> {
        self.accept();
        let mut requests = Vec::new();
        let mut refused = Vec::new();
        self.clients.retain_mut(|client| {
            let alive = client.read();
            while let Some(line) = client.next_line() {
                match serde_json::from_slice::<Request>(&line) {
                    Ok(request) if request.needs() <= client.role => {
                        requests.push((client.id, request));
                    }
                    Ok(_) => refused.push((client.id, "that is for root".to_owned())),
                    Err(e) => refused.push((client.id, format!("not a request: {e}"))),
                }
            }
            alive
        });
        for (id, error) in refused {
            self.answer(id, &Answer::Error { error });
        }
        requests
    }

    /// Answers a request. A client that has gone, or doesn't read, is forgotten.
    pub(crate) fn answer(&mut self, id: ClientId, answer: &Answer) {
        let Some(at) = self.clients.iter().position(|client| client.id == id) else {
            return;
        };
        let sent = serde_json::to_vec(answer)
            .map_err(io::Error::other)
            .and_then(|mut line| {
                line.push(b'\n');
                self.clients[at].stream.write_all(&line)
            });
        if sent.is_err() {
            self.clients.remove(at);
        }
    }

    fn accept(&mut self) {
        while let Ok((stream, _)) = self.listener.accept() {
            let Ok(peer) = getsockopt(&stream, PeerCredentials) else {
                continue;
            };
            let Some(role) = Role::of(peer.uid(), self.owner) else {
                tracing::warn!(uid = peer.uid(), "a stranger came to the control socket");
                continue;
            };
            if self.clients.len() >= MAX_CLIENTS || stream.set_nonblocking(true).is_err() {
                continue;
            }
            self.next_id += 1;
            self.clients.push(Client {
                id: ClientId(self.next_id),
                stream,
                role,
                buffer: Vec::new(),
            });
        }
    }
}

impl Drop for ControlServer {
    fn drop(&mut self) {
        // The next one to bind removes what stays.
        let _ = fs::remove_file(&self.path);
    }
}

impl Client {
    /// Reads what is there; whether to keep the connection.
    fn read(&mut self) -> bool {
        let mut bytes = [0; 1_024];
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => return false,
                Ok(n) => self.buffer.extend_from_slice(&bytes[..n]),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return true,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
            if self.buffer.len() > MAX_REQUEST {
                return false;
            }
        }
    }

    fn next_line(&mut self) -> Option<Vec<u8>> {
        let end = self.buffer.iter().position(|&b| b == b'\n')?;
        let mut line: Vec<u8> = self.buffer.drain(..=end).collect();
        line.pop();
        Some(line)
    }
}

/// Asks the broker behind `path`.
pub(crate) fn ask(path: &Path, request: &Request) -> anyhow::Result<Answer> {
    let what = || format!("asking the broker at {}", path.display());
    let mut stream = UnixStream::connect(path).with_context(what)?;
    stream
        .set_read_timeout(Some(ANSWER_WITHIN))
        .with_context(what)?;
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    stream.write_all(&line).with_context(what)?;
    let mut answer = String::new();
    BufReader::new(stream)
        .read_line(&mut answer)
        .with_context(what)?;
    match answer.as_str() {
        "" => bail!("{}: it closed the connection without an answer", what()),
        answer => serde_json::from_str(answer)
            .with_context(|| format!("{}: it speaks another version", what())),
    }
}

#[cfg(test)]
#[path = "control_socket_test.rs"]
mod tests;
