//! The balloon: memory that a guest gives back to the host, and takes again.
use std::fs;

use slipgate_testbed::{MicroVm, require_kvm, require_root_and_tun};

use crate::{Bed, WAIT, eventually};

/// Memory of the guest's that the host has a page for, MiB: `RssAnon`, or `RssShmem` of a file of memory.
fn resident_mib(vm: &MicroVm, kind: &str) -> u64 {
    let pid = vm.vmm_pid().unwrap();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with(kind)).unwrap();
    let kib = line.split_whitespace().nth(1).unwrap();
    kib.parse::<u64>().unwrap() / 1024
}

impl Bed {
    /// Has the guest give so much, and awaits that it says so.
    #[track_caller]
    fn inflate(&self, vm: &mut MicroVm, mib: u64) {
        eventually("it takes orders", || self.status(vm)["state"] == "running");
        let pid = vm.broker_pid().to_string();
        self.have(&["balloon", &pid, &mib.to_string()]);
        let line = format!("{{\"balloon_mib\":{mib}}}");
        vm.await_line(&line, WAIT).unwrap();
    }

    /// What the counters of its VMM say.
    fn counted(&self, name: &str, field: &str) -> u64 {
        let pins = self.pins.path().to_str().unwrap();
        let stats = self.have(&["stats", "--json", "--pin-dir", pins]);
        let stats: serde_json::Value = serde_json::from_str(&stats).unwrap();
        let vms = stats["vms"].as_array().unwrap();
        let vm = vms.iter().find(|vm| vm["vm"] == name).unwrap();
        vm["vmm"]["balloon"][field].as_u64().unwrap()
    }

    /// Checks that what the guest gives and takes back is taken from the host and given to it.
    #[track_caller]
    fn gives_and_takes(&self, vm: &mut MicroVm, kind: &str) {
        self.inflate(vm, 0);
        let without = resident_mib(vm, kind);
        assert!(without >= 90, "{without} MiB are there");
        self.inflate(vm, 80);
        let with = resident_mib(vm, kind);
        assert!(with + 78 <= without, "{without} MiB, then {with} MiB");
    }
}

#[test]
fn a_guest_gives_memory_back_and_takes_it_again() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let work = "balloon report 24; balloon follow 600s";
    let flags = ["--memory", "192", "--balloon", "96", "--name", "giver"];
    let mut vm = bed.start_with(&[&flags[..], &["--cmdline", work]].concat());
    // What was reported is gone, and can be used.
    let line = vm.await_line("\"action\":\"report\"", WAIT).unwrap();
    assert_eq!(line.json().unwrap()["lost_pages"], 24 * 256, "{line:?}");
    vm.await_line("{\"balloon_mib\":96}", WAIT).unwrap();
    eventually("the guest has said so", || {
        bed.counted("giver", "actual_bytes") == 96 << 20
    });
    assert_eq!(bed.counted("giver", "reported_bytes"), 24 << 20);
    bed.gives_and_takes(&mut vm, "RssAnon");
    // In a pause it is asked, and answers afterwards.
    bed.have(&["pause", "giver"]);
    bed.have(&["balloon", "giver", "8"]);
    bed.have(&["resume", "giver"]);
    vm.await_line("{\"balloon_mib\":8}", WAIT).unwrap();
    let refused = bed.slipgate(&["balloon", "giver", "193"]);
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        !refused.status.success() && why.contains("ask for less"),
        "{why}"
    );
    bed.have(&["kill", "giver"]);
    vm.finish(WAIT).unwrap();
    bed.assert_nothing_is_left();
}

#[test]
fn a_restored_guest_goes_on_with_its_balloon() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let flags = ["--memory", "192", "--balloon", "--name", "giver"];
    let work = "balloon follow 600s";
    let mut vm = bed.start_with(&[&flags[..], &["--cmdline", work]].concat());
    // It has had all of this memory.
    bed.inflate(&mut vm, 96);
    bed.inflate(&mut vm, 0);
    bed.inflate(&mut vm, 48);
    let dir = bed.snapshot(&vm, "warm");
    bed.have(&["kill", "giver"]);
    vm.finish(WAIT).unwrap();

    let mut again = bed.restore(&dir, &["--name", "again"]);
    eventually("it runs", || bed.status(&again)["state"] == "running");
    assert_eq!(bed.counted("again", "target_bytes"), 48 << 20);
    assert_eq!(bed.counted("again", "actual_bytes"), 48 << 20);
    // What it writes is its own until it gives it back.
    bed.inflate(&mut again, 96);
    bed.gives_and_takes(&mut again, "RssAnon");
    bed.have(&["kill", "again"]);
    again.finish(WAIT).unwrap();
    bed.assert_nothing_is_left();
}

#[test]
fn memory_that_the_engine_shares_is_given_back_too() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let work = "balloon follow 600s";
    let flags = ["--memory", "192", "--balloon", "--mode", "userspace"];
    let mut vm = bed.start_with(&[&flags[..], &["--cmdline", work]].concat());
    bed.inflate(&mut vm, 96);
    bed.gives_and_takes(&mut vm, "RssShmem");
    let pid = vm.broker_pid().to_string();
    bed.have(&["kill", &pid]);
    vm.finish(WAIT).unwrap();
}

#[test]
fn a_guest_follows_for_a_while_as_far_as_it_can_and_takes_all_back() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let work = "balloon follow 300ms; balloon report 4; wait 1";
    let vm = bed.start_with(&["--memory", "128", "--balloon", "16", "--cmdline", work]);
    let end = vm.finish(WAIT).unwrap();
    end.assert_success();
    // One that is asked for all it has gives what it can.
    let follow = "balloon follow 600s";
    let flags = ["--memory", "128", "--balloon", "128", "--cmdline", follow];
    let mut vm = bed.start_with(&flags);
    let line = vm.await_line("\"balloon_mib\":", WAIT).unwrap();
    let given = line.json().unwrap()["balloon_mib"].as_u64();
    assert!((64..128).contains(&given.unwrap()), "{line:?}");
    bed.inflate(&mut vm, 8);
    drop(vm);
    // A machine without one says so, and so does its guest.
    let mut vm = bed.start_with(&["--name", "plain", "--cmdline", "serve 7 600s"]);
    vm.await_line("10.0.2.15", WAIT).unwrap();
    let refused = bed.slipgate(&["balloon", "plain", "8"]);
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(why.contains("start it with --balloon"), "{why}");
    drop(vm);
    let vm = bed.start_with(&["--cmdline", work]);
    let end = vm.finish(WAIT).unwrap();
    assert_eq!(end.status.code(), Some(1), "{:#?}", end.lines);
    let refused = bed.slipgate(&["run", "--memory", "64", "--balloon", "65", "--uplink", "x"]);
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(why.contains("the guest has 64 MiB of memory"), "{why}");
}
