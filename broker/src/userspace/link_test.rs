use std::fs::File;

use super::*;
use crate::config::CgroupSpec;

#[test]
fn nobody_changes_the_length_of_the_guests_memory() {
    let link = LinkEnds::rings(8 << 20).unwrap();
    let file = File::from(link.memory.unwrap());
    let length = file.metadata().unwrap().len();
    assert_eq!(length, (8 << 20) + 4_096);
    for other in [0, length - 1, length + 1] {
        assert!(file.set_len(other).is_err());
    }
}

#[test]
fn memory_with_a_limit_is_shared_with_nobody() {
    let machine = r#"{"kernel": null, "initrd": null, "cmdline": "", "cpus": 1, "memory_mib": 64,
        "queues": 1, "mac": "02:00:00:00:00:01"}"#;
    let machine: MachineSpec = serde_json::from_str(machine).unwrap();
    let mut bounds = VmmBounds {
        requires_jail: false,
        console_bytes: 0,
        cgroup: None,
        may_restart: true,
        huge_pages: false,
    };
    let shares = |bounds: &VmmBounds| LinkEnds::make(&machine, bounds).unwrap().memory.is_some();
    assert!(shares(&bounds));
    bounds.huge_pages = true;
    assert!(!shares(&bounds), "a file of memory has none");
    bounds.huge_pages = false;
    let mut limits = CgroupSpec {
        parent: "slipgate".into(),
        cpu_percent: Some(100),
        memory_bytes: None,
        swap_bytes: None,
        pids: None,
    };
    bounds.cgroup = Some(limits.clone());
    assert!(shares(&bounds), "only its CPU time is limited");
    for (memory_bytes, swap_bytes) in [
        (Some(1 << 30), None),
        (None, Some(0)),
        (Some(1 << 30), Some(1 << 30)),
    ] {
        (limits.memory_bytes, limits.swap_bytes) = (memory_bytes, swap_bytes);
        bounds.cgroup = Some(limits.clone());
        assert!(!shares(&bounds), "{limits:?}");
    }
}
