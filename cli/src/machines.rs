//! The machines of `slipgate run` on this host, and orders to them.
//!
//! Each has a socket of its own, and a record of its name beside it ([`slipgate_broker::machines_dir`]).
//! So an order goes to the machine of its name, and one that is stopped delays no order to another. All
//! that are asked are asked at once.
use std::{
    io,
    os::fd::BorrowedFd,
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use slipgate_broker::{MachineRecord, check_machines_dir, machines_dir};
use slipgate_control::paths::netns_inode;
use slipgate_ipc::client::{
    ClientAnswer, ClientError, ClientRequest, Interrupt, MachineOrder, MachineStatus, ask,
};

use crate::brokers::ANOTHER_ANSWER;

/// Time within which a machine has to say what it is.
const STATUS_WITHIN: Duration = Duration::from_secs(2);

/// A machine that has answered, and its socket.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub(crate) status: MachineStatus,
    socket: PathBuf,
}

/// Machines of `slipgate run` that were found on this host.
#[derive(Debug, Default)]
pub(crate) struct Machines {
    /// By name, then by process id.
    pub(crate) found: Vec<Found>,
    /// Process ids of those that did not answer in time.
    pub(crate) silent: Vec<String>,
}

impl Machines {
    /// Asks all machines of this user.
    pub(crate) fn ask() -> anyhow::Result<Self> {
        Self::ask_those(None)
    }

    /// Asks those machines of this user that may be called so, or have this process id.
    fn ask_those(wanted: Option<&str>) -> anyhow::Result<Self> {
        match check_machines_dir() {
            Ok(()) => Self::ask_in(&machines_dir(), wanted, STATUS_WITHIN),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(e) => Err(e).context("looking for machines"),
        }
    }

    fn ask_in(dir: &Path, wanted: Option<&str>, within: Duration) -> anyhow::Result<Self> {
        let entries = match dir.read_dir() {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(e) => {
                let what = format!("looking for machines in {}", dir.display());
                return Err(e).context(what);
            }
        };
        let sockets = entries.flatten().map(|entry| entry.path());
        let sockets = sockets.filter(|path| path.extension().is_some_and(|e| e == "sock"));
        let sockets = sockets.filter(|path| wanted.is_none_or(|wanted| may_be(path, wanted)));
        let (sender, answers) = mpsc::channel();
        let mut waiting: Vec<PathBuf> = Vec::new();
        for socket in sockets {
            waiting.push(socket.clone());
            let sender = sender.clone();
            thread::spawn(move || {
                let order = MachineOrder::Status;
                let answer = ask(&socket, ClientRequest::Machine { order });
                // One that comes too late is heard by nobody.
                let _ = sender.send((socket, answer));
            });
        }
        drop(sender);
        let until = Instant::now() + within;
        let mut machines = Self::default();
        let left = || until.saturating_duration_since(Instant::now());
        while let Ok((socket, answer)) = answers.recv_timeout(left()) {
            waiting.retain(|other| *other != socket);
            match answer {
                Ok(ClientAnswer::Machine { machine }) => machines.found.push(Found {
                    status: *machine,
                    socket,
                }),
                // A process that was killed has left its socket.
                Err(e) if e.is_nobodys() || matches!(e, ClientError::NoAnswer { .. }) => {}
                Ok(_) | Err(_) => machines.silent.push(pid_of(&socket)),
            }
        }
        machines
            .silent
            .extend(waiting.iter().map(|path| pid_of(path)));
        machines.silent.sort();
        let key = |found: &Found| (found.status.name.clone(), found.status.pid);
        machines.found.sort_by_key(key);
        Ok(machines)
    }

    /// Returns the machine of this name or process id; `None`: there is none. Of several of one name,
    /// the one in this network namespace is meant.
    ///
    /// # Errors
    /// Several have this name.
    fn of(self, wanted: &str) -> anyhow::Result<Option<Found>> {
        let netns = netns_inode().unwrap_or(0);
        let pid = wanted.parse::<u32>().ok();
        let by_pid = self
            .found
            .iter()
            .find(|found| Some(found.status.pid) == pid);
        if let Some(found) = by_pid {
            return Ok(Some(found.clone()));
        }
        let mut named = self.found;
        named.retain(|found| found.status.name == wanted);
        if named.iter().any(|found| found.status.netns == netns) {
            named.retain(|found| found.status.netns == netns);
        }
        match &named[..] {
            [] => Ok(None),
            [one] => Ok(Some(one.clone())),
            several => {
                let pids = several.iter().map(|found| found.status.pid.to_string());
                let pids: Vec<_> = pids.collect();
                bail!(
                    "several machines are called {wanted}: give the process id of one, {}",
                    pids.join(" or ")
                );
            }
        }
    }
}

