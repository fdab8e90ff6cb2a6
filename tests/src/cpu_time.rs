//! CPU time of threads of another process.

use std::{fs, time::Duration};

/// Returns the CPU time, since their start, of a process's threads whose names are chosen.
pub fn of_threads(pid: u32, chosen: impl Fn(&str) -> bool) -> Duration {
    let threads = fs::read_dir(format!("/proc/{pid}/task"));
    let of = |thread: fs::DirEntry| {
        let read = |name: &str| fs::read_to_string(thread.path().join(name)).unwrap_or_default();
        // Time on a CPU, ns, is the first (Documentation/scheduler/sched-stats.rst).
        let ns = || {
            read("schedstat")
                .split_whitespace()
                .next()?
                .parse::<u64>()
                .ok()
        };
        chosen(read("comm").trim()).then(ns).flatten()
    };
    let all = threads.into_iter().flatten().flatten().filter_map(of);
    Duration::from_nanos(all.sum())
}

#[cfg(test)]
#[path = "cpu_time_test.rs"]
mod tests;
