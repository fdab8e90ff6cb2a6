//! Threads of the VMM, by kind, so that each kind can be confined in its own way.
//!
//! # Theory of operation
//! A new thread calls its setup first, and does its work only after that succeeded. Whoever starts
//! it does not wait: with few CPUs it can take milliseconds until a new thread runs at all, and a
//! machine has a dozen of them, which so start side by side. Before the guest's first instruction
//! all are waited for ([`ThreadSetup::finish`]).
use std::{
    io,
    sync::{Arc, Mutex, PoisonError, mpsc},
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
    /// Gives memory of the guest back to the host.
    Balloon,
    /// Runs any other device work: the console, the control queue, virtio-rng.
    Device,
}

/// Function that each thread of a machine calls first, for example to install a seccomp filter.
/// Clones are of the same machine.
#[derive(Clone)]
pub struct ThreadSetup {
    setup: Arc<dyn Fn(ThreadKind) -> io::Result<()> + Send + Sync>,
    /// Threads that were started since the last [`ThreadSetup::finish`].
    starting: Arc<Mutex<Vec<Starting>>>,
}

impl ThreadSetup {
    /// Threads call `setup` first.
    pub fn new(setup: impl Fn(ThreadKind) -> io::Result<()> + Send + Sync + 'static) -> Self {
        Self {
            setup: Arc::new(setup),
            starting: Arc::default(),
        }
    }

    /// Waits until each thread that was started has been set up.
    ///
    /// # Errors
    /// The setup of one of them failed or panicked; that thread does no work.
    pub fn finish(&self) -> io::Result<()> {
        let starting = {
            let mut starting = self.starting.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::take(&mut *starting)
        };
        starting.into_iter().try_for_each(Starting::finish)
    }
}

/// A thread whose setup may still be under way.
#[must_use = "the thread may still be without its setup"]
pub struct Starting(mpsc::Receiver<io::Result<()>>);

impl Starting {
    /// Waits until its setup has succeeded.
    ///
    /// # Errors
    /// The setup failed or panicked; the thread does no work.
    pub fn finish(self) -> io::Result<()> {
        let setup = self.0.recv();
        setup.unwrap_or_else(|_| Err(io::Error::other("a thread's setup panicked")))
    }
}

/// Starts a thread of a machine, which calls `setup` first.
pub(crate) fn spawn(
    name: &str,
    kind: ThreadKind,
    setup: &ThreadSetup,
    body: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let function = setup.setup.clone();
    let (thread, started) = spawn_set_up(name, move || function(kind), body)?;
    let mut starting = setup
        .starting
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    starting.push(started);
    Ok(thread)
}

/// Starts a thread that calls `setup`, then `body` if that succeeded.
///
/// # Errors
/// The thread can't be created.
pub fn spawn_set_up(
    name: &str,
    setup: impl FnOnce() -> io::Result<()> + Send + 'static,
    body: impl FnOnce() + Send + 'static,
) -> io::Result<(JoinHandle<()>, Starting)> {
    let (sender, receiver) = mpsc::sync_channel(1);
    let thread = Builder::new().name(name.to_owned()).spawn(move || {
        let ready = setup();
        let go = ready.is_ok();
        // Who no longer waits has given the machine up, and ends this thread.
        let _ = sender.send(ready);
        if go {
            body();
        }
    })?;
    Ok((thread, Starting(receiver)))
}

#[cfg(test)]
#[path = "thread_test.rs"]
mod thread_test;
