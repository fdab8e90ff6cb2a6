//! Commands that change a running slipgate: `policy apply`, `cut`, `freeze`, `thaw`, `capture`.
//! Each sends a request, as root, to the broker that serves the VM.
pub(crate) mod apply;
mod capture;
mod cut;
mod freeze;

use nix::sys::{
    signal::{SigSet, Signal},
    signalfd::{SfdFlags, SignalFd},
};

use crate::args::ControlCommand;

/// Runs a command that changes flows or VMs.
pub(crate) fn run(command: &ControlCommand) -> anyhow::Result<()> {
    match command {
        ControlCommand::Cut(args) => cut::run(args),
        ControlCommand::Freeze(args) => freeze::freeze(args),
        ControlCommand::Thaw(args) => freeze::thaw(args),
        ControlCommand::Capture(args) => capture::run(args),
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
