use std::{
    env,
    io::{BufRead as _, BufReader},
    os::{fd::AsRawFd as _, unix::net::UnixListener},
    process::Command,
    sync::mpsc,
    thread,
};

use nix::sys::{
    resource::{Resource, getrlimit, setrlimit},
    signal::raise,
};
use slipgate_ipc::client::{VmChange, VmState};

use super::*;
use crate::test_vm;

/// A daemon that takes each question, and does this with who asked it.
fn daemon(path: &Path, mut answer: impl FnMut(UnixStream) + Send + 'static) {
    let listener = UnixListener::bind(path).unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let stream = stream.unwrap();
            BufReader::new(&stream)
                .read_line(&mut String::new())
                .unwrap();
            answer(stream);
        }
    });
}

/// A daemon that does not serve the TAP, however often it is asked.
fn busy_daemon(path: &Path) {
    daemon(path, |mut stream| {
        let answer = ClientAnswer::busy("the TAP tapweb of web is not served yet");
        serde_json::to_writer(&mut stream, &answer).unwrap();
        // Who asked may be gone.
        let _ = stream.write_all(b"\n");
    });
}

/// A daemon that answers no question. It keeps the connections.
fn silent_daemon(path: &Path) {
    let mut asked = Vec::new();
    daemon(path, move |stream| asked.push(stream));
}

/// Has a machine join, which a signal stops once it says what it waits for. Returns when it said so, what
/// it said, and why it ended. Fails unless it ends soon.
fn stopped_when_it_waits(socket: &Path, signal: Signal) -> (Duration, String, anyhow::Error) {
    let signals = signals(&[]).unwrap();
    let began = Instant::now();
    let mut said = None;
    let joined = JoinedVm::run_as_once(socket, "web", &signals, |waits| {
        said = Some((began.elapsed(), waits));
        // One that is none of this command's, and one that is.
        raise(Signal::SIGHUP).unwrap();
        assert_eq!(stop_within(&signals, Duration::ZERO).unwrap(), None);
        raise(signal).unwrap();
    });
    let took = began.elapsed();
    let (after, waits) = said.unwrap();
    assert!(took < SERVED_WITHIN / 2, "{took:?}");
    (after, waits, joined.unwrap_err())
}

#[test]
fn a_machine_that_waits_for_its_tap_says_so_and_is_stopped_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    busy_daemon(&socket);
    let (after, waits, stopped) = stopped_when_it_waits(&socket, Signal::SIGTERM);
    assert!(
        after >= SAYS_AFTER && after < SERVED_WITHIN / 2,
        "{after:?}"
    );
    assert_eq!(
        waits,
        "web waits until the daemon takes its machine, 20 s at most in all: \
         the TAP tapweb of web is not served yet"
    );
    assert_eq!(
        stopped.to_string(),
        "stopped by SIGTERM before the guest ran"
    );
    assert_eq!(crate::exit_status(&stopped), 143);
}

#[test]
fn a_daemon_that_takes_no_machine_is_given_up_with_its_reason() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    busy_daemon(&socket);
    let signals = signals(&[]).unwrap();
    let why = JoinedVm::run_as(&socket, "web", &signals).unwrap_err();
    assert_eq!(
        format!("{why:#}"),
        "the daemon has not taken the machine of web in 20 s: \
         the TAP tapweb of web is not served yet"
    );
}

#[test]
fn a_machine_whose_daemon_never_answers_says_so_and_is_stopped_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    silent_daemon(&socket);
    let (after, waits, stopped) = stopped_when_it_waits(&socket, Signal::SIGINT);
    assert_eq!(
        waits,
        "web waits: the daemon was asked to take its machine, and has not answered yet"
    );
    assert!(after >= SAYS_AFTER, "{after:?}");
    assert_eq!(
        stopped.to_string(),
        "stopped by SIGINT before the guest ran"
    );
    assert_eq!(crate::exit_status(&stopped), 130);
}

