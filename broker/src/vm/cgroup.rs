//! The cgroup of a VMM: limits of CPU, memory and processes (cgroup v2).
//!
//! # Theory of operation
//! Who starts the machine names a parent cgroup without processes of its own, which is root's or was
//! delegated to the user. The broker enables the controllers that are needed for its children, makes
//! a child for this machine, sets the limits, and puts the VMM into it before that has read its first
//! message. The VMM can't leave it: it has no file system. The child is removed after the VMM's end;
//! what a killed broker has left is removed by the next one with the same parent.
use std::{
    fs, io,
    os::unix::{ffi::OsStrExt as _, fs::MetadataExt as _},
    path::{Path, PathBuf},
    process, thread,
    time::{Duration, Instant},
};

use slipgate_policy::document::ConfigError;

use crate::config::CgroupSpec;

/// First part of the names of cgroups that are made here. The PID namespace's inode follows, and the
/// process id in it: processes of another namespace can't be seen from here, so what is left of them
/// can't be told from what they use.
const PREFIX: &str = "slipgate-";
/// Period of `cpu.max`, µs.
const PERIOD_US: u64 = 100_000;
/// Type of a cgroup v2 file system (`CGROUP2_SUPER_MAGIC`).
const CGROUP2: i64 = 0x6367_7270;
/// Time within which a cgroup is empty after the end of its last process.
const EMPTY_WITHIN: Duration = Duration::from_secs(1);
const LIMITS: &str = "leave --cpu-max, --memory-max, --swap-max and --pids-max out";

/// A cgroup that goes with this.
#[derive(Debug)]
pub(crate) struct Cgroup {
    path: PathBuf,
    /// Whether it has the limit of `--memory-max`.
    limits_memory: bool,
    /// Whether it has the limit of `--pids-max`.
    limits_threads: bool,
}

impl Cgroup {
    /// Makes a cgroup with these limits.
    ///
    /// # Errors
    /// The host has no cgroup v2, the parent can't be used, or a controller is missing.
    pub(crate) fn make(spec: &CgroupSpec) -> Result<Cgroup, ConfigError> {
        let parent = match spec.parent.is_absolute() {
            true => spec.parent.clone(),
            false => {
                match mount_point(&fs::read_to_string("/proc/self/mountinfo").unwrap_or_default()) {
                    Some(root) => root.join(&spec.parent),
                    None => {
                        let problem = "this host has no cgroup v2 (none is mounted)";
                        return Err(refused(&spec.parent, problem, LIMITS));
                    }
                }
            }
        };
        if !is_cgroup2(&parent) {
            let problem = "it is no directory of a cgroup v2 file system";
            let remedy = "give one below the mount point of type cgroup2, or its path from there";
            return Err(refused(&parent, problem, remedy));
        }
        Cgroup::make_in(&parent, spec)
    }

    fn make_in(parent: &Path, spec: &CgroupSpec) -> Result<Cgroup, ConfigError> {
        let files = files(spec);
        let controllers = |file: &str| {
            let text = fs::read_to_string(parent.join(file)).unwrap_or_default();
            text.split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        let (there, enabled) = (
            controllers("cgroup.controllers"),
            controllers("cgroup.subtree_control"),
        );
        // All before any is enabled: a refusal changes nothing.
        for (controller, flag, ..) in &files {
            if !there.iter().any(|it| it == controller) {
                let problem = format!("it lacks the controller `{controller}`, which {flag} needs");
                let remedy = format!(
                    "enable it in cgroup.subtree_control of the cgroups above (a cgroup v1 hierarchy \
                     may have it), or leave {flag} out"
                );
                return Err(refused(parent, &problem, &remedy));
            }
        }
        for (controller, ..) in &files {
            if !enabled.iter().any(|it| it == controller) {
                let enable = fs::write(
                    parent.join("cgroup.subtree_control"),
                    format!("+{controller}"),
                );
                enable.map_err(|e| {
                    let why = match e.raw_os_error() {
                        Some(libc::EBUSY) => "it has processes of its own".to_owned(),
                        _ => e.to_string(),
                    };
                    let problem =
                        format!("`{controller}` can't be enabled for its children ({why})");
                    refused(parent, &problem, "give an empty cgroup that is yours")
                })?;
            }
        }
        let prefix = own_prefix();
        remove_left(parent, &prefix);
        let path = parent.join(format!("{prefix}{}", process::id()));
        fs::create_dir(&path).map_err(|e| {
            let problem = format!("no cgroup can be made in it ({e})");
            refused(
                parent,
                &problem,
                "give one that is yours or was delegated to you",
            )
        })?;
        let limits_memory = spec.memory_bytes.is_some();
        let cgroup = Cgroup {
            path,
            limits_memory,
            limits_threads: spec.pids.is_some(),
        };
        for (_, flag, file, value) in &files {
            fs::write(cgroup.path.join(file), value).map_err(|e| {
                let remedy = "give another value, or leave it out";
                ConfigError::new(
                    flag,
                    value,
                    format!("{file} does not take it ({e})"),
                    remedy,
                )
            })?;
        }
        Ok(cgroup)
    }

    /// Puts a process into it.
    ///
    /// # Errors
    /// The kernel refuses: who is not root can't move a process into it from elsewhere.
    pub(crate) fn take(&self, pid: u32) -> Result<(), ConfigError> {
        fs::write(self.path.join("cgroup.procs"), pid.to_string()).map_err(|e| {
            let problem = format!("the VMM can't be moved into it ({e})");
            let remedy = "start this command in a cgroup that was delegated to you with the parent in \
                          it, such as by `systemd-run --user --scope -p Delegate=yes`";
            refused(&self.path, &problem, remedy)
        })
    }

    /// Returns why the kernel has killed a process in it for want of memory; `None`: it has not.
    pub(crate) fn out_of_memory(&self) -> Option<&'static str> {
        let events = fs::read_to_string(self.path.join("memory.events")).unwrap_or_default();
        // `oom_kill` counts the kills of processes in it for whichever limit, the host's memory too.
        // `oom` counts how often this cgroup's own was reached.
        if count(&events, "oom_kill") == 0 {
            return None;
        }
        Some(match (count(&events, "oom") > 0, self.limits_memory) {
            (true, true) => "for it reached --memory-max",
            (true, false) => "for it reached memory.max of its cgroup",
            (false, _) => "for want of memory outside of its own cgroup",
        })
    }

