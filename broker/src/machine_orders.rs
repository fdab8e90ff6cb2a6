//! Orders of a daemon's clients to machines of `slipgate run` whose VMs the daemon serves.
//!
//! # Theory of operation
//! A machine answers at a socket of its own once an order is carried out, which for a snapshot takes as
//! long as its memory takes to be written. So a thread asks for each order, and the loop goes on: it
//! takes the answer when an eventfd tells of it. There are few threads ([`MOST_ORDERS`]), and one order
//! to a machine at a time, but for its end, which does not wait for what is under way.
//!
//! The files of a snapshot are made here, in the directory that the operator has named, and passed to
//! the machine open for writing: clients give a plain name, and neither they nor the process that
//! answers them can name another place.
use std::{
    collections::BTreeSet,
    fs::File,
    os::fd::{AsFd as _, BorrowedFd},
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    thread,
};

use anyhow::Context as _;
use nix::sys::eventfd::{EfdFlags, EventFd};
use slipgate_ipc::client::{
    ClientAnswer, ClientError, ClientId, ClientRequest, ErrorKind, MachineOrder, PassedOrder,
    SavedSnapshot, ask,
};

use crate::{
    FolderTaken, MachineRecord, SnapshotChain, SnapshotFolder,
    config::{SNAPSHOT_FILES, check_snapshot_dir},
    machines_dir,
};

/// Most orders under way.
const MOST_ORDERS: usize = 16;
/// Longest name of a snapshot, bytes.
const MAX_NAME: usize = 63;

/// Orders that are under way.
#[derive(Debug)]
pub(crate) struct MachineOrders {
    /// Where snapshots are made; `None`: nowhere.
    snapshots: Option<PathBuf>,
    /// By the machine's VM, and whether it is its end.
    under_way: BTreeSet<Key>,
    finished: mpsc::Receiver<Finished>,
    report: Arc<Report>,
}

type Key = (String, bool);

/// Where threads say that they have finished.
#[derive(Debug)]
struct Report {
    finished: mpsc::Sender<Finished>,
    wake: EventFd,
}

#[derive(Debug)]
struct Finished {
    client: ClientId,
    key: Key,
    answer: ClientAnswer,
}

/// A machine that gets an order.
#[derive(Clone, Debug)]
pub(crate) struct Addressee {
    /// Name of its VM.
    pub(crate) vm: String,
    /// Process id of its `slipgate run`.
    pub(crate) pid: u32,
}

impl MachineOrders {
    /// No order yet. `snapshots`: the directory of `--snapshot-dir`.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub(crate) fn new(snapshots: Option<PathBuf>) -> nix::Result<Self> {
        let (sender, finished) = mpsc::channel();
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Self {
            snapshots,
            under_way: BTreeSet::new(),
            finished,
            report: Arc::new(Report {
                finished: sender,
                wake,
            }),
        })
    }

    /// Readable when [`MachineOrders::done`] has something.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.report.wake.as_fd()
    }

    /// Has an order carried out.
    ///
    /// # Errors
    /// It is refused; the answer says why. Otherwise the answer comes by [`MachineOrders::done`].
    pub(crate) fn begin(
        &mut self,
        client: ClientId,
        machine: &Addressee,
        order: PassedOrder,
    ) -> Result<(), Box<ClientAnswer>> {
        self.begin_at(&machines_dir(), client, machine, order)
    }

    fn begin_at(
        &mut self,
        sockets: &Path,
        client: ClientId,
        machine: &Addressee,
        order: PassedOrder,
    ) -> Result<(), Box<ClientAnswer>> {
        let vm = &machine.vm;
        let order = self.prepared(vm, order)?;
        let key = (vm.clone(), matches!(order, Prepared::Kill));
        if self.under_way.contains(&key) {
            return Err(Box::new(ClientAnswer::taken(format!(
                "{vm}: another order to it is under way: wait for its answer, or for an event of it"
            ))));
        }
        if self.under_way.len() >= MOST_ORDERS {
            return Err(Box::new(ClientAnswer::busy(format!(
                "{MOST_ORDERS} orders to machines are under way already: try again"
            ))));
        }
        let socket = sockets.join(format!("{}.sock", machine.pid));
        let (name, report) = (vm.clone(), self.report.clone());
        let of_thread = key.clone();
        let carry_out = move || {
            let done = catch_unwind(AssertUnwindSafe(|| order.carry_out(&name, &socket)));
            let failed = |_| ClientAnswer::error(format!("{name}: carrying it out has failed"));
            let finished = Finished {
                client,
                key: of_thread,
                answer: done.unwrap_or_else(failed),
            };
            // The daemon may have ended.
            let _ = report.finished.send(finished);
            let _ = report.wake.write(1);
        };
        let thread = thread::Builder::new().name("machine-order".into());
        match thread.spawn(carry_out) {
            Ok(_) => {
                self.under_way.insert(key);
                Ok(())
            }
            Err(e) => Err(Box::new(ClientAnswer::busy(format!(
                "no thread can be started ({e}): try again"
            )))),
        }
    }

    /// Checks what can be checked before anything is done.
    fn prepared(&self, vm: &str, order: PassedOrder) -> Result<Prepared, Box<ClientAnswer>> {
        Ok(match order {
            PassedOrder::Pause => Prepared::Pause,
            PassedOrder::Resume => Prepared::Resume,
            PassedOrder::Kill => Prepared::Kill,
            PassedOrder::Snapshot { to, base } => {
                let Some(directory) = &self.snapshots else {
                    return Err(Box::new(ClientAnswer::error(format!(
                        "{vm}: this daemon makes no snapshots: start `slipgate serve` with \
                         --snapshot-dir DIR, or use `slipgate snapshot`"
                    ))));
                };
                for name in [Some(&to), base.as_ref()].into_iter().flatten() {
                    check_name(name).map_err(|why| Box::new(ClientAnswer::error(why)))?;
                }
                Prepared::Snapshot {
                    directory: directory.clone(),
                    name: to,
                    base,
                }
            }
        })
    }

    /// Takes out the answers of orders that are carried out, each with the client and the machine's VM.
    pub(crate) fn done(&mut self) -> Vec<(ClientId, String, ClientAnswer)> {
        // Before: what is added afterwards wakes the loop again.
        let _ = self.report.wake.read();
        let mut done = Vec::new();
        while let Ok(Finished {
            client,
            key,
            answer,
        }) = self.finished.try_recv()
        {
            self.under_way.remove(&key);
            done.push((client, key.0, answer));
        }
        done
    }
}

