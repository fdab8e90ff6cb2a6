//! Processes of slipgate that end, hang or are signalled: by hand, by a service manager, by a bug.

use std::{
    collections::HashSet,
    fs,
    net::{IpAddr, TcpStream},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use slipgate_testbed::{
    Slipgate,
    clients::tcp::{self, EchoSession},
    require_root_and_tun,
    servers::{TcpServer, TcpService},
    turns,
};

use crate::{
    Cell, Stand, WAIT, eventually,
    matrix::{at, matrix},
};

matrix! {
    a_signal_to_all_processes_at_once_is_an_orderly_stop: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    another_engine_takes_the_place_of_one_that_is_killed: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "flows end with the engine, and slipgate with both (exec.md)";
    a_policy_that_was_applied_is_the_next_engines_too: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "flows end with the engine, and slipgate with both (exec.md)";
    an_engine_that_is_stopped_is_noticed_and_another_takes_its_place: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "flows end with the engine, and slipgate with both (exec.md)";
    an_engine_without_a_frame_sleeps: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    an_engine_that_is_killed_while_it_stops_leaves_nothing_undone: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "flows end with the engine, and slipgate with both (exec.md)";
    an_engine_that_ends_again_and_again_is_given_up_and_its_flows_go_on: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "flows end with the engine, and slipgate with both (exec.md)";
}

/// Time limit after an engine's end for new flows to be admitted.
const AGAIN_WITHIN: Duration = Duration::from_secs(2);
/// Time limit for a stopped engine to be detected, which takes ten seconds at most, and replaced.
const NOTICED_WITHIN: Duration = Duration::from_secs(20);

/// The broker's children of this name, by number.
fn processes(slipgate: &Slipgate, title: &str) -> Vec<Pid> {
    let children = slipgate.children_named(title).into_iter();
    children.map(|pid| Pid::from_raw(pid as i32)).collect()
}

fn engine(slipgate: &Slipgate) -> Pid {
    eventually("an engine", || processes(slipgate, "slipgate-engine").pop())
}

/// Sends a signal to all processes, as a service manager does to a control group; the broker last,
/// which is the worst order.
fn signal_all(stand: &Stand, signal: Signal) {
    for child in processes(&stand.slipgate, "slipgate-") {
        kill(child, signal).unwrap();
    }
    let broker = Pid::from_raw(stand.slipgate.broker_pid() as i32);
    kill(broker, signal).unwrap();
}

fn echo_server(stand: &Stand) -> TcpServer<IpAddr> {
    let address = (stand.cell.server(), 7000);
    TcpServer::start(&stand.world.net, address, TcpService::Echo).unwrap()
}

fn round(stand: &Stand, stream: &mut TcpStream) {
    stand
        .run(|| EchoSession::new(stream).round(10_000))
        .expect("an established flow goes on");
}

/// Each flow has one end in the log, and no more than one start: that of a flow let in within the
/// turn in which its engine was killed is missing. How many there are.
fn assert_books_are_whole(stand: &Stand) -> usize {
    let ids = |event| {
        let mut lines = stand.events(event);
        lines.retain(|line| line["path"] != "relay");
        let ids: HashSet<_> = lines.iter().map(|line| line["id"].to_string()).collect();
        assert_eq!(ids.len(), lines.len(), "{event} once a flow: {lines:#?}");
        ids
    };
    let (started, ended) = (ids("flow_start"), ids("flow_end"));
    assert!(started.is_subset(&ended), "{started:?} {ended:?}");
    ended.len()
}

fn a_signal_to_all_processes_at_once_is_an_orderly_stop(cell: Cell) {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let mut stand = Stand::of(cell, &["--metrics", "127.0.0.1:9600"]);
        let server = echo_server(&stand);
        let mut streams: Vec<_> = (0..3)
            .map(|_| stand.run(|| tcp::connect(server.address(), WAIT)).unwrap())
            .collect();
        // One that stops nothing.
        signal_all(&stand, Signal::SIGHUP);
        for stream in &mut streams {
            round(&stand, stream);
        }
        signal_all(&stand, signal);
        let status = stand.slipgate.stop().unwrap();
        let said = stand.slipgate.stderr();
        assert!(status.success(), "{signal}: {status}\n{said}");
        let leaves = said.contains("nothing is left in the kernel");
        assert_eq!(leaves, cell.is_hybrid(), "{said}");
        assert!(!said.contains("engine has ended"), "{said}");
        assert_eq!(assert_books_are_whole(&stand), 3);
        let ends = stand.records();
        assert!(ends.iter().all(|end| end["end"] == "detached"), "{ends:#?}");
        if cell.is_hybrid() {
            assert!(stand.slipgate.pins().pins().is_empty());
            assert_eq!(stand.world.host.ifindex(stand.slipgate.engine_port()), None);
        }
    }
}

