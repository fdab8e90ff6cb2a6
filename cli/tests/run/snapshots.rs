//! Pause, snapshot and restore of machines with a network.
use std::{
    fs,
    io::{Read as _, Write as _},
    os::unix::net::UnixListener,
    path::{Path, PathBuf},
    process::{Command, Output},
    time::Duration,
};

use slipgate_testbed::{
    MicroVm, MicroVmEnd, Slipgate, require_kvm, require_root_and_tun,
    servers::{TcpServer, TcpService},
    signal, skipped, slipgate,
    world::{SERVER, UPLINK},
};

use crate::{Bed, WAIT, eventually, vsock};

impl Bed {
    /// Runs `slipgate ARGS…` beside the machines.
    pub(crate) fn slipgate(&self, args: &[&str]) -> Output {
        let mut command = Command::new(slipgate::binary().unwrap());
        command.args(args);
        self.world.host.output_with(command, &[1, 2]).unwrap()
    }

    /// As [`Bed::slipgate`], and it has to succeed.
    #[track_caller]
    pub(crate) fn have(&self, args: &[&str]) -> String {
        let output = self.slipgate(args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{args:?}: {stderr}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Returns the statuses that `slipgate ps` gives of all machines.
    fn statuses(&self) -> Vec<serde_json::Value> {
        serde_json::from_str(&self.have(&["ps", "--json"])).unwrap()
    }

    /// Returns the status that it gives of this process's machine.
    pub(crate) fn status(&self, vm: &MicroVm) -> serde_json::Value {
        status_in(&self.statuses(), vm)
    }

    pub(crate) fn snapshot(&self, vm: &MicroVm, name: &str) -> PathBuf {
        let dir = self.folder.path().join(name);
        let pid = vm.broker_pid().to_string();
        self.have(&["snapshot", &pid, dir.to_str().unwrap()]);
        dir
    }

    pub(crate) fn restore(&self, dir: &Path, flags: &[&str]) -> MicroVm {
        let mut all = vec!["--restore", dir.to_str().unwrap()];
        all.extend(flags);
        self.start_with(&all)
    }
}

/// The machine of this process among all; null if it is not there.
fn status_in(all: &[serde_json::Value], vm: &MicroVm) -> serde_json::Value {
    let ours = all.iter().find(|status| status["pid"] == vm.broker_pid());
    ours.cloned().unwrap_or_default()
}

#[track_caller]
fn assert_passed(end: &MicroVmEnd) {
    let code = end.status.code();
    assert_eq!(code, Some(0), "{:#?}\n{}", end.lines, end.stderr);
}

/// The guest's card moves 80 MB a second each way, so streams last however fast the machine is.
const RATES: [&str; 4] = [
    "--net-rate-tx",
    "bandwidth=8M/100ms",
    "--net-rate-rx",
    "bandwidth=8M/100ms",
];

#[test]
fn a_guest_is_paused_amid_its_streams_and_goes_on() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let streams = TcpServer::start(&bed.world.net, (SERVER, 7000), TcpService::Streams).unwrap();
    let work = format!(
        "stream {0} 60000000 up x2; stream {0} 60000000 down x2",
        streams.address()
    );
    let flags = ["--cpus", "2", "--cmdline", &work];
    let mut vm = bed.start_with(&[&flags[..], &RATES].concat());
    vm.await_line("10.0.2.15", WAIT).unwrap();
    // By its number: for a name all machines are asked, those of other tests too that do not answer.
    let pid = vm.broker_pid().to_string();
    for _ in 0..5 {
        bed.have(&["pause", &pid]);
        assert_eq!(bed.status(&vm)["state"], "paused");
        std::thread::sleep(Duration::from_millis(100));
        bed.have(&["resume", &pid]);
        std::thread::sleep(Duration::from_millis(60));
    }
    let end = vm.finish(2 * WAIT).unwrap();
    assert_passed(&end);
    bed.assert_nothing_is_left();
}

/// Its stack gives a connection up that has had no data for 10 s of its own time.
#[test]
fn a_guest_that_is_paused_longer_than_it_waits_for_data_goes_on() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let streams = TcpServer::start(&bed.world.net, (SERVER, 7000), TcpService::Streams).unwrap();
    let work = format!("stream {} 80000000 down x2; wait 1", streams.address());
    let flags = ["--cpus", "2", "--cmdline", &work, "--name", "streams"];
    let mut vm = bed.start_with(&[&flags[..], &RATES].concat());
    vm.await_line("10.0.2.15", WAIT).unwrap();
    bed.have(&["pause", "streams"]);
    std::thread::sleep(Duration::from_secs(12));
    bed.have(&["resume", "streams"]);
    assert_passed(&vm.finish(4 * WAIT).unwrap());
}

