//! The broker's control socket: JSON lines over a Unix stream, one answer per request.
//!
//! The socket is 0600 in a root-only directory: only root comes here, or who was handed a connection
//! of root's. Every connection is checked by `SO_PEERCRED` on top: root is *admin*, the user that
//! started the broker (if that is not root) a *reader*, anybody else is sent away. So nobody is a
//! reader unless root hands the way in on. A client's next request is taken when the one before is
//! answered; one that sends too much, or does not read, is closed: it can't hold the broker up.
//! With a request may come one descriptor, for what is too much for a line; those of readers, and
//! those that no request wants, are closed.
use std::{
    collections::{BTreeMap, VecDeque},
    fs, io,
    io::{BufRead as _, BufReader, IoSlice, IoSliceMut, Write as _},
    os::{
        fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd},
        unix::{
            fs::PermissionsExt as _,
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, bail};
use nix::{
    cmsg_space,
    sys::socket::{
        ControlMessage, ControlMessageOwned, MsgFlags, getsockopt, recvmsg, sendmsg,
        sockopt::PeerCredentials,
    },
};
use serde::{Deserialize, Serialize};
use userspace_nat::control::NamesPage;

use crate::channel::{WhyAnswer, WhyQuestion};

/// Longest request, bytes.
const MAX_REQUEST: usize = 4_096;
/// Most connections at once.
const MAX_CLIENTS: usize = 16;
/// How long a client waits for an answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// And for one that takes the reading of files, or the end of many flows.
const CHANGE_WITHIN: Duration = Duration::from_secs(120);
/// Descriptors of a client that wait for their requests.
const MAX_WAITING_FDS: usize = 2;
/// Most descriptors that the kernel lets come at once (`SCM_MAX_FD`, <net/scm.h>): with room for
/// them all, none comes that is not seen.
const MAX_FDS_AT_ONCE: usize = 253;

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
    /// Who is served here; answered by [`Answer::UnknownVm`].
    Vms,
    /// Stop in order, as by SIGTERM. `keep`: leave flows running for a successor.
    Stop { keep: bool },
    /// Drop everything from and to a VM from now on.
    Freeze { vm: String },
    /// Let it pass again.
    Thaw { vm: String },
    /// Read the policy anew, or another policy file, and put it in force.
    Apply { file: Option<PathBuf> },
    /// End flows.
    Cut { what: Target },
    /// Write packets to the socket that comes with it.
    Capture {
        what: Target,
        /// End after so many.
        packets: Option<u64>,
        /// End after so long, seconds.
        seconds: Option<u64>,
    },
    /// Write what is recorded of a VM to the socket that comes with it, until that is closed.
    Listen { vm: String },
    /// Let a VM do what nothing denies it, until the socket that comes with it is closed.
    Open { vm: String },
}