fn another_engine_takes_the_place_of_one_that_is_killed(cell: Cell) {
    let _turn = turns::alone("it measures how long flows wait for an engine");
    let denied = cell.server_2().to_string();
    let mut stand = Stand::of(cell, &["--forward", "tcp:8080:80", "--deny", &denied]);
    let server = echo_server(&stand);
    let inside = TcpServer::start(&stand.guest.ns, (cell.guest(), 80), TcpService::Echo).unwrap();
    let broker = stand.slipgate.broker_pid();
    let mut stream = stand.run(|| tcp::connect(server.address(), WAIT)).unwrap();
    round(&stand, &mut stream);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // It never waits for long.
        let streaming = scope.spawn(|| {
            let mut slowest = Duration::ZERO;
            stand.run(|| {
                let mut session = EchoSession::new(&mut stream);
                let until = Instant::now() + Duration::from_secs(30);
                while !done.load(Relaxed) && Instant::now() < until {
                    slowest = slowest.max(session.round(10_000).unwrap());
                }
            });
            slowest
        });
        for turn in 0..2 {
            let old = engine(&stand.slipgate);
            kill(old, Signal::SIGKILL).unwrap();
            let killed = Instant::now();
            // Asked for at once: it finds the question in the port's queue.
            let new = stand.run(|| tcp::connect(server.address(), WAIT)).unwrap();
            let took = killed.elapsed();
            println!("turn {turn}: a new flow {took:?} after the engine's end");
            assert!(took < AGAIN_WITHIN, "{took:?}");
            drop(new);
            assert_ne!(engine(&stand.slipgate), old);
        }
        // What rules and forwards say holds as before, from the world and from the host itself.
        stand
            .run(|| tcp::expect_refused(at(cell.server_2(), 80)))
            .unwrap();
        for (from, address) in [
            (&stand.world.net, cell.host()),
            (&stand.world.host, cell.loopback()),
        ] {
            let asked = from.run(|| {
                let mut stream = tcp::connect(at(address, 8080), WAIT)?;
                EchoSession::new(&mut stream).round(1_000)
            });
            asked.unwrap();
        }
        done.store(true, Relaxed);
        let slowest = streaming.join().unwrap();
        println!("the slowest of an established flow's rounds: {slowest:?}");
        assert!(slowest < Duration::from_secs(1), "{slowest:?}");
    });
    assert_eq!(inside.accepted(), 2);
    assert!(stand.slipgate.broker_runs() && stand.slipgate.broker_pid() == broker);
    let said = stand.says("a new engine serves");
    assert!(said.contains("the engine was killed by signal 9"), "{said}");

    // It is confined as the first one was.
    let status = fs::read_to_string(format!("/proc/{}/status", engine(&stand.slipgate))).unwrap();
    for line in [
        "CapInh:\t0000000000000000",
        "CapPrm:\t0000000000000000",
        "CapEff:\t0000000000000000",
        "CapBnd:\t0000000000000000",
        "CapAmb:\t0000000000000000",
        "NoNewPrivs:\t1",
        "Seccomp:\t2",
    ] {
        assert!(status.contains(line), "{line} in:\n{status}");
    }
    assert!(stand.slipgate.stop().unwrap().success());
    // The stream, two new ones, the forward's.
    assert_eq!(assert_books_are_whole(&stand), 4);
    assert!(stand.slipgate.pins().pins().is_empty());
}

