//! The answering side of the control socket.
//!
//! The socket is 0600 in a root-only directory, so only root connects, or a process to which root
//! passed a connection. In addition, every connection is checked by `SO_PEERCRED`: root is *admin*,
//! the user that started the broker (unless that is root) a *reader*, and other users are refused.
//! So a user becomes a reader only when root passes a connection on. The next request of a
//! connection is taken once the one before is answered. A connection that sends too much, or does
//! not read, is closed, so that it can't block the broker. Descriptors from readers, and those that
//! no request uses, are closed.
use std::{
    collections::{HashSet, VecDeque},
    fs, io,
    io::Write as _,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{
            fs::PermissionsExt as _,
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
};

use nix::sys::socket::{MsgFlags, getsockopt, sockopt::PeerCredentials};
use slipgate_model::rights::receive;

use super::{ClientAnswer, ClientRequest, MAX_BASES, Role};
use crate::descriptors::{Inbound as _, Slot};

/// Longest accepted request, bytes: with room for the text of a policy.
const MAX_REQUEST: usize = 64 << 10;
/// Largest number of simultaneous connections. Further ones wait in the kernel to be accepted, as far
/// as their senders wait for an answer.
const MAX_CLIENTS: usize = 16;
/// Largest number of received descriptors that may wait for the requests they belong to.
const MAX_WAITING_FDS: usize = 2 + 2 * MAX_BASES;
/// Most descriptors that the kernel lets come at once (`SCM_MAX_FD`, <net/scm.h>): with room for
/// them all, none comes that is not seen.
const MAX_FDS_AT_ONCE: usize = 253;

/// Number of a connection, never reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ClientId(u64);

/// Listening side of the control socket.
#[derive(Debug)]
pub struct ControlServer {
    listener: UnixListener,
    path: PathBuf,
    owner: u32,
    /// Role of the owner, who is not root.
    owner_role: Role,
    clients: Vec<Client>,
    /// Requests of clients that do not come by the socket, without their answers.
    others: HashSet<ClientId>,
    /// Answers to the requests of those clients, until they are fetched.
    answers: Vec<(ClientId, ClientAnswer)>,
    next_id: u64,
}

#[derive(Debug)]
struct Client {
    id: ClientId,
    stream: UnixStream,
    role: Role,
    buffer: Vec<u8>,
    fds: VecDeque<OwnedFd>,
    /// Whether its request is not answered yet; further input waits.
    busy: bool,
}

/// A request that its sender is permitted to make.
#[derive(Debug)]
pub struct PermittedRequest {
    /// Connection that sent the request.
    pub client: ClientId,
    /// The request, decoded and within limits.
    pub request: ClientRequest,
}

impl ControlServer {
    /// Listens at `path`, in place of a dead predecessor's socket. `owner`: the user that may read.
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
            owner_role: Role::Reader,
            clients: Vec::new(),
            others: HashSet::new(),
            answers: Vec::new(),
            next_id: 0,
        })
    }

    /// Lets the owner change things too: whatever is served has no more privileges than the owner has.
    #[must_use]
    pub fn of_its_owner(mut self) -> Self {
        self.owner_role = Role::Admin;
        self
    }

    /// Descriptors to poll for input: every connection, and the listener while there is room for
    /// another one.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let clients = self.clients.iter().map(|client| client.stream.as_fd());
        let listener = self.has_room().then(|| self.listener.as_fd());
        listener.into_iter().chain(clients)
    }

    /// Whether a client has sent its next request already, so that [`ControlServer::serve`] has
    /// work without new input.
    pub fn has_waiting(&self) -> bool {
        let mut clients = self.clients.iter();
        clients.any(|client| !client.busy && client.buffer.contains(&b'\n'))
    }

    /// Whether a client is still connected, as far as its input was read.
    pub fn is_connected(&self, id: ClientId) -> bool {
        self.others.contains(&id) || self.clients.iter().any(|client| client.id == id)
    }

    /// Accepts connections and reads requests without waiting. Returns the permitted requests, at
    /// most one per connection until it is answered.
    pub fn serve(&mut self) -> Vec<PermittedRequest> {
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
                    Ok(request) => requests.push(PermittedRequest {
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

    /// Takes in a request that came by another way than the socket: its number, under which
    /// [`ControlServer::answer`] answers it.
    pub fn take_in(&mut self) -> ClientId {
        self.next_id += 1;
        let id = ClientId(self.next_id);
        self.others.insert(id);
        id
    }

    /// Takes out the answers to requests of [`ControlServer::take_in`].
    pub fn answers(&mut self) -> Vec<(ClientId, ClientAnswer)> {
        std::mem::take(&mut self.answers)
    }

    /// Answers a request. A connection that is closed or does not read is dropped.
    pub fn answer(&mut self, id: ClientId, answer: &ClientAnswer) {
        if self.others.remove(&id) {
            self.answers.push((id, answer.clone()));
            return;
        }
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

    fn has_room(&self) -> bool {
        self.clients.len() < MAX_CLIENTS
    }

    fn accept(&mut self) {
        while self.has_room() {
            let Ok((stream, _)) = self.listener.accept() else {
                return;
            };
            let Ok(peer) = getsockopt(&stream, PeerCredentials) else {
                continue;
            };
            let Some(role) = Role::of(peer.uid(), self.owner, self.owner_role) else {
                tracing::warn!(
                    uid = peer.uid(),
                    "refused a connection of another user at the control socket"
                );
                continue;
            };
            if stream.set_nonblocking(true).is_err() {
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
    /// Reads all available input; returns whether to keep the connection.
    fn read(&mut self) -> bool {
        let mut bytes = [0; 1_024];
        loop {
            let (stream, flags) = (self.stream.as_fd(), MsgFlags::MSG_DONTWAIT);
            let n = match receive(stream, &mut bytes, MAX_FDS_AT_ONCE, flags) {
                Ok(received) => {
                    // There is room for all that can come, if this process has descriptors left.
                    if self.role == Role::Admin && !received.was_cut {
                        let room = MAX_WAITING_FDS.saturating_sub(self.fds.len());
                        self.fds.extend(received.fds.into_iter().take(room));
                    }
                    received.len
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

    /// Decodes a line as a request, with the descriptor that came for it.
    ///
    /// # Errors
    /// The line is no request, the role does not permit it, or its descriptor is missing.
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
