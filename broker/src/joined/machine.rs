//! A VM of `slipgate run` whose NAT is a daemon's.
use std::{
    os::fd::{AsFd as _, BorrowedFd},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{signal::Signal, signalfd::SignalFd},
};
use slipgate_ipc::{client::VmStatus, engine::OnExit};

use super::{JoinedVm, News};
use crate::{
    asking::timeout_of,
    process::MESSAGES_AT_ONCE,
    serve::End,
    vm::{Typed, Vm},
};

/// The error where the daemon says that the VM is none of its own any more.
const REMOVED: &str = "the VM was removed from the daemon by somebody else";

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
            let wants = vm.console.wants();
            let wanted = wants.map(|(fd, flags)| PollFd::new(fd, flags));
            let fd = self.joined.fd().map(input);
            let is_typed = poll_vm(vm, signals, [wanted, fd], self.joined.timeout())?[0];
            if let Some(end) = turn(vm, signals)? {
                return Ok(end);
            }
            if is_typed && vm.console.turn() == Typed::Quit {
                return Ok(asked(Signal::SIGINT));
            }
            if self.joined.turn()? {
                bail!("{REMOVED}");
            }
        }
    }

    /// Waits until a descriptor can be read, before the guest runs. `late`: after so long this is done.
    /// Returns how the VM has ended or is to end, if that came first.
    ///
    /// # Errors
    /// The daemon does not serve it any more.
    pub(crate) fn wait(
        &mut self,
        signals: &SignalFd,
        done: BorrowedFd<'_>,
        (late, say): (Duration, impl FnOnce()),
    ) -> anyhow::Result<Option<End>> {
        let says_at = Instant::now() + late;
        let mut say = Some(say);
        loop {
            let Some(vm) = &mut self.vm else {
                return Ok(Some(End::VmmGone));
            };
            let left = says_at.saturating_duration_since(Instant::now());
            let timeout = say.is_some().then(|| timeout_of(left));
            let fds = [Some(input(done)), self.joined.fd().map(input)];
            let is_done = poll_vm(vm, signals, fds, timeout)?[0];
            if let Some(end) = turn(vm, signals)? {
                return Ok(Some(end));
            }
            if is_done {
                return Ok(None);
            }
            match self.joined.news() {
                News::None => {}
                News::Removed => bail!("{REMOVED}"),
                // Nobody is waited for, as nothing runs yet.
                News::DaemonGone => bail!("the daemon has ended before the guest ran"),
            }
            if Instant::now() >= says_at
                && let Some(say) = say.take()
            {
                say();
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

fn input(fd: BorrowedFd<'_>) -> PollFd<'_> {
    PollFd::new(fd, PollFlags::POLLIN)
}

fn asked(signal: Signal) -> End {
    End::Asked {
        exit: OnExit::Detach,
        signal,
    }
}

/// Waits until there is something to do for the VM, for a signal, or for `others`. Returns which of these
/// have an event.
fn poll_vm<const N: usize>(
    vm: &Vm,
    signals: &SignalFd,
    others: [Option<PollFd<'_>>; N],
    timeout: Option<PollTimeout>,
) -> anyhow::Result<[bool; N]> {
    let are_there = others.each_ref().map(Option::is_some);
    let mut fds: Vec<PollFd<'_>> = others.into_iter().flatten().collect();
    let first_of_vm = fds.len();
    fds.push(input(signals.as_fd()));
    fds.extend(vm.poll_fds());
    let timeout = match vm.orders.has_waiting() {
        true => PollTimeout::ZERO,
        false => timeout.unwrap_or(PollTimeout::NONE),
    };
    match poll(&mut fds, timeout) {
        Ok(_) | Err(nix::Error::EINTR) => {}
        Err(e) => return Err(e).context("waiting for something to do"),
    }
    let mut events = fds[..first_of_vm].iter();
    Ok(are_there.map(|is_there| {
        let polled = is_there.then(|| events.next()).flatten();
        polled.is_some_and(|fd| fd.any().unwrap_or(true))
    }))
}

/// Takes signals and what the VM has said. Returns how it has ended or is to end.
fn turn(vm: &mut Vm, signals: &SignalFd) -> anyhow::Result<Option<End>> {
    if let Some(info) = signals.read_signal()? {
        let signal = Signal::try_from(info.ssi_signo as i32).unwrap_or(Signal::SIGTERM);
        // The policy and the flow log are the daemon's.
        if signal != Signal::SIGHUP {
            return Ok(Some(asked(signal)));
        }
    }
    // Nobody asks for its counters.
    Ok(vm.hear(MESSAGES_AT_ONCE, |_, _| {}).map(End::of_vm))
}
