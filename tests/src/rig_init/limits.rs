//! Limits of a VMM by cgroup v2, on a host that has its controllers: the VMM is below its limits while
//! it runs, and leaves no cgroup. Each limit is exceeded too: a VMM above that of memory is killed, one with
//! too few threads is not made, one that wants more CPU time waits, and each is reported.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Child,
    thread,
    time::{Duration, Instant},
};

use slipgate_testbed::{Error, Result, error::Tried, signal};

use crate::mount::mount;

const MOUNT_POINT: &str = "/sys/fs/cgroup";
/// Memory limit in which the guest has room, bytes, and one that its kernel alone exceeds.
const ENOUGH_BYTES: u64 = 400 << 20;
const TOO_LITTLE_BYTES: u64 = 40 << 20;
/// Memory that a guest has touched once its kernel prints, at least, bytes.
const TOUCHED_BYTES: u64 = 24 << 20;
/// Threads that are too few for a machine of two vCPUs, and how its run ends.
const TOO_FEW_THREADS: u32 = 4;
pub(crate) const NOT_MADE: [i32; 1] = [1];
/// CPU time that is too little for a boot, percent of a CPU. Two vCPUs want up to 200.
const TOO_LITTLE_PERCENT: u32 = 20;
/// Most that a VMM with so little has over this time: the kernel hands out a part of it at a time.
const HAD_PERCENT: u128 = 40;
const HAD_OVER: Duration = Duration::from_secs(2);
/// Time for a guest to want more than it may have, and to be held back.
const THROTTLED_WITHIN: Duration = Duration::from_secs(120);
/// Exit status of a run that SIGTERM ends.
const TERMINATED: i32 = 143;
/// Exit status of `slipgate run` whose VMM died, and of one that died before there was a machine.
pub(crate) const KILLED: [i32; 2] = [122, 1];

/// Makes a cgroup with limits and without processes.
///
/// # Errors
/// The kernel has no cgroup v2.
pub(crate) fn make_idle_cgroup() -> Result<()> {
    let cgroup = make_cgroup("idle")?;
    for (file, limit) in [("cpu.max", "50000 100000"), ("memory.max", "1048576")] {
        let path = cgroup.join(file);
        fs::write(&path, limit).tried(format!("write {limit} to {}", path.display()))?;
    }
    Ok(())
}

/// Mounts cgroup v2, unless that was done before, and makes a cgroup of this name.
fn make_cgroup(name: &str) -> Result<PathBuf> {
    let enabled = Path::new(MOUNT_POINT).join("cgroup.subtree_control");
    if !enabled.exists() {
        mount(c"cgroup2", c"/sys/fs/cgroup")?;
        // As systemd has it on a host.
        fs::write(&enabled, "+cpu +memory +pids")
            .tried(format!("enable controllers in {}", enabled.display()))?;
    }
    let cgroup = Path::new(MOUNT_POINT).join(name);
    if !cgroup.is_dir() {
        fs::create_dir(&cgroup).tried(format!("make {}", cgroup.display()))?;
    }
    Ok(cgroup)
}

/// A cgroup in which slipgate makes those of its VMMs.
pub(crate) struct Limits {
    parent: PathBuf,
}

impl Limits {
    /// Mounts cgroup v2, unless that was done before, and makes the cgroup.
    ///
    /// # Errors
    /// The kernel has no cgroup v2.
    pub(crate) fn make() -> Result<Self> {
        Ok(Self {
            parent: make_cgroup("vms")?,
        })
    }

    /// Flags of `slipgate run` by which the guest has room.
    pub(crate) fn flags(&self) -> Vec<String> {
        self.flags_with(300, ENOUGH_BYTES, 64)
    }

    /// Flags by which it has not.
    pub(crate) fn flags_that_kill(&self) -> Vec<String> {
        self.flags_with(300, TOO_LITTLE_BYTES, 64)
    }

    /// Flags by which its VMM can't be made for want of threads.
    pub(crate) fn flags_of_few_threads(&self) -> Vec<String> {
        self.flags_with(300, ENOUGH_BYTES, TOO_FEW_THREADS)
    }

    /// Flags by which its VMM has less CPU time than it wants.
    pub(crate) fn flags_that_throttle(&self) -> Vec<String> {
        self.flags_with(TOO_LITTLE_PERCENT, ENOUGH_BYTES, 64)
    }

    fn flags_with(&self, cpu_percent: u32, memory_bytes: u64, threads: u32) -> Vec<String> {
        let parent = self.parent.display().to_string();
        let [cpu, memory] = [cpu_percent.into(), memory_bytes].map(|it: u64| it.to_string());
        let threads = threads.to_string();
        ["--cgroup", &parent, "--cpu-max", &cpu]
            .into_iter()
            .chain(["--memory-max", &memory, "--pids-max", &threads])
            .map(str::to_owned)
            .collect()
    }