/// Returns the user id of a process.
fn user(pid: Pid) -> u32 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:\t"));
    line.unwrap().split('\t').next().unwrap().parse().unwrap()
}

#[test]
fn each_process_is_a_user_that_nobody_else_is() {
    require_root_and_tun!();
    const NOBODY: u32 = 65_534;
    let stands = [(); 2].map(|()| Stand::new(&["--metrics", "127.0.0.1:9600"]));
    let server = echo_server(&stands[0]);
    let all: Vec<Pid> = stands
        .iter()
        .flat_map(|stand| {
            eventually("engine and metrics process", || {
                let all = processes(&stand.slipgate, "slipgate-");
                // Confined by now.
                let confined = all.iter().filter(|pid| user(**pid) != 0);
                (confined.count() == 2).then_some(all)
            })
        })
        .collect();
    let users: HashSet<u32> = all.iter().map(|pid| user(*pid)).collect();
    assert_eq!(users.len(), 4, "{users:?}");
    assert!(!users.contains(&NOBODY));
    // The engine of one may be stopped or killed by none of these, nor by anybody's nobody.
    let victim = processes(&stands[0].slipgate, "slipgate-engine")[0];
    let own = user(victim);
    for other in users
        .iter()
        .copied()
        .chain([NOBODY])
        .filter(|user| *user != own)
    {
        for signal in ["-STOP", "-KILL"] {
            use std::os::unix::process::CommandExt as _;
            let mut command = std::process::Command::new("kill");
            command.args([signal, &victim.to_string()]);
            let output = command.uid(other).gid(other).output().unwrap();
            assert!(!output.status.success(), "{other} may send {signal}");
        }
    }
    stands[0]
        .run(|| tcp::connect(server.address(), WAIT))
        .unwrap();

    // The next engine is the same user.
    kill(victim, Signal::SIGKILL).unwrap();
    stands[0]
        .run(|| tcp::connect(server.address(), WAIT))
        .unwrap();
    assert_eq!(user(engine(&stands[0].slipgate)), own);
    for mut stand in stands {
        assert!(stand.slipgate.stop().unwrap().success());
    }
    for user in users {
        let lock = format!("/run/slipgate/users/{}.lock", user & !3);
        assert!(!std::path::Path::new(&lock).exists(), "{lock}");
    }
}

fn a_policy_that_was_applied_is_the_next_engines_too(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let server = echo_server(&stand);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("policy.toml");
    let denied = cell.destination(cell.server(), "7000/tcp");
    let denies = format!("default = \"allow\"\nrules = [{{ deny = \"{denied}\" }}]\n");
    fs::write(&file, denies).unwrap();
    stand.run(|| tcp::connect(server.address(), WAIT)).unwrap();
    let applied = stand
        .slipgate
        .run(&["policy", "apply", file.to_str().unwrap()]);
    applied.unwrap();
    stand.run(|| tcp::expect_refused(server.address())).unwrap();
    let old = engine(&stand.slipgate);
    kill(old, Signal::SIGKILL).unwrap();
    stand.run(|| tcp::expect_refused(server.address())).unwrap();
    assert_ne!(engine(&stand.slipgate), old);
}

