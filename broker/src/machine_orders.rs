//! Orders of a daemon's clients to machines of `slipgate run` whose VMs the daemon serves.
//!
//! # Theory of operation
//! A machine answers at a socket of its own once an order is carried out, which for a snapshot takes as
//! long as its memory takes to be written. So a thread asks for each order, and the loop goes on: it
//! takes the answer when an eventfd tells of it. There are few threads ([`MOST_ORDERS`]), and one order
//! to a machine at a time, but for its end, which does not wait for what is under way, of this machine
//! or of others: ends have as many threads of their own.
//!
//! The files of a snapshot are made here, in the directory that the operator has named, and passed to
//! the machine open for writing: clients give a plain name, and neither they nor the process that
//! answers them can name another place.
use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io,
    os::fd::{AsFd as _, BorrowedFd},
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    thread,
};

use anyhow::{Context as _, anyhow, bail};
use nix::sys::{
    eventfd::{EfdFlags, EventFd},
    statvfs::statvfs,
};
use slipgate_ipc::client::{
    ClientAnswer, ClientError, ClientId, ClientRequest, ErrorKind, Interrupt, MachineOrder,
    MachineStatus, PassedOrder, SavedSnapshot, ask,
};

use crate::{
    ChainError, FolderTaken, MachineRecord, SleepBySnapshot, SnapshotChain, SnapshotFolder,
    config::{MachineSpec, SNAPSHOT_FILES, check_snapshot_dir, mac_text},
    host::check_private,
    machines_dir,
};

/// Most orders under way, ends of machines aside; and most of those.
const MOST_ORDERS: usize = 16;
/// Longest name of a snapshot, bytes.
const MAX_NAME: usize = 63;
/// Why no snapshot by which a VM sleeps is made.
const ENDING: &str = "the daemon is ending: try again with the next one";

/// Orders that are under way.
#[derive(Debug)]
pub(crate) struct MachineOrders {
    /// Where snapshots are made; `None`: nowhere.
    snapshots: Option<Snapshots>,
    /// The daemon's own control socket.
    daemon: PathBuf,
    /// By the machine's VM, and whether it is its end.
    under_way: BTreeSet<Key>,
    /// Of these, snapshots by which VMs sleep, by the VM.
    sleeps: BTreeMap<String, Interrupt>,
    /// Whether no more of those are begun.
    gives_up: bool,
    finished: mpsc::Receiver<Finished>,
    report: Arc<Report>,
}

type Key = (String, bool);

/// Where clients have snapshots made.
#[derive(Clone, Debug)]
pub(crate) struct Snapshots {
    /// The directory of `--snapshot-dir`.
    pub(crate) directory: PathBuf,
    /// Most that are in it.
    pub(crate) most: usize,
}

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

