//! Virtual CPUs. Each has a thread, which runs the guest, handles its exits, and runs it again.
//!
//! All vCPUs but the first wait inside KVM for the INIT and SIPI that the guest sends them.
mod exit;
mod setup;

use std::{
    io,
    sync::{
        Arc,
        atomic::{
            AtomicBool,
            Ordering::{Acquire, Release},
        },
    },
    thread::JoinHandle,
};

use kvm_ioctls::VcpuFd;

use crate::{
    GuestMemory, ThreadKind, ThreadSetup,
    counters::Counters,
    kick::Kickable,
    machine::{Bus, Ending, Gate, Outcome},
    report::{Access, Cause, capture},
    thread,
};

pub(crate) use setup::create;

/// State that the vCPUs of a machine share.
pub(crate) struct Shared {
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) bus: Bus,
    pub(crate) counters: Arc<Counters>,
    pub(crate) ending: Ending,
    /// Gate that opens when the machine starts.
    pub(crate) gate: Gate,
    /// True once no vCPU may enter the guest any more. A kick follows.
    pub(crate) stopping: AtomicBool,
}

impl Shared {
    /// Keeps every vCPU from entering the guest again, and from waiting in a device.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Release);
        self.bus.console.end_waits();
    }
}

/// Starts the thread of a vCPU, which waits at the gate.
pub(crate) fn start(
    index: u8,
    fd: VcpuFd,
    shared: Arc<Shared>,
    threads: &ThreadSetup,
) -> io::Result<JoinHandle<()>> {
    let vcpu = Vcpu {
        index,
        fd,
        shared,
        last_access: None,
    };
    thread::spawn(
        &format!("vcpu{index}"),
        ThreadKind::Vcpu,
        threads,
        move || vcpu.run(),
    )
}

struct Vcpu {
    index: u8,
    fd: VcpuFd,
    shared: Arc<Shared>,
    last_access: Option<Access>,
}

impl Vcpu {
    fn run(mut self) {
        let kickable = Kickable::new(&mut self.fd);
        self.shared.gate.pass();
        while !self.shared.stopping.load(Acquire) {
            if let Some(outcome) = self.step() {
                self.shared.ending.with(outcome);
                break;
            }
        }
        drop(kickable);
    }

    /// Runs the guest up to its next exit and handles it. An outcome ends the machine.
    fn step(&mut self) -> Option<Outcome> {
        match self.run_guest() {
            Ok(outcome) => outcome,
            Err(cause) => Some(self.crashed(cause)),
        }
    }

    fn crashed(&self, cause: Cause) -> Outcome {
        let memory = &self.shared.memory;
        let report = capture::report(self.index, &self.fd, memory, cause, self.last_access);
        Outcome::Crashed(Box::new(report))
    }
}

impl Drop for Vcpu {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let outcome = self.crashed(Cause::VmmPanicked);
            self.shared.ending.with(outcome);
        }
    }
}
