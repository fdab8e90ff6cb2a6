//! The emulated machine: Debian's kernel with KVM, in which each VMM boots the guest.

use std::{path::Path, time::Duration};

use serde::{Deserialize, Serialize};

use super::{DiskMeasured, DiskVmm, DiskWork, disk_guest_initramfs};
use crate::{
    error::{Error, Result, Tried},
    rig::{
        Ended, Hardware, Initramfs, Kernel, Machine, NESTED_CPU_MODEL, NESTED_CPUS, NESTED_MODULES,
        NESTED_OUTER, on_path,
    },
};

/// A folder that, if it is there, has what is to be measured instead of the checks.
pub const DISK_RIG: &str = "/disk-rig";
/// Prefix of the report's lines that hold a [`DiskRigResult`].
const LINE: &str = "disk-rig ";
/// Time for a boot, of the outer machine or of one in it, on a machine under load.
const BOOT: Duration = Duration::from_secs(90);

/// What is measured in the machine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DiskRigPlan {
    /// The guests' work.
    pub work: DiskWork,
    /// VMMs, in order.
    pub vmms: Vec<DiskVmm>,
}

/// What a VMM came to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DiskRigResult {
    /// The VMM.
    pub vmm: DiskVmm,
    /// Each case, or why there is none.
    pub outcome: std::result::Result<Vec<DiskMeasured>, String>,
    /// Blocks of the image that the guest has written.
    pub written_blocks: u64,
}

/// Programs and kernels of the machine.
#[derive(Clone, Copy, Debug)]
pub struct DiskRig<'a> {
    /// The program `slipgate-rig-init`: init of both machines.
    pub init: &'a Path,
    /// The program `slipgate`.
    pub slipgate: &'a Path,
    /// The outer machine's kernel.
    pub outer: &'a Kernel,
    /// The guests' kernel.
    pub guest: &'a Kernel,
}

impl DiskRig<'_> {
    /// Boots the machine, and measures in it.
    ///
    /// # Errors
    /// A file can't be read, or QEMU can't be started. A machine that breaks down is none: then results
    /// are missing.
    pub fn run(&self, plan: &DiskRigPlan) -> Result<(Vec<DiskRigResult>, Ended)> {
        let mut outer = Initramfs::new(self.init)?;
        outer.modules(self.outer, &NESTED_MODULES)?;
        outer.program_as("slipgate", self.slipgate)?;
        outer.program(&on_path("ip")?)?;
        outer.qemu(&format!("{DISK_RIG}/firmware"))?;
        let kernel = std::fs::read(self.guest.image()).tried("read the guest's kernel")?;
        outer.file(&format!("{DISK_RIG}/vmlinuz"), &kernel);
        let inner = disk_guest_initramfs(self.init, self.guest, &plan.work)?;
        outer.file(&format!("{DISK_RIG}/initramfs"), &inner);
        outer.file(&format!("{DISK_RIG}/plan"), plan.to_text().as_bytes());
        let guests = u32::try_from(plan.vmms.len()).unwrap_or(u32::from(u8::MAX));
        let machine = Machine {
            kernel: self.outer,
            initramfs: &outer.finish(),
            parameters: NESTED_OUTER,
            timeout: BOOT + (BOOT + plan.work.lasts()) * guests,
            hardware: Hardware {
                cpus: NESTED_CPUS,
                cpu_model: NESTED_CPU_MODEL,
                memory_mib: 2048,
                ..Hardware::default()
            },
        };
        let ended = machine.run()?;
        Ok((DiskRigResult::read(&ended.report), ended))
    }
}

impl DiskRigPlan {
    /// Returns the plan as [`DiskRigPlan::of_text`] reads it.
    pub fn to_text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Reads the plan.
    ///
    /// # Errors
    /// The text is none.
    pub fn of_text(text: &str) -> Result<Self> {
        serde_json::from_str(text).map_err(|why| Error::unexpected(format!("{text:?}: {why}")))
    }
}

impl DiskRigResult {
    /// Reads the results in a report, in order.
    pub fn read(report: &str) -> Vec<Self> {
        let results = report.lines().filter_map(|line| line.strip_prefix(LINE));
        let results = results.map(serde_json::from_str);
        results.filter_map(std::result::Result::ok).collect()
    }
}

/// The line of the report.
impl std::fmt::Display for DiskRigResult {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let json = serde_json::to_string(self).map_err(|_| std::fmt::Error)?;
        write!(f, "{LINE}{json}")
    }
}

#[cfg(test)]
#[path = "machine_test.rs"]
mod tests;
