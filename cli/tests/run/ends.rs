//! Ends of a guest: each has a status of its own, and the TAP and the NAT are removed.
use std::{collections::BTreeSet, time::Duration};

use slipgate_testbed::{
    MicroVmEnd, require_kvm, require_root_and_tun,
    servers::{TcpServer, TcpService},
    signal,
    world::{SERVER, UPLINK},
};

use crate::{Bed, WAIT, eventually, payload::Payload};

fn payload() -> Payload {
    Payload::default().say("here\n")
}

/// Checks the exit status and the report's outcome.
#[track_caller]
fn assert_ended(end: &MicroVmEnd, status: i32, outcome: &str) {
    assert_eq!(end.status.code(), Some(status), "{}", end.stderr);
    assert_eq!(end.report["outcome"], outcome, "{:#}", end.report);
    assert_eq!(end.report["exit_code"], status);
}

#[test]
fn a_guest_has_its_own_exit_status_and_a_report() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    for status in [0, 7, 255] {
        let end = bed.run(&payload().exit(status));
        assert_ended(&end, status.into(), "exited");
        assert_eq!(end.report["status"], status);
        let said: Vec<_> = end.lines.iter().map(|line| line.text.as_str()).collect();
        assert_eq!(said, ["here"]);
        bed.assert_nothing_is_left();
    }
    let end = bed.run(&payload().exit(0));
    let report = &end.report;
    assert_eq!(report["machine"]["memory_mib"], 32);
    assert_eq!(report["machine"]["mac"], "02:53:4c:47:00:02");
    let (line, ran) = (report["first_line_us"].as_u64(), report["ran_us"].as_u64());
    assert!(line.is_some() && line <= ran, "{report:#}");
    assert!(report["vmm"]["vcpus"][0]["port_writes"].as_u64() >= Some(6));
    assert_eq!(report["vmm"]["net"]["pairs"].as_array().unwrap().len(), 1);
    assert_eq!(report["nat"]["vm"], report["name"]);
}

#[test]
fn nobody_has_to_read_what_is_said() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let kernel = bed.kernel("kernel", &payload().exit(7));
    let report = bed.folder.path().join("report");
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_slipgate"));
    command
        .args([
            "run", "--memory", "32", "--log", "trace", "--uplink", UPLINK,
        ])
        .arg("--kernel")
        .arg(&kernel)
        .arg("--report")
        .arg(&report)
        .arg("--pin-dir")
        .arg(bed.pins.path())
        .stdin(std::process::Stdio::null());
    // Both are pipes without a reader.
    let unread = || std::io::pipe().unwrap().1;
    command.stdout(unread()).stderr(unread());
    let status = bed.world.host.spawn(command).unwrap().wait().unwrap();
    let report = std::fs::read_to_string(report).unwrap();
    assert_eq!(status.code(), Some(7), "{report}");
    assert!(report.contains("\"outcome\": \"exited\""), "{report}");
    bed.assert_nothing_is_left();
}

#[test]
fn power_off_is_success_and_a_reset_is_not() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    // ACPI: SLP_EN and SLP_TYP of S5 to the sleep control register; i8042: pulse the reset line.
    assert_ended(
        &bed.run(&payload().out(0x600, 0x20 | 5 << 2).halt()),
        0,
        "powered_off",
    );
    assert_ended(&bed.run(&payload().out(0x64, 0xfe).halt()), 120, "reset");
    bed.assert_nothing_is_left();
}

#[test]
fn a_crash_ends_in_a_report_with_registers_and_what_to_do() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let end = bed.run(&payload().crash());
    assert_ended(&end, 121, "crashed");
    for part in [
        "a triple fault",
        "what to do:",
        "rip ",
        "cr0 ",
        "code at rip: 0f 0b",
    ] {
        assert!(end.stderr.contains(part), "{}", end.stderr);
        assert!(end.report["report"].as_str().unwrap().contains(part));
    }
    bed.assert_nothing_is_left();
}

#[test]
fn a_signal_stops_the_vm_then_the_nat() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    // Asleep or at work: it is stopped at once.
    for (image, signal) in [
        (payload().halt(), libc::SIGTERM),
        (payload().spin(), libc::SIGINT),
    ] {
        let mut vm = bed.start(&image, &["--cpus", "2"]);
        vm.await_line("here", WAIT).unwrap();
        slipgate_testbed::signal(vm.broker_pid(), signal);
        let end = vm.finish(Duration::from_secs(10)).unwrap();
        assert_ended(&end, 128 + signal, "stopped");
        assert!(end.report["vmm"].is_object(), "{:#}", end.report);
        bed.assert_nothing_is_left();
    }
}

