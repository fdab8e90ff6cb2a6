//! Keeping threads on a CPU, so that measurements repeat.

use crate::error::{Result, Tried, checked};

/// Pins the calling thread to `cpu`, and the threads and processes that it starts later.
///
/// # Errors
/// The CPU does not exist or is not allowed to this process.
pub fn pin_thread(cpu: usize) -> Result<()> {
    pin(0, cpu)
}

/// Pins a thread to `cpu`; number 0 is the calling thread.
///
/// # Errors
/// The thread or the CPU does not exist, or the CPU is not allowed to this process.
pub fn pin(thread: libc::pid_t, cpu: usize) -> Result<()> {
    let what = || format!("pin the thread {thread} (0: this one) to CPU {cpu}");
    if cpu >= CPUS {
        return Err(std::io::Error::from_raw_os_error(libc::EINVAL)).tried(what());
    }
    permit(thread, cpu..cpu + 1).tried(what())
}

/// Number of CPUs in a set.
const CPUS: usize = libc::CPU_SETSIZE as usize;

/// Lets a thread run on these CPUs, of which one exists at least.
fn permit(thread: libc::pid_t, cpus: std::ops::Range<usize>) -> std::io::Result<()> {
    // SAFETY: cpu_set_t is a bit set, for which zeroes are valid.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for cpu in cpus.start..cpus.end.min(CPUS) {
        // SAFETY: the number was checked against the set's size.
        unsafe { libc::CPU_SET(cpu, &mut set) };
    }
    // SAFETY: the set is readable for its size.
    checked(unsafe { libc::sched_setaffinity(thread, size_of_val(&set), &raw const set) }).map(drop)
}

/// Does something on a thread that the scheduler places, wherever the caller is pinned; threads
/// that it starts are not pinned either.
pub fn unpinned<T: Send>(f: impl FnOnce() -> T + Send) -> T {
    on_thread(|| {
        // The kernel leaves out the CPUs that there are not.
        let _ = permit(0, 0..CPUS);
        f()
    })
}

/// Does something on a thread that keeps to a CPU, where one is given and there is one; threads
/// that it starts keep to it too.
pub fn on_cpu<T: Send>(cpu: Option<usize>, f: impl FnOnce() -> T + Send) -> T {
    let work = || {
        if let Some(cpu) = cpu {
            // Where the machine has no such CPU, it is done unpinned.
            let _ = pin_thread(cpu);
        }
        f()
    };
    on_thread(work)
}

fn on_thread<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| scope.spawn(work).join())
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
