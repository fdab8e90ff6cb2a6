//! `slipgate run --mode userspace`, as a user without any privilege but for /dev/kvm.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use serde_json::Value;
use slipgate_testbed::{
    MicroVm, MicroVmEnd, require_kvm, require_root_and_tun,
    servers::{Answer, DnsServer, TcpServer, TcpService, Zone},
    signal,
    world::{SERVER, SERVER_2},
};

use crate::unprivileged::Place;

const WAIT: Duration = Duration::from_secs(20);
const MINUTE: Duration = Duration::from_secs(60);
const STREAMS: u16 = 7000;
const CLOSE: u16 = 7001;
const ECHO: u16 = 7002;
const FORBIDDEN: u16 = 7100;
/// Bytes of a stream: many times every queue on the way.
const STREAM_BYTES: u64 = 30_000_000;

fn start(place: &Place, line: &str, flags: &[&str]) -> MicroVm {
    let all = [&["--name", "vm", "--cmdline", line], flags].concat();
    MicroVm::start_by(&place.world.host, &place.user, &all).unwrap()
}

/// Waits for the end. Returns it with its status, and checks that nothing is left.
fn end(vm: MicroVm, place: &Place) -> (Option<i32>, MicroVmEnd) {
    let end = vm.finish(WAIT).unwrap();
    assert!(place.user.has_nothing_left());
    (end.status.code(), end)
}

fn json(place: &Place, command: &str) -> Value {
    serde_json::from_str(&place.output(&[command, "--json"])).unwrap()
}

