//! What a thread of the VMM is for, so that each kind can be confined in its own way.
use std::{
    io,
    sync::{Arc, mpsc},
    thread::{Builder, JoinHandle},
};

/// The threads that a machine runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadKind {
    /// Runs one virtual CPU; handles its exits.
    Vcpu,
    /// Moves frames for one queue pair.
    NetWorker,
    /// Everything else: the console's input, the control queue, virtio-rng.
    Device,
}

/// Called first on each thread that the VMM starts, for example to install a seccomp filter.
pub type ThreadSetup = Arc<dyn Fn(ThreadKind) -> io::Result<()> + Send + Sync>;

/// Starts a thread of a machine's.
pub(crate) fn spawn(
    name: &str,
    kind: ThreadKind,
    setup: &ThreadSetup,
    body: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let setup = setup.clone();
    spawn_set_up(name, move || setup(kind), body)
}

/// Starts a thread that calls `setup` first. Fails if the thread can't be had or `setup` fails;
/// when it returns, `body` is about to run.
pub fn spawn_set_up(
    name: &str,
    setup: impl FnOnce() -> io::Result<()> + Send + 'static,
    body: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let (tell, told) = mpsc::sync_channel(1);
    let thread = Builder::new().name(name.to_owned()).spawn(move || {
        let ready = setup();
        let go = ready.is_ok();
        // The other side is waiting.
        let _ = tell.send(ready);
        if go {
            body();
        }
    })?;
    told.recv()
        .unwrap_or_else(|_| Err(io::Error::other("its setup panicked")))?;
    Ok(thread)
}
