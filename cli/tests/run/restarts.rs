//! `--on-reboot restart`: a guest that resets itself begins anew, and its flows have ended by then.
use std::fs;

use slipgate_testbed::{require_kvm, require_root_and_tun, signal, world::SERVER};

use crate::{Bed, WAIT, eventually, payload::Payload};

/// Returns a payload that prints a line in each life, and then resets the machine.
fn resets() -> Vec<u8> {
    Payload::default().say("here\n").out(0x64, 0xfe).halt()
}

#[test]
fn a_guest_that_resets_itself_begins_anew_so_often_and_no_oftener() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let started = bed.start(&resets(), &["--on-reboot", "restart"]);
    let end = started.finish(WAIT).unwrap();
    assert_eq!(end.status.code(), Some(120), "{}", end.stderr);
    assert_eq!(end.report["outcome"], "reset");
    assert_eq!(end.report["restarts"], 6, "{:#}", end.report);
    let said = end.lines.iter().filter(|line| line.text == "here");
    assert_eq!(said.count(), 7);
    let gives_up = "has reset itself 7 times within a minute, and does not begin anew";
    assert!(end.stderr.contains(gives_up), "{}", end.stderr);
    bed.assert_nothing_is_left();

    let end = bed.run(&resets());
    assert_eq!(end.status.code(), Some(120), "{}", end.stderr);
    assert_eq!(end.report["restarts"], 0);
}

#[test]
fn flows_of_the_former_life_have_ended_when_the_next_begins() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let log = bed.folder.path().join("flows");
    let disk = bed.folder.path().join("disk");
    fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    // The flow to the server is alive when the guest resets itself.
    let work = format!("disk 0 write 4096; disk 0 check 4096; flood {SERVER}:9 3; reset");
    let flags = [
        "--on-reboot",
        "restart",
        "--cpus",
        "2",
        "--disk",
        disk.to_str().unwrap(),
        "--flow-log",
        log.to_str().unwrap(),
        "--cmdline",
        &work,
    ];
    let machine = bed.start_with(&flags);
    let ended = || {
        let log = fs::read_to_string(&log).unwrap_or_default();
        let records = log
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok());
        let records: Vec<serde_json::Value> = records.collect();
        let is_end = |record: &&serde_json::Value| {
            record["event"] == "flow_end" && record["end"] == "generation"
        };
        records.iter().filter(is_end).count()
    };
    // By the end of the third the second restart is counted.
    eventually("three lives have ended", || ended() >= 3);
    signal(machine.broker_pid(), libc::SIGTERM);
    let end = machine.finish(WAIT).unwrap();
    assert_eq!(end.status.code(), Some(143), "{}", end.stderr);
    // Each life has brought its card up and got its lease anew.
    let lines = end.said("workload");
    let leases = lines.iter().filter(|line| line["workload"] == "lease");
    assert!(leases.count() >= 2, "{:?}", end.lines);
    assert!(
        end.report["restarts"].as_u64().unwrap() >= 2,
        "{:#}",
        end.report
    );
    assert!(
        end.stderr.contains("ended 1 flow of its former life"),
        "{}",
        end.stderr
    );
}

#[test]
fn a_restart_and_a_snapshot_are_refused_together() {
    require_root_and_tun!();
    let bed = Bed::new();
    let dir = bed.folder.path().to_str().unwrap();
    let flags = ["--on-reboot", "restart", "--restore", dir];
    let end = bed.start_with(&flags).finish(WAIT).unwrap();
    assert_eq!(end.status.code(), Some(2), "{}", end.stderr);
}