#[test]
fn its_vm_has_a_lease_names_streams_and_its_policy() {
    require_root_and_tun!();
    require_kvm!();
    let place = Place::new();
    let world = &place.world;
    let zone = Zone::from([
        ("api.example.test".into(), Answer::a(SERVER_2, 300)),
        ("evil.test".into(), Answer::a(SERVER_2, 300)),
    ]);
    let resolver = DnsServer::start(&world.net, (SERVER, 53), zone).unwrap();
    let tcp = |port, service| TcpServer::start(&world.net, (SERVER_2, port), service).unwrap();
    let _streams = tcp(STREAMS, TcpService::Streams);
    let close = tcp(CLOSE, TcpService::Close);
    let _echo = tcp(ECHO, TcpService::Echo);
    let forbidden = tcp(FORBIDDEN, TcpService::Echo);
    let log = place.file("run/flows.jsonl");
    let dns = SERVER.to_string();
    let flags = [
        "--dns",
        &dns,
        "--default",
        "deny",
        "--allow",
        "*.example.test:7000-7002",
        "--flow-log",
        log.to_str().unwrap(),
        "--cpus",
        "2",
    ];
    let host = "api.example.test";
    let line = format!(
        "ping 10.0.2.2 2; crr {host}:{CLOSE} 200 x4 close; rr {host}:{ECHO} 50; \
         stream {host}:{STREAMS} {STREAM_BYTES} up x2; stream {host}:{STREAMS} {STREAM_BYTES} down x2; \
         crr {host}:{FORBIDDEN} 1; wait 60s"
    );
    let mut vm = start(&place, &line, &flags);
    let mut done = Vec::new();
    while done.len() < 7 {
        let line = vm.await_line("\"workload\"", MINUTE).unwrap();
        done.push(line.json().unwrap());
    }
    let is_well = |workload: &Value| workload["failed"].as_u64().unwrap_or(0) == 0;
    let (last, before) = done.split_last().unwrap();
    assert!(before.iter().all(is_well), "{before:#?}");
    assert_eq!(before[2]["done"], 200, "{before:#?}");
    assert!(!is_well(last), "{last}");
    assert_eq!((forbidden.accepted(), close.accepted()), (0, 200));

    for (title, pid) in [("engine", vm.engine_pid()), ("VMM", vm.vmm_pid())] {
        let status = fs::read_to_string(format!("/proc/{}/status", pid.unwrap())).unwrap();
        for line in ["NoNewPrivs:\t1", "Seccomp:\t2", "CapBnd:\t0000000000000000"] {
            assert!(status.contains(line), "{title} has not {line}: {status}");
        }
    }

    // What the other commands say, as the same user.
    let flows = json(&place, "flows");
    let flow = flows.as_array().unwrap().iter();
    let flow = flow.into_iter().find(|flow| flow["dns_name"] == host);
    let flow = flow.unwrap_or_else(|| panic!("none by its name in {flows:#}"));
    assert_eq!(
        (&flow["vm"], &flow["path"]),
        (&"vm".into(), &"sockets".into())
    );
    let stats = json(&place, "stats");
    let stats = &stats["vms"][0];
    assert!(stats["kernel"]["rx_packets"].as_u64().unwrap() >= STREAM_BYTES / 1_460);
    let card = &stats["vmm"]["net"];
    // No frame passes the VMM, and it makes no call for one.
    assert_eq!(card["link"], "rings", "{card:#}");
    let carried = &card["pairs"][0];
    assert_eq!(carried["syscalls"], 0, "{card:#}");
    // Streams pass whole: a frame has many segments.
    let frames = |way: &str| carried[way].as_u64().unwrap();
    let segments = |way: &str| stats["kernel"][way].as_u64().unwrap();
    assert!(
        frames("tx_frames") * 2 < segments("tx_packets"),
        "{stats:#}"
    );
    assert!(
        frames("rx_frames") * 2 < segments("rx_packets"),
        "{stats:#}"
    );
    // Most of what was sent went from its buffers to the sockets by one copy, and most of what came into
    // its buffers.
    for (direct, all) in [
        ("tx_direct_bytes", "tx_bytes"),
        ("rx_direct_bytes", "rx_bytes"),
    ] {
        let direct = frames(direct);
        assert!(direct > STREAM_BYTES && direct < frames(all), "{card:#}");
    }
    let why = place.output(&["why", "vm", "evil.test:7000"]);
    assert!(why.starts_with("no: "), "{why}");
    assert_eq!(resolver.udp_queries("evil.test"), 0);

    signal(vm.broker_pid(), libc::SIGTERM);
    let (status, end) = end(vm, &place);
    assert_eq!(status, Some(143));
    assert_eq!(end.report["outcome"], "stopped");
    assert_eq!(end.report["tap"], Value::Null);
    assert_eq!(end.report["nat"]["vm"], "vm");
    assert!(end.report["nat"]["admitted"].as_u64().unwrap() > 200);
    assert!(
        end.report["vmm"]["net"]["pairs"][0]["tx_frames"]
            .as_u64()
            .unwrap()
            > 200
    );
    let records = fs::read_to_string(&log).unwrap();
    let records = records
        .lines()
        .map(|line| serde_json::from_str(line).unwrap());
    let of = |event: &str| {
        let records = records.clone();
        records
            .filter(|record: &Value| record["event"] == event)
            .count()
    };
    assert_eq!(of("flow_start"), of("flow_end"));
    assert!(of("flow_end") > 200);
}

#[test]
fn it_ends_with_its_vm() {
    require_root_and_tun!();
    require_kvm!();
    let place = Place::new();
    let (status, ended) = end(start(&place, "selftest", &["--dns", "none"]), &place);
    assert_eq!((status, &ended.report["exit_code"]), (Some(0), &0.into()));
    let checks = ended.said("selftest");
    assert!(checks.len() > 10 && checks.iter().all(|check| check["ok"] == true));
    let vm = start(&place, "crr 10.0.2.2:1 1", &["--dns", "none"]);
    let (status, ended) = end(vm, &place);
    assert_eq!(
        (status, &ended.report["outcome"]),
        (Some(1), &"exited".into())
    );
}

#[test]
fn an_engine_or_a_vmm_that_dies_ends_it() {
    require_root_and_tun!();
    require_kvm!();
    let place = Place::new();
    for (is_engine, status, outcome) in [(true, 123, "nat_failed"), (false, 122, "vmm_killed")] {
        let mut vm = start(&place, "wait 60s", &["--dns", "none"]);
        vm.await_line("\"boot\"", WAIT).unwrap();
        let pids = [vm.engine_pid().unwrap(), vm.vmm_pid().unwrap()];
        signal(pids[usize::from(!is_engine)], libc::SIGKILL);
        let (ended, end) = end(vm, &place);
        assert_eq!(
            (ended, &end.report["outcome"]),
            (Some(status), &outcome.into())
        );
        let is_gone = |pid: &u32| !Path::new(&format!("/proc/{pid}")).exists();
        assert!(pids.iter().all(is_gone));
    }
}

