//! Orders to the VM of `slipgate run`, at a control socket of the machine's own.
//!
//! The sockets of all machines of this host are in one directory, that of root or of the user: so
//! `slipgate ps` finds those of all network namespaces and modes. The broker passes orders on to the
//! VMM and never waits for it: one that hangs delays nobody else's.
use std::{
    collections::BTreeMap,
    fs, io,
    os::{fd::BorrowedFd, unix::net::UnixStream},
    path::{Path, PathBuf},
    process,
    time::Instant,
};

use anyhow::Context as _;
use nix::unistd::geteuid;
use serde::{Deserialize, Serialize};
use slipgate_control::{device::Device, paths::netns_inode};
use slipgate_ipc::{
    client::{
        ClientAnswer, ClientId, ClientRequest, ControlServer, MachineEvent, MachineOrder,
        MachineState, MachineStatus,
    },
    vmm::{VmmOrder, VmmSnapshot},
};

use super::{VmmProcess, notices::Notices, report::How};
use crate::{
    config::{MachineSpec, SavedMachine, mac_text},
    host::{check_private, make_private, user_mode_dir},
};

/// Directory of the sockets of root's machines.
const MACHINES_OF_ROOT: &str = "/run/slipgate/machines";
/// Endings of the files of a machine: its socket, and its record.
const SOCKET: &str = "sock";
const RECORD: &str = "json";
/// Tries to make the socket.
const TRIES: u32 = 10;
/// Most orders that wait for the VMM.
const MOST_WAITING: usize = 16;

/// Directory of the sockets of this user's machines.
pub fn machines_dir() -> PathBuf {
    match geteuid().is_root() {
        true => MACHINES_OF_ROOT.into(),
        false => user_mode_dir().join("machines"),
    }
}

/// Checks that the directory of the sockets is this user's alone: in /tmp another user may have made one
/// of its name, and would answer for the machines.
///
/// # Errors
/// It, or the directory that it is in, is not this user's, or others can get into it; it is not there.
pub fn check_machines_dir() -> io::Result<()> {
    check_private(&machines_dir())
}

/// The socket, and orders that the VMM has not carried out yet.
#[derive(Debug)]
pub(crate) struct Orders {
    // Dropped in this order: the socket's file goes, then what names the machine, then the directory.
    control: ControlServer,
    _record: Record,
    _directory: Directory,
    status: MachineStatus,
    saved: serde_json::Value,
    began: Option<Instant>,
    last: u64,
    notices: Notices,
    waiting: BTreeMap<u64, Waiting>,
    /// Number of snapshots that are written, and were not said to be complete.
    unfinished: usize,
}

/// Record of a machine in a file beside its socket, so that nobody has to ask all machines for the
/// one of a name: a process that is stopped would not answer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MachineRecord {
    /// Name of its VM.
    pub name: String,
}

impl MachineRecord {
    /// Reads the record that belongs to a socket; `None`: there is none.
    pub fn of_socket(socket: &Path) -> Option<Self> {
        let text = fs::read(socket.with_extension(RECORD)).ok()?;
        serde_json::from_slice(&text).ok()
    }
}

/// The file of a record, which goes with it.
#[derive(Debug)]
struct Record(PathBuf);

impl Record {
    fn write(socket: &Path, record: &MachineRecord) -> io::Result<Self> {
        let path = socket.with_extension(RECORD);
        fs::write(&path, serde_json::to_vec(record)?)?;
        Ok(Self(path))
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        // The next machine removes what stays.
        let _ = fs::remove_file(&self.0);
    }
}

/// The directory of the sockets, which goes with the last of them.
#[derive(Debug)]
struct Directory(PathBuf);

impl Drop for Directory {
    fn drop(&mut self) {
        // Others may have theirs in it.
        let _ = fs::remove_dir(&self.0);
    }
}

#[derive(Debug)]
struct Waiting {
    client: ClientId,
    kind: Kind,
    /// Whether the VMM was told that the client has gone.
    cancelled: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Pause,
    Resume,
    Snapshot,
    Balloon,
}

