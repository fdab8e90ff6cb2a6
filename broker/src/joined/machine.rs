//! A VM of `slipgate run` whose NAT is a daemon's.
use std::os::fd::AsFd as _;

use anyhow::{Context as _, bail};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{signal::Signal, signalfd::SignalFd},
};
use slipgate_ipc::{client::VmStatus, engine::OnExit};

use super::JoinedVm;
use crate::{
    process::MESSAGES_AT_ONCE,
    serve::End,
    vm::{Typed, Vm},
};

/// The machine, and its place in the daemon.
#[derive(Debug)]
pub(crate) struct JoinedMachine {
    /// `None` once it has ended.
    pub(crate) vm: Option<Vm>,
    joined: JoinedVm,
}

impl JoinedMachine {
    pub(crate) fn new(vm: Vm, joined: JoinedVm) -> Self {
        Self {
            vm: Some(vm),
            joined,
        }
    }

    /// The VM as the daemon served it at the start.
    pub(crate) fn claimed(&self) -> &VmStatus {
        &self.joined.claimed
    }

    /// Watches the VM until it ends or is to end.
    ///
    /// # Errors
    /// The daemon does not serve it any more.
    pub(crate) fn serve(&mut self, signals: &SignalFd) -> anyhow::Result<End> {
        loop {
            let Some(vm) = &mut self.vm else {
                return Ok(End::VmmGone);
            };
            if let Some(line) = self.joined.new_line() {
                vm.orders.notify_by(line);
            }
            let input = |fd| PollFd::new(fd, PollFlags::POLLIN);
            let mut fds = vec![input(signals.as_fd())];
            fds.extend(vm.poll_fds());
            fds.extend(self.joined.fd().map(input));
            let wants = vm.console.wants();
            let typed_at = wants.map(|_| fds.len());
            fds.extend(wants.map(|(fd, flags)| PollFd::new(fd, flags)));
            let timeout = match vm.orders.has_waiting() {
                true => PollTimeout::ZERO,
                false => self.joined.timeout().unwrap_or(PollTimeout::NONE),
            };
            match poll(&mut fds, timeout) {
                Ok(_) | Err(nix::Error::EINTR) => {}
                Err(e) => return Err(e).context("waiting for something to do"),
            }
            let is_typed = typed_at.is_some_and(|at| fds[at].any().unwrap_or(true));
            let asked = |signal| End::Asked {
                exit: OnExit::Detach,
                signal,
            };
            if let Some(info) = signals.read_signal()? {
                let signal = Signal::try_from(info.ssi_signo as i32).unwrap_or(Signal::SIGTERM);
                // The policy and the flow log are the daemon's.
                if signal != Signal::SIGHUP {
                    return Ok(asked(signal));
                }
            }
            // Nobody asks for its counters.
            if let Some(heard) = vm.hear(MESSAGES_AT_ONCE, |_, _| {}) {
                return Ok(End::of_vm(heard));
            }
            if is_typed && vm.console.turn() == Typed::Quit {
                return Ok(asked(Signal::SIGINT));
            }
            if self.joined.turn()? {
                bail!("the VM was removed from the daemon by somebody else");
            }
        }
    }

    /// Has the daemon remove the VM, which has ended.
    ///
    /// # Errors
    /// The daemon does not answer, or can't remove it now.
    pub(crate) fn leave(self) -> anyhow::Result<()> {
        self.joined.leave()
    }
}
