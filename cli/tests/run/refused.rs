//! Runs that are refused: the error says why and what to do, and nothing is left.
use std::process::Command;

use slipgate_testbed::{require_kvm, require_root_and_tun, world::UPLINK};

use crate::{Bed, WAIT, payload::Payload};

#[test]
fn files_that_can_not_be_used_are_named() {
    require_root_and_tun!();
    let bed = Bed::new();
    let empty = bed.kernel("empty", b"");
    let (empty, folder) = (empty.to_str().unwrap(), bed.folder.path().to_str().unwrap());
    for (flags, part) in [
        (
            vec!["--kernel", "/nowhere/k"],
            "--kernel /nowhere/k: it can't be read",
        ),
        (vec!["--kernel", folder], "it is no regular file"),
        (vec!["--kernel", empty], "it is empty"),
    ] {
        let end = bed.start_with(&flags).finish(WAIT).unwrap();
        assert_eq!(end.status.code(), Some(2), "{}", end.stderr);
        assert!(end.stderr.contains(part), "{}", end.stderr);
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_slipgate"));
    command.args(["run", "--report", "/nowhere/r"]);
    let said = bed.world.host.output(command).unwrap_err().to_string();
    assert!(
        said.contains("--report /nowhere/r: it can't be written"),
        "{said}"
    );
    bed.assert_nothing_is_left();
}

#[test]
fn what_the_nats_flags_name_is_looked_at_before_anything_is_made() {
    require_root_and_tun!();
    let bed = Bed::new();
    let rules = bed.kernel("rules", b"192.0.2.1\n192.0.2.0/33\n");
    let (rules, folder) = (rules.to_str().unwrap(), bed.folder.path().to_str().unwrap());
    for (flags, part) in [
        (["--deny-file", "/nowhere/d"], "it can't be read"),
        (["--deny-file", folder], "it can't be read"),
        (["--deny-file", rules], "rules:2: Prefix length \"33\""),
        (["--flow-log", "/nowhere/l"], "can't append to it"),
        (["--flow-log", "/dev/null"], "it is no regular file"),
    ] {
        let end = bed.start_with(&flags).finish(WAIT).unwrap();
        assert_eq!(end.status.code(), Some(2), "{flags:?}: {}", end.stderr);
        assert!(end.stderr.contains(part), "{}", end.stderr);
        assert!(!end.stderr.contains("--mode auto"), "{}", end.stderr);
        assert!(end.report.is_null(), "{:#}", end.report);
    }
    bed.assert_nothing_is_left();
}

#[test]
fn a_report_is_no_other_flags_file() {
    require_root_and_tun!();
    let bed = Bed::new();
    let file = bed.kernel("file", b"text");
    let file = file.to_str().unwrap();
    for flag in ["--kernel", "--flow-log"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_slipgate"));
        command.args(["run", "--report", file, flag, file]);
        let said = bed.world.host.output(command).unwrap_err().to_string();
        let part = format!("{flag} names the same file");
        assert!(said.contains(&part), "{said}");
        assert_eq!(std::fs::read(file).unwrap(), b"text", "{flag}");
    }
}

#[test]
fn an_uplink_is_a_device_that_leads_somewhere() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    for (uplink, part) in [
        ("lo", "it is the loopback device"),
        ("nowhere0", "there is no such device"),
    ] {
        let end = bed.start_with(&["--uplink", uplink]).finish(WAIT).unwrap();
        assert_eq!(end.status.code(), Some(2), "{}", end.stderr);
        assert!(end.stderr.contains(part), "{}", end.stderr);
        assert!(!end.stderr.contains("--mode auto"), "{}", end.stderr);
        assert_eq!(end.report["outcome"], "not_started");
    }
    bed.assert_nothing_is_left();
}

#[test]
fn what_is_no_kernel_is_refused_before_anything_is_in_the_kernel() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    for image in [&b"#!/bin/sh\nexit 0\n"[..], b"\x7fELF", &[0x90; 70_000]] {
        let end = bed.run(image);
        assert_eq!(end.status.code(), Some(2), "{}", end.stderr);
        assert!(
            end.stderr.contains("the machine can't be made"),
            "{}",
            end.stderr
        );
        assert_eq!(end.report["outcome"], "not_started", "{:#}", end.report);
        assert_eq!(end.report["exit_code"], 2);
        let why = end.report["why"].as_str().unwrap();
        assert!(end.stderr.contains(why), "{}\n{why}", end.stderr);
        bed.assert_nothing_is_left();
    }
    let end = bed
        .start_with(&["--kernel", "/bin/sh"])
        .finish(WAIT)
        .unwrap();
    let due = "--kernel /bin/sh: this ELF file is no kernel but a program";
    assert!(end.stderr.contains(due), "{}", end.stderr);
    bed.assert_nothing_is_left();
}

#[test]
fn a_tap_of_that_name_is_somebody_elses() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    bed.world
        .host
        .ip("tuntap add taken mode tap multi_queue vnet_hdr")
        .unwrap();
    let image = Payload::default().exit(0);
    let end = bed.start(&image, &["--tap", "taken"]).finish(WAIT).unwrap();
    assert_eq!(end.status.code(), Some(1), "{}", end.stderr);
    assert!(
        end.stderr.contains("a device taken already"),
        "{}",
        end.stderr
    );
    assert!(bed.world.host.ifindex("taken").is_some());
}

#[test]
fn without_kvm_it_says_what_to_do() {
    require_root_and_tun!();
    let bed = Bed::new();
    let mut command = Command::new("unshare");
    // A /dev with nothing in it, for this command only.
    let script = "mount -t tmpfs none /dev && exec \"$0\" run --uplink \"$1\" 2>&1";
    command.args(["--mount", "sh", "-c", script]);
    command.args([env!("CARGO_BIN_EXE_slipgate"), UPLINK]);
    let said = bed.world.host.output(command).unwrap_err().to_string();
    for part in ["/dev/kvm", "modprobe kvm_intel", "nested virtualisation"] {
        assert!(said.contains(part), "{said}");
    }
    bed.assert_nothing_is_left();
}
