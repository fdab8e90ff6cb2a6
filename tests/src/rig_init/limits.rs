//! Limits of a VMM by cgroup v2, on a host that has its controllers: the VMM is below its limits while
//! it runs, is killed above them, which is reported, and leaves no cgroup.

use std::{
    fs,
    path::{Path, PathBuf},
};

use slipgate_testbed::{Error, Result, error::Tried};

use crate::boot::mount;

const MOUNT_POINT: &str = "/sys/fs/cgroup";
/// Memory limit in which the guest has room, bytes, and one that its kernel alone exceeds.
const ENOUGH_BYTES: u64 = 400 << 20;
const TOO_LITTLE_BYTES: u64 = 40 << 20;
/// Memory that a guest has touched once its kernel prints, at least, bytes.
const TOUCHED_BYTES: u64 = 24 << 20;
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
        self.flags_with(ENOUGH_BYTES)
    }

    /// Flags by which it has not.
    pub(crate) fn flags_that_kill(&self) -> Vec<String> {
        self.flags_with(TOO_LITTLE_BYTES)
    }

    fn flags_with(&self, memory_bytes: u64) -> Vec<String> {
        let parent = self.parent.display().to_string();
        let memory = memory_bytes.to_string();
        ["--cgroup", &parent, "--cpu-max", "300"]
            .into_iter()
            .chain(["--memory-max", &memory, "--pids-max", "64"])
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
