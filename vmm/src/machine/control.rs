//! Orders to a running machine from outside: pause, resume, snapshot.
//!
//! # Theory of operation
//! A [`Control`] is a handle that any thread may have. Each order is carried out by the thread that
//! gives it, one at a time, under a lock. The machine's end waits for the order under way and then
//! takes the machine out of the handle. So no thread but that of [`Machine::run`](super::Machine::run)
//! ever drops the machine, whose parts may need system calls that only that thread may make. An
//! order notices the end while it waits for vCPUs, and each [`PAUSE_BYTES`] of memory; a snapshot that
//! nobody wants any more is noticed there too. The guest goes on before the files are synced.
//!
//! ```text
//! running ── pause: vCPUs to the meeting, then devices to rest ──► paused
//! running ◄─ resume: devices go on, then vCPUs ─────────────────── paused
//! ```
//! The vCPUs come first, so that no register of a device is accessed while it is suspended.
//!
//! While a machine is reset by its guest, its owner is asked whether it goes on, which may take
//! seconds. The lock is free meanwhile, and orders are refused: none waits, and none is carried out
//! behind the back of a client that has given up.
//!
//! [`PAUSE_BYTES`]: crate::snapshot::PAUSE_BYTES
use std::{
    fs::File,
    os::unix::fs::FileExt as _,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Acquire},
    },
    time::Duration,
};

use kvm_ioctls::VmFd;

use super::{MachineError, restart::Restart, vcpu::Shared};
use crate::{
    kick::Target,
    kvm, memory,
    snapshot::{self, BaseState, Layers, MachineState, SavedFiles, SnapshotError, SnapshotId},
};

/// Time between kicks of a vCPU that has not come to the meeting.
const KICK_AGAIN: Duration = Duration::from_millis(1);

/// Files of a snapshot: empty, and open for writing.
#[derive(Debug)]
pub struct SnapshotFiles {
    /// File for the machine's state.
    pub state: File,
    /// File for its memory.
    pub memory: File,
}

impl SnapshotFiles {
    fn sync(&self, cancelled: &AtomicBool) -> Result<(), SnapshotError> {
        let failed = SnapshotError::file("write the file `memory`");
        self.memory.sync_data().map_err(failed)?;
        let failed = SnapshotError::file("write the file `state`");
        self.state.sync_data().map_err(failed)?;
        match cancelled.load(Acquire) {
            true => Err(SnapshotError::Cancelled),
            false => Ok(()),
        }
    }

    /// Frees what they take on a disk that may be full: whoever made them may be gone.
    fn clear(&self) {
        for file in [&self.state, &self.memory] {
            // What is reported is why they are cleared.
            let _ = file.set_len(0);
        }
    }
}

/// Gives orders to a machine. Orders to a machine that has ended are refused.
#[derive(Clone)]
pub struct Control(Arc<Mutex<Option<Machine>>>);

/// Parts of a machine that orders use.
struct Machine {
    shared: Arc<Shared>,
    vm: Arc<VmFd>,
    vcpus: Vec<Target>,
    is_paused: bool,
    /// Whether the guest's reset is under way, so that the machine rests.
    is_resetting: bool,
}

impl Control {
    /// Makes the handle of a machine. [`Control::close`] must be called before the vCPUs' threads are
    /// joined.
    pub(super) fn new(shared: Arc<Shared>, vm: Arc<VmFd>, vcpus: Vec<Target>) -> Self {
        Self(Arc::new(Mutex::new(Some(Machine {
            shared,
            vm,
            vcpus,
            is_paused: false,
            is_resetting: false,
        }))))
    }

    /// Waits for the order under way, and refuses all further ones.
    pub(super) fn close(&self) {
        drop(self.lock().take());
    }

    fn lock(&self) -> MutexGuard<'_, Option<Machine>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pauses the machine: when it returns, the guest does not run and no device works for it. A
    /// machine that is paused stays so.
    ///
    /// # Errors
    /// The machine ends, or has ended, or is being reset.
    pub fn pause(&self) -> Result<(), SnapshotError> {
        self.order(Machine::pause)
    }

