//! Who listens to what is recorded of a VM, over a socket that the client brought.
//!
//! # Theory of operation
//! The first lines are of the flows that live; then comes each line as it is recorded
//! ([`Listener`]). The socket is never waited for: what does not fit in a bounded buffer is lost to
//! the listener, and a line says how much. A client that has heard enough shuts its side for
//! writing: it gets what waits, and then the end. One that is gone is forgotten.
use std::{
    io,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
};

use nix::sys::socket::{MsgFlags, recv, send};

use crate::{
    clock::{Clock, SECOND_NS},
    control::{Control, MOST_LISTENERS, NotListening},
    datapath::Datapath,
    event_loop::Engine,
    poll::{Interest, Poller, Readiness, Subsystem, Token},
    port::FrameIo,
    record::Listener,
    services::Services,
};

/// How long one that has heard enough is given to take the rest, ns.
const LINGER_NS: u64 = 2 * SECOND_NS;

/// Those who do.
#[derive(Debug, Default)]
pub(crate) struct Listening {
    list: Vec<Client>,
    last_key: u32,
}

#[derive(Debug)]
struct Client {
    key: u32,
    row: u16,
    id: u32,
    to: OwnedFd,
    waits_for: Interest,
    /// It has heard enough; what waits may still go until then.
    lingers_until_ns: Option<u64>,
}

impl Listening {
    /// When [`Engine::tell_listeners`] is due, ns.
    pub(crate) fn next_deadline_ns(&self) -> Option<u64> {
        self.list.iter().filter_map(|c| c.lingers_until_ns).min()
    }
}

impl<D: Datapath, P: FrameIo, C: Clock, K: Control, S: Services> Engine<D, P, C, K, S> {
    /// Lets one listen to a VM from now on.
    pub(crate) fn listen(&mut self, row: u16, to: OwnedFd) -> Result<(), NotListening> {
        let id = self.core.vm(row).map(|vm| vm.net.id);
        let id = id.ok_or(NotListening::NoVm)?;
        let Listening { list, last_key } = &mut self.listening;
        if list.len() >= MOST_LISTENERS {
            return Err(NotListening::TooMany);
        }
        *last_key = last_key.wrapping_add(1);
        let key = *last_key;
        let waits_for = Interest::Read;
        let added = self.poller.add(&to, token(key), waits_for);
        added.map_err(|_| NotListening::Socket)?;
        list.push(Client {
            key,
            row,
            id,
            to,
            waits_for,
            lingers_until_ns: None,
        });
        self.log.listen(Listener::new(key, id));
        self.keep_records();
        self.tell_of_flows(row, key);
        Ok(())
    }

    /// A client has room again, has heard enough, or is gone.
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
            match recv(client.to.as_raw_fd(), &mut [0; 64], MsgFlags::MSG_DONTWAIT) {
                Ok(0) => client.lingers_until_ns = Some(now_ns + LINGER_NS),
                // What it says is of no interest.
                Ok(_) | Err(nix::Error::EAGAIN | nix::Error::EINTR) => {}
                Err(_) => self.end_listener(at),
            }
        }
    }

    /// Sends on what was recorded, and ends what is over.
    pub(crate) fn tell_listeners(&mut self, now_ns: u64) {
        for at in (0..self.listening.list.len()).rev() {
            let client = &mut self.listening.list[at];
            let vm = self.core.vm(client.row).map(|vm| vm.net.id);
            if vm != Some(client.id) {
                client.lingers_until_ns.get_or_insert(now_ns + LINGER_NS);
            }
            let Some(listener) = self.log.listener(client.key) else {
                continue;
            };
            if client.lingers_until_ns.is_some() || listener.waiting() == 0 {
                listener.tell_lost();
            }
            let takes = client.send(listener, &self.poller);
            let over = client.lingers_until_ns;
            if !takes || over.is_some_and(|until| now_ns >= until || listener.waiting() == 0) {
                self.end_listener(at);
            }
        }
    }

    /// Ends them all: the engine does. What the clients take at once they get.
    pub(crate) fn end_listening(&mut self) {
        let now_ns = self.clock.now_ns();
        self.tell_listeners(now_ns);
        for at in (0..self.listening.list.len()).rev() {
            self.end_listener(at);
        }
    }

    fn end_listener(&mut self, at: usize) {
        let client = self.listening.list.swap_remove(at);
        // Closing it would not take it out of the epoll set if the client had it too. It is in the
        // set, so there is no error.
        let _ = self.poller.remove(&client.to);
        self.log.unlisten(client.key);
        self.keep_records();
    }
}

impl Client {
    /// Sends what waits as far as the client takes it; `false` when it is gone.
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
            // The end of what it says would come again and again.
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
