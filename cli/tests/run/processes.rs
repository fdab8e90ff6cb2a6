//! Privileges of the VMM process, and requests while it runs.
use std::fs;

use slipgate_testbed::{require_kvm, require_root_and_tun};

use crate::{Bed, WAIT, payload::Payload};

/// A field of a `/proc/PID/status`.
pub(crate) fn field(path: &str, name: &str) -> String {
    let status = fs::read_to_string(path).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|rest| rest.strip_prefix(':'))
        .unwrap_or_else(|| panic!("{name} in {path}"))
        .trim()
        .to_owned()
}

#[test]
fn the_vmm_has_no_privileges_and_each_thread_its_own_filter() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let image = Payload::default().say("here\n").halt();
    let mut vm = bed.start(&image, &["--cpus", "2", "--queues", "2"]);
    vm.await_line("here", WAIT).unwrap();
    let pid = vm.vmm_pid().unwrap();
    let mut names = Vec::new();
    let user = field(&format!("/proc/{pid}/status"), "Uid");
    let number: u32 = user.split('\t').next().unwrap().parse().unwrap();
    assert!((0x7c00_0000..=0x7c00_ffff).contains(&number), "{user}");
    // And not the engine's.
    let engine = vm.engine_pid().unwrap();
    assert_ne!(field(&format!("/proc/{engine}/status"), "Uid"), user);
    for thread in fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        let path = thread.unwrap().path().join("status");
        let path = path.to_str().unwrap();
        let name = field(path, "Name");
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert_eq!(field(path, set), "0000000000000000", "{set} of {name}");
        }
        assert_eq!(field(path, "Uid"), user, "{name}");
        assert_eq!(field(path, "Groups"), "");
        assert_eq!(field(path, "NoNewPrivs"), "1");
        assert_eq!(field(path, "Seccomp"), "2");
        // Three are the process's, one more the thread's own.
        assert_eq!(field(path, "Seccomp_filters"), "4", "{name}");
        names.push(name);
    }
    for thread in ["vcpu0", "vcpu1", "channel"] {
        assert!(names.iter().any(|name| name == thread), "{names:?}");
    }
    // Nobody of another user's may look into it: the guest's memory is there.
    let memory = fs::metadata(format!("/proc/{pid}/mem")).unwrap();
    assert_eq!(std::os::unix::fs::MetadataExt::uid(&memory), 0);
}

#[test]
fn stats_show_the_machine_while_it_runs() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let image = Payload::default().say("here\n").halt();
    let mut vm = bed.start(&image, &["--name", "shown", "--queues", "2"]);
    vm.await_line("here", WAIT).unwrap();
    let json = vm.run(&["stats", "--json"]).unwrap().stdout;
    let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
    let shown = &json["vms"][0];
    assert_eq!(shown["vm"], "shown");
    let machine = &shown["vmm"];
    assert!(
        machine["vcpus"][0]["port_writes"].as_u64() >= Some(5),
        "{json:#}"
    );
    assert_eq!(machine["net"]["pairs"].as_array().unwrap().len(), 2);
    assert!(json["total"].get("vmm").is_none());
    let text = vm.run(&["stats"]).unwrap().stdout;
    let text = String::from_utf8(text).unwrap();
    for part in ["QUEUE-PAIR", "shown"] {
        assert!(text.contains(part), "{text}");
    }
}
