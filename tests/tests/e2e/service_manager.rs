//! `slipgate serve` under a service manager: what it is told (sd_notify(3)), and the sockets that it
//! passes on (sd_listen_fds(3)).

use std::{
    fs,
    io::{Read as _, Write as _},
    os::{
        fd::AsRawFd as _,
        unix::{
            fs::PermissionsExt as _,
            net::{UnixDatagram, UnixListener, UnixStream},
        },
    },
    sync::Arc,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use slipgate_testbed::{
    PinDir, Slipgate, World,
    slipgate::{Start, binary},
    turns,
    world::UPLINK,
};

use crate::{Cell, WAIT, eventually, matrix::matrix};

matrix! {
    a_service_manager_hears_of_the_start_reloads_signs_of_life_and_the_stop: [hybrid_ipv4],
        without [hybrid_ipv6]: "no packet of the guest's is part of it",
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
    a_client_that_connects_to_a_service_managers_socket_waits_for_the_daemon: [hybrid_ipv4],
        without [hybrid_ipv6]: "no packet of the guest's is part of it",
        without [user_ipv4, user_ipv6]: "its VMs have no daemon (attach-socket.md)";
}

/// How long the manager waits for a sign of life. Two come in that time.
const WATCHDOG: Duration = Duration::from_millis(400);

/// A service manager: its socket, and the kind of start that it serves.
struct Manager {
    socket: UnixDatagram,
    start: Start,
    scratch: tempfile::TempDir,
}

impl Manager {
    fn new() -> Self {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        let variable = |name: &str, value: String| (name.to_owned(), value);
        let start = Start {
            environment: vec![
                variable("NOTIFY_SOCKET", path.display().to_string()),
                variable("WATCHDOG_USEC", WATCHDOG.as_micros().to_string()),
            ],
            ..Start::default()
        };
        Self {
            socket,
            start,
            scratch,
        }
    }

    /// The next message, if one comes in that time.
    fn hears(&self, within: Duration) -> Option<String> {
        let mut buffer = [0; 1024];
        self.socket.set_read_timeout(Some(within)).unwrap();
        let len = self.socket.recv(&mut buffer).ok()?;
        Some(String::from_utf8(buffer[..len].to_vec()).unwrap())
    }

    /// The next message that is no sign of life.
    fn hears_news(&self) -> String {
        let until = Instant::now() + WAIT;
        while Instant::now() < until {
            match self.hears(WAIT) {
                Some(sign) if is_sign_of_life(&sign) => {}
                Some(news) => return news,
                None => break,
            }
        }
        panic!("nothing was said within 5 s");
    }

    fn forget(&self) {
        while self.hears(Duration::from_millis(1)).is_some() {}
    }
}

fn is_sign_of_life(message: &str) -> bool {
    message.trim_end() == "WATCHDOG=1"
}

fn has(message: &str, line: &str) -> bool {
    message.lines().any(|l| l == line)
}

fn a_service_manager_hears_of_the_start_reloads_signs_of_life_and_the_stop(cell: Cell) {
    let _turn = turns::alone("it compares the time of signs of life with what is promised");
    let manager = Manager::new();
    let world = World::new().unwrap();
    let ipv6 = cell.give(&world);
    let policy = manager.scratch.path().join("policy.toml");
    fs::write(&policy, "default = \"allow\"\n").unwrap();
    let policy_flag = policy.display().to_string();
    let args = [&["--uplink", UPLINK, "--policy", &policy_flag], ipv6].concat();
    let pins = PinDir::new().unwrap();
    let mut daemon = Slipgate::serve_as(&manager.start, &world.host, &pins, &args).unwrap();

    let first = manager.hears(WAIT).unwrap();
    assert!(has(&first, "READY=1"), "{first}");
    let status = format!("STATUS=Guests reach the world by {UPLINK}.");
    assert!(has(&first, &status), "{first}");

    // They come from the loop: a daemon that stands still gives none.
    for _ in 0..3 {
        let sign = manager.hears(WATCHDOG).expect("a sign of life");
        assert!(is_sign_of_life(&sign), "{sign}");
    }
    let signal = |signal| kill(Pid::from_raw(daemon.broker_pid() as i32), signal).unwrap();
    signal(Signal::SIGSTOP);
    manager.forget();
    assert_eq!(manager.hears(WATCHDOG * 2), None);
    signal(Signal::SIGCONT);

    // A policy that can't be put in force ends a reload as well as one that can.
    for text in ["default = \"deny\"\n", "default = \"maybe\"\n"] {
        fs::write(&policy, text).unwrap();
        signal(Signal::SIGHUP);
        let began = manager.hears_news();
        assert!(has(&began, "RELOADING=1"), "{began}");
        assert!(began.contains("MONOTONIC_USEC="), "{began}");
        assert_eq!(manager.hears_news().trim_end(), "READY=1");
    }
    eventually("the second is refused", || {
        daemon.stderr().contains("maybe").then_some(())
    });

    assert!(daemon.stop().unwrap().success());
    assert_eq!(manager.hears_news().trim_end(), "STOPPING=1");
    let kept = manager.hears_news();
    assert!(
        has(&kept, "FDSTORE=1") && has(&kept, "FDNAME=slipgate"),
        "{kept}"
    );
    assert_eq!(manager.hears_news().trim_end(), "BARRIER=1");
    assert_eq!(manager.hears(Duration::from_millis(10)), None);
}

/// Asks for the daemon's health, and returns the answer's first line.
fn health(mut stream: UnixStream) -> String {
    let request = "GET /v1/health HTTP/1.1\r\nhost: slipgate\r\nconnection: close\r\n\r\n";
    stream.write_all(request.as_bytes()).unwrap();
    stream.set_read_timeout(Some(WAIT)).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.lines().next().unwrap_or_default().to_owned()
}

fn a_client_that_connects_to_a_service_managers_socket_waits_for_the_daemon(cell: Cell) {
    let world = World::new().unwrap();
    let ipv6 = cell.give(&world);
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("api.sock");
    let listener = UnixListener::bind(&path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    // Only a process itself knows its number before it is another program. The first descriptor
    // that is passed on is 3.
    let script = scratch.path().join("start");
    let text = "#!/bin/bash\nexec 3<&$LISTENER\n\
                LISTEN_PID=$$ LISTEN_FDS=1 exec \"$PROGRAM\" \"$@\"\n";
    fs::write(&script, text).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o700)).unwrap();
    let program = (
        "PROGRAM".to_owned(),
        binary().unwrap().display().to_string(),
    );
    let number = ("LISTENER".to_owned(), listener.as_raw_fd().to_string());
    let start = Start {
        binary: Some(script),
        environment: vec![program, number],
        descriptors: vec![Arc::new(listener.into())],
        ..Start::default()
    };

    let early = UnixStream::connect(&path).unwrap();
    let api = path.display().to_string();
    let args = [&["--uplink", UPLINK, "--api", &api], ipv6].concat();
    let pins = PinDir::new().unwrap();
    let mut daemon = Slipgate::serve_as(&start, &world.host, &pins, &args).unwrap();
    assert_eq!(health(early), "HTTP/1.1 200 OK");
    assert!(daemon.stop().unwrap().success());
    // Between two daemons.
    let waiting = UnixStream::connect(&path).unwrap();
    let daemon = daemon.again_as(&start).unwrap();
    assert_eq!(health(waiting), "HTTP/1.1 200 OK");
    eventually("a third answer", || {
        let stream = UnixStream::connect(&path).ok()?;
        (health(stream) == "HTTP/1.1 200 OK").then_some(())
    });
    drop(daemon);
}