/// A flow, or all of a VM's.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Target {
    /// By its id, as `flows` and the flow log have it.
    Flow(String),
    /// By the VM's name.
    Vm(String),
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
    /// No VM of that name, or none was named.
    UnknownVm {
        /// Those that are.
        served: Vec<String>,
    },
    /// A policy is in force.
    Applied {
        /// Flows that were cut.
        cut: u64,
        /// Flows that go on.
        kept: u64,
        /// Of those, how many it would refuse now.
        left: u64,
    },
    /// No such flow lives here.
    UnknownFlow,
    /// Flows were ended.
    Cut {
        flows: u64,
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
            Self::Why(_) | Self::Machines | Self::Vms | Self::Names { .. } => Role::Reader,
            Self::Stop { .. }
            | Self::Freeze { .. }
            | Self::Thaw { .. }
            | Self::Apply { .. }
            | Self::Cut { .. }
            | Self::Capture { .. }
            | Self::Listen { .. }
            | Self::Open { .. } => Role::Admin,
        }
    }

    /// Whether the engine has to be told of it.
    pub(crate) fn asks_engine(&self) -> bool {
        match self {
            Self::Why(_)
            | Self::Names { .. }
            | Self::Thaw { .. }
            | Self::Apply { .. }
            | Self::Cut { .. }
            | Self::Capture { .. }
            | Self::Listen { .. }
            | Self::Open { .. } => true,
            Self::Machines | Self::Vms | Self::Stop { .. } | Self::Freeze { .. } => false,
        }
    }

    /// Whether a descriptor comes with it.
    fn takes_descriptor(&self) -> bool {
        matches!(
            self,
            Self::Capture { .. } | Self::Listen { .. } | Self::Open { .. }
        )
    }

    /// How long its answer may take.
    fn within(&self) -> Duration {
        match self.needs() {
            Role::Reader => ANSWER_WITHIN,
            Role::Admin => CHANGE_WITHIN,
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
    fds: VecDeque<OwnedFd>,
    /// Its request is not answered yet; what else it has sent waits.
    busy: bool,
}

/// A request that may be asked, and the descriptor that came with it.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) client: ClientId,
    pub(crate) request: Request,
    pub(crate) descriptor: Option<OwnedFd>,
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

    /// Whether a client has sent its next request already: [`ControlServer::serve`] has work though
    /// nothing comes.
    pub(crate) fn has_waiting(&self) -> bool {
        let mut clients = self.clients.iter();
        clients.any(|client| !client.busy && client.buffer.contains(&b'\n'))
    }

    /// Takes connections and reads requests; returns those that may be asked, one of a client until
    /// it is answered. Waits for nothing.
    pub(crate) fn serve(&mut self) -> Vec<Asked> {
        self.accept();
        let mut requests = Vec::new();
        let mut refused = Vec::new();
        self.clients.retain_mut(|client| {
            let alive = client.read();
            if !client.busy
                && let Some(line) = client.next_line()
            {
                client.busy = true;
                match serde_json::from_slice::<Request>(&line) {
                    Ok(request) if request.needs() <= client.role => {
                        let wants = request.takes_descriptor();
                        requests.push(Asked {
                            client: client.id,
                            request,
                            descriptor: wants.then(|| client.fds.pop_front()).flatten(),
                        });
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
        self.clients[at].busy = false;
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
                fds: VecDeque::new(),
                busy: false,
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
        let mut space = cmsg_space!([RawFd; MAX_FDS_AT_ONCE]);
        loop {
            let mut parts = [IoSliceMut::new(&mut bytes)];
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
            let fd = self.stream.as_raw_fd();
            let n = match recvmsg::<()>(fd, &mut parts, Some(&mut space), flags) {
                Ok(received) => {
                    if let Ok(all) = received.cmsgs() {
                        for control in all {
                            take_descriptors(control, self.role, &mut self.fds);
                        }
                    }
                    received.bytes
                }
                Err(nix::Error::EAGAIN) => return true,
                Err(nix::Error::EINTR) => continue,
                Err(_) => return false,
            };
            if n == 0 {
                return false;
            }
            self.buffer.extend_from_slice(&bytes[..n]);
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

/// Keeps what of an admin's descriptors may be wanted; the rest is closed here.
fn take_descriptors(control: ControlMessageOwned, role: Role, fds: &mut VecDeque<OwnedFd>) {
    let ControlMessageOwned::ScmRights(raw) = control else {
        return;
    };
    for fd in raw {
        // SAFETY: the kernel made it for us just now; nobody else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        if role == Role::Admin && fds.len() < MAX_WAITING_FDS {
            fds.push_back(fd);
        }
    }
}

/// Asks the broker behind `path`.
pub(crate) fn ask(path: &Path, request: &Request) -> anyhow::Result<Answer> {
    ask_with(path, request, None)
}

/// Asks the broker behind `path`, and gives it a descriptor.
pub(crate) fn ask_with(
    path: &Path,
    request: &Request,
    descriptor: Option<BorrowedFd<'_>>,
) -> anyhow::Result<Answer> {
    let what = || format!("asking the broker at {}", path.display());
    let mut stream = UnixStream::connect(path).with_context(what)?;
    stream
        .set_read_timeout(Some(request.within()))
        .with_context(what)?;
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    let raw: Vec<RawFd> = descriptor.iter().map(|fd| fd.as_raw_fd()).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let rights = if raw.is_empty() { &[][..] } else { &rights };
    let parts = [IoSlice::new(&line)];
    let flags = MsgFlags::MSG_NOSIGNAL;
    // A request is a few hundred bytes; a stream may take them in parts all the same.
    let sent = sendmsg::<()>(stream.as_raw_fd(), &parts, rights, flags, None)
        .map_err(io::Error::from)
        .with_context(what)?;
    stream.write_all(&line[sent..]).with_context(what)?;
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
