//! The thread that stands in for a VMM, or for a wire: it moves frames between two TAPs.
//!
//! Theory of operation. What a stack transmits on a TAP is read from the TAP's descriptor with its
//! vnet header and written, header and all, into the other TAP's descriptor, where it is received.
//! So a GSO frame stays one frame, and a partial checksum stays partial. One thread serves both
//! directions, up to 64 frames from a queue before it looks at the next, and sleeps in `poll`
//! when there is nothing. A write that fails (device down: EIO) loses that frame, and is counted.
//!
//! The hooks are locked from the moment they see a frame until it was written, or is on its way on an impaired
//! link. So who has changed them meets no frame that was judged before. While a frame waits for room they
//! are not locked; if they change meanwhile, those that are new see it too, and a new filter judges it, as
//! if it came now. Copies that were written count as such of the new fate.

mod hooks;
mod run;

use std::{
    os::fd::{AsRawFd, OwnedFd},
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
};

pub use hooks::{Direction, Fate, Filter, FrameTap, SeenFrame};

use self::{hooks::Hooks, run::Run};
use crate::{
    accounting::FlowCounts,
    affinity,
    error::{Result, Tried, checked},
    impairment::{Impairment, ImpairmentCounts},
    pcap::{LinkType, PcapWriter},
    tap::TapQueue,
};

/// Frames and bytes one way; a GSO frame is one frame.
#[derive(Debug, Default)]
struct Moved {
    frames: AtomicU64,
    bytes: AtomicU64,
    failed: AtomicU64,
}

/// Frames that a pump has moved in one direction. A GSO frame is one frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MovedCounts {
    /// Frames written into the other side.
    pub frames: u64,
    /// Bytes of the frames, with the Ethernet header, without the vnet header.
    pub bytes: u64,
    /// Frames the other side's device refused (it was down, for one).
    pub failed: u64,
}

struct Shared {
    wake: OwnedFd,
    stop: AtomicBool,
    paused: AtomicBool,
    count: bool,
    ethernet: bool,
    moved: [Moved; 2],
    hooks: Mutex<Hooks>,
    flows: Mutex<[FlowCounts; 2]>,
    impaired: Mutex<[ImpairmentCounts; 2]>,
}

/// Both sides of a pump.
pub(crate) struct Sides {
    /// The side `Out` frames come from: a guest's `eth0`, or an uplink. Empty: a hand-made guest.
    pub(crate) inner: Vec<TapQueue>,
    /// The side `Out` frames go to: the guest's TAP on the host, or the world's end.
    pub(crate) outer: Vec<TapQueue>,
    /// Whether frames have an Ethernet header.
    pub(crate) ethernet: bool,
    /// Whether flows are counted.
    pub(crate) count: bool,
    /// Impairment of each direction.
    pub(crate) impairment: Option<Impairment>,
    /// The CPU to stay on.
    pub(crate) cpu: Option<usize>,
}

/// A running pump; stops on drop.
pub(crate) struct Pump {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Pump {
    pub(crate) fn start(name: &str, sides: Sides) -> Result<Pump> {
        // SAFETY: eventfd takes numbers and returns a descriptor or -1.
        let wake = checked(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })
            .tried("make an eventfd")?;
        let shared = Arc::new(Shared {
            // SAFETY: a fresh descriptor that nothing else owns.
            wake: unsafe { std::os::fd::FromRawFd::from_raw_fd(wake) },
            stop: AtomicBool::new(false),
            paused: AtomicBool::new(false),
            count: sides.count,
            ethernet: sides.ethernet,
            moved: Default::default(),
            hooks: Mutex::default(),
            flows: Mutex::default(),
            impaired: Mutex::default(),
        });
        let cpu = sides.cpu;
        let mut run = Run::new(shared.clone(), sides);
        let thread = std::thread::Builder::new()
            .name(format!("pump-{name}"))
            .spawn(move || {
                if let Some(cpu) = cpu {
                    // Where the machine has no such CPU, it is measured unpinned.
                    let _ = affinity::pin_thread(cpu);
                }
                run.run();
            })
            .tried("start a pump thread")?;
        Ok(Pump {
            shared,
            thread: Some(thread),
        })
    }

    pub(crate) fn moved(&self, direction: Direction) -> MovedCounts {
        let moved = &self.shared.moved[direction as usize];
        MovedCounts {
            frames: moved.frames.load(Ordering::Relaxed),
            bytes: moved.bytes.load(Ordering::Relaxed),
            failed: moved.failed.load(Ordering::Relaxed),
        }
    }

    pub(crate) fn flows(&self, direction: Direction) -> FlowCounts {
        locked(&self.shared.flows)[direction as usize].clone()
    }

    pub(crate) fn impaired(&self, direction: Direction) -> ImpairmentCounts {
        locked(&self.shared.impaired)[direction as usize]
    }

    pub(crate) fn set_paused(&self, paused: bool) {
        self.shared.paused.store(paused, Ordering::SeqCst);
        self.wake();
    }

    pub(crate) fn set_filter(&self, filter: Option<Filter>) {
        self.hook(|hooks| hooks.set_filter(filter));
    }

    pub(crate) fn subscribe(&self) -> FrameTap {
        self.hook(Hooks::subscribe)
    }

    pub(crate) fn write_pcap(&self, path: &Path) -> Result<()> {
        let link = if self.shared.ethernet {
            LinkType::Ethernet
        } else {
            LinkType::Ip
        };
        let writer = PcapWriter::create(path, link).tried(format!("create {}", path.display()))?;
        self.hook(|hooks| hooks.set_pcap(writer));
        Ok(())
    }

    /// Changes the hooks. When this returns, no frame is still to be passed that was judged before, other than
    /// those on their way on an impaired link: the link was given them, and passes them when they are due.
    fn hook<T>(&self, change: impl FnOnce(&mut Hooks) -> T) -> T {
        change(&mut locked(&self.shared.hooks))
    }

    fn wake(&self) {
        // SAFETY: writes the 8 bytes of a u64 to our own eventfd.
        unsafe { libc::write(self.shared.wake.as_raw_fd(), (&raw const ONE).cast(), 8) };
    }
}

static ONE: u64 = 1;

impl Drop for Pump {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        if let Some(pcap) = locked(&self.shared.hooks).pcap() {
            let _ = pcap.flush();
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[path = "pump_test.rs"]
mod tests;