/// Runs a command of the user's to its end: its status, and what it wrote to stdout and to stderr.
fn output(place: &Place, mut command: Command) -> (Option<i32>, String, String) {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = place.world.host.spawn(command).unwrap();
    let output = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (
        output.status.code(),
        text(output.stdout),
        text(output.stderr),
    )
}

#[test]
fn without_a_mode_it_says_why_it_is_this_one() {
    require_root_and_tun!();
    require_kvm!();
    let place = Place::new();
    let run = |flags: &[&str]| {
        let args = ["run", "--dns", "none", "--cmdline", "ping 10.0.2.2 1"];
        output(
            &place,
            place.user.slipgate_with_kvm(&[&args, flags].concat()),
        )
    };
    let (status, _, said) = run(&[]);
    assert_eq!(status, Some(0), "{said}");
    assert!(said.contains("(without CAP_NET_ADMIN, CAP_PERFMON, CAP_BPF): going on in user mode"));
    let (status, _, said) = run(&["--xdp", "on"]);
    assert_eq!(status, Some(2), "{said}");
    assert!(
        said.contains("user mode can't take its place") && said.contains("--xdp on"),
        "{said}"
    );
    let (status, _, said) = run(&["--mode", "hybrid"]);
    assert!(status == Some(1) && !said.contains("user mode"), "{said}");
    let (status, found, _) = output(&place, place.user.slipgate_with_kvm(&["doctor"]));
    assert_eq!(status, Some(1));
    assert!(
        found.contains("MISSING  capabilities") && found.contains("User mode can"),
        "{found}"
    );
}

#[test]
fn without_kvm_it_names_the_group_and_leaves_nothing() {
    require_root_and_tun!();
    require_kvm!();
    let place = Place::new();
    // The device is root's here.
    let (status, _, said) = output(&place, place.slipgate(&["run", "--mode", "userspace"]));
    assert_eq!(status, Some(1), "{said}");
    assert!(
        said.contains("/dev/kvm") && said.contains("kvm $USER"),
        "{said}"
    );
    assert!(place.user.has_nothing_left());
}

#[test]
fn a_user_pauses_saves_and_restores_a_vm_of_theirs() {
    require_root_and_tun!();
    require_kvm!();
    let place = Place::new();
    let close = TcpServer::start(&place.world.net, (SERVER_2, CLOSE), TcpService::Close).unwrap();
    let line = format!("wait 2s; crr {} 30 x2 close", close.address());
    let mut vm = start(&place, &line, &["--memory", "64"]);
    vm.await_line("10.0.2.15", MINUTE).unwrap();
    let state = |place: &Place| json(place, "ps")[0]["state"].clone();
    place.output(&["pause", "vm"]);
    assert_eq!(state(&place), "paused");
    let saved = place.file("run/warm");
    let dir = saved.to_str().unwrap();
    place.output(&["snapshot", "vm", dir]);
    assert_eq!(state(&place), "paused", "as it was");
    place.output(&["resume", "vm"]);
    assert_eq!(state(&place), "running");
    place.output(&["kill", "vm"]);
    let (status, _) = end(vm, &place);
    assert_eq!(status, Some(143));

    let flags = ["--restore", dir, "--name", "again"];
    let clone = MicroVm::start_by(&place.world.host, &place.user, &flags).unwrap();
    let (status, end) = end(clone, &place);
    assert_eq!(status, Some(0), "{:#?}\n{}", end.lines, end.stderr);
    // The pages of a snapshot's file are private to the VMM.
    assert_eq!(end.report["vmm"]["net"]["link"], "socket");
    assert_eq!(end.report["nat"]["vm"], "again");
    assert_eq!(close.accepted(), 30);
}