#[test]
fn what_was_saved_goes_on_after_the_machine_was_killed() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let close = TcpServer::start(&bed.world.net, (SERVER, 7001), TcpService::Close).unwrap();
    let work = format!("wait 2s; crr {} 40 x4 close", close.address());
    let mut vm = bed.start_with(&["--cpus", "2", "--memory", "64", "--cmdline", &work]);
    vm.await_line("10.0.2.15", WAIT).unwrap();
    let dir = bed.snapshot(&vm, "warm");
    for (name, mode) in [("", 0o700), ("state", 0o600), ("memory", 0o600)] {
        use std::os::unix::fs::PermissionsExt as _;
        let data = fs::metadata(dir.join(name)).unwrap();
        assert_eq!(data.permissions().mode() & 0o777, mode, "{name}");
    }
    // The original goes on, until it is killed.
    assert_eq!(bed.status(&vm)["state"], "running");
    signal(vm.broker_pid(), libc::SIGKILL);
    drop(vm);
    eventually("its TAP is gone", || {
        !bed.world.host.ip("-brief link").unwrap().contains("sgvm")
    });

    let end = bed
        .restore(&dir, &["--name", "again", "--forward", "tcp:8007:7"])
        .finish(WAIT)
        .unwrap();
    assert_passed(&end);
    // Its console has what it says from then on.
    assert!(end.said("boot").is_empty(), "{:?}", end.lines);
    assert_eq!(end.said("workload")[1]["done"], 40, "{:?}", end.lines);
    assert_eq!(end.report["name"], "again");
    assert_eq!(end.report["nat"]["admitted"], 40);
    // What it has of the saved one.
    let inherits = serde_json::json!({
        "vm": "new", "policy": null, "own_rules": false, "forwards": ["tcp:8007:7"],
        "quotas": {}, "flows": false, "names": false,
    });
    assert_eq!(end.report["inherits"], inherits);
    let told = "again is a new VM to the network: the default policy, the quotas of that policy, 1 \
                forward; no flow and no open name of the saved one";
    assert!(end.stderr.contains(told), "{}", end.stderr);
    println!("{}", end.report["prepared_us"]);
}

#[test]
fn clones_of_one_snapshot_work_side_by_side_each_on_its_own_network() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let close = TcpServer::start(&bed.world.net, (SERVER, 7001), TcpService::Close).unwrap();
    let _daemon = Slipgate::serve(&bed.world.host, &bed.pins, &["--uplink", UPLINK]).unwrap();
    // Saved before it works; and after that long enough that all of them run at once on a busy machine,
    // too, where another test's stopped process delays `ps`.
    let work = format!("wait 5s; crr {} 30 x3 close; wait 10s", close.address());
    let mut vm = bed.start_with(&["--memory", "64", "--cmdline", &work]);
    vm.await_line("10.0.2.15", WAIT).unwrap();
    let dir = bed.snapshot(&vm, "warm");
    bed.have(&["kill", &vm.broker_pid().to_string()]);
    assert_eq!(vm.finish(WAIT).unwrap().status.code(), Some(143));

    let names = ["a", "b", "c", "d"];
    let quota = ["--max-flows", "700", "--deny", "192.0.2.1"];
    let clones = names.map(|name| bed.restore(&dir, &[&["--name", name], &quota[..]].concat()));
    eventually("all run", || {
        let all = bed.statuses();
        let runs = |vm| status_in(&all, vm)["state"] == "running";
        clones.iter().all(runs)
    });
    for clone in clones {
        let end = clone.finish(WAIT).unwrap();
        assert_passed(&end);
        assert_eq!(end.said("workload")[1]["done"], 30, "{:?}", end.lines);
        let inherits = &end.report["inherits"];
        assert_eq!(
            (&inherits["vm"], &inherits["own_rules"]),
            (&"new".into(), &true.into())
        );
        assert_eq!(inherits["quotas"]["max_flows"], 700, "{inherits}");
        let told = "a new VM to the network: rules of its own, quotas of its own, 0 forwards";
        assert!(end.stderr.contains(told), "{}", end.stderr);
        println!("{} {}", end.report["name"], end.report["prepared_us"]);
    }
}