#[test]
fn a_vm_whose_daemon_never_answers_is_given_up_at_a_signal() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    silent_daemon(&socket);
    let signals = signals(&[]).unwrap();
    raise(Signal::SIGTERM).unwrap();
    let began = Instant::now();
    let joined = JoinedVm::join(&socket, VmDefinition::default(), None, &signals);
    assert!(began.elapsed() < Duration::from_secs(1));
    assert!(joined.unwrap_err().is::<StoppedEarly>());
    raise(Signal::SIGTERM).unwrap();
    let vms = vec![VmDefinition::default()];
    attach_to_daemon(&socket, vms, None).unwrap();
}

/// A VM that a daemon has served, and that daemon's end of the lifeline.
fn joined(socket: &Path) -> (JoinedVm, UnixStream) {
    let claimed = test_vm::status(VmDefinition::default(), VmState::Served);
    let claim = Claim::Kept { name: "web".into() };
    let (lifeline, daemons) = UnixStream::pair().unwrap();
    lifeline.set_nonblocking(true).unwrap();
    (JoinedVm::with(socket, claim, lifeline, claimed), daemons)
}

#[test]
fn whoever_waits_for_another_daemon_does_so_without_waiting_in_a_turn() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let (asks, asked) = mpsc::channel();
    daemon(&socket, move |stream| asks.send(stream).unwrap());
    let (mut vm, daemons) = joined(&socket);
    let claimed = vm.claimed.clone();
    assert!(vm.new_line().is_some() && !vm.turn().unwrap());
    drop(daemons);
    // Of two questions the first is put off, and each is answered late.
    for answer in [
        ClientAnswer::busy("not yet"),
        ClientAnswer::Vm {
            vm: claimed.into(),
            change: VmChange::Unchanged,
        },
    ] {
        let began = Instant::now();
        let mut stream = loop {
            assert!(!vm.turn().unwrap() && began.elapsed() < DAEMON_WITHIN / 2);
            match asked.recv_timeout(Duration::from_millis(1)) {
                Ok(stream) => break stream,
                Err(_) => continue,
            }
        };
        for _ in 0..100 {
            assert!(!vm.turn().unwrap());
        }
        assert!(asked.try_recv().is_err(), "it is asked once at a time");
        assert!(vm.fd().is_none() && vm.new_line().is_none());
        serde_json::to_writer(&mut stream, &answer).unwrap();
        stream.write_all(b"\n").unwrap();
    }
    let began = Instant::now();
    while vm.fd().is_none() {
        assert!(!vm.turn().unwrap() && began.elapsed() < DAEMON_WITHIN / 2);
        thread::sleep(Duration::from_millis(1));
    }
    assert!(vm.new_line().is_some() && vm.timeout().is_none());
}

/// The limit is the whole process's.
#[test]
fn whoever_can_open_no_file_for_a_while_still_finds_another_daemon() {
    let ran = Command::new(env::current_exe().unwrap())
        .args(["joined::tests::with_few_files", "--exact", "--ignored"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success() && said.contains("1 passed"), "{ran:?}");
}

#[test]
#[ignore = "the child of whoever_can_open_no_file_for_a_while_still_finds_another_daemon"]
fn with_few_files() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let (mut vm, daemons) = joined(&socket);
    drop(daemons);
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    let limit = |files| setrlimit(Resource::RLIMIT_NOFILE, files, hard).unwrap();
    let free = vm.lifeline.try_clone().unwrap().as_raw_fd() as u64;
    // There is no room for the sockets of who asks, or for these and for no lifeline.
    for room in [0, 2] {
        limit(free + room);
        for _ in 0..20 {
            assert!(!vm.turn().unwrap());
            thread::sleep(Duration::from_millis(1));
        }
    }
    vm.search.as_mut().unwrap().until = Instant::now();
    limit(free);
    let ended = loop {
        match vm.turn() {
            Ok(_) => thread::sleep(Duration::from_millis(1)),
            Err(e) => break e,
        }
    };
    assert!(
        format!("{ended:#}").starts_with("the daemon that served web has ended: making a pair")
    );
    vm.search.as_mut().unwrap().until = Instant::now() + DAEMON_WITHIN;
    limit(soft);
    // Not before: it is of this process, and accepts.
    let (asks, asked) = mpsc::channel();
    daemon(&socket, move |stream| asks.send(stream).unwrap());
    vm.search.as_mut().unwrap().asking = None;
    assert!(!vm.turn().unwrap());
    assert!(asked.recv_timeout(DAEMON_WITHIN).is_ok());
}
