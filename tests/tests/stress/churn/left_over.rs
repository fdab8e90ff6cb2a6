//! Lists a daemon's resources: in the kernel, in its run-time directory, and its processes' own.

use std::{collections::BTreeMap, fs, path::Path, process::Command};

use slipgate_control::SharedMaps;
use slipgate_testbed::{Slipgate, World};

use crate::eventually;

/// Memory by which a process may have grown, KiB.
const MORE_KIB: u64 = 6 << 10;
/// Descriptors by which it may have: a connection of a client that has just gone.
const MORE_DESCRIPTORS: usize = 2;

/// The most descriptors and anonymous memory (KiB) that the broker, an engine and the API's process
/// have.
pub(super) type Footprint = BTreeMap<&'static str, (usize, u64)>;

pub(super) fn footprint(daemon: &Slipgate) -> Footprint {
    let pids =
        ["slipgate-engine", "slipgate-api"].map(|title| (title, daemon.children_named(title)));
    let pids = [("broker", vec![daemon.broker_pid()])]
        .into_iter()
        .chain(pids);
    let of = |pid: u32| {
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let anonymous = status
            .lines()
            .find_map(|line| line.strip_prefix("RssAnon:"));
        let kib = anonymous.and_then(|rest| rest.trim().trim_end_matches(" kB").parse().ok());
        (descriptors, kib.unwrap_or(0))
    };
    let most = |name, pids: Vec<u32>| {
        let all: Vec<_> = pids.into_iter().map(of).collect();
        let descriptors = all.iter().map(|(descriptors, _)| *descriptors).max();
        let kib = all.iter().map(|(_, kib)| *kib).max();
        (
            name,
            descriptors
                .zip(kib)
                .unwrap_or_else(|| panic!("there is no {name}")),
        )
    };
    pids.map(|(name, pids)| most(name, pids)).collect()
}

/// Nothing has grown with what came and went.
pub(super) fn assert_as_before(before: &Footprint, after: &Footprint) {
    println!("descriptors, KiB: before {before:?}, after {after:?}");
    for (process, (descriptors, kib)) in after {
        let (descriptors_before, kib_before) = before[process];
        assert!(
            *descriptors <= descriptors_before + MORE_DESCRIPTORS,
            "{process} has {descriptors} descriptors open, {descriptors_before} before"
        );
        assert!(
            *kib <= kib_before + MORE_KIB,
            "{process} has {kib} KiB, {kib_before} before"
        );
    }
}

/// Names of the files of VMs and of policies that a daemon keeps for a successor.
pub(super) fn kept_files(run_dir: &Path) -> Vec<String> {
    let names = |part| {
        let entries = fs::read_dir(run_dir.join(part))
            .into_iter()
            .flatten()
            .flatten();
        entries.map(|entry| entry.file_name().into_string().unwrap())
    };
    let mut all: Vec<_> = names("vms").chain(names("policies")).collect();
    all.sort();
    all
}

/// Names of the VMs that have a row.
pub(super) fn rows(maps: &SharedMaps) -> Vec<String> {
    let vms = maps.vm_rows().filter_map(|row| maps.vm(row));
    let used = vms.filter(|vm| vm.id().load(std::sync::atomic::Ordering::Acquire) != 0);
    // SAFETY: a mapped row, which nobody changes by now.
    let name = |vm: slipgate_abi::VmRef| unsafe { (*vm.as_ptr()).name };
    used.map(|vm| slipgate_control::maps::text_of(&name(vm)))
        .collect()
}

/// None of these TAPs carries a program or is up. The clsact qdisc stays: others may use it.
pub(super) fn assert_taps_bare(world: &World, taps: &[String]) {
    let said = |program: &str, args: &[&str]| {
        let mut command = Command::new(program);
        command.args(args);
        String::from_utf8(world.host.output(command).unwrap().stdout).unwrap()
    };
    for tap in taps {
        let filters = said("tc", &["filter", "show", "dev", tap, "ingress"]);
        assert_eq!(filters, "", "{tap}");
        let link = said("ip", &["-d", "link", "show", "dev", tap]);
        assert!(
            link.contains("state DOWN") && !link.contains("xdp"),
            "{link}"
        );
    }
}

/// No process has one of these ports.
pub(super) fn assert_ports_free(world: &World, ports: std::ops::Range<u16>) {
    let take = |port| {
        // Of both families.
        let tcp = std::net::TcpListener::bind(("::", port));
        tcp.and_then(|_| std::net::UdpSocket::bind(("::", port)))
    };
    world.host.run(|| {
        for port in ports {
            take(port).unwrap_or_else(|e| panic!("port {port}: {e}"));
        }
    });
}

/// No flow, name, forward or TAP of a VM is in the tables.
pub(super) fn assert_tables_empty(maps: &SharedMaps) {
    eventually("the end of all entries", || {
        let by_ipv4 = maps.flows.entries().unwrap().len() + maps.forwards.entries().unwrap().len();
        let by_ipv6 =
            maps.flows6.entries().unwrap().len() + maps.forwards6.entries().unwrap().len();
        by_ipv4 + by_ipv6 == 0
    });
    assert_eq!(maps.taps.entries().unwrap().len(), 0, "TAPS");
    assert_eq!(maps.names.entries().unwrap().len(), 0, "NAMES");
}