impl Orders {
    /// Makes the socket.
    ///
    /// # Errors
    /// The directory or the socket can't be made.
    pub(crate) fn listen(name: &str, machine: &MachineSpec) -> anyhow::Result<Self> {
        let dir = machines_dir();
        let pid = process::id();
        let socket = dir.join(format!("{pid}.{SOCKET}"));
        let record = MachineRecord {
            name: name.to_owned(),
        };
        let bound = (0..TRIES).find_map(|last| match bind(&dir, &socket, &record) {
            // Another one may have removed the directory meanwhile.
            Err(e) if e.kind() == io::ErrorKind::NotFound && last + 1 < TRIES => None,
            bound => Some(bound),
        });
        let bound = bound.unwrap_or_else(|| Err(io::ErrorKind::NotFound.into()));
        let (control, record) =
            bound.with_context(|| format!("listening at {}", socket.display()))?;
        let saved = serde_json::to_value(SavedMachine::of(machine));
        Ok(Self {
            control: control.of_its_owner(),
            _record: record,
            _directory: Directory(dir),
            status: MachineStatus {
                name: name.to_owned(),
                pid,
                state: MachineState::Starting,
                cpus: machine.cpus,
                memory_mib: machine.memory_mib,
                mac: Some(mac_text(machine.mac)),
                tap: (!machine.tap.is_empty()).then(|| machine.tap.clone()),
                netns: netns_inode().unwrap_or(0),
                runs_s: 0,
            },
            saved: saved.context("describing the machine")?,
            began: None,
            last: 0,
            notices: Notices::default(),
            waiting: BTreeMap::new(),
            unfinished: 0,
        })
    }

    /// The guest runs from now on.
    pub(crate) fn begin(&mut self) {
        self.began = Some(Instant::now());
        self.status.state = MachineState::Running;
        self.notify(None);
    }

    /// Tells a daemon by this line what happens from now on, and what the machine is.
    pub(crate) fn notify_by(&mut self, line: UnixStream) {
        self.notices.go_by(line);
        self.notify(None);
    }

    /// Tells the daemon that the machine has ended.
    pub(crate) fn notify_end(&mut self, how: &How) {
        let outcome = how.name();
        let exit_code = how.exit_code();
        self.notify(Some(MachineEvent::Ended { outcome, exit_code }));
    }

    fn notify(&mut self, event: Option<MachineEvent>) {
        let status = self.status();
        self.notices.tell(status, event);
    }

