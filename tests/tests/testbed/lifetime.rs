//! Everything goes away: after a drop, a panic, and when the process is killed.
//!
//! One end of a veth pair stays here and the other is in the world's host namespace: when that
//! namespace is destroyed, and only then, this end goes too.

use std::{
    env, fs,
    io::{self, BufRead, BufReader},
    net::UdpSocket,
    path::Path,
    process::{Command, Stdio},
    sync::atomic::{AtomicBool, Ordering::SeqCst},
    thread,
    time::{Duration, Instant},
};

use slipgate_testbed::{Guest, GuestConfig, NetNs, PinDir, World, require_root_and_tun};

use super::WAIT;

const WITNESS_PATH: &str = "SLIPGATE_TESTBED_WITNESS";

fn world_with_witness(path: &Path) -> (World, Guest) {
    let world = World::new().unwrap();
    let guest = Guest::new(&world, GuestConfig::new("tap0")).unwrap();
    let add = format!(
        "link add there type veth peer name here netns {}",
        path.display()
    );
    world.host.ip(&add).unwrap();
    (world, guest)
}

fn comes_true(what: impl Fn() -> bool) -> bool {
    let deadline = Instant::now() + WAIT;
    while Instant::now() < deadline {
        if what() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    false
}

fn pump_threads(tap: &str) -> usize {
    let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
    let names = tasks.map(|task| fs::read_to_string(task.path().join("comm")).unwrap_or_default());
    names
        .filter(|name| name.trim() == format!("pump-{tap}"))
        .count()
}

#[test]
fn a_drop_and_a_panic_leave_nothing() {
    require_root_and_tun!();
    let witness = NetNs::new("witness").unwrap();
    let path = witness.path();
    for panics in [false, true] {
        let result = std::panic::catch_unwind(|| {
            let (world, _guest) = world_with_witness(&path);
            let _second = Guest::new(&world, GuestConfig::new("taplife")).unwrap();
            let mut sleep = Command::new("sleep");
            sleep.arg("60");
            let mut sleep = world.host.spawn(sleep).unwrap();
            assert!(witness.ifindex("here").is_some());
            assert_eq!(pump_threads("taplife"), 1);
            assert!(!panics, "on purpose");
            drop(world);
            assert!(!sleep.wait().unwrap().success(), "killed with its world");
        });
        assert_eq!(result.is_err(), panics);
        assert!(
            comes_true(|| witness.ifindex("here").is_none()),
            "the namespace is left over"
        );
        assert!(
            comes_true(|| pump_threads("taplife") == 0),
            "a pump is left over"
        );
    }
}

/// The victim of the next test; by itself it does nothing.
#[test]
fn victim() {
    let Some(path) = env::var_os(WITNESS_PATH) else {
        return;
    };
    let (world, _guest) = world_with_witness(Path::new(&path));
    let pins = PinDir::new().unwrap();
    let mut sleep = Command::new("sleep");
    sleep.arg("60").stdin(Stdio::null()).stdout(Stdio::null());
    let mut sleep = world.host.spawn(sleep).unwrap();
    println!("\nmade {} {}", sleep.id(), pins.path().display());
    sleep.wait().unwrap();
}

#[test]
fn a_killed_process_leaves_nothing() {
    require_root_and_tun!();
    let witness = NetNs::new("witness").unwrap();
    let mut victim = Command::new(env::current_exe().unwrap())
        .args(["--exact", "lifetime::victim", "--nocapture"])
        .env(WITNESS_PATH, witness.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(victim.stdout.take().unwrap())
        .lines()
        .map_while(Result::ok);
    let made = lines.find(|line| line.starts_with("made ")).unwrap();
    let words: Vec<&str> = made.split(' ').collect();
    let (sleep, pins) = (format!("/proc/{}", words[1]), Path::new(words[2]));
    assert!(Path::new(&sleep).exists() && pins.exists() && witness.ifindex("here").is_some());
    drop(PinDir::new().unwrap());
    assert!(pins.exists(), "the pins of a living process are not swept");
    victim.kill().unwrap();
    victim.wait().unwrap();
    assert!(
        comes_true(|| witness.ifindex("here").is_none()),
        "the namespace is left over"
    );
    assert!(
        comes_true(|| !Path::new(&sleep).exists()),
        "a child is left over"
    );
    let mine = PinDir::new().unwrap();
    assert!(
        !pins.exists(),
        "the pins of a dead process are swept by the next"
    );
    assert!(mine.path().exists() && mine.pins().is_empty());
}

#[test]
fn a_command_blocks_no_signal() {
    require_root_and_tun!();
    let ns = NetNs::new("signals").unwrap();
    let mut grep = Command::new("grep");
    grep.args(["SigBlk", "/proc/self/status"]);
    let said = ns.output(grep).unwrap().stdout;
    assert_eq!(
        String::from_utf8_lossy(&said),
        "SigBlk:\t0000000000000000\n"
    );
}

/// The kernel tells this process of each child's end by SIGCHLD.
#[test]
fn a_receive_with_a_time_limit_is_not_interrupted_by_the_end_of_a_command() {
    require_root_and_tun!();
    let ns = NetNs::new("commands").unwrap();
    let socket = ns.run(|| UdpSocket::bind("127.0.0.1:0")).unwrap();
    let limit = Some(Duration::from_millis(20));
    socket.set_read_timeout(limit).unwrap();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let commands = || (0..200).try_for_each(|_| ns.output(Command::new("true")).map(drop));
        let commands: Vec<_> = (0..4).map(|_| scope.spawn(commands)).collect();
        scope.spawn(|| {
            for thread in commands {
                thread.join().unwrap().unwrap();
            }
            is_over.store(true, SeqCst);
        });
        while !is_over.load(SeqCst) {
            let error = socket.recv(&mut [0; 1]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{error}");
        }
    });
}
