//! Keeping threads on a CPU, so that measurements repeat.

use crate::error::{Result, Tried, checked};

/// Pins the calling thread to `cpu`, and the threads and processes that it starts later.
pub fn pin_thread(cpu: usize) -> Result<()> {
    pin(0, cpu)
}

/// Pins a thread to `cpu`; number 0 is the calling thread.
pub fn pin(thread: libc::pid_t, cpu: usize) -> Result<()> {
    let what = || format!("pin the thread {thread} (0: this one) to CPU {cpu}");
    if cpu >= libc::CPU_SETSIZE as usize {
        return Err(std::io::Error::from_raw_os_error(libc::EINVAL)).tried(what());
    }
    // SAFETY: cpu_set_t is a bit set, for which zeroes are valid.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the number was checked against the set's size.
    unsafe { libc::CPU_SET(cpu, &mut set) };
    // SAFETY: the set is readable for its size.
    checked(unsafe { libc::sched_setaffinity(thread, size_of_val(&set), &raw const set) })
        .map(drop)
        .tried(what())
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
    std::thread::scope(|scope| scope.spawn(work).join())
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
