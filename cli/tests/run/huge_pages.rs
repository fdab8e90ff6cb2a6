//! Guests whose memory is of the host's huge pages.
use slipgate_testbed::{HugePages, require_kvm, require_root_and_tun, skipped, turns};

use crate::{Bed, WAIT};

fn pool(name: &str) -> u64 {
    HugePages::count(name).unwrap()
}

#[test]
fn a_guest_has_huge_pages_and_its_snapshot_is_restored_with_ordinary_ones() {
    require_root_and_tun!();
    require_kvm!();
    let turn = turns::alone("it sets the host's pool of huge pages");
    let bed = Bed::new();
    let more = pool("free_hugepages") + pool("nr_overcommit_hugepages") - pool("surplus_hugepages");
    let too_much = ((more + 8) * 2).max(64).to_string();
    let refused = bed.slipgate(&[
        "run",
        "--huge-pages",
        "--memory",
        &too_much,
        "--uplink",
        "eth0",
    ]);
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(2), "{why}");
    assert!(
        why.contains("--huge-pages") && why.contains("vm.nr_hugepages="),
        "{why}"
    );
    let refused = bed.slipgate(&["run", "--huge-pages", "--memory", "65", "--uplink", "eth0"]);
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(why.contains("no multiple"), "{why}");

    let Some(_more) = HugePages::more(16, &turn) else {
        return skipped!("the host has no room for 16 huge pages more");
    };
    let used = || pool("nr_hugepages") - pool("free_hugepages") + pool("resv_hugepages");
    let before = used();
    let flags = [
        "--huge-pages",
        "--memory",
        "32",
        "--balloon",
        "--name",
        "large",
    ];
    let work = "balloon report 2; serve 7 600s";
    let mut vm = bed.start_with(&[&flags[..], &["--cmdline", work]].concat());
    // Reports of 1 MiB are no whole page of the host's.
    let line = vm.await_line("\"action\":\"report\"", WAIT).unwrap();
    assert_eq!(line.json().unwrap()["lost_pages"], 0, "{line:?}");
    vm.await_line("10.0.2.15", WAIT).unwrap();
    assert_eq!(used() - before, 16);
    let dir = bed.snapshot(&vm, "warm");
    bed.have(&["kill", "large"]);
    vm.finish(WAIT).unwrap();
    assert_eq!(used(), before);

    let again = bed.restore(&dir, &["--name", "again"]);
    crate::eventually("it runs", || bed.status(&again)["state"] == "running");
    assert_eq!(used(), before);
    bed.have(&["kill", "again"]);
    again.finish(WAIT).unwrap();
    bed.assert_nothing_is_left();
}
