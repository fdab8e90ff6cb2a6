//! A machine that begins anew when its guest resets it.
//!
//! # Theory of operation
//! Nothing is made again: a restart brings the same VM, vCPUs and devices back to their state at
//! power-on, so it needs no call that the machine's threads may not make. That state is read when the
//! machine is made, as for a snapshot. At a reset
//! 1. the vCPUs come to the meeting and the devices rest, as for a pause. A vCPU that has ended the
//!    life waits for that;
//! 2. the owner of the machine is asked whether to go on, while nothing of the former life runs;
//! 3. devices are reset and their BARs set as at power-on, memory is given back to the host, which
//!    makes it zeroes, and kernel, tables and a new generation id are loaded into it;
//! 4. interrupt controllers, clock and each vCPU get their state of power-on, and the guest runs.
//!
//! Counters, the console and rate limits go on. A machine of a snapshot has no kernel to load, and
//! does not restart.
use std::io;

use super::{MachineError, write_generation_id};
use crate::{
    GuestMemory,
    acpi::{self, AcpiConfig},
    boot::{self, BootSource},
    memory,
    snapshot::MachineState,
};

/// Everything that a restart needs.
pub(super) struct Restart {
    pub(super) source: BootSource,
    pub(super) acpi: AcpiConfig,
    /// Places and entry of the kernel, from its first loading.
    pub(super) kernel: boot::Loaded,
    /// State of the machine at power-on, without its vCPUs, which have theirs.
    pub(super) power_on: MachineState,
}

impl Restart {
    /// Loads into cleared memory what the machine began with.
    ///
    /// # Errors
    /// The files can't be read any more, or the kernel is another.
    pub(super) fn load(&self, memory: &GuestMemory) -> Result<(), MachineError> {
        memory::clear(memory).map_err(MachineError::host("clearing the guest's memory"))?;
        let kernel = boot::load(memory, &self.source)?;
        if kernel != self.kernel {
            let other = io::Error::other("it is not what the machine was made with");
            return Err(MachineError::host("loading the kernel again")(other));
        }
        acpi::write(memory, &self.acpi)?;
        write_generation_id(memory)
    }
}