fn an_engine_that_is_stopped_is_noticed_and_another_takes_its_place(cell: Cell) {
    let _turn = turns::alone("it compares an answer's time with a promise");
    let mut stand = Stand::of(cell, &[]);
    let server = echo_server(&stand);
    let mut stream = stand.run(|| tcp::connect(server.address(), WAIT)).unwrap();
    let old = engine(&stand.slipgate);
    kill(old, Signal::SIGSTOP).unwrap();
    let stopped = Instant::now();
    stand
        .run(|| tcp::connect(server.address(), NOTICED_WITHIN))
        .expect("a new flow");
    println!("a new flow {:?} after the engine's stop", stopped.elapsed());
    stand.says("the engine hangs");
    assert_ne!(engine(&stand.slipgate), old);
    round(&stand, &mut stream);

    // One that was stopped just now is no reason not to end in order.
    kill(engine(&stand.slipgate), Signal::SIGSTOP).unwrap();
    let broker = Pid::from_raw(stand.slipgate.broker_pid() as i32);
    kill(broker, Signal::SIGTERM).unwrap();
    let asked = Instant::now();
    while stand.slipgate.broker_runs() {
        assert!(asked.elapsed() < NOTICED_WITHIN);
        std::thread::sleep(Duration::from_millis(20));
    }
    let status = stand.slipgate.stop().unwrap();
    assert!(status.success(), "{}", stand.slipgate.stderr());
    assert_eq!(assert_books_are_whole(&stand), 2);
    assert!(stand.slipgate.pins().pins().is_empty());
}

/// A VM that has not sent a frame yet, as between its start and its guest's boot.
fn an_engine_without_a_frame_sleeps(cell: Cell) {
    let stand = Stand::of_hand_made(cell, &[]);
    let stat = format!("/proc/{}/stat", engine(&stand.slipgate));
    let sleeps = || {
        std::thread::sleep(Duration::from_millis(10));
        fs::read_to_string(&stat).unwrap().contains(") S ")
    };
    // It wakes now and then.
    eventually("it sleeps most of the time", || {
        let times = (0..20).filter(|_| sleeps()).count();
        (times >= 15).then_some(())
    });
}

fn an_engine_that_is_killed_while_it_stops_leaves_nothing_undone(cell: Cell) {
    // It waits for 50 ms between the two steps of a flow's end.
    for delay_ms in [0, 10, 40] {
        let mut stand = Stand::of(cell, &[]);
        let server = echo_server(&stand);
        let streams = [(); 3].map(|()| stand.run(|| tcp::connect(server.address(), WAIT)).unwrap());
        let victim = engine(&stand.slipgate);
        let broker = Pid::from_raw(stand.slipgate.broker_pid() as i32);
        kill(broker, Signal::SIGTERM).unwrap();
        std::thread::sleep(Duration::from_millis(delay_ms));
        kill(victim, Signal::SIGKILL).unwrap();
        let status = stand.slipgate.stop().unwrap();
        assert!(status.success(), "{}", stand.slipgate.stderr());
        assert_eq!(assert_books_are_whole(&stand), streams.len());
        assert!(stand.slipgate.pins().pins().is_empty());
    }
}

fn an_engine_that_ends_again_and_again_is_given_up_and_its_flows_go_on(cell: Cell) {
    let mut stand = Stand::of(cell, &[]);
    let server = echo_server(&stand);
    let mut stream = stand.run(|| tcp::connect(server.address(), WAIT)).unwrap();
    let mut last = None;
    while stand.slipgate.broker_runs() {
        let running = processes(&stand.slipgate, "slipgate-engine").pop();
        if let Some(pid) = running.filter(|pid| Some(*pid) != last) {
            // An error: it has just ended with the broker.
            let _ = kill(pid, Signal::SIGKILL);
            last = Some(pid);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let said = stand.says("is not started again");
    assert!(said.contains("run `slipgate attach` again"), "{said}");
    assert_eq!(said.matches("it is started again").count(), 5, "{said}");
    assert!(!stand.slipgate.stop().unwrap().success());
    round(&stand, &mut stream);
    stand.again();
    round(&stand, &mut stream);
    stand.run(|| tcp::connect(server.address(), WAIT)).unwrap();
}
