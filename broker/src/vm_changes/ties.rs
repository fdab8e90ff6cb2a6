//! VMs that are served for as long as a client lives: those that `attach` and `run` bring to a
//! daemon.
//!
//! The client makes a pair of sockets and sends one along; it keeps the other. A machine of `run`
//! says on it what it is and what happens to it ([`TiedMachine`]); others send nothing. When its end is
//! closed for any reason, the VM goes. When the VM goes for another reason, the client is told by a
//! byte, and by the end of its socket. A daemon that starts again serves such VMs as it serves all, and
//! gives their clients some time to come back.
use std::{
    collections::BTreeMap,
    os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use nix::{
    sys::{
        epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
        socket::{MsgFlags, getsockopt, send, sockopt::PeerCredentials},
    },
    unistd::read,
};
use slipgate_ipc::{api::Event, client::MachineStatus};

use super::tied_machine::TiedMachine;

/// How long clients have to come back to a daemon that starts again.
const BACK_WITHIN: Duration = Duration::from_secs(30);
/// Before a VM whose client has gone is tried to be removed once more.
const AGAIN_AFTER: Duration = Duration::from_secs(2);
/// Clients whose ends are taken note of at a time.
const AT_ONCE: usize = 64;
/// Most bytes that are read of a client at a time.
const MOST_AT_ONCE: usize = 4 << 10;

/// The clients that VMs are tied to.
#[derive(Debug)]
pub(crate) struct Ties {
    epoll: Epoll,
    tied: BTreeMap<u64, Tied>,
    of_vm: BTreeMap<String, u64>,
    last: u64,
    /// VMs that are removed at this time, because no client is there.
    untied: BTreeMap<String, Instant>,
    /// Events of machines that were not fetched yet.
    events: Vec<Event>,
}

/// A VM with its client.
#[derive(Debug)]
struct Tied {
    vm: String,
    client: OwnedFd,
    machine: TiedMachine,
}

impl Tied {
    /// Reads what the client has sent, a bounded part of it. Returns whether the client is there.
    fn hear(&mut self, events: &mut Vec<Event>) -> bool {
        let mut bytes = [0; MOST_AT_ONCE];
        match read(&self.client, &mut bytes) {
            Ok(0) => false,
            Ok(length) => {
                self.machine.take(&self.vm, &bytes[..length], events);
                true
            }
            Err(nix::Error::EAGAIN | nix::Error::EINTR) => true,
            Err(_) => false,
        }
    }
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
            events: Vec::new(),
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

    /// The VM stays, whether its client comes back or not.
    pub(crate) fn forget_awaited(&mut self, vm: &str) {
        self.untied.remove(vm);
    }

    /// Whether a client has the VM.
    pub(crate) fn has(&self, vm: &str) -> bool {
        self.of_vm.contains_key(vm)
    }

    /// Whether the machine of the client that has the VM has said that it ended: the client goes soon.
    pub(crate) fn is_ending(&self, vm: &str) -> bool {
        let number = self.of_vm.get(vm);
        let tied = number.and_then(|number| self.tied.get(number));
        tied.is_some_and(|tied| tied.machine.has_ended())
    }

    /// Ties a VM to a client.
    ///
    /// # Errors
    /// The kernel does not watch that descriptor.
    pub(crate) fn tie(&mut self, vm: &str, client: OwnedFd) -> nix::Result<()> {
        self.last += 1;
        let event = EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP, self.last);
        self.epoll.add(&client, event)?;
        // Of a pair: who made it. What is no Unix socket was made by nobody.
        let maker = getsockopt(&client, PeerCredentials).map_or(0, |made| made.pid());
        let maker = u32::try_from(maker).unwrap_or(0);
        self.untied.remove(vm);
        let tied = Tied {
            vm: vm.to_owned(),
            client,
            machine: TiedMachine::of(maker),
        };
        self.tied.insert(self.last, tied);
        if let Some(former) = self.of_vm.insert(vm.to_owned(), self.last) {
            self.tied.remove(&former);
        }
        Ok(())
    }

    /// Lets go of a VM that is removed, and tells its client.
    pub(crate) fn untie(&mut self, vm: &str) {
        self.untied.remove(vm);
        let number = self.of_vm.remove(vm);
        if let Some(mut tied) = number.and_then(|number| self.tied.remove(&number)) {
            // The machine may have said how it ended.
            tied.hear(&mut self.events);
            tied.machine.gone(vm, &mut self.events);
            let client = tied.client;
            // One that has gone needs to be told nothing. The set forgets what is closed.
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
            let _ = send(client.as_raw_fd(), b"x", flags);
        }
    }

    /// A VM without client could not be removed now.
    pub(crate) fn again(&mut self, vm: String) {
        self.untied.insert(vm, Instant::now() + AGAIN_AFTER);
    }

    /// The machines of clients that are here, by the names of their VMs.
    pub(crate) fn machines(&self) -> impl Iterator<Item = MachineStatus> {
        let numbers = self.of_vm.values();
        numbers.filter_map(|number| self.tied.get(number)?.machine.status())
    }

    /// The machine behind a VM; `None`: it has none here.
    pub(crate) fn machine(&self, vm: &str) -> Option<MachineStatus> {
        self.tied.get(self.of_vm.get(vm)?)?.machine.status()
    }

    /// Reads what a VM's client has sent, now. One that has gone is noticed by [`Ties::ended`].
    pub(crate) fn hear(&mut self, vm: &str) {
        let number = self.of_vm.get(vm);
        if let Some(tied) = number.and_then(|number| self.tied.get_mut(number)) {
            tied.hear(&mut self.events);
        }
    }

    /// Takes out what has happened to machines.
    pub(crate) fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
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
            let Some(tied) = self.tied.get_mut(&number) else {
                continue;
            };
            if tied.hear(&mut self.events) {
                continue;
            }
            let Some(Tied {
                vm, mut machine, ..
            }) = self.tied.remove(&number)
            else {
                continue;
            };
            // The VM may be another client's by now.
            if self.of_vm.get(&vm) == Some(&number) {
                self.of_vm.remove(&vm);
                machine.gone(&vm, &mut self.events);
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
