//! CPU time of other processes.

use std::{fs, time::Duration};

/// A tick of /proc/PID/stat (`USER_HZ` is 100 on every Linux).
const TICK: Duration = Duration::from_millis(10);

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

/// Returns the CPU time, in ticks of 10 ms, of all children of a process that have ended and that it has
/// waited for, and of their own such children; none for a process that is not there.
pub fn of_waited_children(pid: u32) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let ticks = |stat: &str| {
        // The name before may have spaces and parentheses. Behind it are the fields from 3 on
        // (proc_pid_stat(5)): cutime and cstime are 16 and 17.
        let mut fields = stat[stat.rfind(')')? + 1..].split_whitespace().skip(13);
        let mut next = || fields.next()?.parse::<u32>().ok();
        Some(next()? + next()?)
    };
    TICK * ticks(&stat).unwrap_or_default()
}

#[cfg(test)]
#[path = "cpu_time_test.rs"]
mod tests;