#[test]
fn a_killed_vmm_is_reported_and_taken_down_after() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let mut vm = bed.start(&payload().halt(), &["--name", "victim"]);
    vm.await_line("here", WAIT).unwrap();
    signal(vm.vmm_pid().unwrap(), libc::SIGKILL);
    let end = vm.finish(WAIT).unwrap();
    assert_ended(&end, 122, "vmm_killed");
    let said = "the VMM of victim was killed by signal 9";
    assert!(end.stderr.contains(said), "{}", end.stderr);
    bed.assert_nothing_is_left();
}

/// It waits for its TAP to be served then, and the broker is at work on that.
#[test]
fn a_vmm_killed_before_its_guest_ran_is_named_and_the_next_run_tidies_up() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let vm = bed.start(&payload().halt(), &["--name", "stillborn"]);
    let until = std::time::Instant::now() + WAIT;
    let vmm = loop {
        assert!(std::time::Instant::now() < until, "no VMM is ready");
        // No rest between two looks: its guest runs a moment later.
        if let Some(pid) = vm.vmm_pid()
            && is_ready(pid)
        {
            break pid;
        }
    };
    signal(vmm, libc::SIGKILL);
    let end = vm.finish(WAIT).unwrap();
    // 122 should it have been told to run by then.
    assert!(matches!(end.status.code(), Some(1 | 122)), "{}", end.stderr);
    let said = "was killed by signal 9";
    assert!(end.stderr.contains(said), "{}", end.stderr);
    let next = bed.start(&payload().exit(0), &["--name", "stillborn"]);
    assert_ended(&next.finish(WAIT).unwrap(), 0, "exited");
    bed.assert_nothing_is_left();
}

/// Whether the machine is made: its vCPU is there, and the main thread receives (47) or, should it
/// be late, waits for the guest's end by a read (0).
fn is_ready(vmm: u32) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{vmm}/task"));
    let mut tasks = tasks.into_iter().flatten().flatten();
    let is_vcpu = |task: std::fs::DirEntry| {
        let name = std::fs::read_to_string(task.path().join("comm"));
        name.is_ok_and(|name| name == "vcpu0\n")
    };
    let call = std::fs::read_to_string(format!("/proc/{vmm}/syscall")).unwrap_or_default();
    tasks.any(is_vcpu) && (call.starts_with("47 ") || call.starts_with("0 "))
}

/// As a service manager does it; the broker gets it last, which is the worst order.
#[test]
fn a_signal_to_all_processes_at_once_stops_in_order() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let mut vm = bed.start(&payload().spin(), &[]);
    vm.await_line("here", WAIT).unwrap();
    let all = [
        vm.vmm_pid().unwrap(),
        vm.engine_pid().unwrap(),
        vm.broker_pid(),
    ];
    for pid in all {
        signal(pid, libc::SIGTERM);
    }
    let end = vm.finish(WAIT).unwrap();
    assert_ended(&end, 128 + libc::SIGTERM, "stopped");
    assert!(end.report["vmm"].is_object(), "{:#}", end.report);
    bed.assert_nothing_is_left();
}

#[test]
fn a_vm_outlives_its_engine() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let mut vm = bed.start(&payload().halt(), &["--name", "tough"]);
    vm.await_line("here", WAIT).unwrap();
    let (vmm, engine) = (vm.vmm_pid(), vm.engine_pid());
    signal(engine.unwrap(), libc::SIGKILL);
    eventually("another engine", || {
        vm.stderr().contains("a new engine serves")
    });
    assert_eq!(vm.vmm_pid(), vmm);
    assert_ne!(vm.engine_pid(), engine);
    signal(vm.broker_pid(), libc::SIGTERM);
    assert_ended(&vm.finish(WAIT).unwrap(), 143, "stopped");
    bed.assert_nothing_is_left();
}

