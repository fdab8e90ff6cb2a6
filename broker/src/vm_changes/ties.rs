//! VMs that are served for as long as a client lives: those that `attach` and `run` bring to a
//! daemon.
//!
//! The client makes a pair of sockets and sends one along; it keeps the other and sends nothing.
//! When its end is closed for any reason, the VM goes. When the VM goes for another reason, the
//! client is told by a byte, and by the end of its socket. A daemon that starts again serves such
//! VMs as it serves all, and gives their clients some time to come back.
use std::{
    collections::BTreeMap,
    os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use nix::{
    sys::{
        epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
        socket::{MsgFlags, send},
    },
    unistd::read,
};

/// How long clients have to come back to a daemon that starts again.
const BACK_WITHIN: Duration = Duration::from_secs(30);
/// Before a VM whose client has gone is tried to be removed once more.
const AGAIN_AFTER: Duration = Duration::from_secs(2);
/// Clients whose ends are taken note of at a time.
const AT_ONCE: usize = 64;

/// The clients that VMs are tied to.
#[derive(Debug)]
pub(crate) struct Ties {
    epoll: Epoll,
    /// VMs and clients' sockets, by number.
    tied: BTreeMap<u64, (String, OwnedFd)>,
    of_vm: BTreeMap<String, u64>,
    last: u64,
    /// VMs that are removed at this time, because no client is there.
    untied: BTreeMap<String, Instant>,
}

impl Ties {
    /// No tie yet.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub(crate) fn new() -> nix::Result<Self> {
        Ok(Self {
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            tied: BTreeMap::new(),
            of_vm: BTreeMap::new(),
            last: 0,
            untied: BTreeMap::new(),
        })
    }

    /// Readable when a client has gone.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.0.as_fd()
    }

    /// When [`Ties::ended`] has something in any case.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.untied.values().min().copied()
    }

    /// Waits for the client of a VM that a predecessor served.
    pub(crate) fn await_client(&mut self, vm: &str) {
        let due = Instant::now() + BACK_WITHIN;
        self.untied.insert(vm.to_owned(), due);
    }

    /// Whether a client has the VM.
    pub(crate) fn has(&self, vm: &str) -> bool {
        self.of_vm.contains_key(vm)
    }

    /// Ties a VM to a client.
    ///
    /// # Errors
    /// The kernel does not watch that descriptor.
    pub(crate) fn tie(&mut self, vm: &str, client: OwnedFd) -> nix::Result<()> {
        self.last += 1;
        let event = EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP, self.last);
        self.epoll.add(&client, event)?;
        self.untied.remove(vm);
        self.tied.insert(self.last, (vm.to_owned(), client));
        if let Some(former) = self.of_vm.insert(vm.to_owned(), self.last) {
            self.tied.remove(&former);
        }
        Ok(())
    }

    /// Lets go of a VM that is removed, and tells its client.
    pub(crate) fn untie(&mut self, vm: &str) {
        self.untied.remove(vm);
        let number = self.of_vm.remove(vm);
        if let Some((_, client)) = number.and_then(|number| self.tied.remove(&number)) {
            // One that has gone needs to be told nothing. The set forgets what is closed.
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
            let _ = send(client.as_raw_fd(), b"x", flags);
        }
    }

    /// A VM without client could not be removed now.
    pub(crate) fn again(&mut self, vm: String) {
        self.untied.insert(vm, Instant::now() + AGAIN_AFTER);
    }

    /// Takes out the VMs whose clients have gone.
    pub(crate) fn ended(&mut self) -> Vec<String> {
        let mut events = [EpollEvent::empty(); AT_ONCE];
        // What fails now is reported again.
        let ready = self
            .epoll
            .wait(&mut events, EpollTimeout::ZERO)
            .unwrap_or(0);
        let mut ended = Vec::new();
        for event in &events[..ready] {
            let number = event.data();
            let Some((_, client)) = self.tied.get(&number) else {
                continue;
            };
            // What a client sends means nothing.
            if matches!(
                read(client, &mut [0; 64]),
                Ok(1..) | Err(nix::Error::EAGAIN)
            ) {
                continue;
            }
            let Some((vm, _)) = self.tied.remove(&number) else {
                continue;
            };
            // The VM may be another client's by now.
            if self.of_vm.get(&vm) == Some(&number) {
                self.of_vm.remove(&vm);
                ended.push(vm);
            }
        }
        let now = Instant::now();
        let late = self.untied.extract_if(.., |_, due| *due <= now);
        ended.extend(late.map(|(vm, _)| vm));
        ended
    }
}

#[cfg(test)]
#[path = "ties_test.rs"]
mod tests;
