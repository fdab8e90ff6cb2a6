//! `slipgate run` beside a daemon, which serves its VM for as long as it runs.
use std::{
    fs,
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    sync::mpsc::{self, Receiver},
    thread,
    time::{Duration, Instant},
};

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

/// Passes questions on to a daemon, and its answers back, but for one kind of question: that one is taken,
/// and never answered. Tells of each.
fn never_answer(socket: &Path, question: &'static str) -> Receiver<()> {
    let behind = socket.with_extension("behind");
    fs::rename(socket, &behind).unwrap();
    let listener = UnixListener::bind(socket).unwrap();
    let (tell, asked) = mpsc::channel();
    thread::spawn(move || {
        for client in listener.incoming() {
            let (mut client, behind, tell) = (client.unwrap(), behind.clone(), tell.clone());
            // One may ask while another waits for its answer.
            thread::spawn(move || -> io::Result<()> {
                let mut asks = String::new();
                BufReader::new(&client).read_line(&mut asks)?;
                if asks.contains(question) {
                    let _ = tell.send(());
                    // Until who asks has gone.
                    return client.read(&mut [0]).map(drop);
                }
                let mut daemon = UnixStream::connect(&behind)?;
                daemon.write_all(asks.as_bytes())?;
                io::copy(&mut daemon, &mut client).map(drop)
            });
        }
    });
    asked
}

/// With `--as` as well, and already where the daemon is asked for the TAPs' MTU.
#[test]
fn a_machine_whose_daemon_never_answers_is_stopped_by_a_signal() {
    const SAYS: &str = "web waits: the daemon was asked to take its machine";
    require_root_and_tun!();
    require_kvm!();
    for (question, how, name, number) in [
        ("run_vm", "--as", "web", libc::SIGTERM),
        ("serve_vm", "--name", "other", libc::SIGINT),
        ("guest_network", "--as", "web", libc::SIGTERM),
    ] {
        let bed = Bed::new();
        let daemon = Slipgate::serve(&bed.world.host, &bed.pins, &["--uplink", UPLINK]).unwrap();
        let added = daemon.run(&["vm", "add", "web", "--tap", "tapweb"]);
        assert!(added.unwrap().status.success());
        let asked = never_answer(&daemon.run_dir().unwrap().join("daemon.sock"), question);
        let machine = bed.start_with(&[how, name, "--memory", "64", "--cmdline", "wait 60s"]);
        asked.recv_timeout(WAIT).expect(question);
        if question == "run_vm" {
            eventually("it says so", || machine.stderr().contains(SAYS));
        }
        let began = Instant::now();
        signal(machine.broker_pid(), number);
        let end = machine.finish(WAIT).unwrap();
        let (took, stderr) = (began.elapsed(), &end.stderr);
        let code = end.status.code();
        assert_eq!(code, Some(128 + number), "{question}: {stderr}");
        let why = "before the guest ran";
        assert!(stderr.contains(why), "{question}: {stderr}");
        assert!(took < Duration::from_secs(5), "{question}: {took:?}");
        let says = stderr.contains(SAYS);
        assert_eq!(says, question == "run_vm", "{question}: {stderr}");
        assert_eq!(end.report["outcome"], "not_started", "{question}");
        let links = bed.world.host.ip("-brief link").unwrap();
        assert!(!links.contains("tapweb"), "{links}");
    }
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