    fn order<T>(
        &self,
        order: impl FnOnce(&mut Machine) -> Result<T, SnapshotError>,
    ) -> Result<T, SnapshotError> {
        match &mut *self.lock() {
            Some(machine) if machine.is_resetting => Err(SnapshotError::Resetting),
            Some(machine) => order(machine),
            None => Err(SnapshotError::Ended),
        }
    }

    /// Begins a machine that was reset by its guest anew. `go_on` is asked when all vCPUs and devices
    /// rest. Returns its answer: a machine that is not to go on stays at rest.
    ///
    /// # Errors
    /// The machine ends, or can't be brought back to its state at power-on.
    pub(super) fn restart(
        &self,
        again: &Restart,
        go_on: impl FnOnce() -> bool,
    ) -> Result<bool, MachineError> {
        self.order(|machine| {
            machine.rest()?;
            machine.is_resetting = true;
            Ok(())
        })?;
        if !go_on() {
            return Ok(false);
        }
        match &mut *self.lock() {
            Some(machine) => machine.begin_again(again)?,
            None => return Err(SnapshotError::Ended.into()),
        }
        Ok(true)
    }

    /// Has a paused machine go on. One that runs goes on running.
    ///
    /// # Errors
    /// The machine has ended, or is being reset.
    pub fn resume(&self) -> Result<(), SnapshotError> {
        self.order(|machine| {
            machine.resume();
            Ok(())
        })
    }

    /// Asks the guest for so many bytes of its memory in all, whole pages of 4 KiB: it gives what is
    /// more than it has given, or takes back what is less. It does so in its own time, and once it
    /// runs; [`Counters`](crate::Counters) say how far it has come.
    ///
    /// # Errors
    /// The machine has no balloon, or not so much memory; or it has ended, or is being reset.
    pub fn set_balloon(&self, bytes: u64) -> Result<(), SnapshotError> {
        self.order(|machine| {
            let target = machine.shared.balloon.as_ref();
            let target = target.ok_or(SnapshotError::NoBalloon)?;
            let memory = memory::total_bytes(&machine.shared.memory);
            if bytes > memory {
                let wanted = bytes;
                return Err(SnapshotError::BalloonSize { wanted, memory });
            }
            target.ask_for(bytes);
            Ok(())
        })
    }

    /// Writes a snapshot of the machine, which is paused meanwhile, and has both files stable on
    /// their disk; that does not delay the machine, nor its end. `cancelled`: nobody wants it any more.
    ///
    /// # Errors
    /// KVM does not give the state, a file can't be written, it is cancelled, or the machine ends or
    /// is being reset. The files are empty then; the machine goes on.
    pub fn snapshot(
        &self,
        files: &SnapshotFiles,
        cancelled: &AtomicBool,
    ) -> Result<(), SnapshotError> {
        self.differences(files, Vec::new(), cancelled)
    }

    /// As [`Control::snapshot`], but writes what differs from another snapshot's memory. `bases`: that
    /// snapshot, then its base, and so on; none: all memory is written.
    ///
    /// # Errors
    /// As of [`Control::snapshot`]; or the bases don't belong together or to such a machine, or can't be
    /// read.
    pub fn differences(
        &self,
        files: &SnapshotFiles,
        bases: Vec<SavedFiles>,
        cancelled: &AtomicBool,
    ) -> Result<(), SnapshotError> {
        let written = self.order(|machine| machine.snapshot(files, bases, cancelled));
        let written = written.and_then(|()| files.sync(cancelled));
        if written.is_err() {
            files.clear();
        }
        written
    }
}

impl Machine {
    fn pause(&mut self) -> Result<(), SnapshotError> {
        if self.is_paused {
            return Ok(());
        }
        self.lives()?;
        self.rest()?;
        // A vCPU may have ended the guest's life on its way to the meeting.
        self.lives().inspect_err(|_| self.resume())
    }

    /// # Errors
    /// A vCPU has ended the guest's life.
    fn lives(&self) -> Result<(), SnapshotError> {
        match self.shared.ending.outcome() {
            None => Ok(()),
            Some(end) if self.shared.may_restart && end.is_reset() => Err(SnapshotError::Resetting),
            Some(_) => Err(SnapshotError::Ended),
        }
    }

