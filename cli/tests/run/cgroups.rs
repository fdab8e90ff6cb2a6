//! The VMM's cgroup: it is put there, has its limits, and leaves nothing.
use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use slipgate_testbed::{MicroVm, left_out, require_kvm, require_root_and_tun, signal, skipped};

use crate::{Bed, WAIT, payload::Payload};

/// A cgroup of the test's own, which goes with it.
pub(crate) struct Parent(pub(crate) PathBuf);

impl Parent {
    /// `None`: this host has no cgroup v2, or not to make one in.
    pub(crate) fn make(name: &str) -> Option<Self> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let line = mounts.lines().find(|line| line.contains(" - cgroup2 "))?;
        let root = Path::new(line.split_whitespace().nth(4)?);
        let path = root.join(format!("slipgate-test-{name}-{}", std::process::id()));
        fs::create_dir(&path).ok()?;
        Some(Self(path))
    }

    fn has(&self, controller: &str) -> bool {
        let there = fs::read_to_string(self.0.join("cgroup.controllers")).unwrap();
        there.split_whitespace().any(|it| it == controller)
    }

    pub(crate) fn children(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(&self.0).unwrap().flatten();
        entries
            .map(|entry| entry.path())
            .filter(|path| path.is_dir())
            .collect()
    }
}

impl Drop for Parent {
    fn drop(&mut self) {
        let removed = fs::remove_dir(&self.0);
        if !std::thread::panicking() {
            removed.unwrap();
        }
    }
}

/// The name that the broker gives to its VMM's cgroup.
fn name(broker: u32) -> String {
    let namespace = fs::metadata("/proc/self/ns/pid").unwrap().ino();
    format!("slipgate-{namespace}-{broker}")
}

/// Ends a machine, and checks that it leaves neither a cgroup nor anything else.
#[track_caller]
fn assert_its_end_leaves_nothing(machine: MicroVm, parent: &Parent, bed: &Bed) {
    signal(machine.broker_pid(), libc::SIGTERM);
    let end = machine.finish(WAIT).unwrap();
    assert_eq!(end.status.code(), Some(143), "{}", end.stderr);
    assert_eq!(parent.children(), Vec::<PathBuf>::new(), "{}", end.stderr);
    bed.assert_nothing_is_left();
}

#[test]
fn the_vmm_is_in_a_cgroup_of_its_own_which_goes_with_it() {
    require_root_and_tun!();
    require_kvm!();
    let Some(parent) = Parent::make("own") else {
        return skipped!("this host has no cgroup v2");
    };
    let path = parent.0.display().to_string();
    let bed = Bed::new();
    let image = Payload::default().say("here\n").halt();
    let mut machine = bed.start(&image, &["--cgroup", &path]);
    machine.await_line("here", WAIT).unwrap();
    let own = parent.0.join(name(machine.broker_pid()));
    assert_eq!(parent.children(), std::slice::from_ref(&own));
    let vmm = machine.vmm_pid().unwrap();
    let procs = fs::read_to_string(own.join("cgroup.procs")).unwrap();
    assert_eq!(
        procs.split_whitespace().collect::<Vec<_>>(),
        [vmm.to_string()]
    );
    assert_its_end_leaves_nothing(machine, &parent, &bed);
}

#[test]
fn the_cgroup_has_the_limits_that_were_given() {
    require_root_and_tun!();
    require_kvm!();
    let Some(parent) = Parent::make("limits") else {
        return skipped!("this host has no cgroup v2");
    };
    let path = parent.0.display().to_string();
    let mut flags = vec!["--cgroup", &path];
    let limits = [
        ("cpu", ["--cpu-max", "150"], "cpu.max", "150000 100000"),
        (
            "memory",
            ["--memory-max", "256M"],
            "memory.max",
            "268435456",
        ),
        ("pids", ["--pids-max", "200"], "pids.max", "200"),
    ];
    let (there, lacked): (Vec<_>, Vec<_>) = limits.into_iter().partition(|it| parent.has(it.0));
    if !lacked.is_empty() {
        let lacked: Vec<_> = lacked.iter().map(|it| it.0).collect();
        left_out!("this host's cgroup v2 lacks {}", lacked.join(", "));
    }
    if there.is_empty() {
        return;
    }
    for (_, flag, ..) in &there {
        flags.extend(flag);
    }
    let bed = Bed::new();
    let image = Payload::default().say("here\n").halt();
    let mut machine = bed.start(&image, &flags);
    machine.await_line("here", WAIT).unwrap();
    let own = parent.0.join(name(machine.broker_pid()));
    for (_, _, file, value) in there {
        let set = fs::read_to_string(own.join(file)).unwrap();
        assert_eq!(set.trim(), value, "{file}");
    }
    assert_its_end_leaves_nothing(machine, &parent, &bed);
}

#[test]
fn limits_that_the_host_can_not_keep_are_refused_and_leave_nothing() {
    require_root_and_tun!();
    require_kvm!();
    let Some(parent) = Parent::make("lacks") else {
        return skipped!("this host has no cgroup v2");
    };
    let bed = Bed::new();
    let folder = bed.folder.path().display().to_string();
    let mut refused = vec![(folder, "it is no directory of a cgroup v2 file system")];
    if !parent.has("pids") {
        let path = parent.0.display().to_string();
        refused.push((
            path,
            "it lacks the controller `pids`, which --pids-max needs",
        ));
    }
    for (path, why) in refused {
        let flags = ["--cgroup", &path, "--pids-max", "200"];
        let end = bed.start_with(&flags).finish(WAIT).unwrap();
        assert_eq!(end.status.code(), Some(2), "{}", end.stderr);
        assert!(end.stderr.contains(why), "{}", end.stderr);
    }
    let end = bed.start_with(&["--pids-max", "200"]).finish(WAIT).unwrap();
    assert_eq!(end.status.code(), Some(2), "{}", end.stderr);
    assert!(end.stderr.contains("--cgroup"), "{}", end.stderr);
    assert_eq!(parent.children(), Vec::<PathBuf>::new());
    bed.assert_nothing_is_left();
}