impl MachineOrders {
    /// No order yet. `daemon`: its own control socket.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub(crate) fn new(snapshots: Option<Snapshots>, daemon: PathBuf) -> nix::Result<Self> {
        let (sender, finished) = mpsc::channel();
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Self {
            snapshots,
            daemon,
            under_way: BTreeSet::new(),
            sleeps: BTreeMap::new(),
            gives_up: false,
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

    /// Has an order carried out by a machine, whose name is that of its VM.
    ///
    /// # Errors
    /// It is refused; the answer says why. Otherwise the answer comes by [`MachineOrders::done`].
    pub(crate) fn begin(
        &mut self,
        client: ClientId,
        machine: MachineStatus,
        order: PassedOrder,
    ) -> Result<(), Box<ClientAnswer>> {
        self.begin_at(&machines_dir(), client, machine, order)
    }

    fn begin_at(
        &mut self,
        sockets: &Path,
        client: ClientId,
        machine: MachineStatus,
        order: PassedOrder,
    ) -> Result<(), Box<ClientAnswer>> {
        let vm = &machine.name;
        let order = self.prepared(vm, order)?;
        let key = (vm.clone(), matches!(order, Prepared::Kill));
        if self.under_way.contains(&key) {
            return Err(Box::new(ClientAnswer::taken(format!(
                "{vm}: another order to it is under way: wait for its answer, or for an event of it"
            ))));
        }
        if machine.pid == 0 {
            return Err(Box::new(ClientAnswer::unknown(format!(
                "{vm}: its `slipgate run` is in another PID namespace than this daemon, which can't \
                 tell its socket from others: use `slipgate pause`, `resume`, `snapshot` or `kill` there"
            ))));
        }
        let alike = self.under_way.iter().filter(|(_, ends)| *ends == key.1);
        if alike.count() >= MOST_ORDERS {
            return Err(Box::new(ClientAnswer::busy(format!(
                "{MOST_ORDERS} orders to machines are under way already: try again"
            ))));
        }
        let socket = sockets.join(format!("{}.sock", machine.pid));
        let sleeps = matches!(order, Prepared::Snapshot { sleep: Some(_), .. });
        if sleeps && self.gives_up {
            return Err(Box::new(ClientAnswer::busy(ENDING)));
        }
        let interrupt = Interrupt::default();
        let until = interrupt.clone();
        let report = self.report.clone();
        let of_thread = key.clone();
        let carry_out = move || {
            let finished = Finished {
                client,
                key: of_thread,
                answer: order.carry_out(&machine, &socket, &until),
            };
            // The daemon may have ended.
            let _ = report.finished.send(finished);
            let _ = report.wake.write(1);
        };
        let thread = thread::Builder::new().name("machine-order".into());
        match thread.spawn(carry_out) {
            Ok(_) => {
                if sleeps {
                    self.sleeps.insert(key.0.clone(), interrupt);
                }
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
            PassedOrder::Balloon { mib } => Prepared::Balloon { mib },
            PassedOrder::Snapshot { to, base, sleep } => {
                let Some(snapshots) = &self.snapshots else {
                    return Err(Box::new(ClientAnswer::error(format!(
                        "{vm}: this daemon makes no snapshots: start `slipgate serve` with \
                         --snapshot-dir DIR, or use `slipgate snapshot`"
                    ))));
                };
                for name in [Some(&to), base.as_ref()].into_iter().flatten() {
                    check_name(name).map_err(|why| Box::new(ClientAnswer::error(why)))?;
                }
                Prepared::Snapshot {
                    snapshots: snapshots.clone(),
                    name: to,
                    base,
                    sleep: sleep.then(|| self.daemon.clone()),
                }
            }
        })
    }

    /// Gives up the snapshots by which VMs sleep, as the daemon ends: what was done for them is taken back,
    /// for which the daemon is needed. Those that are whole already go on. No more are begun.
    pub(crate) fn give_up_sleeps(&mut self) {
        self.gives_up = true;
        self.sleeps.values().for_each(Interrupt::interrupt);
    }

    /// Whether such snapshots are under way, or are taken back.
    pub(crate) fn has_sleeps(&self) -> bool {
        !self.sleeps.is_empty()
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
            if !key.1 {
                self.sleeps.remove(&key.0);
            }
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
    Balloon {
        mib: u64,
    },
    Snapshot {
        snapshots: Snapshots,
        name: String,
        base: Option<String>,
        /// The daemon's own socket, if the VM sleeps from then on.
        sleep: Option<PathBuf>,
    },
}

impl Prepared {
    /// Asks the machine, and waits for its answer.
    fn carry_out(&self, machine: &MachineStatus, socket: &Path, until: &Interrupt) -> ClientAnswer {
        let vm = machine.name.as_str();
        // In /tmp another user may have made the directory, and would answer for the machines.
        if let Err(e) = socket.parent().map_or(Ok(()), check_private)
            && e.kind() != io::ErrorKind::NotFound
        {
            return ClientAnswer::error(format!("{vm}: {e}"));
        }
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
            Self::Balloon { mib } => ask_machine(vm, socket, MachineOrder::Balloon { mib: *mib }),
            Self::Snapshot {
                snapshots,
                name,
                base,
                sleep,
            } => {
                let base = base.as_ref().map(|base| snapshots.directory.join(base));
                let sleep = sleep.as_deref();
                let asked = (socket, until);
                save(machine, asked, (snapshots, name), base, sleep).unwrap_or_else(|e| {
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
/// differences are written. `sleep`: the socket of the daemon, if the VM sleeps from then on.
fn save(
    saved: &MachineStatus,
    (socket, until): (&Path, &Interrupt),
    (Snapshots { directory, most }, name): (&Snapshots, &str),
    base: Option<PathBuf>,
    sleep: Option<&Path>,
) -> anyhow::Result<ClientAnswer> {
    // It may be another one since the start.
    check_snapshot_dir(directory)
        .map_err(|why| anyhow!("--snapshot-dir {}: {why}", directory.display()))?;
    has_room(directory, saved.memory_mib)?;
    let opened = base.as_ref().map(|base| SnapshotChain::open(base));
    let refused = |e: ChainError| {
        let base = base.as_deref().unwrap_or(Path::new("")).display();
        anyhow!("the base {base}: {}", e.explained())
    };
    let chain = opened.transpose().map_err(refused)?;
    if let Some(chain) = &chain {
        is_of(chain.machine(), saved)?;
    }
    let bases = chain.as_ref().map(SnapshotChain::bases);
    let bases = bases.transpose().map_err(refused)?;
    let path = directory.join(name);
    let folder = SnapshotFolder::make(&path)?;
    has_place(directory, *most)?;
    let [state, memory, _] = SNAPSHOT_FILES;
    let files: [File; 2] = [folder.file(state)?, folder.file(memory)?];
    let sleep = sleep.map(|daemon| SleepBySnapshot::begin(daemon, (socket, saved)));
    let sleep = sleep.transpose()?;
    let [state, memory] = files.each_ref().map(|file| file.as_fd());
    let order = MachineOrder::snapshot(state, memory, bases.unwrap_or_default());
    let asked = until.ask(socket, ClientRequest::Machine { order });
    if asked.is_err() && until.is_interrupted() {
        return Ok(ClientAnswer::busy(format!("{}: {ENDING}", saved.name)));
    }
    let mut machine = match answered(&saved.name, asked, false) {
        ClientAnswer::Saved { machine } => machine,
        other => return Ok(other),
    };
    if let Some(chain) = &chain {
        chain.describe(&mut machine)?;
    }
    folder.finish(&machine).context("finishing the snapshot")?;
    // It is there, whatever the machine answers: it may have ended.
    let _ = ask_machine(&saved.name, socket, MachineOrder::Finished);
    sleep.map_or(Ok(()), SleepBySnapshot::finish)?;
    Ok(ClientAnswer::SnapshotSaved {
        snapshot: SavedSnapshot {
            name: name.to_owned(),
            directory: path,
        },
    })
}

/// Checks that a base is of such a machine: one of another guest's would give this one's VMM that guest's
/// memory to read.
fn is_of(base: &MachineSpec, machine: &MachineStatus) -> anyhow::Result<()> {
    let mac = mac_text(base.mac);
    let is_alike = (base.cpus, base.memory_mib) == (machine.cpus, machine.memory_mib)
        && machine.mac.as_ref().is_none_or(|own| *own == mac);
    if !is_alike {
        bail!(
            "the base is of another machine, with {} CPUs, {} MiB of memory and the MAC address {mac}, \
             and this one has {}, {} and {}: give a snapshot of this one",
            base.cpus,
            base.memory_mib,
            machine.cpus,
            machine.memory_mib,
            machine.mac.as_deref().unwrap_or("none that it says")
        );
    }
    Ok(())
}

/// Checks that there are no more snapshots than may be, the one that is being made among them: of several
/// at once more than necessary may be refused, and none is one too many.
fn has_place(directory: &Path, most: usize) -> anyhow::Result<()> {
    let entries =
        fs::read_dir(directory).with_context(|| format!("looking into {}", directory.display()))?;
    let is_directory = |entry: &io::Result<fs::DirEntry>| {
        let kind = entry
            .as_ref()
            .map_err(|_| ())
            .and_then(|it| it.file_type().map_err(|_| ()));
        kind.is_ok_and(|kind| kind.is_dir())
    };
    if entries.filter(is_directory).nth(most).is_some() {
        bail!(
            "{} has {most} snapshots, as many as --snapshots-max of `slipgate serve` permits: remove \
             some",
            directory.display()
        );
    }
    Ok(())
}

/// Checks that the directory's file system has room for all memory. Zeroes and what does not differ take
/// none, but how much that is, the guest decides.
fn has_room(directory: &Path, memory_mib: u64) -> anyhow::Result<()> {
    let found = statvfs(directory)
        .with_context(|| format!("asking for the room in {}", directory.display()))?;
    let bytes = found
        .blocks_available()
        .saturating_mul(found.fragment_size());
    let free_mib = bytes >> 20;
    if free_mib < memory_mib {
        bail!(
            "{} has {free_mib} MiB free, and a snapshot may take as much as the memory, {memory_mib} \
             MiB: remove some snapshots",
            directory.display()
        );
    }
    Ok(())
}

fn ask_machine(vm: &str, socket: &Path, order: MachineOrder<BorrowedFd<'_>>) -> ClientAnswer {
    let is_end = matches!(order, MachineOrder::Kill);
    answered(vm, ask(socket, ClientRequest::Machine { order }), is_end)
}

fn answered(vm: &str, answer: Result<ClientAnswer, ClientError>, is_end: bool) -> ClientAnswer {
    match answer {
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