/// A clone's connections are those of another VM: it learns that when it first uses them.
#[test]
fn connections_of_the_original_are_reset_in_the_restored_guest() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let echo = TcpServer::start(&bed.world.net, (SERVER, 7), TcpService::Echo).unwrap();
    let work = format!("rr {} 1000000 x2", echo.address());
    let mut vm = bed.start_with(&["--memory", "64", "--cmdline", &work]);
    vm.await_line("10.0.2.15", WAIT).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    let dir = bed.snapshot(&vm, "warm");
    bed.have(&["kill", &vm.broker_pid().to_string()]);
    drop(vm);
    let began = std::time::Instant::now();
    let end = bed.restore(&dir, &[]).finish(WAIT).unwrap();
    assert!(
        began.elapsed() < Duration::from_secs(8),
        "it waited for them"
    );
    assert_eq!(end.status.code(), Some(1), "{:#?}", end.lines);
    let failures = &end.said("workload")[0]["failures"];
    assert!(failures["reset"].as_u64() > Some(0), "{failures}");
    assert_eq!(failures.get("timed_out"), None, "{failures}");
    println!("ran {} µs", end.report["ran_us"]);
}

#[test]
fn what_is_no_snapshot_or_does_not_fit_is_refused_with_a_remedy() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let mut vm = bed.start_with(&["--memory", "64", "--cmdline", "wait 60s", "--name", "v"]);
    vm.await_line("10.0.2.15", WAIT).unwrap();
    let dir = bed.snapshot(&vm, "warm");
    let refused = |args: &[&str], part: &str| {
        let output = bed.slipgate(args);
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            !output.status.success() && stderr.contains(part),
            "{stderr}"
        );
    };
    let text = dir.display().to_string();
    refused(&["snapshot", "v", &text], "give a directory that does not");
    // Others of this host may be named too.
    refused(
        &["snapshot", "nobody", "/nowhere"],
        "machine \"nobody\"; there is ",
    );
    refused(&["snapshot", "v", "/nowhere/x"], "making /nowhere/x");
    bed.have(&["kill", "v"]);
    assert_eq!(vm.finish(WAIT).unwrap().status.code(), Some(143));
    refused(&["pause", "v"], "no `slipgate run`");

    let failed = |flags: &[&str], part: &str| {
        let end = bed.restore(&dir, flags).finish(WAIT).unwrap();
        assert_eq!(end.status.code(), Some(2), "{part}: {}", end.stderr);
        assert!(end.stderr.contains(part), "{}", end.stderr);
        bed.assert_nothing_is_left();
    };
    failed(
        &["--disk", "/dev/null"],
        "1 disks were given in the place of 0",
    );
    failed(&["--cpus", "2"], "cannot be used with");
    let description = dir.join("machine.json");
    let good = fs::read_to_string(&description).unwrap();
    fs::write(&description, good.replace("\"cpus\": 1", "\"cpus\": 2")).unwrap();
    failed(&[], "it has 1 CPUs");
    fs::write(
        &description,
        good.replace("\"version\": 1", "\"version\": 9"),
    )
    .unwrap();
    failed(&[], "it is of version 9");
    fs::remove_file(&description).unwrap();
    failed(&[], "its machine.json can't be read");
    fs::write(&description, &good).unwrap();
    let state = fs::read(dir.join("state")).unwrap();
    let mut other = state.clone();
    other[8] = 77;
    fs::write(dir.join("state"), &other).unwrap();
    failed(&[], "layout version 77");
    other = state;
    let last = other.len() - 1;
    other[last] ^= 1;
    fs::write(dir.join("state"), &other).unwrap();
    failed(&[], "its digest is of other bytes");
}

