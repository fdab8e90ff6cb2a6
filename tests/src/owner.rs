//! Ownership marks of resources that outlive a descriptor: child processes and pins.
//!
//! Both are marked with the pid and start time of the test process. So a later run can distinguish
//! the leftovers of a killed run (an orphaned engine, a pin directory) from the resources of a
//! parallel one.

use std::{fs, sync::OnceLock};

/// The environment variable that marks a child process with its owner's token.
pub(crate) const VARIABLE: &str = "SLIPGATE_TESTBED_OWNER";

/// This process's token: `PID-STARTTIME`.
pub(crate) fn token() -> &'static str {
    static TOKEN: OnceLock<String> = OnceLock::new();
    TOKEN.get_or_init(|| {
        let pid = std::process::id();
        format!("{pid}-{}", start_time(pid).unwrap_or(0))
    })
}

/// Whether the process that made `token` still runs. An unreadable token counts as alive: it is not
/// ours to sweep.
pub(crate) fn alive(token: &str) -> bool {
    let parsed = token
        .split_once('-')
        .and_then(|(pid, start)| Some((pid.parse::<u32>().ok()?, start.parse::<u64>().ok()?)));
    parsed.is_none_or(|(pid, start)| start_time(pid) == Some(start))
}

/// Kills the children that dead test processes left, once per process.
pub(crate) fn sweep_processes() {
    static SWEPT: OnceLock<()> = OnceLock::new();
    SWEPT.get_or_init(|| {
        for pid in pids() {
            let Ok(environment) = fs::read(format!("/proc/{pid}/environ")) else {
                continue;
            };
            let owner = environment.split(|byte| *byte == 0).find_map(|entry| {
                std::str::from_utf8(entry)
                    .ok()?
                    .strip_prefix(VARIABLE)?
                    .strip_prefix('=')
            });
            if owner.is_some_and(|token| !alive(token)) {
                kill(pid);
            }
        }
    });
}

/// Sends SIGKILL to a process.
pub(crate) fn kill(pid: u32) {
    signal(pid, libc::SIGKILL);
}

/// Sends a signal to a process; one that has ended gets none.
pub fn signal(pid: u32, signal: i32) {
    // SAFETY: kill takes numbers only.
    unsafe { libc::kill(pid as i32, signal) };
}

/// Whether the process runs; a zombie does not.
pub(crate) fn runs(pid: u32) -> bool {
    start_time(pid).is_some()
}

/// The processes whose parent is `parent`.
pub(crate) fn children(parent: u32) -> Vec<u32> {
    pids()
        .filter(|pid| stat_field(*pid, 1) == Some(u64::from(parent)))
        .collect()
}

/// Those of them whose command line begins with `title`, as a process of slipgate's names itself.
pub fn children_named(parent: u32, title: &str) -> Vec<u32> {
    let is_named = |pid: &u32| {
        let line = fs::read(format!("/proc/{pid}/cmdline"));
        line.is_ok_and(|line| line.starts_with(title.as_bytes()))
    };
    children(parent).into_iter().filter(is_named).collect()
}

pub(crate) fn pids() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn start_time(pid: u32) -> Option<u64> {
    // A zombie is as good as gone.
    (state(pid)? != 'Z').then(|| stat_field(pid, 19))?
}

fn state(pid: u32) -> Option<char> {
    stat_after_name(pid)?.trim_start().chars().next()
}

/// Field `index` of /proc/PID/stat counted from the state (0), as proc(5) lists them from 3.
fn stat_field(pid: u32, index: usize) -> Option<u64> {
    stat_after_name(pid)?
        .split_whitespace()
        .nth(index)?
        .parse()
        .ok()
}

/// Text after the parenthesised name, which may itself contain spaces and parentheses.
fn stat_after_name(pid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    Some(stat[stat.rfind(')')? + 1..].to_owned())
}
