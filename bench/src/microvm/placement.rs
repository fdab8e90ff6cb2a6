//! Which CPU a machine's threads keep to, as with libvirt's `vcpupin` and `emulatorpin`: the vCPU
//! has the first, all else of the VMM and of its network the last, where the world's servers are
//! too.
//!
//! Left to the scheduler, whole boots are twice as slow as others, of every VMM: those in which the
//! vCPU has come to share its CPU with the servers.

use std::{
    fs,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

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
    /// Chooses CPUs of this machine; `None` if it has only one.
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
    pub(super) fn keep(self, namespace: &NetNs, done: &AtomicBool) {
        let mut left = LOOKS_AFTER;
        while left > 0 && !done.load(Ordering::Relaxed) {
            if self.place(namespace) {
                left -= 1;
            }
            thread::sleep(PAUSE);
        }
    }

    /// Says whether there is a vCPU. Who ends meanwhile needs no place.
    fn place(self, namespace: &NetNs) -> bool {
        let mut has_vcpu = false;
        for process in namespace.processes() {
            let tasks = fs::read_dir(format!("/proc/{process}/task"));
            for task in tasks.into_iter().flatten().flatten() {
                let name = fs::read_to_string(task.path().join("comm")).unwrap_or_default();
                let is_vcpu = is_vcpu(&name);
                has_vcpu |= is_vcpu;
                let cpu = if is_vcpu { self.vcpu } else { self.others };
                let number = task.file_name().to_str().and_then(|text| text.parse().ok());
                if let Some(number) = number {
                    let _ = affinity::pin(number, cpu);
                }
            }
        }
        has_vcpu
    }
}

/// Whether a thread has the name of a vCPU thread in slipgate's VMM or in QEMU
/// (`debug-threads=on`).
fn is_vcpu(name: &str) -> bool {
    name.starts_with("vcpu") || (name.starts_with("CPU ") && name.trim_end().ends_with("/KVM"))
}
