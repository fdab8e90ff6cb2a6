//! `slipgate pause`, `snapshot` and `kill`: orders to a machine of `slipgate run`.
//!
//! The files of a snapshot are made here, by who asks for it, and given to the machine open for
//! writing: neither the broker nor the VMM opens a path that a client chose. They have no names
//! until the snapshot is whole, so a command that is killed leaves an empty directory. The machine
//! notices that its client has gone, ends the writing, and the guest goes on.
use std::{
    cell::RefCell,
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write as _},
    os::{
        fd::{AsFd as _, AsRawFd as _},
        unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _},
    },
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
    time::Duration,
};

use anyhow::{Context as _, bail};
use nix::{
    fcntl::{AT_FDCWD, AtFlags},
    unistd::{geteuid, linkat},
};
use slipgate_broker::config::SNAPSHOT_FILES;
use slipgate_ipc::client::{ClientAnswer, MachineOrder};

use super::stop_signals;
use crate::{
    args::{MachineArgs, SnapshotArgs},
    brokers::ANOTHER_ANSWER,
    log,
    machines::{Found, existing},
};

/// Time between looks for a signal while a snapshot is written.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Pauses a guest.
pub(super) fn pause(args: &MachineArgs) -> anyhow::Result<()> {
    existing(&args.machine)?.have_done(MachineOrder::Pause)
}

/// Ends a machine.
pub(super) fn kill(args: &MachineArgs) -> anyhow::Result<()> {
    existing(&args.machine)?.end()
}

/// Writes a snapshot. One that is interrupted or fails leaves nothing.
pub(super) fn snapshot(args: &SnapshotArgs) -> anyhow::Result<()> {
    let machine = existing(&args.machine)?;
    // Blocked before there is anything to remove.
    let signals = stop_signals().context("waiting for signals")?;
    let folder = NewFolder::make(&args.dir)?;
    let [state, memory, _] = SNAPSHOT_FILES;
    let files = [folder.file(state)?, folder.file(memory)?];
    let (sender, answer) = mpsc::channel();
    thread::spawn(move || {
        // Nobody listens after a signal.
        let _ = sender.send(write(&machine, &files));
    });
    let description = loop {
        match answer.recv_timeout(LOOK_EVERY) {
            Ok(written) => {
                break written.with_context(|| format!("saving to {}", args.dir.display()))?;
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => bail!("asking the machine has failed"),
            Err(mpsc::RecvTimeoutError::Timeout) => {}
        }
        if has_signal(&signals) {
            // The machine notices that this process is gone.
            bail!("interrupted: the snapshot is not written");
        }
    };
    folder.finish(&description)
}

fn has_signal(signals: &nix::sys::signalfd::SignalFd) -> bool {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    let mut fds = [PollFd::new(signals.as_fd(), PollFlags::POLLIN)];
    matches!(poll(&mut fds, PollTimeout::ZERO), Ok(1..))
}

/// Has the machine write its files. Returns its description.
fn write(machine: &Found, [state, memory]: &[File; 2]) -> anyhow::Result<serde_json::Value> {
    let order = MachineOrder::Snapshot {
        state: state.as_fd(),
        memory: memory.as_fd(),
    };
    match machine.order(order)? {
        ClientAnswer::Saved { machine } => Ok(machine),
        _ => bail!(ANOTHER_ANSWER),
    }
}

/// Whether a directory is what a killed command has left: empty, and this user's alone.
fn is_left(path: &Path) -> bool {
    let is_own = path.symlink_metadata().is_ok_and(|found| {
        found.is_dir() && found.uid() == geteuid().as_raw() && found.mode() & 0o077 == 0
    });
    is_own && fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none())
}

/// A directory that is removed with what is in it, unless it is finished.
struct NewFolder {
    path: PathBuf,
    /// Files that get their names at the end.
    unnamed: RefCell<Vec<(String, File)>>,
    /// Whether it was not there before.
    is_made: bool,
    is_finished: bool,
}

impl NewFolder {
    fn make(path: &Path) -> anyhow::Result<Self> {
        let made = DirBuilder::new().mode(0o700).create(path);
        let is_made = match made {
            Ok(()) => true,
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                if !is_left(path) {
                    bail!(
                        "{} exists: give a directory that does not, for it is made",
                        path.display()
                    );
                }
                false
            }
            Err(e) => bail!("making {}: {e}", path.display()),
        };
        Ok(Self {
            path: path.to_owned(),
            unnamed: RefCell::default(),
            is_made,
            is_finished: false,
        })
    }

    /// Makes a file in it, for writing only. It has a name at once only where the file system can't
    /// give it one later.
    fn file(&self, name: &str) -> anyhow::Result<File> {
        let unnamed = OpenOptions::new()
            .write(true)
            .mode(0o600)
            .custom_flags(libc::O_TMPFILE)
            .open(&self.path);
        let path = self.path.join(name);
        let made = match unnamed {
            Ok(file) => {
                let copy = file.try_clone()?;
                self.unnamed.borrow_mut().push((name.to_owned(), copy));
                Ok(file)
            }
            Err(_) => OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&path),
        };
        made.with_context(|| format!("making {}", path.display()))
    }

    /// Gives the files that were made so far their names.
    fn name(&self) -> io::Result<()> {
        for (name, file) in self.unnamed.borrow_mut().drain(..) {
            let own = format!("/proc/self/fd/{}", file.as_raw_fd());
            let path = self.path.join(name);
            linkat(
                AT_FDCWD,
                own.as_str(),
                AT_FDCWD,
                &path,
                AtFlags::AT_SYMLINK_FOLLOW,
            )?;
        }
        Ok(())
    }

    /// Writes the description, which makes the snapshot whole, and has all of it on the disk.
    fn finish(mut self, description: &serde_json::Value) -> anyhow::Result<()> {
        let [.., name] = SNAPSHOT_FILES;
        self.name()
            .with_context(|| format!("naming the files in {}", self.path.display()))?;
        let mut file = self.file(name)?;
        let mut text = serde_json::to_vec_pretty(description)?;
        text.push(b'\n');
        let parent = match self.path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
            _ => PathBuf::from("."),
        };
        let written = file
            .write_all(&text)
            .and_then(|()| file.sync_all())
            .and_then(|()| self.name())
            .and_then(|()| File::open(&self.path)?.sync_all())
            .and_then(|()| File::open(&parent)?.sync_all());
        written.with_context(|| format!("writing {}", self.path.display()))?;
        self.is_finished = true;
        Ok(())
    }
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        if self.is_finished {
            return;
        }
        for name in SNAPSHOT_FILES {
            // One that was not made is not there.
            let _ = fs::remove_file(self.path.join(name));
        }
        if !self.is_made {
            return;
        }
        if let Err(e) = fs::remove_dir(&self.path) {
            log::say(format_args!("removing {}: {e}", self.path.display()));
        }
    }
}

#[cfg(test)]
#[path = "machine_test.rs"]
mod tests;
