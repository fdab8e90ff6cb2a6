//! Virtual CPUs. Each has a thread, which runs the guest, handles its exits, and runs it again.
//!
//! All vCPUs but the first wait inside KVM for the INIT and SIPI that the guest sends them.
//!
//! While the machine is paused, the threads wait in the [`Meeting`]. On the way there a thread has
//! KVM finish the instruction whose exit it has handled last, so that the registers are those
//! between two instructions.
//!
//! In a machine that may begin anew, a vCPU that has ended the guest's life does not run the guest
//! again, whatever it is called for, before it was reset.
mod exit;
mod setup;
mod state;

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

use kvm_bindings::CpuId;
use kvm_ioctls::VcpuFd;

use crate::{
    GuestMemory, ThreadKind, ThreadSetup,
    counters::Counters,
    cpuid::Template,
    kick::Kickable,
    machine::{
        Bus, Ending, Gate, Outcome,
        meeting::{Meeting, Order},
    },
    report::{Access, Cause, capture},
    snapshot::{MachineState, SnapshotError, VcpuState},
    thread,
    virtio::balloon::Target,
};

pub(crate) use setup::{Made, create, power_on, restore};
pub(crate) use state::Abilities;

/// State that the vCPUs of a machine share.
pub(crate) struct Shared {
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) bus: Bus,
    /// What sets the size of the balloon, if there is one.
    pub(crate) balloon: Option<Target>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) ending: Ending,
    /// Gate that opens when the machine starts.
    pub(crate) gate: Gate,
    /// True once no vCPU may enter the guest any more. A kick follows.
    pub(crate) stopping: AtomicBool,
    /// Where vCPUs wait while the machine is paused.
    pub(crate) meeting: Meeting,
    /// Parts of a vCPU's state that can be saved.
    pub(crate) abilities: Abilities,
    /// CPU that the guest is told of.
    pub(crate) template: Template,
    /// Whether a reset by the guest may begin the machine anew: the threads outlive it.
    pub(crate) may_restart: bool,
}

impl Shared {
    /// Resets the devices that vCPUs reach by exits, and gives the PCI functions the state of
    /// power-on. The devices stay suspended.
    ///
    /// # Errors
    /// The state is of other devices.
    pub(crate) fn reset(&self, power_on: &MachineState) -> Result<(), SnapshotError> {
        self.bus.console.reset();
        self.bus.pci.reset();
        self.restore(power_on)
    }

    /// Sets the state of the devices that vCPUs reach by exits. They stay suspended.
    ///
    /// # Errors
    /// The state is of other devices.
    pub(crate) fn restore(&self, state: &MachineState) -> Result<(), SnapshotError> {
        self.bus.rtc.select(state.rtc_index);
        self.bus.pm_timer.restore(state.pm_timer_ns);
        self.bus.pci.restore(state.pci_address, &state.functions)
    }

    /// Keeps every vCPU from entering the guest again, and from waiting in a device.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Release);
        self.bus.console.end_waits();
        self.meeting.end();
    }
}

/// Starts the thread of a vCPU, which waits at the gate.
/// `power_on`: its state then, for a machine that may restart.
pub(crate) fn start(
    index: u8,
    made: Made,
    power_on: Option<Box<VcpuState>>,
    shared: Arc<Shared>,
    threads: &ThreadSetup,
) -> io::Result<JoinHandle<()>> {
    let vcpu = Vcpu {
        index,
        fd: made.fd,
        cpuid: made.cpuid,
        power_on,
        shared,
        last_access: None,
        is_between: true,
        has_ended: false,
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
    cpuid: CpuId,
    power_on: Option<Box<VcpuState>>,
    shared: Arc<Shared>,
    last_access: Option<Access>,
    /// Whether the registers are those between two instructions: no exit waits to be completed.
    is_between: bool,
    /// Whether it has ended the guest's life, and was not reset since.
    has_ended: bool,
}

/// Most runs in which a vCPU that has ended the guest's life finishes the instruction by which it did:
/// each moves a part of a string to the port, one byte at least.
const MOST_RUNS: u32 = 1 << 16;

impl Vcpu {
    fn run(mut self) {
        let kickable = Kickable::new(&mut self.fd);
        self.shared.gate.pass();
        while !self.shared.stopping.load(Acquire) {
            if self.has_ended {
                // Whoever waits for the end stops the machine, or calls for the restart.
                self.shared.meeting.await_call();
                if self.shared.stopping.load(Acquire) {
                    break;
                }
            }
            let outcome = match self.has_ended || self.shared.meeting.is_called() {
                true => self.attend(),
                false => self.step(),
            };
            if let Some(outcome) = outcome {
                self.shared.ending.with(outcome);
                if !self.shared.may_restart {
                    break;
                }
                self.has_ended = true;
            }
        }
        drop(kickable);
    }

    /// Waits in the meeting until the machine goes on, or stops. An outcome ends the machine.
    fn attend(&mut self) -> Option<Outcome> {
        while !self.is_between && !self.has_ended {
            self.fd.set_kvm_immediate_exit(1);
            if let Some(outcome) = self.step() {
                if !self.shared.may_restart {
                    return Some(outcome);
                }
                // It comes all the same: a restart needs every vCPU.
                self.shared.ending.with(outcome);
                self.has_ended = true;
            }
        }
        if self.has_ended {
            self.finish();
        }
        let shared = self.shared.clone();
        let mut was_reset = false;
        shared.meeting.attend(usize::from(self.index), |order| {
            match order {
                Order::Reset => {
                    was_reset = true;
                    let can = &shared.abilities;
                    return self.power_on.as_deref().map(|power_on| {
                        if !self.is_between {
                            return Err(SnapshotError::Unfinished);
                        }
                        // KVM takes an INIT or SIPI of the former life with this, not the next one.
                        let _ = self.fd.get_mp_state();
                        state::restore(&self.fd, power_on, &self.cpuid, can)?;
                        state::save(&self.fd, &self.cpuid, can)
                    });
                }
                Order::Save => return Some(state::save(&self.fd, &self.cpuid, &shared.abilities)),
                // The guest's watchdogs are told. A guest without kvm-clock has nothing to be told.
                Order::Leave => drop(self.fd.kvmclock_ctrl()),
            }
            None
        });
        if was_reset {
            self.last_access = None;
            self.has_ended = false;
        }
        None
    }

    /// Has KVM finish the instruction by which the guest's life has ended. It would be finished in the
    /// next life else, and its address written over the first one of that. What it leads to is nothing
    /// more than the end.
    fn finish(&mut self) {
        for _ in 0..MOST_RUNS {
            if self.is_between {
                break;
            }
            self.fd.set_kvm_immediate_exit(1);
            let _ = self.run_guest();
        }
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
