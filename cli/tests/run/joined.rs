//! `slipgate run` beside a daemon, which serves its VM for as long as it runs.
use slipgate_testbed::{
    PinDir, Slipgate, require_kvm, require_root_and_tun,
    servers::{TcpServer, TcpService},
    signal, slipgate,
    world::{SERVER, UPLINK},
};

use crate::{Bed, WAIT, eventually};

fn vms(bed: &Bed, pins: &PinDir) -> serde_json::Value {
    let listed = slipgate::run(&bed.world.host, pins, &["vm", "ls", "--json"]).unwrap();
    serde_json::from_slice(&listed.stdout).unwrap()
}

#[test]
fn a_machine_is_the_daemons_vm_for_as_long_as_it_runs() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let _daemon = Slipgate::serve(&bed.world.host, &bed.pins, &["--uplink", UPLINK]).unwrap();
    let close = TcpServer::start(&bed.world.net, (SERVER, 7001), TcpService::Close).unwrap();
    let work = format!("crr {} 50 close", close.address());
    // What is said of the machine is not the daemon's.
    let of_machine = [
        "--jail",
        "auto",
        "--console-limit",
        "1M",
        "--net-rate-tx",
        "bandwidth=1G",
        "--net-rate-rx",
        "bandwidth=1G,packets=100000",
        "--on-reboot",
        "exit",
    ];
    let end = bed.start_with(&[&of_machine[..], &["--cmdline", &work]].concat());
    let end = end.finish(WAIT).unwrap();
    end.assert_success();
    assert!(end.stderr.contains("by the daemon"), "{}", end.stderr);
    assert_eq!(vms(&bed, &bed.pins), serde_json::json!([]));

    // One that is killed leaves nothing either.
    let machine = bed.start_with(&["--name", "b", "--cmdline", "serve 7 60s"]);
    eventually("it is served", || {
        vms(&bed, &bed.pins)[0]["state"] == "served"
    });
    signal(machine.broker_pid(), libc::SIGKILL);
    eventually("it is gone", || {
        vms(&bed, &bed.pins) == serde_json::json!([])
    });
}

/// The card is made before the daemon serves the TAP, and tells the guest what the daemon will set: of
/// the two that a guest is told, by its card and by DHCP, it takes the lower one.
#[test]
fn the_card_of_a_machine_has_the_mtu_that_the_daemon_gives_its_tap() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let flags = ["--uplink", UPLINK, "--mtu", "1600"];
    let daemon = Slipgate::serve(&bed.world.host, &bed.pins, &flags).unwrap();
    let told = |flags: &[&str]| {
        let end = bed.start_with(&[&["--cmdline", "wait 1"], flags].concat());
        let end = end.finish(WAIT).unwrap();
        end.assert_success();
        end.said("mtu_by_dhcp")[0]["mtu"].clone()
    };
    assert_eq!(told(&[]), 1600);
    let added = daemon.run(&["vm", "add", "web", "--tap", "tapweb"]);
    assert!(added.unwrap().status.success());
    assert_eq!(told(&["--as", "web"]), 1600);
}

/// The user of a process, from its status: its files in /proc are root's.
fn user(pid: u32) -> u32 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("Uid:"));
    let user = line.and_then(|line| line.split_whitespace().nth(1));
    user.expect("a user").parse().unwrap()
}

#[test]
fn the_user_of_a_machine_is_its_own_until_it_has_ended() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let _daemon = Slipgate::serve(&bed.world.host, &bed.pins, &["--uplink", UPLINK]).unwrap();
    let machine = bed.start_with(&["--name", "b", "--cmdline", "serve 7 60s"]);
    eventually("it is served", || {
        vms(&bed, &bed.pins)[0]["state"] == "served"
    });
    let vmm = user(machine.vmm_pid().unwrap());
    // Of a block of four.
    let lock = std::path::PathBuf::from(format!("/run/slipgate/users/{}.lock", vmm & !3));
    assert!(lock.exists(), "{}", lock.display());
    signal(machine.broker_pid(), libc::SIGTERM);
    let end = machine.finish(WAIT).unwrap();
    assert_eq!(end.status.code(), Some(143), "{}", end.stderr);
    assert!(!lock.exists(), "{}", lock.display());
}

#[test]
fn a_machine_that_begins_anew_has_its_flows_ended_by_the_daemon() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let log = bed.folder.path().join("flows");
    let flags = ["--uplink", UPLINK, "--flow-log", log.to_str().unwrap()];
    let _daemon = Slipgate::serve(&bed.world.host, &bed.pins, &flags).unwrap();
    let work = format!("flood {SERVER}:9 3; reset");
    let machine = bed.start_with(&["--on-reboot", "restart", "--cmdline", &work]);
    eventually("two lives have ended", || {
        let log = std::fs::read_to_string(&log).unwrap_or_default();
        let records = log
            .lines()
            .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
        let ended =
            records.filter(|record| record["event"] == "flow_end" && record["end"] == "generation");
        ended.count() >= 2
    });
    signal(machine.broker_pid(), libc::SIGTERM);
    let end = machine.finish(WAIT).unwrap();
    assert_eq!(end.status.code(), Some(143), "{}", end.stderr);
    let restarts = end.report["restarts"].as_u64();
    assert!(restarts >= Some(1), "{:#}", end.report);
    let ended = "ended 1 flow of its former life";
    assert!(end.stderr.contains(ended), "{}", end.stderr);
}
