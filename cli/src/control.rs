//! Commands that change what runs: `policy apply`, `cut`, `freeze`, `thaw`, `capture`. Each asks the
//! broker that serves the VM, as root.
pub(crate) mod apply;
pub(crate) mod capture;
pub(crate) mod cut;
pub(crate) mod freeze;

use std::{io, os::fd::BorrowedFd, path::Path};

use anyhow::bail;
use nix::sys::{
    signal::{SigSet, Signal},
    signalfd::{SfdFlags, SignalFd},
};

use crate::{
    control_socket::{Answer, Request, ask_with},
    show::sockets,
};

const NOBODY: &str =
    "no slipgate runs in this network namespace: start `slipgate attach` or `slipgate run`";

/// What the brokers here came to, when none did it.
#[derive(Debug, Default)]
pub(crate) struct Asked {
    /// VMs that they serve.
    served: Vec<String>,
    errors: Vec<String>,
    any: bool,
}

/// Several brokers may serve VMs here: asks one after the other, until one does it. The errors of
/// those that do not serve the VM or the flow are left to [`Asked::error`].
pub(crate) fn ask_each(
    pin_dir: &Path,
    request: &Request,
    descriptor: Option<BorrowedFd<'_>>,
) -> anyhow::Result<Result<Answer, Asked>> {
    let mut asked = Asked::default();
    for socket in sockets(pin_dir)? {
        match ask_with(&socket, request, descriptor) {
            Ok(Answer::UnknownVm { served }) => {
                asked.any = true;
                asked.served.extend(served);
            }
            Ok(Answer::UnknownFlow) => asked.any = true,
            Ok(Answer::Error { error }) => asked.errors.push(error),
            Ok(answer) => return Ok(Ok(answer)),
            // One that was killed has left it.
            Err(e) if is_nobodys(&e) => {}
            Err(e) => asked.errors.push(format!("{e:#}")),
        }
    }
    Ok(Err(asked))
}

impl Asked {
    /// Why nobody did it; `what` is the VM or flow that was meant.
    pub(crate) fn error(self, what: &str) -> anyhow::Error {
        if !self.errors.is_empty() {
            return anyhow::anyhow!("{}", self.errors.join("; "));
        }
        if !self.any {
            return anyhow::anyhow!(NOBODY);
        }
        match self.served.is_empty() {
            true => anyhow::anyhow!(
                "no flow {what} lives here; `slipgate flows` lists those that do, by their id"
            ),
            false => no_such_vm(what, self.served),
        }
    }
}

/// Of a VM that is not among those that are served.
pub(crate) fn no_such_vm(vm: &str, mut served: Vec<String>) -> anyhow::Error {
    served.sort();
    let names = served.join(", ");
    anyhow::anyhow!("no VM {vm:?} is served; there is {names}")
}

/// ^C and its like, by descriptor from now on.
pub(crate) fn stop_signals() -> nix::Result<SignalFd> {
    let mut set = SigSet::empty();
    set.add(Signal::SIGINT);
    set.add(Signal::SIGTERM);
    set.thread_block()?;
    SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC)
}

/// Asks for what is answered by [`Answer::Done`] alone.
pub(crate) fn have_done(pin_dir: &Path, request: &Request, what: &str) -> anyhow::Result<()> {
    match ask_each(pin_dir, request, None)? {
        Ok(Answer::Done) => Ok(()),
        Ok(_) => bail!("an answer to another question: the broker is of another version"),
        Err(asked) => Err(asked.error(what)),
    }
}

/// Whether nobody listens at the socket that was asked.
pub(crate) fn is_nobodys(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<io::Error>();
    io.is_some_and(|e| {
        matches!(
            e.kind(),
            io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound
        )
    })
}
