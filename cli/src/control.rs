//! Commands that change a running slipgate: `policy apply`, `cut`, `freeze`, `thaw`, `capture`,
//! `stop`. Each sends a request, as root, to the broker that serves the VM. Those about a machine of
//! `slipgate run` (`pause`, `balloon`, `snapshot`, `kill`) go to the machine's own socket.
pub(crate) mod apply;
mod capture;
mod cut;
mod machine;
mod traffic;

use nix::sys::{
    signal::{SigSet, Signal},
    signalfd::{SfdFlags, SignalFd},
};

use anyhow::bail;
use slipgate_ipc::client::{ClientAnswer, ClientRequest};

use crate::{
    args::{ControlCommand, StopArgs},
    brokers::{ANOTHER_ANSWER, ask_daemon},
};

/// Runs a command that changes flows or VMs.
pub(crate) fn run(command: &ControlCommand) -> anyhow::Result<()> {
    match command {
        ControlCommand::Cut(args) => cut::run(args),
        ControlCommand::Generation(args) => cut::end_generation(args),
        ControlCommand::Freeze(args) => traffic::freeze(args),
        ControlCommand::Thaw(args) => traffic::thaw(args),
        ControlCommand::Sleep(args) => traffic::sleep(args),
        ControlCommand::Pause(args) => machine::pause(args),
        ControlCommand::Resume(args) => traffic::resume(args),
        ControlCommand::Balloon(args) => machine::balloon(args),
        ControlCommand::Snapshot(args) => machine::snapshot(args),
        ControlCommand::Kill(args) => machine::kill(args),
        ControlCommand::Capture(args) => capture::run(args),
        ControlCommand::Stop(args) => stop(args),
    }
}

/// Has the daemon stop in order. It has begun to when this returns.
fn stop(args: &StopArgs) -> anyhow::Result<()> {
    match ask_daemon(&args.pin_dir, ClientRequest::Stop { keep: args.keep })? {
        ClientAnswer::Done => Ok(()),
        _ => bail!(ANOTHER_ANSWER),
    }
}

/// ^C and its like, by descriptor from now on.
pub(crate) fn stop_signals() -> nix::Result<SignalFd> {
    let mut set = SigSet::empty();
    set.add(Signal::SIGINT);
    set.add(Signal::SIGTERM);
    set.thread_block()?;
    SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC)
}
