use super::*;

fn spec() -> CgroupSpec {
    CgroupSpec {
        parent: PathBuf::from("/nowhere"),
        cpu_percent: Some(150),
        memory_bytes: Some(1 << 30),
        swap_bytes: Some(0),
        pids: Some(64),
    }
}

/// A directory with the files that a cgroup has.
fn parent(controllers: &str) -> tempfile::TempDir {
    let parent = tempfile::tempdir().unwrap();
    fs::write(parent.path().join("cgroup.controllers"), controllers).unwrap();
    fs::write(parent.path().join("cgroup.subtree_control"), "").unwrap();
    parent
}

#[test]
fn limits_are_written_and_controllers_enabled() {
    let parent = parent("cpuset cpu io memory pids\n");
    // Left by a process that was killed, and by one that runs.
    let prefix = own_prefix();
    let left = parent.path().join(format!("{prefix}4194305"));
    let other = parent.path().join(format!("{prefix}1"));
    // Of another PID namespace, and of nobody here.
    let foreign = parent.path().join(format!("{PREFIX}7-4194305"));
    let users = parent.path().join("slipgate-own");
    for path in [&left, &other, &foreign, &users] {
        fs::create_dir(path).unwrap();
    }
    fs::write(parent.path().join("cgroup.subtree_control"), "pids\n").unwrap();
    let cgroup = Cgroup::make_in(parent.path(), &spec()).unwrap();
    assert!(!left.exists() && other.exists() && foreign.exists() && users.exists());
    let read = |file: &str| fs::read_to_string(cgroup.path.join(file)).unwrap();
    assert_eq!(read("cpu.max"), "150000 100000");
    assert_eq!(read("memory.max"), (1_u64 << 30).to_string());
    assert_eq!(read("memory.swap.max"), "0");
    assert_eq!(read("pids.max"), "64");
    // One that was enabled is left alone; here each write takes the last one's place.
    let enabled = fs::read_to_string(parent.path().join("cgroup.subtree_control")).unwrap();
    assert_eq!(enabled, "+memory");
    cgroup.take(7).unwrap();
    assert_eq!(read("cgroup.procs"), "7");

    // A kill for the host's want of memory is not this limit's.
    for (oom, kills, why) in [
        (0, 0, None),
        (1, 0, None),
        (0, 1, Some("for want of memory outside of its own cgroup")),
        (1, 1, Some("for it reached --memory-max")),
    ] {
        let events =
            format!("low 0\nhigh 0\nmax 12\noom {oom}\noom_kill {kills}\noom_group_kill 0\n");
        fs::write(cgroup.path.join("memory.events"), events).unwrap();
        assert_eq!(cgroup.out_of_memory(), why);
    }
    let no_limit = Cgroup {
        path: cgroup.path.clone(),
        limits_memory: false,
        limits_threads: false,
    };
    let why = "for it reached memory.max of its cgroup";
    assert_eq!(no_limit.out_of_memory(), Some(why));

    let own = "for it reached --pids-max, or a cgroup above its pids.max";
    let above = "for a cgroup above reached its pids.max";
    for (refused, own, above) in [(0, None, None), (3, Some(own), Some(above))] {
        fs::write(cgroup.path.join("pids.events"), format!("max {refused}\n")).unwrap();
        assert_eq!(cgroup.out_of_threads(), own);
        assert_eq!(no_limit.out_of_threads(), above);
    }
    std::mem::forget(no_limit);

    for (throttled_us, throttled) in [(0, None), (1_500, Some(Duration::from_micros(1_500)))] {
        let stat = format!("usage_usec 7\nnr_throttled 2\nthrottled_usec {throttled_us}\n");
        fs::write(cgroup.path.join("cpu.stat"), stat).unwrap();
        assert_eq!(cgroup.throttled(), throttled);
    }

    // A cgroup's files go with it.
    let path = cgroup.path.clone();
    for file in fs::read_dir(&path).unwrap().flatten() {
        fs::remove_file(file.path()).unwrap();
    }
    drop(cgroup);
    assert!(!path.exists());
}

#[test]
fn what_a_host_lacks_is_said_with_a_remedy() {
    let parent = parent("cpu hugetlb\n");
    let error = Cgroup::make_in(parent.path(), &spec())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("lacks the controller `memory`, which --memory-max needs"),
        "{error}"
    );
    assert!(error.contains("leave --memory-max out"), "{error}");
    let entries = fs::read_dir(parent.path()).unwrap().count();
    assert_eq!(entries, 2, "nothing was made");
    let enabled = fs::read_to_string(parent.path().join("cgroup.subtree_control")).unwrap();
    assert_eq!(enabled, "", "nothing was enabled");

    let error = Cgroup::make(&CgroupSpec {
        parent: parent.path().to_owned(),
        ..spec()
    });
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("it is no directory of a cgroup v2 file system"),
        "{error}"
    );
}

#[test]
fn the_mount_point_is_found() {
    let hybrid = "24 20 0:21 / /sys rw - sysfs sysfs rw\n\
                  31 24 0:27 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw\n\
                  32 24 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n";
    let found = mount_point(hybrid);
    assert_eq!(found, Some("/sys/fs/cgroup/unified".into()));
    assert_eq!(
        mount_point("24 20 0:21 / /sys rw - sysfs cgroup2 rw\n"),
        None
    );
    assert_eq!(mount_point(""), None);
}