    /// Have an event when there is something to do.
    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.control.fds()
    }

    /// Whether there is something to do without an event.
    pub(crate) fn has_waiting(&self) -> bool {
        self.control.has_waiting()
    }

    /// Answers clients and passes their orders on. Returns whether one has asked for the end.
    pub(crate) fn serve(&mut self, vmm: &VmmProcess) -> bool {
        // A client may have sent the next request already.
        let ends = (0..MOST_WAITING)
            .any(|round| (round == 0 || self.control.has_waiting()) && self.serve_once(vmm));
        self.cancel_what_nobody_wants(vmm);
        ends
    }

    /// Ends the writing of snapshots whose clients have gone: the guest would be paused for nothing.
    fn cancel_what_nobody_wants(&mut self, vmm: &VmmProcess) {
        for (id, waiting) in &mut self.waiting {
            let is_unwanted = waiting.kind == Kind::Snapshot
                && !waiting.cancelled
                && !self.control.is_connected(waiting.client);
            if is_unwanted {
                waiting.cancelled = vmm.cancel(*id);
            }
        }
    }

    fn serve_once(&mut self, vmm: &VmmProcess) -> bool {
        for permitted in self.control.serve() {
            let client = permitted.client;
            let ClientRequest::Machine { order } = permitted.request else {
                let why = "this is the socket of a machine: it takes orders to the machine";
                self.control.answer(client, &ClientAnswer::error(why));
                continue;
            };
            let (kind, order) = match order {
                MachineOrder::Status => {
                    self.tell(client);
                    continue;
                }
                MachineOrder::Finished => {
                    self.finished(client);
                    continue;
                }
                MachineOrder::Kill => {
                    self.control.answer(client, &ClientAnswer::Done);
                    return true;
                }
                MachineOrder::Pause => (Kind::Pause, VmmOrder::Pause),
                MachineOrder::Resume => (Kind::Resume, VmmOrder::Resume),
                MachineOrder::Balloon { mib } => (Kind::Balloon, VmmOrder::Balloon { mib }),
                MachineOrder::Snapshot { state, memory } => {
                    let bases = Vec::new();
                    let files = VmmSnapshot {
                        state,
                        memory,
                        bases,
                    };
                    (Kind::Snapshot, VmmOrder::Snapshot(files))
                }
                MachineOrder::Differences {
                    state,
                    memory,
                    bases,
                } => {
                    let files = VmmSnapshot {
                        state,
                        memory,
                        bases,
                    };
                    (Kind::Snapshot, VmmOrder::Snapshot(files))
                }
            };
            self.last += 1;
            let is_sent = self.waiting.len() < MOST_WAITING && vmm.order(self.last, order);
            if is_sent {
                let waiting = Waiting {
                    client,
                    kind,
                    cancelled: false,
                };
                self.waiting.insert(self.last, waiting);
                if kind == Kind::Snapshot {
                    self.notify(None);
                }
            } else {
                let why = "orders wait for the VMM already: try again";
                self.control.answer(client, &ClientAnswer::busy(why));
            }
        }
        false
    }

    /// Tells of a snapshot that is complete.
    fn finished(&mut self, client: ClientId) {
        let answer = match self.unfinished.checked_sub(1) {
            Some(left) => {
                self.unfinished = left;
                self.notify(Some(MachineEvent::Saved));
                ClientAnswer::Done
            }
            None => ClientAnswer::error("no snapshot of this machine waits to be completed"),
        };
        self.control.answer(client, &answer);
    }

    fn tell(&mut self, client: ClientId) {
        let machine = Box::new(self.status());
        self.control
            .answer(client, &ClientAnswer::Machine { machine });
    }

    fn status(&self) -> MachineStatus {
        let mut status = self.status.clone();
        let saves = |waiting: &Waiting| waiting.kind == Kind::Snapshot;
        if self.waiting.values().any(saves) {
            status.state = MachineState::Saving;
        }
        status.runs_s = self.began.map_or(0, |began| began.elapsed().as_secs());
        status
    }

    /// Notes what the TAP is by now.
    fn describe_tap(&mut self) {
        let tap = self.status.tap.as_deref();
        let mtu = tap.and_then(|tap| Device::named(tap).and_then(|tap| tap.mtu()).ok());
        if let Some(machine) = self
            .saved
            .get_mut("machine")
            .and_then(|it| it.as_object_mut())
        {
            match mtu {
                Some(mtu) => machine.insert("mtu".into(), mtu.into()),
                None => machine.remove("mtu"),
            };
        }
    }

    /// Passes the VMM's answer on.
    pub(crate) fn carried(&mut self, id: u64, error: Option<String>) {
        let Some(waiting) = self.waiting.remove(&id) else {
            return;
        };
        let Waiting { client, kind, .. } = waiting;
        if waiting.cancelled && error.is_some() {
            tracing::info!("a snapshot was not finished: who asked for it has gone");
        }
        let event = match (&error, kind) {
            // It saves no more; a snapshot is told of when its directory is complete.
            (Some(_), _) | (None, Kind::Snapshot | Kind::Balloon) => None,
            (None, Kind::Pause) => Some(MachineEvent::Paused),
            (None, Kind::Resume) => Some(MachineEvent::Resumed),
        };
        let answer = match (error, kind) {
            (Some(why), _) => ClientAnswer::error(why),
            (None, Kind::Snapshot) => {
                self.describe_tap();
                self.unfinished = (self.unfinished + 1).min(MOST_WAITING);
                ClientAnswer::Saved {
                    machine: self.saved.clone(),
                }
            }
            (None, Kind::Balloon) => ClientAnswer::Done,
            (None, Kind::Pause) => {
                self.status.state = MachineState::Paused;
                ClientAnswer::Done
            }
            (None, Kind::Resume) => {
                self.status.state = MachineState::Running;
                ClientAnswer::Done
            }
        };
        // Who hears of the answer finds that the daemon knows.
        self.notify(event);
        self.control.answer(client, &answer);
    }
}

fn bind(dir: &Path, socket: &Path, record: &MachineRecord) -> io::Result<(ControlServer, Record)> {
    make_private(dir)?;
    remove_left(dir);
    // First: who finds the socket finds what it is.
    let record = Record::write(socket, record)?;
    Ok((ControlServer::bind(socket, geteuid().as_raw())?, record))
}

/// Removes the files of processes that were killed.
fn remove_left(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        // What is not called as a process is none of ours.
        let is_gone = |pid: &str| {
            let pid = pid.parse::<u32>();
            pid.is_ok_and(|pid| !Path::new("/proc").join(pid.to_string()).exists())
        };
        let pid = path.file_stem().and_then(|stem| stem.to_str());
        let is_ours = path
            .extension()
            .is_some_and(|ending| ending == SOCKET || ending == RECORD);
        if is_ours && pid.is_some_and(is_gone) {
            // Another one may have removed it.
            let _ = fs::remove_file(&path);
        }
    }
}

#[cfg(test)]
#[path = "orders_test.rs"]
mod tests;