    /// Has vCPUs and devices rest.
    fn rest(&mut self) -> Result<(), SnapshotError> {
        if self.is_paused {
            return Ok(());
        }
        let meeting = &self.shared.meeting;
        meeting.call();
        loop {
            self.vcpus.iter().for_each(Target::kick);
            match meeting.is_complete(KICK_AGAIN) {
                Some(true) => break,
                Some(false) => {}
                None => return Err(SnapshotError::Ended),
            }
        }
        self.shared.bus.pci.suspend();
        self.is_paused = true;
        Ok(())
    }

    fn resume(&mut self) {
        if self.is_paused {
            self.shared.bus.pci.resume();
            self.shared.meeting.dismiss();
            self.is_paused = false;
        }
    }

    /// Begins the machine, which rests, anew.
    fn begin_again(&mut self, again: &Restart) -> Result<(), MachineError> {
        let Shared { memory, .. } = &*self.shared;
        self.shared.reset(&again.power_on)?;
        again.load(memory)?;
        kvm::restore(&self.vm, &again.power_on.kvm)?;
        let vcpus = self.shared.meeting.reset().ok_or(SnapshotError::Ended)?;
        for vcpu in vcpus {
            vcpu?;
        }
        self.shared.ending.forget();
        self.is_resetting = false;
        self.resume();
        Ok(())
    }

    fn snapshot(
        &mut self,
        files: &SnapshotFiles,
        bases: Vec<SavedFiles>,
        cancelled: &AtomicBool,
    ) -> Result<(), SnapshotError> {
        // Before the guest is paused: what can't be used costs it nothing.
        let bytes = memory::total_bytes(&self.shared.memory);
        let base = match bases.is_empty() {
            true => None,
            false => Some(Layers::to_differ_from(bases, bytes)?),
        };
        let was_running = !self.is_paused;
        if cancelled.load(Acquire) {
            return Err(SnapshotError::Cancelled);
        }
        self.pause()?;
        let written = self.write(files, base, cancelled);
        if was_running {
            self.resume();
        }
        written
    }

    fn write(
        &self,
        files: &SnapshotFiles,
        base: Option<(Layers, SnapshotId)>,
        cancelled: &AtomicBool,
    ) -> Result<(), SnapshotError> {
        let mut state = self.state()?;
        let goes_on = || match () {
            () if self.shared.stopping.load(Acquire) => Err(SnapshotError::Ended),
            () if cancelled.load(Acquire) => Err(SnapshotError::Cancelled),
            () => Ok(()),
        };
        let memory = &self.shared.memory;
        match base {
            None => snapshot::write_memory(memory, &files.memory, &goes_on)?,
            Some((layers, id)) => {
                let runs = snapshot::write_differences(memory, &layers, &files.memory, &goes_on)?;
                state.base = Some(BaseState { id, runs });
            }
        }
        let state = snapshot::encode(&state)?;
        let failed = SnapshotError::file("write the file `state`");
        files.state.write_all_at(&state, 0).map_err(failed)
    }

    /// Reads the state of the paused machine. What interrupts is read before what it interrupts: an
    /// interrupt that is raised in between is in the later part.
    fn state(&self) -> Result<MachineState, SnapshotError> {
        let Shared { bus, meeting, .. } = &*self.shared;
        let serial = bus.console.state();
        let (pci_address, functions) = bus.pci.state();
        let kvm = kvm::save(&self.vm)?;
        let vcpus = meeting.save().ok_or(SnapshotError::Ended)?;
        Ok(MachineState {
            base: None,
            memory_bytes: memory::total_bytes(&self.shared.memory),
            template: self.shared.template,
            kvm,
            vcpus: vcpus.into_iter().collect::<Result<_, _>>()?,
            serial,
            rtc_index: bus.rtc.index(),
            pm_timer_ns: bus.pm_timer.counted_ns(),
            pci_address,
            functions,
        })
    }
}
