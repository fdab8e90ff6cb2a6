//! `slipgate pause`, `balloon`, `snapshot` and `kill`: orders to a machine of `slipgate run`.
//!
//! The files of a snapshot are made here, by who asks for it ([`SnapshotFolder`]), and given to the
//! machine open for writing: neither the broker nor the VMM opens a path that a client chose. The
//! machine notices when its client has gone, ends the writing, and the guest goes on.
use std::{
    fs::File,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use anyhow::{Context as _, anyhow, bail};
use slipgate_broker::{
    ChainError, SleepBySnapshot, SnapshotChain, SnapshotFolder, config::SNAPSHOT_FILES,
};
use slipgate_ipc::client::{ClientAnswer, Interrupt, MachineOrder};

use super::stop_signals;
use crate::{
    args::{BalloonArgs, MachineArgs, SnapshotArgs},
    brokers::{self, ANOTHER_ANSWER},
    machines::{Found, existing},
};

/// Time between looks for a signal while a snapshot is written.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Pauses a machine's guest.
pub(super) fn pause(args: &MachineArgs) -> anyhow::Result<()> {
    existing(&args.machine)?.have_done(MachineOrder::Pause)
}

/// Asks a guest for memory.
pub(super) fn balloon(args: &BalloonArgs) -> anyhow::Result<()> {
    existing(&args.machine)?.have_done(MachineOrder::Balloon { mib: args.size })
}

/// Ends a machine at once.
pub(super) fn kill(args: &MachineArgs) -> anyhow::Result<()> {
    existing(&args.machine)?.end()
}

/// Writes a snapshot. One that is interrupted or fails leaves nothing.
pub(super) fn snapshot(args: &SnapshotArgs) -> anyhow::Result<()> {
    let machine = existing(&args.machine)?;
    let daemon = args.sleep.then(|| daemon_of(&machine, args)).transpose()?;
    // Blocked before there is anything to remove.
    let signals = stop_signals().context("waiting for signals")?;
    let base = args
        .diff
        .as_deref()
        .map(|dir| SnapshotChain::open(dir).map_err(|e| refused_base(dir, &e)));
    let base = Arc::new(base.transpose()?);
    let folder = SnapshotFolder::make(&args.dir)?;
    let sleep = daemon.map(|daemon| SleepBySnapshot::begin(&daemon, machine.at_its_socket()));
    let sleep = sleep.transpose()?;
    let [state, memory, _] = SNAPSHOT_FILES;
    let files = [folder.file(state)?, folder.file(memory)?];
    let (sender, answer) = mpsc::channel();
    let (read, asked) = (base.clone(), Arc::new(machine));
    let machine = asked.clone();
    let interrupt = Interrupt::default();
    let until = interrupt.clone();
    let writing = thread::spawn(move || {
        // Nobody listens after a signal.
        let _ = sender.send(write((&asked, &until), &files, read.as_ref().as_ref()));
    });
    let mut description = loop {
        match answer.recv_timeout(LOOK_EVERY) {
            Ok(written) => {
                break written.with_context(|| format!("saving to {}", args.dir.display()))?;
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => bail!("asking the machine has failed"),
            Err(mpsc::RecvTimeoutError::Timeout) => {}
        }
        if has_signal(&signals) {
            // The machine notices that nobody waits for it, and stops writing. Only then it carries out
            // what takes the sleep back.
            interrupt.interrupt();
            let _ = writing.join();
            bail!("interrupted: the snapshot is not written");
        }
    };
    if let Some(base) = &*base {
        base.describe(&mut description)?;
    }
    folder.finish(&description)?;
    // It is there, whatever the machine answers: it may have ended.
    let _ = machine.order(MachineOrder::Finished);
    sleep.map_or(Ok(()), SleepBySnapshot::finish)
}

/// The control socket of the daemon that is to keep a machine's VM.
fn daemon_of(machine: &Found, args: &SnapshotArgs) -> anyhow::Result<PathBuf> {
    let name = &machine.status.name;
    if !machine.is_here() {
        bail!("--sleep: {name} is in another network namespace: give the order there");
    }
    brokers::daemon(&args.pin_dir)?.with_context(|| {
        format!("--sleep: no `slipgate serve` is here to keep {name}: start one before the machine")
    })
}

fn refused_base(dir: &Path, error: &ChainError) -> anyhow::Error {
    anyhow!("--diff {}: {}", dir.display(), error.explained())
}

fn has_signal(signals: &nix::sys::signalfd::SignalFd) -> bool {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    let mut fds = [PollFd::new(signals.as_fd(), PollFlags::POLLIN)];
    matches!(poll(&mut fds, PollTimeout::ZERO), Ok(1..))
}

/// Has the machine write its files. Returns its description.
fn write(
    (machine, until): (&Found, &Interrupt),
    [state, memory]: &[File; 2],
    base: Option<&SnapshotChain>,
) -> anyhow::Result<serde_json::Value> {
    let bases = base.map(SnapshotChain::bases).transpose();
    let bases = bases.map_err(|e| anyhow!("--diff: {}", e.explained()))?;
    let order = MachineOrder::snapshot(state.as_fd(), memory.as_fd(), bases.unwrap_or_default());
    match machine.order_until(until, order)? {
        ClientAnswer::Saved { machine } => Ok(machine),
        _ => bail!(ANOTHER_ANSWER),
    }
}