    /// Checks the cgroup of the VMM that runs now.
    ///
    /// # Errors
    /// It is missing, a limit is another one, or the guest's memory and the VMM's threads are not
    /// charged to it.
    pub(crate) fn check_running(&self) -> Result<()> {
        let children = self.children()?;
        let [own] = &children[..] else {
            return Err(Error::unexpected(format!(
                "one VMM runs, and its cgroups are {children:?}"
            )));
        };
        let read = |file: &str| {
            let path = own.join(file);
            let text = fs::read_to_string(&path).tried(format!("read {}", path.display()))?;
            Ok::<_, Error>(text.trim().to_owned())
        };
        let number = |file: &str| Ok::<_, Error>(read(file)?.parse::<u64>().unwrap_or(0));
        for (file, value) in [
            ("cpu.max", "300000 100000"),
            ("memory.max", &ENOUGH_BYTES.to_string()),
            ("pids.max", "64"),
        ] {
            let set = read(file)?;
            if set != value {
                return Err(Error::unexpected(format!("{file} is {set}, not {value}")));
            }
        }
        let (memory, threads) = (number("memory.current")?, number("pids.current")?);
        // Two vCPUs, and the thread that began.
        if !(TOUCHED_BYTES..=ENOUGH_BYTES).contains(&memory) || !(3..=64).contains(&threads) {
            return Err(Error::unexpected(format!(
                "{memory} bytes and {threads} threads are charged to the VMM's cgroup"
            )));
        }
        println!("limits: {memory} bytes and {threads} threads of the VMM are in its cgroup");
        Ok(())
    }

    /// Checks how a run by [`Limits::flags_that_kill`] ended.
    ///
    /// # Errors
    /// It was not killed for its memory, or that was not reported.
    pub(crate) fn check_killed(&self, status: Option<i32>, stderr: &str) -> Result<()> {
        let is_expected = status.is_some_and(|status| KILLED.contains(&status));
        if !is_expected || !stderr.contains("for it reached --memory-max") {
            return Err(Error::unexpected(format!(
                "a guest in too little memory ended with {status:?}: {stderr}"
            )));
        }
        println!("limits: a VMM above --memory-max was killed, and slipgate says so");
        self.check_left()
    }

    /// Checks how a run by [`Limits::flags_of_few_threads`] ended.
    ///
    /// # Errors
    /// There was a machine, or the limit was not reported.
    pub(crate) fn check_not_made(&self, status: Option<i32>, stderr: &str) -> Result<()> {
        let is_expected = status.is_some_and(|status| NOT_MADE.contains(&status));
        if !is_expected || !stderr.contains("for it reached --pids-max") {
            return Err(Error::unexpected(format!(
                "a VMM that may have {TOO_FEW_THREADS} threads ended with {status:?}: {stderr}"
            )));
        }
        println!("limits: a VMM above --pids-max was not made, and slipgate says so");
        self.check_left()
    }

    /// Checks a run by [`Limits::flags_that_throttle`], which has just begun, and ends it.
    ///
    /// # Errors
    /// It had more CPU time than it may all the time, or was not held back, or that was not reported.
    pub(crate) fn check_throttled(&self, running: Child) -> Result<()> {
        let until = Instant::now() + THROTTLED_WITHIN;
        let read = |name: &str| {
            let children = self.children().unwrap_or_default();
            fs::read_to_string(children.first()?.join(name)).ok()
        };
        let stat = |name: &str| {
            let text = read("cpu.stat")?;
            let line = text.lines().find(|line| line.starts_with(name))?;
            line.split_whitespace().nth(1)?.parse::<u64>().ok()
        };
        while stat("throttled_usec").unwrap_or(0) == 0 && Instant::now() < until {
            thread::sleep(Duration::from_millis(50));
        }
        let limit = read("cpu.max").unwrap_or_default();
        // Where the machine itself stood still, its CPU's thread had all of that time, and pays it back.
        let mut had_percent = None;
        while had_percent.is_none_or(|had| had > HAD_PERCENT) && Instant::now() < until {
            let (before_us, began) = (stat("usage_usec"), Instant::now());
            thread::sleep(HAD_OVER);
            let (after_us, took) = (stat("usage_usec"), began.elapsed());
            let (Some(before_us), Some(after_us)) = (before_us, after_us) else {
                break;
            };
            let had = u128::from(after_us - before_us) * 100 / took.as_micros();
            println!("limits: a VMM with {TOO_LITTLE_PERCENT} % of a CPU had {had} %");
            had_percent = Some(had);
        }
        signal(running.id(), libc::SIGTERM);
        let end = running.wait_with_output().tried("wait for slipgate run")?;
        let stderr = String::from_utf8_lossy(&end.stderr);
        let is_set = limit.trim() == format!("{TOO_LITTLE_PERCENT}000 100000");
        let is_little = had_percent.is_some_and(|had| had <= HAD_PERCENT);
        let is_said = stderr.contains("--cpu-max has held the VMM's threads back for");
        let is_ended = end.status.code() == Some(TERMINATED);
        if !(is_set && is_little && is_said && is_ended) {
            return Err(Error::unexpected(format!(
                "a VMM that may have {TOO_LITTLE_PERCENT} % of a CPU had {had_percent:?} % at last, by \
                 the limit {limit:?}, and ended with {}: {stderr}",
                end.status
            )));
        }
        println!("limits: a VMM above --cpu-max was held back, and slipgate says so");
        self.check_left()
    }

    /// Checks that no cgroup is left behind.
    ///
    /// # Errors
    /// One is.
    pub(crate) fn check_left(&self) -> Result<()> {
        match self.children()? {
            left if left.is_empty() => Ok(()),
            left => Err(Error::unexpected(format!("left behind: {left:?}"))),
        }
    }

    fn children(&self) -> Result<Vec<PathBuf>> {
        let what = || format!("read {}", self.parent.display());
        let mut children = Vec::new();
        for entry in fs::read_dir(&self.parent).tried(what())? {
            let path = entry.tried(what())?.path();
            if path.is_dir() {
                children.push(path);
            }
        }
        Ok(children)
    }
}
