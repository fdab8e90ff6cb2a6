//! Which CPU a machine's threads keep to, as with libvirt's `vcpupin` and `emulatorpin`: the vCPU has
//! the first, all else of the VMM and of its network the last, where the world's servers are too.
//!
//! Left to the scheduler, whole boots are twice as slow as others, of every VMM: those in which the
//! vCPU has come to share its CPU with the servers.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context, Result};
use slipgate_testbed::{NetNs, affinity};

/// Between two looks for threads, and how often to look once more when the vCPU was there: threads
/// that begin later are placed as those that begin them.
const PAUSE: Duration = Duration::from_millis(10);
const LOOKS_AFTER: u32 = 3;

/// The CPUs of a machine with one vCPU; `None` where there is only one to be had.
#[derive(Clone, Copy, Debug)]
pub(super) struct Placement {
    vcpu: usize,
    others: usize,
}

impl Placement {
    /// On this machine.
    pub(super) fn here() -> Option<Placement> {
        let cpus = thread::available_parallelism().ok()?.get();
        (cpus > 1).then(|| Placement {
            vcpu: 0,
            others: cpus - 1,
        })
    }

    /// Where all but the vCPU is, and the world's servers.
    pub(super) fn others(self) -> usize {
        self.others
    }

    /// Places the threads of all processes in a namespace, until `done` or until all are there.
    pub(super) fn keep(self, namespace: &NetNs, done: &AtomicBool) -> Result<()> {
        let path = namespace.path();
        let wanted = fs::metadata(&path)
            .with_context(|| format!("look at {}", path.display()))?
            .ino();
        let mut left = LOOKS_AFTER;
        while left > 0 && !done.load(Ordering::Relaxed) {
            if self.place(wanted) {
                left -= 1;
            }
            thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Says whether there is a vCPU. Who ends meanwhile needs no place.
    fn place(self, namespace: u64) -> bool {
        let mut has_vcpu = false;
        let inside = |process: &Path| {
            fs::metadata(process.join("ns/net")).is_ok_and(|of| of.ino() == namespace)
        };
        for process in entries(Path::new("/proc")).filter(|path| inside(path)) {
            for task in entries(&process.join("task")) {
                let name = fs::read_to_string(task.join("comm")).unwrap_or_default();
                let is_vcpu = is_vcpu(&name);
                has_vcpu |= is_vcpu;
                let cpu = if is_vcpu { self.vcpu } else { self.others };
                if let Some(number) = number(&task) {
                    let _ = affinity::pin(number, cpu);
                }
            }
        }
        has_vcpu
    }
}

/// As slipgate's VMM names such a thread, and QEMU (`debug-threads=on`).
fn is_vcpu(name: &str) -> bool {
    name.starts_with("vcpu") || (name.starts_with("CPU ") && name.trim_end().ends_with("/KVM"))
}

/// What of a folder has a number for a name.
fn entries(folder: &Path) -> impl Iterator<Item = std::path::PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.path())
        .filter(|path| number(path).is_some())
}

fn number(path: &Path) -> Option<i32> {
    path.file_name()?.to_str()?.parse().ok()
}
