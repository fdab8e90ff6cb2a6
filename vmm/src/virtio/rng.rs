//! The entropy device (OASIS virtio 1.2, section 5.4): fills the driver's buffers with the host's
//! random bytes.
//!
//! The device has one thread, which is started with it and sleeps until the driver sends a request.
//! A request is answered with at most [`MAX_REQUEST_BYTES`], as the specification allows, and all
//! of them together with [`BYTES_PER_SECOND`]. So a guest that sends requests without end costs the
//! host a bounded, small share of a CPU, and waits. Every request is charged at least
//! [`MIN_CHARGE_BYTES`], so empty requests can't get around the limit.
use std::{
    io,
    os::fd::AsRawFd,
    sync::mpsc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_queue::{QueueOwnedT, QueueT};
use vm_memory::Bytes;

use super::{
    ActivateError, Activation, EnabledQueue, VirtioDevice,
    mailbox::{Inbox, Mailbox, Rested, mailbox},
};
use crate::{
    ThreadKind, ThreadSetup,
    snapshot::{DeviceState, Model, Progress},
    thread,
};

/// Largest answer to one request, bytes.
pub const MAX_REQUEST_BYTES: usize = 4096;
/// Rate of all answers once a burst of [`BURST_BYTES`] is used up, bytes per second.
pub const BYTES_PER_SECOND: i64 = 1 << 20;
/// Bytes that a burst may take at once.
pub const BURST_BYTES: i64 = 1 << 16;
/// Least charge of a request, bytes.
pub const MIN_CHARGE_BYTES: i64 = 256;
/// Number of a request's descriptors that are used. Those after them get nothing.
pub const MAX_DESCRIPTORS: usize = 64;

const QUEUE_SIZES: &[u16] = &[64];
/// Time between checks of the allowance while it is used up.
const PAUSE: Duration = Duration::from_millis(20);

/// The virtio entropy device.
pub struct Rng {
    mailbox: Mailbox<Command>,
    worker: Option<JoinHandle<()>>,
}

/// Command to the device's thread.
enum Command {
    Start(Box<Activation>),
    /// Drop the activation and serve no longer.
    Stop,
    /// Rest, and say how far the queue is served.
    Suspend(mpsc::Sender<Progress>),
    Resume,
    Exit,
}

impl Rng {
    /// Starts the device's thread, which calls `threads` first.
    ///
    /// # Errors
    /// The host refuses the thread or an eventfd.
    pub fn new(threads: ThreadSetup) -> io::Result<Self> {
        let (mailbox, inbox) = mailbox()?;
        let work = move || work(&inbox);
        let worker = thread::spawn("rng", ThreadKind::Device, &threads, work)?;
        Ok(Self {
            mailbox,
            worker: Some(worker),
        })
    }
}

impl Drop for Rng {
    fn drop(&mut self) {
        self.mailbox.send(Command::Exit);
        if let Some(worker) = self.worker.take() {
            // A panic of the device's thread must not panic this one.
            let _ = worker.join();
        }
    }
}

impl VirtioDevice for Rng {
    fn device_id(&self) -> u16 {
        4
    }

    fn pci_class(&self) -> u32 {
        // Unassigned: PCI has no class for entropy devices.
        0xff_00_00
    }

    fn queue_sizes(&self) -> &[u16] {
        QUEUE_SIZES
    }

    fn features(&self) -> u64 {
        1 << VIRTIO_RING_F_EVENT_IDX | 1 << VIRTIO_RING_F_INDIRECT_DESC
    }

    fn read_config(&self, _offset: usize, into: &mut [u8]) {
        into.fill(0);
    }

    fn write_config(&mut self, _offset: usize, _bytes: &[u8]) {}

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        if activation.queues.len() != 1 {
            let why = "the entropy device has one";
            return Err(ActivateError::Queues {
                enabled: activation.queues.len(),
                why,
            });
        }
        match self.mailbox.send(Command::Start(Box::new(activation))) {
            true => Ok(()),
            false => Err(ActivateError::Host {
                what: "starting to serve entropy",
                source: io::Error::other("the device's thread has ended"),
            }),
        }
    }

    fn reset(&mut self) {
        self.mailbox.send(Command::Stop);
    }

    fn suspend(&mut self) -> DeviceState {
        let (to, progress) = mpsc::channel();
        self.mailbox.send(Command::Suspend(to));
        DeviceState {
            queues: progress.try_iter().collect(),
            model: Model::Plain,
        }
    }

    fn resume(&mut self) {
        self.mailbox.send(Command::Resume);
    }
}

/// Body of the device's thread.
fn work(inbox: &Inbox<Command>) {
    let mut command = inbox.wait();
    while let Some(given) = command {
        inbox.answer();
        command = match given {
            Command::Start(activation) => serve(*activation, inbox),
            Command::Stop | Command::Suspend(_) | Command::Resume => inbox.wait(),
            Command::Exit => return,
        };
    }
}