#[test]
fn a_machine_of_a_template_is_restored_with_it_and_no_other() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let (mut tried, mut began) = (Vec::new(), None);
    for template in ["x86-64-v3", "x86-64-v2", "x86-64-v1"] {
        let flags = ["--memory", "64", "--cpus", "2", "--cpu-template", template];
        let work = ["--cmdline", "serve 7 600s"];
        let mut vm = bed.start_with(&[&flags[..], &work].concat());
        if vm.await_line("\"serving\"", WAIT).is_ok() {
            began = Some((template, vm));
            break;
        }
        let end = vm.finish(WAIT).unwrap();
        assert_eq!(end.status.code(), Some(2), "{}", end.stderr);
        let says = format!("--cpu-template {template}: this host's CPU or KVM lacks ");
        assert!(end.stderr.contains(&says), "{}", end.stderr);
        tried.push(end.stderr);
    }
    let Some((template, vm)) = began else {
        return skipped!("this host has no template: {tried:?}");
    };
    let dir = bed.snapshot(&vm, "warm");
    bed.have(&["kill", &vm.broker_pid().to_string()]);
    assert_eq!(vm.finish(WAIT).unwrap().status.code(), Some(143));
    let again = bed.restore(&dir, &[]);
    eventually("it runs", || bed.status(&again)["state"] == "running");
    // As a snapshot of a restored machine.
    let second = bed.snapshot(&again, "again");
    bed.have(&["kill", &again.broker_pid().to_string()]);
    assert_eq!(again.finish(WAIT).unwrap().status.code(), Some(143));
    let path = second.join("machine.json");
    let description = fs::read_to_string(&path).unwrap();
    let mut described: serde_json::Value = serde_json::from_str(&description).unwrap();
    assert_eq!(described["machine"]["cpu_template"], template);
    let failed = |flags: &[&str], part: &str| {
        let end = bed.restore(&second, flags).finish(WAIT).unwrap();
        assert_eq!(end.status.code(), Some(2), "{}", end.stderr);
        assert!(end.stderr.contains(part), "{}", end.stderr);
    };
    failed(&["--cpu-template", template], "cannot be used with");
    described["machine"]["cpu_template"] = "host".into();
    fs::write(&path, described.to_string()).unwrap();
    let says = format!("its CPU template is {template}, and the machine's host");
    failed(&[], &says);
}

/// A connection of vsock outlives a pause, and a snapshot has none: a clone is reached at a socket of
/// its own, and reaches the programs beside that. A disk is another image.
#[test]
fn a_clone_has_a_disk_and_a_vsock_of_its_own() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let file = |name: &str| bed.folder.path().join(name).display().to_string();
    let [image, copy] = [file("image"), file("copy")];
    fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let [socket, another] = [file("vm.sock"), file("clone.sock")];
    let programs = [&socket, &another].map(|socket| {
        let listener = UnixListener::bind(format!("{socket}_52")).unwrap();
        vsock::echo(listener, 1)
    });
    let work = "disk 0 write 65536; vsock echo 5 1; vsock connect 52 1 70000; wait 1";
    let vsock = format!("3,{socket}");
    let flags = [
        "--memory",
        "64",
        "--cmdline",
        work,
        "--disk",
        &image,
        "--vsock",
        &vsock,
    ];
    let vm = bed.start_with(&flags);
    let mut stream = vsock::reach(Path::new(&socket), 5);
    let mut echoed = [0; 5];
    stream.write_all(b"first").unwrap();
    stream.read_exact(&mut echoed).unwrap();
    let pid = vm.broker_pid().to_string();
    bed.have(&["pause", &pid]);
    stream.write_all(b"later").unwrap();
    let dir = bed.snapshot(&vm, "warm");
    bed.have(&["resume", &pid]);
    stream.read_exact(&mut echoed).unwrap();
    assert_eq!(&echoed, b"later");

    // The original has its image locked.
    fs::copy(&image, &copy).unwrap();
    let taken = bed.restore(&dir, &["--vsock", &format!("3,{another}")]);
    let taken = taken.finish(WAIT).unwrap();
    assert!(
        taken.stderr.contains("in use by another"),
        "{}",
        taken.stderr
    );
    let clone = bed.restore(&dir, &["--vsock", &format!("3,{another}"), "--disk", &copy]);
    let own = vsock::reach(Path::new(&another), 5);
    vsock::exchange(own, 7, 300_000);
    assert_passed(&clone.finish(WAIT).unwrap());
    drop(stream);
    assert_passed(&vm.finish(WAIT).unwrap());
    for program in programs {
        program.join().unwrap();
    }
}