/// Rules are no part of a snapshot: a restored VM has those of the command that restores it, from its first
/// packet on.
#[test]
fn a_restored_vm_is_denied_what_its_rules_deny() {
    require_root_and_tun!();
    require_kvm!();
    let place = Place::new();
    let tcp = |port| TcpServer::start(&place.world.net, (SERVER_2, port), TcpService::Close);
    let [denied, open] = [CLOSE, FORBIDDEN].map(|port| tcp(port).unwrap());
    let line = format!(
        "wait 15s; crr {} 5 close; crr {} 5 close",
        denied.address(),
        open.address()
    );
    let deny = format!("{SERVER_2}:{CLOSE}/tcp");
    let rules = ["--deny", &deny];
    let flags = [&["--memory", "64"], &rules[..]].concat();
    let mut vm = start(&place, &line, &flags);
    vm.await_line("10.0.2.15", MINUTE).unwrap();
    // It has not yet connected.
    place.output(&["pause", "vm"]);
    let saved = place.file("run/warm");
    let dir = saved.to_str().unwrap();
    place.output(&["snapshot", "vm", dir]);
    place.output(&["kill", "vm"]);
    end(vm, &place);
    assert_eq!((denied.accepted(), open.accepted()), (0, 0));

    let restored = |rules: &[&str]| {
        let flags = [&["--restore", dir, "--name", "again"], rules].concat();
        let vm = MicroVm::start_by(&place.world.host, &place.user, &flags).unwrap();
        end(vm, &place)
    };
    let (status, ended) = restored(&rules);
    assert_eq!(status, Some(1), "{:#?}\n{}", ended.lines, ended.stderr);
    assert_eq!((denied.accepted(), open.accepted()), (0, 5));
    // Without them it would have connected.
    let (status, ended) = restored(&[]);
    assert_eq!(status, Some(0), "{:#?}\n{}", ended.lines, ended.stderr);
    assert_eq!((denied.accepted(), open.accepted()), (5, 10));
}

/// The engine stops its rings, so it touches no memory of a guest that rests, and takes up where it was.
#[test]
fn a_pause_in_the_middle_of_streams_loses_nothing() {
    require_root_and_tun!();
    require_kvm!();
    let place = Place::new();
    let tcp = |port, service| TcpServer::start(&place.world.net, (SERVER_2, port), service);
    let streams = tcp(STREAMS, TcpService::Streams).unwrap();
    let to = streams.address();
    let line = format!("stream {to} 400000000 up x2; stream {to} 400000000 down x2");
    let mut vm = start(&place, &line, &["--memory", "64"]);
    vm.await_line("10.0.2.15", MINUTE).unwrap();
    let frames = || {
        let stats = json(&place, "stats");
        let pair = &stats["vms"][0]["vmm"]["net"]["pairs"][0];
        ["tx_frames", "rx_frames"].map(|way| pair[way].as_u64().unwrap())
    };
    for _ in 0..8 {
        place.output(&["pause", "vm"]);
        let before = frames();
        place.output(&["snapshot", "vm", place.file("run/saved").to_str().unwrap()]);
        std::fs::remove_dir_all(place.file("run/saved")).unwrap();
        assert_eq!(frames(), before, "it rests");
        place.output(&["resume", "vm"]);
    }
    let (status, end) = end(vm, &place);
    assert_eq!(status, Some(0), "{:#?}\n{}", end.lines, end.stderr);
    assert_eq!(end.report["vmm"]["net"]["link"], "rings");
}

/// The former life's rings and flows are gone, and the next one has the card.
#[test]
fn a_guest_that_resets_itself_has_its_rings_again() {
    require_root_and_tun!();
    require_kvm!();
    let place = Place::new();
    let close = TcpServer::start(&place.world.net, (SERVER_2, CLOSE), TcpService::Close).unwrap();
    let line = format!("crr {} 20 x2 close; reset", close.address());
    let mut vm = start(&place, &line, &["--on-reboot", "restart"]);
    for _ in 0..3 {
        let done = vm.await_line("\"workload\":\"crr\"", MINUTE).unwrap();
        assert_eq!(done.json().unwrap()["done"], 20);
    }
    signal(vm.broker_pid(), libc::SIGTERM);
    let (status, end) = end(vm, &place);
    assert_eq!(status, Some(143), "{}", end.stderr);
    assert!(end.report["restarts"].as_u64().unwrap() >= 2);
    assert_eq!(end.report["vmm"]["net"]["link"], "rings");
}