/// Checks the name of a snapshot, which is that of a directory in another.
fn check_name(name: &str) -> Result<(), String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    match (1..=MAX_NAME).contains(&name.len())
        && name.chars().all(is_plain)
        && !name.starts_with('.')
    {
        true => Ok(()),
        false => Err(format!(
            "the snapshot's name {name:?}: give 1 to {MAX_NAME} letters, digits, `-`, `_` or `.`, \
             and no `.` in front: it is the name of a directory in --snapshot-dir"
        )),
    }
}

/// An order that was checked.
#[derive(Clone, Debug)]
enum Prepared {
    Pause,
    Resume,
    Kill,
    Snapshot {
        directory: PathBuf,
        name: String,
        base: Option<String>,
    },
}

impl Prepared {
    /// Asks the machine, and waits for its answer.
    fn carry_out(&self, vm: &str, socket: &Path) -> ClientAnswer {
        // A process of another PID namespace may have this id.
        if MachineRecord::of_socket(socket).is_none_or(|record| record.name != vm) {
            return ClientAnswer::unknown(format!(
                "{vm}: its `slipgate run` has no socket at {}: it has ended, or runs in another PID \
                 namespace",
                socket.display()
            ));
        }
        match self {
            Self::Pause => ask_machine(vm, socket, MachineOrder::Pause),
            Self::Resume => ask_machine(vm, socket, MachineOrder::Resume),
            Self::Kill => ask_machine(vm, socket, MachineOrder::Kill),
            Self::Snapshot {
                directory,
                name,
                base,
            } => {
                let base = base.as_ref().map(|base| directory.join(base));
                save(vm, socket, (directory, name), base).unwrap_or_else(|e| {
                    match e.downcast_ref::<FolderTaken>() {
                        Some(taken) => ClientAnswer::taken(taken.to_string()),
                        None => ClientAnswer::error(format!("{vm}: {e:#}")),
                    }
                })
            }
        }
    }
}

/// Has a machine write a snapshot of this name in the directory. `base`: that of the one whose
/// differences are written.
fn save(
    vm: &str,
    socket: &Path,
    (directory, name): (&Path, &str),
    base: Option<PathBuf>,
) -> anyhow::Result<ClientAnswer> {
    // It may be another one since the start.
    check_snapshot_dir(directory)
        .map_err(|why| anyhow::anyhow!("--snapshot-dir {}: {why}", directory.display()))?;
    let base = base.map(|base| {
        SnapshotChain::open(&base).with_context(|| format!("the base {}", base.display()))
    });
    let base = base.transpose()?;
    let bases = base.as_ref().map(SnapshotChain::bases).transpose()?;
    let path = directory.join(name);
    let folder = SnapshotFolder::make(&path)?;
    let [state, memory, _] = SNAPSHOT_FILES;
    let files: [File; 2] = [folder.file(state)?, folder.file(memory)?];
    let [state, memory] = files.each_ref().map(|file| file.as_fd());
    let order = MachineOrder::Snapshot {
        state,
        memory,
        bases: bases.unwrap_or_default(),
    };
    let mut machine = match ask_machine(vm, socket, order) {
        ClientAnswer::Saved { machine } => machine,
        other => return Ok(other),
    };
    if let Some(base) = &base {
        base.describe(&mut machine);
    }
    folder.finish(&machine).context("finishing the snapshot")?;
    Ok(ClientAnswer::SnapshotSaved {
        snapshot: SavedSnapshot {
            name: name.to_owned(),
            directory: path,
        },
    })
}

fn ask_machine(vm: &str, socket: &Path, order: MachineOrder<BorrowedFd<'_>>) -> ClientAnswer {
    let is_end = matches!(order, MachineOrder::Kill);
    match ask(socket, ClientRequest::Machine { order }) {
        Ok(ClientAnswer::Error { error, kind }) => ClientAnswer::Error {
            error: format!("{vm}: {error}"),
            kind,
        },
        Ok(answer) => answer,
        Err(e) if e.is_nobodys() || matches!(e, ClientError::NoAnswer { .. }) => match is_end {
            // It was quicker than its answer.
            true => ClientAnswer::Done,
            false => ClientAnswer::Error {
                error: format!("{vm} has ended meanwhile"),
                kind: ErrorKind::Removed,
            },
        },
        Err(e) => ClientAnswer::busy(format!("{vm} does not answer: {:#}", anyhow::Error::new(e))),
    }
}

#[cfg(test)]
#[path = "machine_orders_test.rs"]
mod tests;