/// Who asks for a snapshot is killed, or interrupted, while it is written: the guest goes on at once.
#[test]
fn a_snapshot_that_is_interrupted_is_not_written_and_the_guest_goes_on() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let mut vm = bed.start_with(&["--memory", "64", "--cmdline", "wait 60s", "--name", "v"]);
    vm.await_line("10.0.2.15", WAIT).unwrap();
    let vmm = vm.vmm_pid().unwrap();
    for (name, signal_number) in [("killed", libc::SIGKILL), ("interrupted", libc::SIGINT)] {
        let dir = bed.folder.path().join(name);
        let mut command = Command::new(slipgate::binary().unwrap());
        command
            .arg("snapshot")
            .arg(vm.broker_pid().to_string())
            .arg(&dir);
        // Stopped, the VMM saves for as long as it takes to end who asked.
        signal(vmm, libc::SIGSTOP);
        let mut asks = bed.world.host.spawn(command).unwrap();
        eventually("it is being saved", || bed.status(&vm)["state"] == "saving");
        signal(asks.id(), signal_number);
        assert!(!asks.wait().unwrap().success());
        signal(vmm, libc::SIGCONT);
        eventually("it runs", || bed.status(&vm)["state"] == "running");
        let left = fs::read_dir(&dir).map(Iterator::count).ok();
        assert_eq!(left, (name == "killed").then_some(0), "{name}");
    }
    // What a killed command has left is in nobody's way.
    bed.snapshot(&vm, "killed");
    bed.have(&["kill", "v"]);
    let end = vm.finish(WAIT).unwrap();
    let cancelled = end.stderr.matches("who asked for it has gone").count();
    assert_eq!(cancelled, 2, "{}", end.stderr);
}

/// A small file system of the test's own.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(dir: PathBuf, size: &str) -> Self {
        fs::create_dir(&dir).unwrap();
        let mut mount = Command::new("mount");
        let options = format!("size={size}");
        mount
            .args(["-t", "tmpfs", "-o", &options, "none"])
            .arg(&dir);
        assert!(mount.status().unwrap().success());
        Self(dir)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn a_full_disk_leaves_no_snapshot_and_the_guest_goes_on() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let disk = SmallDisk::mount(bed.folder.path().join("small"), "128k");
    let mut vm = bed.start_with(&["--memory", "64", "--cmdline", "wait 60s", "--name", "v"]);
    vm.await_line("10.0.2.15", WAIT).unwrap();
    let dir = disk.0.join("warm");
    let output = bed.slipgate(&["snapshot", "v", dir.to_str().unwrap()]);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success());
    for part in [dir.to_str().unwrap(), "`memory`", "No space left"] {
        assert!(stderr.contains(part), "{part}: {stderr}");
    }
    assert_eq!(fs::read_dir(&disk.0).unwrap().count(), 0);
    assert_eq!(bed.status(&vm)["state"], "running");
    bed.snapshot(&vm, "elsewhere");
    bed.have(&["kill", "v"]);
    assert_eq!(vm.finish(WAIT).unwrap().status.code(), Some(143));
}

/// A process that is stopped is named by `ps`, and orders to others are carried out.
#[test]
fn a_stopped_process_delays_no_order_to_another_machine() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let flags = ["--memory", "32", "--cmdline", "wait 60s"];
    let [mut stopped, mut vm] = [(); 2].map(|()| bed.start_with(&flags));
    for vm in [&mut stopped, &mut vm] {
        vm.await_line("10.0.2.15", WAIT).unwrap();
    }
    signal(stopped.broker_pid(), libc::SIGSTOP);
    let began = std::time::Instant::now();
    let pid = vm.broker_pid().to_string();
    bed.have(&["pause", &pid]);
    // It was not even asked.
    assert!(
        began.elapsed() < Duration::from_secs(2),
        "{:?}",
        began.elapsed()
    );
    assert_eq!(bed.status(&vm)["state"], "paused");
    let listed = bed.slipgate(&["ps"]);
    let told = String::from_utf8_lossy(&listed.stderr).into_owned();
    let silent = stopped.broker_pid().to_string();
    assert!(
        told.contains(&silent) && told.contains("does not answer"),
        "{told}"
    );
    bed.have(&["kill", &pid]);
    // It may have been stopped amid a change of the tables: the other one's end waits for that.
    signal(stopped.broker_pid(), libc::SIGCONT);
    assert_eq!(vm.finish(WAIT).unwrap().status.code(), Some(143));
}
