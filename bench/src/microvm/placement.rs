//! CPU pinning of a machine's threads, as with libvirt's `vcpupin` and `emulatorpin`: the vCPU on
//! the first CPU; the VMM's other threads, its network and the world's servers on the last.
//!
//! Without pinning, whole boots of every VMM are twice as slow as others: those in which the
//! scheduler puts the vCPU on the CPU of the servers.

use std::{
    collections::BTreeSet,
    fs,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use slipgate_testbed::{NetNs, affinity};

use crate::process_tree::descendants;

/// Interval between searches for threads, and the number of searches after the vCPU was found.
/// Threads that start later inherit the pinning of the thread that starts them.
const PAUSE: Duration = Duration::from_millis(10);
const LOOKS_AFTER: u32 = 3;

/// CPUs of a machine with one vCPU; `None` if only one CPU is available.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placement {
    vcpu: usize,
    others: usize,
}

impl Placement {
    /// Chooses CPUs of this machine; `None` if it has only one.
    pub(crate) fn here() -> Option<Placement> {
        let cpus = thread::available_parallelism().ok()?.get();
        (cpus > 1).then(|| Placement {
            vcpu: 0,
            others: cpus - 1,
        })
    }

    /// Returns the CPU of everything but the vCPU, the world's servers included.
    pub(crate) fn others(self) -> usize {
        self.others
    }

    /// Pins the threads of all processes in a namespace and of those that they have started, until
    /// `done` is set or all threads were found. A jailed VMM is in a namespace of its own.
    pub(crate) fn keep(self, namespace: &NetNs, done: &AtomicBool) {
        let mut left = LOOKS_AFTER;
        while left > 0 && !done.load(Ordering::Relaxed) {
            if self.place(namespace) {
                left -= 1;
            }
            thread::sleep(PAUSE);
        }
    }

    /// Pins the present threads. Returns whether a vCPU is among them. Threads that end meanwhile
    /// are skipped.
    fn place(self, namespace: &NetNs) -> bool {
        let mut has_vcpu = false;
        let inside = namespace.processes();
        let started = inside.iter().flat_map(|process| descendants(*process));
        let processes: BTreeSet<u32> = inside.iter().copied().chain(started).collect();
        for process in processes {
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

/// Whether a thread has the name of a vCPU thread in slipgate's VMM, Cloud Hypervisor, Firecracker,
/// or QEMU (`debug-threads=on`).
pub(crate) fn is_vcpu(name: &str) -> bool {
    name.starts_with("vcpu")
        || name.starts_with("fc_vcpu")
        || (name.starts_with("CPU ") && name.trim_end().ends_with("/KVM"))
}
