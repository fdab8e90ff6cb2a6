//! Listeners, which receive records over a socket that was passed: those of one VM, or those of the
//! events that a process asks for.
//!
//! # Theory of operation
//! The first lines for the listener of a VM describe the live flows; each later line is sent as it
//! is recorded ([`Listener`]). A process that answers the API chooses events: it sends a byte, the
//! set of those that it wants from now on ([`Events`]), and nothing is made of the others. The
//! engine never waits for the socket: lines that do not fit in a bounded buffer are lost to the
//! listener, and a line reports how many. A client that wants no more shuts its side down for
//! writing: it receives the waiting lines, and then the end of the stream. A client that is gone is
//! removed.
use std::{
    io,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
};

use slipgate_abi::{VmId, VmRow};

use nix::sys::socket::{MsgFlags, recv, send};

use crate::{
    clock::{Clock, SECOND_NS},
    datapath::Datapath,
    event_loop::Engine,
    poll::{Interest, Poller, Readiness, Subsystem, Token},
    port::FrameIo,
    record::{Events, Listener},
};

/// Most clients that receive the records of a VM at once.
pub const MOST_LISTENERS: usize = 8;
/// Most processes that receive events at once; the broker starts two at most.
const MOST_STREAMS: usize = 4;
/// Time for which a listener that is ending may take the rest, ns.
const LINGER_NS: u64 = 2 * SECOND_NS;

/// Reason why a request to listen was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NotListening {
    /// No VM is served in that row.
    #[error("that VM is not served any more")]
    NoVm,
    /// [`MOST_LISTENERS`] listeners are connected already.
    #[error("{MOST_LISTENERS} listen already; end one of them")]
    TooMany,
    /// The descriptor is not a stream socket.
    #[error("the descriptor that was sent is no stream socket")]
    Socket,
}

/// The clients that listen to records.
#[derive(Debug, Default)]
pub(crate) struct Listening {
    list: Vec<Client>,
    last_key: u32,
}

#[derive(Debug)]
struct Client {
    key: u32,
    /// The VM; `None`: all of them.
    of: Option<(VmRow, VmId)>,
    to: OwnedFd,
    waits_for: Interest,
    /// End of the time in which the rest is sent; `None` while the client listens.
    lingers_until_ns: Option<u64>,
}

impl Listening {
    /// Returns when [`Engine::send_to_listeners`] is due, ns.
    pub(crate) fn next_deadline_ns(&self) -> Option<u64> {
        self.list.iter().filter_map(|c| c.lingers_until_ns).min()
    }
}

impl<D: Datapath, P: FrameIo, C: Clock> Engine<D, P, C> {
    /// Sends the records of a VM from now on to a stream socket.
    ///
    /// # Errors
    /// When the VM is not served, one listener more is too many, or it is no stream socket.
    pub fn listen(&mut self, row: VmRow, to: OwnedFd) -> Result<(), NotListening> {
        let id = self.core.vms.id_of(row);
        let id = id.ok_or(NotListening::NoVm)?;
        let key = self.add_listener(Some((row, id)), to, MOST_LISTENERS)?;
        self.log.listen(Listener::new(key, id));
        self.keep_records();
        self.describe_flows(row, key);
        Ok(())
    }

    /// Sends the records of the events that are asked for over a stream socket to it, from now on.
    ///
    /// # Errors
    /// When one listener more is too many, or it is no stream socket.
    pub fn send_events(&mut self, to: OwnedFd) -> Result<(), NotListening> {
        let key = self.add_listener(None, to, MOST_STREAMS)?;
        self.log.listen(Listener::of_all(key));
        Ok(())
    }

    fn add_listener(
        &mut self,
        of: Option<(VmRow, VmId)>,
        to: OwnedFd,
        most: usize,
    ) -> Result<u32, NotListening> {
        let Listening { list, last_key } = &mut self.listening;
        let alike = |client: &&Client| client.of.is_some() == of.is_some();
        if list.iter().filter(alike).count() >= most {
            return Err(NotListening::TooMany);
        }
        *last_key = last_key.wrapping_add(1);
        let key = *last_key;
        let waits_for = Interest::Read;
        let added = self.poller.add(&to, token(key), waits_for);
        added.map_err(|_| NotListening::Socket)?;
        list.push(Client {
            key,
            of,
            to,
            waits_for,
            lingers_until_ns: None,
        });
        Ok(key)
    }