/// Streams go on over two kills of the engine, connections after these are served by the third, and each
/// flow is recorded once with all that it carried.
#[test]
fn flows_and_records_are_right_when_the_engine_is_killed_amid_the_traffic_of_a_run() {
    const STREAMS: usize = 6;
    const BYTES: u64 = 100_000_000;
    const SHORT: usize = 40;
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let net = &bed.world.net;
    let streams = TcpServer::start(net, (SERVER, 7000), TcpService::HeldStreams).unwrap();
    let _close = TcpServer::start(net, (SERVER, 7001), TcpService::Close).unwrap();
    let log = bed.folder.path().join("flows");
    let work = format!(
        "stream {SERVER}:7000 {BYTES} mixed x{STREAMS}; crr {SERVER}:7001 {SHORT} x4 close; wait 100"
    );
    let flags = ["--name", "busy", "--flow-log", log.to_str().unwrap()];
    let mut vm = bed.start_with(&[&flags[..], &["--cmdline", &work]].concat());
    vm.await_line("\"lease\"", WAIT).unwrap();
    eventually("all are connected", || streams.accepted() == STREAMS as u64);
    for kills in 1..=2 {
        let engine = vm.engine_pid().unwrap();
        signal(engine, libc::SIGKILL);
        eventually("another engine", || {
            vm.stderr().matches("a new engine serves").count() == kills
        });
        assert_eq!(streams.open(), STREAMS, "the engine was killed too late");
    }
    streams.release();
    let end = vm.finish(4 * WAIT).unwrap();
    // The guest has checked each byte that it got, and the servers each that they got.
    end.assert_success();
    let done: Vec<_> = end
        .said("done")
        .iter()
        .map(|it| it["done"].clone())
        .collect();
    assert_eq!(done, [STREAMS, SHORT], "{:?}", end.lines);
    let text = std::fs::read_to_string(&log).unwrap();
    let records: Vec<serde_json::Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .filter(|record: &serde_json::Value| record["event"] == "flow_end")
        .collect();
    let to = |port: u16| {
        let remote = format!("{SERVER}:{port}");
        let of_port = move |record: &&serde_json::Value| record["remote"] == remote.as_str();
        records.iter().filter(of_port).collect::<Vec<_>>()
    };
    let ids: BTreeSet<_> = records.iter().map(|it| it["id"].to_string()).collect();
    assert_eq!(ids.len(), records.len(), "one is recorded twice: {text}");
    assert_eq!((to(7000).len(), to(7001).len()), (STREAMS, SHORT), "{text}");
    // A third each up and down; the rest has 4,096 bytes.
    for way in ["tx_bytes", "rx_bytes"] {
        let carried = to(7000).into_iter().map(|it| it[way].as_u64().unwrap());
        let whole = carried.filter(|bytes| *bytes > BYTES).count();
        assert_eq!(whole, STREAMS / 3, "{way}: {text}");
    }
    assert_eq!(end.report["nat"]["admitted"], STREAMS + SHORT);
    bed.assert_nothing_is_left();
}

#[test]
fn a_vm_ends_when_its_engine_is_given_up_and_the_next_of_its_name_takes_the_rest_down() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let mut vm = bed.start(&payload().halt(), &["--name", "orphan"]);
    vm.await_line("here", WAIT).unwrap();
    let given_up = "is not started again";
    let mut killed = None;
    eventually("the engine is given up", || {
        if let Some(pid) = vm.engine_pid().filter(|pid| Some(*pid) != killed) {
            signal(pid, libc::SIGKILL);
            killed = Some(pid);
        }
        vm.stderr().contains(given_up)
    });
    let end = vm.finish(WAIT).unwrap();
    assert_ended(&end, 123, "nat_failed");
    for part in [
        "the engine was killed by signal 9",
        given_up,
        "orphan was stopped",
        "--name orphan",
    ] {
        assert!(end.stderr.contains(part), "{}", end.stderr);
    }
    // The VM and its TAP are gone; pins are left.
    assert!(!bed.world.host.ip("-brief link").unwrap().contains("sgvm"));
    assert!(!bed.pins.pins().is_empty());
    let next = bed.start(&payload().exit(0), &["--name", "orphan"]);
    assert_ended(&next.finish(WAIT).unwrap(), 0, "exited");
    bed.assert_nothing_is_left();
}

#[test]
fn nothing_outlives_a_killed_broker() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let mut vm = bed.start(&payload().spin(), &["--name", "left"]);
    vm.await_line("here", WAIT).unwrap();
    let (vmm, engine) = (vm.vmm_pid().unwrap(), vm.engine_pid().unwrap());
    signal(vm.broker_pid(), libc::SIGKILL);
    drop(vm.finish(WAIT).unwrap());
    let runs = |pid: u32| std::path::Path::new(&format!("/proc/{pid}/exe")).exists();
    let has_tap = || bed.world.host.ifindex("sgvm0").is_some();
    eventually("their end", || !(runs(vmm) || runs(engine) || has_tap()));
    let next = bed.start(&payload().exit(0), &["--name", "left"]);
    assert_ended(&next.finish(WAIT).unwrap(), 0, "exited");
    bed.assert_nothing_is_left();
}

#[test]
fn two_at_once_share_the_maps_and_nothing_else() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let image = payload().halt();
    let mut first = bed.start(&image, &[]);
    first.await_line("here", WAIT).unwrap();
    let mut second = bed.start(&image, &[]);
    second.await_line("here", WAIT).unwrap();
    let stats = first.run(&["stats", "--json"]).unwrap().stdout;
    let stats: serde_json::Value = serde_json::from_slice(&stats).unwrap();
    let names: Vec<_> = stats["vms"]
        .as_array()
        .unwrap()
        .iter()
        .map(|vm| &vm["vm"])
        .collect();
    assert_eq!(names, ["sgvm0", "sgvm1"]);
    for (vm, other_is_left) in [(first, true), (second, false)] {
        signal(vm.broker_pid(), libc::SIGTERM);
        assert_ended(&vm.finish(WAIT).unwrap(), 143, "stopped");
        let links = bed.world.host.ip("-brief link").unwrap();
        assert_eq!(links.contains("sgvm1"), other_is_left, "{links}");
    }
    bed.assert_nothing_is_left();
}