/// The VMM holds the rate, so it has to see the frames.
#[test]
fn a_card_with_a_rate_has_its_frames_pass_the_vmm_which_holds_it() {
    require_root_and_tun!();
    require_kvm!();
    let place = Place::new();
    let tcp = |port, service| TcpServer::start(&place.world.net, (SERVER_2, port), service);
    let streams = tcp(STREAMS, TcpService::Streams).unwrap();
    let line = format!("stream {} 3000000 up", streams.address());
    let vm = start(&place, &line, &["--net-rate-tx", "bandwidth=1M"]);
    let (status, end) = end(vm, &place);
    assert_eq!(status, Some(0), "{:#?}\n{}", end.lines, end.stderr);
    let card = &end.report["vmm"]["net"];
    assert_eq!(card["link"], "socket");
    assert!(card["pairs"][0]["tx_throttled"].as_u64().unwrap() > 0);
}

/// Prints what the guest measures by the binary of SLIPGATE_BIN (docs/performance.md).
#[test]
#[ignore = "a measurement"]
fn measure_a_guest_in_user_mode() {
    require_root_and_tun!();
    require_kvm!();
    let place = Place::new();
    let tcp = |port, service| TcpServer::start(&place.world.net, (SERVER_2, port), service);
    let streams = tcp(STREAMS, TcpService::Streams).unwrap();
    let close_server = tcp(CLOSE, TcpService::Close).unwrap();
    let echo_server = tcp(ECHO, TcpService::Echo).unwrap();
    let at = |server: &TcpServer| server.address().to_string();
    let (close, echo, to) = (at(&close_server), at(&echo_server), at(&streams));
    let line = format!(
        "crr {close} 1000 close; crr {close} 1000 x4 close; rr {echo} 2000; \
         stream {to} 2000000000 up; stream {to} 2000000000 down"
    );
    let (_, end) = end(start(&place, &line, &[]), &place);
    for line in end.lines {
        println!("{line:?}");
    }
    println!("{}", end.report["vmm"]["net"]["pairs"][0]);
}

/// Prints what CPU time one upload takes of the engine of SLIPGATE_BIN (docs/performance.md).
#[test]
#[ignore = "a measurement"]
fn measure_the_engine_during_an_upload() {
    require_root_and_tun!();
    require_kvm!();
    measure_the_engine("up");
}

/// As [`measure_the_engine_during_an_upload`], of a download.
#[test]
#[ignore = "a measurement"]
fn measure_the_engine_during_a_download() {
    require_root_and_tun!();
    require_kvm!();
    measure_the_engine("down");
}

fn measure_the_engine(way: &str) {
    const BYTES: u64 = 4_000_000_000;
    let place = Place::new();
    let streams = TcpServer::start(&place.world.net, (SERVER_2, STREAMS), TcpService::Streams);
    let streams = streams.unwrap();
    let line = format!("stream {} {BYTES} {way}; wait 60s", streams.address());
    let mut vm = start(&place, &line, &[]);
    let ran_ns = |vm: &MicroVm| {
        // Of its one thread (Documentation/scheduler/sched-stats.rst).
        let path = format!("/proc/{}/schedstat", vm.engine_pid().unwrap());
        let fields = fs::read_to_string(path).unwrap();
        fields.split(' ').next().unwrap().parse::<u64>().unwrap()
    };
    vm.await_line("\"lease\"", MINUTE).unwrap();
    let before_ns = ran_ns(&vm);
    let done = vm.await_line("\"stream\"", MINUTE).unwrap();
    println!("engine: {} ms", (ran_ns(&vm) - before_ns) / 1_000_000);
    println!("{:?}", done.json().unwrap());
    println!(
        "{}",
        json(&place, "stats")["vms"][0]["vmm"]["net"]["pairs"][0]
    );
    signal(vm.broker_pid(), libc::SIGTERM);
    end(vm, &place);
}