    /// Returns why a thread in it was refused; `None`: none was.
    pub(crate) fn out_of_threads(&self) -> Option<&'static str> {
        let events = fs::read_to_string(self.path.join("pids.events")).unwrap_or_default();
        // Before Linux 6.11 the limit of a cgroup above is counted here too, and later by
        // `pids_localevents` (kernel commit 73e75e6fc352).
        (count(&events, "max") > 0).then_some(match self.limits_threads {
            true => "for it reached --pids-max, or a cgroup above its pids.max",
            false => "for a cgroup above reached its pids.max",
        })
    }

    /// Returns for how long its threads have waited for CPU time beyond the limit, in sum; `None`: never.
    pub(crate) fn throttled(&self) -> Option<Duration> {
        let stat = fs::read_to_string(self.path.join("cpu.stat")).unwrap_or_default();
        let throttled_us = count(&stat, "throttled_usec");
        (throttled_us > 0).then(|| Duration::from_micros(throttled_us))
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let until = Instant::now() + EMPTY_WITHIN;
        // Its last process may be ending.
        while let Err(e) = fs::remove_dir(&self.path) {
            if e.raw_os_error() != Some(libc::EBUSY) || Instant::now() >= until {
                tracing::warn!("removing the cgroup {}: {e}", self.path.display());
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
}

fn refused(path: &Path, problem: &str, remedy: &str) -> ConfigError {
    ConfigError::new(
        "--cgroup",
        path.display(),
        problem.to_owned(),
        remedy.to_owned(),
    )
}

/// Returns the files to write, one per limit: controller, flag, file and value.
fn files(spec: &CgroupSpec) -> Vec<(&'static str, &'static str, &'static str, String)> {
    let cpu = spec.cpu_percent.map(|percent| {
        let quota = u64::from(percent) * PERIOD_US / 100;
        (
            "cpu",
            "--cpu-max",
            "cpu.max",
            format!("{quota} {PERIOD_US}"),
        )
    });
    let memory = spec
        .memory_bytes
        .map(|bytes| ("memory", "--memory-max", "memory.max", bytes.to_string()));
    let swap = spec
        .swap_bytes
        .map(|bytes| ("memory", "--swap-max", "memory.swap.max", bytes.to_string()));
    let pids = spec
        .pids
        .map(|pids| ("pids", "--pids-max", "pids.max", pids.to_string()));
    [cpu, memory, swap, pids].into_iter().flatten().collect()
}

/// Mount point of cgroup v2, from the text of /proc/self/mountinfo.
fn mount_point(mounts: &str) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        let is_it = after.split_whitespace().next() == Some("cgroup2");
        is_it.then(|| before.split_whitespace().nth(4).map(PathBuf::from))?
    })
}

/// Number in the line `name` of `memory.events`, or of a file of its form.
fn count(events: &str, name: &str) -> u64 {
    let number = |line: &str| {
        let (named, number) = line.split_once(' ')?;
        let is_it = named == name;
        is_it.then(|| number.trim().parse().ok())?
    };
    events.lines().find_map(number).unwrap_or(0)
}

/// Returns the prefix of the cgroup names of this PID namespace's processes.
fn own_prefix() -> String {
    // Without /proc all processes are in one namespace as far as can be told.
    let inode = fs::metadata("/proc/self/ns/pid").map_or(0, |data| data.ino());
    format!("{PREFIX}{inode}-")
}

fn is_cgroup2(path: &Path) -> bool {
    let Ok(path) = std::ffi::CString::new(path.as_os_str().as_bytes()) else {
        return false;
    };
    // SAFETY: zeroes are a valid statfs.
    let mut found: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the path is terminated, and the call fills `found`.
    let rc = unsafe { libc::statfs(path.as_ptr(), &raw mut found) };
    rc == 0 && found.f_type as i64 == CGROUP2
}

/// Removes the cgroups, whose names begin with `prefix`, of processes that were killed: those with
/// processes stay.
fn remove_left(parent: &Path, prefix: &str) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| name.strip_prefix(prefix));
        let pid = pid.and_then(|pid| pid.parse::<u32>().ok());
        let is_left = pid.is_some_and(|pid| {
            pid == process::id() || !Path::new("/proc").join(pid.to_string()).exists()
        });
        if is_left {
            // One that can't be removed is somebody's, or is made again with an error.
            let removed: io::Result<()> = fs::remove_dir(entry.path());
            drop(removed);
        }
    }
}

#[cfg(test)]
#[path = "cgroup_test.rs"]
mod tests;
