//! `slipgate pause`, `snapshot` and `kill`: orders to a machine of `slipgate run`.
//!
//! The files of a snapshot are made here, by who asks for it, and given to the machine open for
//! writing: neither the broker nor the VMM opens a path that a client chose.
use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write as _},
    os::{
        fd::AsFd as _,
        unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    },
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
    time::Duration,
};

use anyhow::{Context as _, bail};
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
            Ok(written) => break written?,
            Err(mpsc::RecvTimeoutError::Disconnected) => bail!("asking the machine has failed"),
            Err(mpsc::RecvTimeoutError::Timeout) => {}
        }
        if has_signal(&signals) {
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

/// A directory that is removed with what is in it, unless it is finished.
struct NewFolder {
    path: PathBuf,
    is_finished: bool,
}

impl NewFolder {
    fn make(path: &Path) -> anyhow::Result<Self> {
        let made = DirBuilder::new().mode(0o700).create(path);
        made.map_err(|e| match e.kind() {
            io::ErrorKind::AlreadyExists => anyhow::anyhow!(
                "{} exists: give a directory that does not, for it is made",
                path.display()
            ),
            _ => anyhow::anyhow!("making {}: {e}", path.display()),
        })?;
        Ok(Self {
            path: path.to_owned(),
            is_finished: false,
        })
    }

    /// Makes a file in it, for writing only.
    fn file(&self, name: &str) -> anyhow::Result<File> {
        let path = self.path.join(name);
        let options = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path);
        options.with_context(|| format!("making {}", path.display()))
    }

    /// Writes the description, which makes the snapshot whole, and has all of it on the disk.
    fn finish(mut self, description: &serde_json::Value) -> anyhow::Result<()> {
        let [.., name] = SNAPSHOT_FILES;
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
        if let Err(e) = fs::remove_dir(&self.path) {
            log::say(format_args!("removing {}: {e}", self.path.display()));
        }
    }
}

#[cfg(test)]
#[path = "machine_test.rs"]
mod tests;
