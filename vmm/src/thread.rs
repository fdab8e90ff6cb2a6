//! Threads of the VMM, by kind, so that each kind can be confined in its own way.
use std::{
    io,
    sync::{Arc, mpsc},
    thread::{Builder, JoinHandle},
};

/// Kind of a machine's thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadKind {
    /// Runs one virtual CPU and handles its exits.
    Vcpu,
    /// Moves the frames of one queue pair.
    NetWorker,
    /// Tells another process of a network card's rings, which that process serves.
    NetRings,
    /// Reads and writes one disk's file.
    Disk,
    /// Moves the bytes of the connections between guest and host.
    Vsock,
    /// Runs any other device work: the console, the control queue, virtio-rng.
    Device,
}

/// Function that each thread of the VMM calls first, for example to install a seccomp filter.
pub type ThreadSetup = Arc<dyn Fn(ThreadKind) -> io::Result<()> + Send + Sync>;

/// Starts a thread of a machine.
pub(crate) fn spawn(
    name: &str,
    kind: ThreadKind,
    setup: &ThreadSetup,
    body: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let setup = setup.clone();
    spawn_set_up(name, move || setup(kind), body)
}

/// Starts a thread that calls `setup`, then `body`. When it returns, `setup` has succeeded and
/// `body` is about to run.
///
/// # Errors
/// The thread can't be created, or `setup` fails or panics.
pub fn spawn_set_up(
    name: &str,
    setup: impl FnOnce() -> io::Result<()> + Send + 'static,
    body: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let (sender, receiver) = mpsc::sync_channel(1);
    let thread = Builder::new().name(name.to_owned()).spawn(move || {
        let ready = setup();
        let go = ready.is_ok();
        // The receiver is waiting.
        let _ = sender.send(ready);
        if go {
            body();
        }
    })?;
    receiver
        .recv()
        .unwrap_or_else(|_| Err(io::Error::other("its setup panicked")))?;
    Ok(thread)
}
