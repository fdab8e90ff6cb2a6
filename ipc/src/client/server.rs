//! The answering side of the control socket.
//!
//! The socket is 0600 in a root-only directory: only root comes here, or who was handed a connection
//! of root's. Every connection is checked by `SO_PEERCRED` on top: root is *admin*, the user that
//! started the broker (if that is not root) a *reader*, anybody else is sent away. So nobody is a
//! reader unless root hands the way in on. A client's next request is taken when the one before is
//! answered; one that sends too much, or does not read, is closed: it can't hold the broker up.
//! Descriptors of readers, and those that no request wants, are closed.
use std::{
    collections::VecDeque,
    fs, io,
    io::{IoSliceMut, Write as _},
    os::{
        fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd, RawFd},
        unix::{
            fs::PermissionsExt as _,
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
};

use nix::{
    cmsg_space,
    sys::socket::{MsgFlags, getsockopt, recvmsg, sockopt::PeerCredentials},
};

use super::{ClientAnswer, ClientRequest, Role};
use crate::{
    descriptors::{Inbound as _, Slot},
    rights,
};

/// Longest request, bytes.
const MAX_REQUEST: usize = 4_096;
/// Most connections at once.
const MAX_CLIENTS: usize = 16;
/// Descriptors of a client that wait for their requests.
const MAX_WAITING_FDS: usize = 2;
/// Most descriptors that the kernel lets come at once (`SCM_MAX_FD`, <net/scm.h>): with room for
/// them all, none comes that is not seen.
const MAX_FDS_AT_ONCE: usize = 253;

/// A connection's number, never reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ClientId(u64);

/// The listening side.
#[derive(Debug)]
pub struct ControlServer {
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

/// A request that may be asked.
#[derive(Debug)]
pub struct Asked {
    /// Who asks.
    pub client: ClientId,
    /// What is asked.
    pub request: ClientRequest,
}

impl ControlServer {
    /// Listens at `path`, in the place of what a dead predecessor left there. `owner`: the user
    /// that may read.
    ///
    /// # Errors
    /// The socket can't be made there.
    pub fn bind(path: &Path, owner: u32) -> io::Result<Self> {
        match fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
        listener.set_nonblocking(true)?;
        Ok(Self {
            listener,
            path: path.to_owned(),
            owner,
            clients: Vec::new(),
            next_id: 0,
        })
    }

    /// What to wait on, to be readable.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let clients = self.clients.iter().map(|client| client.stream.as_fd());
        std::iter::once(self.listener.as_fd()).chain(clients)
    }

    /// Whether a client has sent its next request already: [`ControlServer::serve`] has work though
    /// nothing comes.
    pub fn has_waiting(&self) -> bool {
        let mut clients = self.clients.iter();
        clients.any(|client| !client.busy && client.buffer.contains(&b'\n'))
    }

    /// Takes connections and reads requests; returns those that may be asked, one of a client until
    /// it is answered. Waits for nothing.
    pub fn serve(&mut self) -> Vec<Asked> {
        self.accept();
        let mut requests = Vec::new();
        let mut refused = Vec::new();
        self.clients.retain_mut(|client| {
            let alive = client.read();
            if !client.busy
                && let Some(line) = client.next_line()
            {
                client.busy = true;
                match client.request(&line) {
                    Ok(request) => requests.push(Asked {
                        client: client.id,
                        request,
                    }),
                    Err(why) => refused.push((client.id, why)),
                }
            }
            alive
        });
        for (id, why) in refused {
            self.answer(id, &ClientAnswer::error(why));
        }
        requests
    }

    /// Answers a request. A client that has gone, or doesn't read, is forgotten.
    pub fn answer(&mut self, id: ClientId, answer: &ClientAnswer) {
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
                    // Never cut short: there is room for all that can come.
                    let came = rights::take(&received).unwrap_or_default();
                    if self.role == Role::Admin {
                        let room = MAX_WAITING_FDS.saturating_sub(self.fds.len());
                        self.fds.extend(came.into_iter().take(room));
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

    /// The request of a line, with the descriptor that came for it; or why it is refused.
    fn request(&mut self, line: &[u8]) -> Result<ClientRequest, String> {
        let wire: ClientRequest<Slot> =
            serde_json::from_slice(line).map_err(|e| format!("not a request: {e}"))?;
        if wire.needs() > self.role {
            return Err("that is for root".to_owned());
        }
        let mut fds = std::iter::from_fn(|| self.fds.pop_front());
        ClientRequest::put_back(wire, &mut fds).map_err(|e| e.to_string())
    }

    fn next_line(&mut self) -> Option<Vec<u8>> {
        let end = self.buffer.iter().position(|&b| b == b'\n')?;
        let mut line: Vec<u8> = self.buffer.drain(..=end).collect();
        line.pop();
        Some(line)
    }
}

#[cfg(test)]
#[path = "server_test.rs"]
mod tests;
