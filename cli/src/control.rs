//! Commands that change what runs: `policy apply`, `cut`, `freeze`, `thaw`, `capture`. Each asks the
//! broker that serves the VM, as root.
pub(crate) mod apply;
pub(crate) mod capture;
pub(crate) mod cut;
pub(crate) mod freeze;

use nix::sys::{
    signal::{SigSet, Signal},
    signalfd::{SfdFlags, SignalFd},
};

/// ^C and its like, by descriptor from now on.
pub(crate) fn stop_signals() -> nix::Result<SignalFd> {
    let mut set = SigSet::empty();
    set.add(Signal::SIGINT);
    set.add(Signal::SIGTERM);
    set.thread_block()?;
    SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC)
}