    /// Handles a client's socket that is writable, was shut down, or failed.
    pub(crate) fn listener_ready(&mut self, readiness: Readiness, now_ns: u64) {
        let list = &mut self.listening.list;
        let key = readiness.token.key;
        let Some(at) = list.iter().position(|client| client.key == key) else {
            return;
        };
        let client = &mut list[at];
        if readiness.failed {
            return self.end_listener(at);
        }
        if readiness.readable && client.lingers_until_ns.is_none() {
            let mut bytes = [0; 64];
            match recv(client.to.as_raw_fd(), &mut bytes, MsgFlags::MSG_DONTWAIT) {
                Ok(0) => client.lingers_until_ns = Some(now_ns + LINGER_NS),
                Ok(n) => {
                    // Later bytes replace earlier ones. Of a VM's listener they mean nothing.
                    self.log.hear(key, Events::from_bits(bytes[n - 1]));
                    self.keep_records();
                }
                Err(nix::Error::EAGAIN | nix::Error::EINTR) => {}
                Err(_) => self.end_listener(at),
            }
        }
    }

    /// Sends new records, and removes the listeners that are over.
    pub(crate) fn send_to_listeners(&mut self, now_ns: u64) {
        for at in (0..self.listening.list.len()).rev() {
            let client = &mut self.listening.list[at];
            if let Some((row, id)) = client.of
                && self.core.vms.id_of(row) != Some(id)
            {
                client.lingers_until_ns.get_or_insert(now_ns + LINGER_NS);
            }
            let Some(listener) = self.log.listener(client.key) else {
                continue;
            };
            if client.lingers_until_ns.is_some() || listener.waiting() == 0 {
                listener.report_lost();
            }
            let takes = client.send(listener, &self.poller);
            let over = client.lingers_until_ns;
            if !takes || over.is_some_and(|until| now_ns >= until || listener.waiting() == 0) {
                self.end_listener(at);
            }
        }
    }

    /// Removes all listeners: the engine stops. Clients receive what their sockets accept at once.
    pub(crate) fn end_listening(&mut self) {
        let now_ns = self.clock.now_ns();
        self.send_to_listeners(now_ns);
        for at in (0..self.listening.list.len()).rev() {
            self.end_listener(at);
        }
    }

    fn end_listener(&mut self, at: usize) {
        let client = self.listening.list.swap_remove(at);
        // Closing the socket would not remove it from the epoll set if the client had it too. It is
        // in the set, so there is no error.
        let _ = self.poller.remove(&client.to);
        self.log.unlisten(client.key);
        self.keep_records();
    }
}

impl Client {
    /// Sends the waiting lines as far as the client takes them. Returns `false` when the client is
    /// gone.
    fn send(&mut self, listener: &mut Listener, poller: &Poller) -> bool {
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        let fd = self.to.as_raw_fd();
        let sent = listener.fetch(|bytes| match send(fd, bytes, flags) {
            Err(nix::Error::EAGAIN | nix::Error::EINTR) => Ok(0),
            other => other.map_err(io::Error::from),
        });
        if sent.is_err() {
            return false;
        }
        let waits_for = match (self.lingers_until_ns, listener.waiting()) {
            // The end of the client's stream would be reported again and again.
            (Some(_), 0) => Interest::None,
            (Some(_), _) => Interest::Write,
            (None, 0) => Interest::Read,
            (None, _) => Interest::Both,
        };
        if waits_for == self.waits_for {
            return true;
        }
        self.waits_for = waits_for;
        poller
            .modify(self.to.as_fd(), token(self.key), waits_for)
            .is_ok()
    }
}

fn token(key: u32) -> Token {
    Token {
        subsystem: Subsystem::Listener,
        key,
    }
}