/// Whether a machine may be the one of this name or process id, by what is written beside its socket.
fn may_be(socket: &Path, wanted: &str) -> bool {
    pid_of(socket) == wanted
        || MachineRecord::of_socket(socket).is_none_or(|record| record.name == wanted)
}

fn pid_of(socket: &Path) -> String {
    let stem = socket.file_stem().unwrap_or_default();
    stem.to_string_lossy().into_owned()
}

/// Returns the machine of this name or process id; `None`: there is none.
///
/// # Errors
/// Several have this name, those that have it do not answer, or the sockets can't be looked for.
pub(crate) fn find(wanted: &str) -> anyhow::Result<Option<Found>> {
    let machines = Machines::ask_those(Some(wanted))?;
    let silent = machines.silent.join(", ");
    match machines.of(wanted)? {
        None if !silent.is_empty() => {
            bail!("no machine {wanted:?} answers; those that do not answer have the ids {silent}")
        }
        found => Ok(found),
    }
}

/// As [`find`], where there has to be one.
///
/// # Errors
/// There is none, or as [`find`].
pub(crate) fn existing(wanted: &str) -> anyhow::Result<Found> {
    if let Some(found) = find(wanted)? {
        return Ok(found);
    }
    let machines = Machines::ask()?;
    let names = machines.found.iter().map(|found| found.status.name.clone());
    let names: Vec<_> = names.collect();
    match machines.of(wanted)? {
        // It was just made.
        Some(found) => Ok(found),
        None if names.is_empty() => bail!("no `slipgate run` runs on this host for this user"),
        None => bail!(
            "no `slipgate run` has a machine {wanted:?}; there is {}",
            names.join(", ")
        ),
    }
}

impl Found {
    /// Its socket, and what it is.
    pub(crate) fn at_its_socket(&self) -> (&Path, &MachineStatus) {
        (&self.socket, &self.status)
    }

    /// Whether it is in this network namespace.
    pub(crate) fn is_here(&self) -> bool {
        netns_inode().is_ok_and(|here| here == self.status.netns)
    }

    /// Gives the machine an order. Returns the answer once it is carried out.
    ///
    /// # Errors
    /// It could not be carried out, or there is no answer.
    pub(crate) fn order(
        &self,
        order: MachineOrder<BorrowedFd<'_>>,
    ) -> anyhow::Result<ClientAnswer> {
        match self.ask(order)? {
            Some(answer) => Ok(answer),
            None => bail!("{} has ended meanwhile", self.status.name),
        }
    }

    /// As [`Found::order`], until `interrupt` is used.
    ///
    /// # Errors
    /// As [`Found::order`], also where it is interrupted.
    pub(crate) fn order_until(
        &self,
        interrupt: &Interrupt,
        order: MachineOrder<BorrowedFd<'_>>,
    ) -> anyhow::Result<ClientAnswer> {
        let asked = interrupt.ask(&self.socket, ClientRequest::Machine { order });
        match self.answered(asked)? {
            Some(answer) => Ok(answer),
            None => bail!("{} has ended meanwhile", self.status.name),
        }
    }

    /// Ends the machine. Its process may be gone before it has answered.
    ///
    /// # Errors
    /// As [`Found::order`], but for a machine that has ended.
    pub(crate) fn end(&self) -> anyhow::Result<()> {
        match self.ask(MachineOrder::Kill)? {
            None | Some(ClientAnswer::Done) => Ok(()),
            Some(_) => bail!(ANOTHER_ANSWER),
        }
    }

    /// Returns the answer; `None` if the machine has ended without one.
    fn ask(&self, order: MachineOrder<BorrowedFd<'_>>) -> anyhow::Result<Option<ClientAnswer>> {
        self.answered(ask(&self.socket, ClientRequest::Machine { order }))
    }

    fn answered(
        &self,
        answer: Result<ClientAnswer, ClientError>,
    ) -> anyhow::Result<Option<ClientAnswer>> {
        let name = &self.status.name;
        match answer {
            Ok(ClientAnswer::Error { error, .. }) => bail!("{name}: {error}"),
            Ok(answer) => Ok(Some(answer)),
            Err(ClientError::NoAnswer { .. }) => Ok(None),
            Err(e) if e.is_nobodys() => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// Gives the machine an order whose only answer is [`ClientAnswer::Done`].
    ///
    /// # Errors
    /// As [`Found::order`].
    pub(crate) fn have_done(&self, order: MachineOrder<BorrowedFd<'_>>) -> anyhow::Result<()> {
        match self.order(order)? {
            ClientAnswer::Done => Ok(()),
            _ => bail!(ANOTHER_ANSWER),
        }
    }
}

#[cfg(test)]
#[path = "machines_test.rs"]
mod tests;