/// Serves until there is another command, which is returned. The activation is dropped by then.
fn serve(mut activation: Activation, inbox: &Inbox<Command>) -> Option<Command> {
    let Some(mut queue) = activation.queues.pop() else {
        return inbox.wait();
    };
    let mut allowance = Allowance::new(Instant::now());
    let mut is_throttled = false;
    loop {
        inbox.quiet();
        match inbox.take() {
            None => {}
            Some(Command::Suspend(to)) => {
                // Requests are answered in order, so none is taken and not given back.
                let _ = to.send(Progress {
                    queue: queue.index,
                    next_available: queue.queue.next_avail(),
                    next_used: queue.queue.next_used(),
                    taken: Vec::new(),
                });
                drop(to);
                match inbox.rest(|command| matches!(command, Command::Resume)) {
                    Rested::Resumed => continue,
                    Rested::Command(command) => return Some(command),
                    Rested::Over => return None,
                }
            }
            command => return command,
        }
        // Notifications are not waited for while the allowance is used up.
        let kick = (!is_throttled).then_some(queue.kick.as_raw_fd());
        let waited = inbox.wait_beside(kick, None, is_throttled.then_some(PAUSE));
        // It only signals that there may be work; an empty eventfd is no error.
        let _ = queue.kick.read();
        allowance.refill(Instant::now());
        let answered = waited
            .map_err(|_| Broken)
            .and_then(|_| answer(&mut queue, &activation, &mut allowance));
        match answered {
            Ok(done) => is_throttled = !done,
            Err(Broken) => {
                activation.signals.needs_reset();
                return inbox.wait();
            }
        }
    }
}

/// Error: the driver's rings are invalid, or the host failed.
struct Broken;

/// Answers the requests in the ring, as far as the allowance goes. Returns true if none is left.
fn answer(
    EnabledQueue { queue, index, .. }: &mut EnabledQueue,
    Activation {
        memory, signals, ..
    }: &Activation,
    allowance: &mut Allowance,
) -> Result<bool, Broken> {
    let memory = &**memory;
    let mut bytes = [0; MAX_REQUEST_BYTES];
    let mut used_any = false;
    let done = loop {
        queue.disable_notification(memory).map_err(|_| Broken)?;
        while allowance.is_left() {
            let chain = queue.iter(memory).map_err(|_| Broken)?.next();
            let Some(chain) = chain else { break };
            let head = chain.head_index();
            let mut written = 0;
            for buffer in chain.take(MAX_DESCRIPTORS) {
                let len = (MAX_REQUEST_BYTES - written).min(buffer.len() as usize);
                if len == 0 || !buffer.is_write_only() {
                    continue;
                }
                let bytes = &mut bytes[..len];
                fill(bytes).map_err(|_| Broken)?;
                memory
                    .write_slice(bytes, buffer.addr())
                    .map_err(|_| Broken)?;
                written += len;
            }
            allowance.charge(written);
            let written = u32::try_from(written).expect("at most 4096");
            queue.add_used(memory, head, written).map_err(|_| Broken)?;
            used_any = true;
        }
        if !allowance.is_left() {
            break false;
        }
        if !queue.enable_notification(memory).map_err(|_| Broken)? {
            break true;
        }
    };
    if used_any && queue.needs_notification(memory).map_err(|_| Broken)? {
        signals.queue(*index);
    }
    Ok(done)
}

/// Bytes that may be given out now. It is negative after a request that exceeded it.
struct Allowance {
    bytes: i64,
    at: Instant,
}

impl Allowance {
    fn new(now: Instant) -> Self {
        Self {
            bytes: BURST_BYTES,
            at: now,
        }
    }

    fn refill(&mut self, now: Instant) {
        let micros = now.saturating_duration_since(self.at).as_micros();
        // One second fills any burst.
        let micros = i64::try_from(micros).unwrap_or(i64::MAX).min(1_000_000);
        let more = micros * BYTES_PER_SECOND / 1_000_000;
        self.bytes = self.bytes.saturating_add(more).min(BURST_BYTES);
        self.at = now;
    }

    fn is_left(&self) -> bool {
        self.bytes > 0
    }

    fn charge(&mut self, bytes: usize) {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        self.bytes = self.bytes.saturating_sub(bytes.max(MIN_CHARGE_BYTES));
    }
}

/// Fills a buffer with the host's random bytes, by getrandom(2) and nothing else. A fallback to a
/// file would be refused to a confined thread; to an unconfined one it would wait for entropy that
/// a host may not gather early in its boot.
fn fill(mut bytes: &mut [u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        // SAFETY: the pointer and the length are those of `bytes`.
        let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
        match usize::try_from(got) {
            Ok(got) => bytes = &mut bytes[got..],
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => {}
                error => return Err(error),
            },
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "rng_test.rs"]
mod tests;
