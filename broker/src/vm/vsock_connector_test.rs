use std::{
    fs,
    io::{Read as _, Write as _},
    os::unix::{
        fs::symlink,
        net::{UnixDatagram, UnixListener, UnixStream},
    },
    path::PathBuf,
};

use slipgate_ipc::vsock::RequestWriter;

use super::*;

/// A socket of `--vsock` in a directory of its own.
struct Bed {
    dir: tempfile::TempDir,
    socket: ListeningSocket,
}

impl Bed {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v.sock");
        let socket = ListeningSocket::listen("--vsock", path).unwrap();
        Self { dir, socket }
    }

    fn at(&self, port: &str) -> PathBuf {
        self.dir.path().join(format!("v.sock_{port}"))
    }

    fn programs(&self) -> Programs {
        Programs::beside(&self.socket).unwrap()
    }
}

fn why(refused: io::Result<OwnedFd>) -> ErrorKind {
    refused.unwrap_err().kind()
}

/// Checks that both are ends of one connection.
fn assert_connected(guest: OwnedFd, listener: &UnixListener) {
    let (mut program, _) = listener.accept().unwrap();
    let mut guest = UnixStream::from(guest);
    guest.write_all(b"hello").unwrap();
    drop(guest);
    let mut got = String::new();
    program.read_to_string(&mut got).unwrap();
    assert_eq!(got, "hello");
}

#[test]
fn a_port_is_the_program_that_listens_there_and_no_other() {
    let bed = Bed::new();
    let programs = bed.programs();
    assert_eq!(why(programs.connect(52)), ErrorKind::NotFound);
    let listener = UnixListener::bind(bed.at("52")).unwrap();
    let other = UnixListener::bind(bed.at("520")).unwrap();
    other.set_nonblocking(true).unwrap();
    assert_connected(programs.connect(52).unwrap(), &listener);
    assert_eq!(why(programs.connect(5)), ErrorKind::NotFound);
    assert_eq!(why(programs.connect(u32::MAX)), ErrorKind::NotFound);
    assert!(other.accept().is_err(), "nobody came");
    let last = UnixListener::bind(bed.at("4294967295")).unwrap();
    assert_connected(programs.connect(u32::MAX).unwrap(), &last);
    drop(listener);
    assert_eq!(why(programs.connect(52)), ErrorKind::ConnectionRefused);
}

#[test]
fn what_is_no_stream_socket_with_this_one_name_is_not_used() {
    let bed = Bed::new();
    let programs = bed.programs();
    let elsewhere = bed.dir.path().join("other");
    let other = UnixListener::bind(&elsewhere).unwrap();
    other.set_nonblocking(true).unwrap();
    symlink(&elsewhere, bed.at("1")).unwrap();
    assert_eq!(why(programs.connect(1)), ErrorKind::PermissionDenied);
    fs::hard_link(&elsewhere, bed.at("2")).unwrap();
    assert_eq!(why(programs.connect(2)), ErrorKind::PermissionDenied);
    fs::write(bed.at("3"), "notes").unwrap();
    fs::create_dir(bed.at("4")).unwrap();
    nix::unistd::mkfifo(&bed.at("5"), Mode::S_IRWXU).unwrap();
    for port in 3..=5 {
        assert_eq!(why(programs.connect(port)), ErrorKind::PermissionDenied);
    }
    let _datagrams = UnixDatagram::bind(bed.at("6")).unwrap();
    assert!(programs.connect(6).is_err());
    assert!(other.accept().is_err(), "nobody came");
}

#[test]
fn the_directory_is_the_one_that_was_there_at_the_start() {
    let bed = Bed::new();
    let programs = bed.programs();
    let listener = UnixListener::bind(bed.at("52")).unwrap();
    let moved = bed.dir.path().with_extension("moved");
    fs::rename(bed.dir.path(), &moved).unwrap();
    fs::create_dir(bed.dir.path()).unwrap();
    let other = UnixListener::bind(bed.at("53")).unwrap();
    other.set_nonblocking(true).unwrap();
    assert_connected(programs.connect(52).unwrap(), &listener);
    assert_eq!(why(programs.connect(53)), ErrorKind::NotFound);
    // Nor is a socket that another file has replaced given to anybody.
    assert!(Programs::beside(&bed.socket).is_err());
    fs::remove_dir_all(&moved).unwrap();
}

/// Root's alone: who is not root can make no file of another.
#[test]
fn a_program_of_another_user_is_used_only_if_the_socket_is_theirs() {
    if !geteuid().is_root() {
        eprintln!(
            "skipped: a_program_of_another_user_is_used_only_if_the_socket_is_theirs: not root"
        );
        return;
    }
    let own = |path: PathBuf, user| std::os::unix::fs::chown(path, Some(user), None).unwrap();
    let bed = Bed::new();
    let programs = bed.programs();
    let listener = UnixListener::bind(bed.at("52")).unwrap();
    own(bed.at("52"), 1000);
    assert_eq!(why(programs.connect(52)), ErrorKind::PermissionDenied);
    own(bed.dir.path().join("v.sock"), 1000);
    assert_connected(programs.connect(52).unwrap(), &listener);
    own(bed.at("52"), 1001);
    assert_eq!(why(programs.connect(52)), ErrorKind::PermissionDenied);
    own(bed.at("52"), 0);
    assert_connected(programs.connect(52).unwrap(), &listener);
    // Another file in its place says nothing.
    own(bed.at("52"), 1000);
    fs::remove_file(bed.dir.path().join("v.sock")).unwrap();
    let _other = UnixListener::bind(bed.dir.path().join("v.sock")).unwrap();
    own(bed.dir.path().join("v.sock"), 1000);
    assert_eq!(why(programs.connect(52)), ErrorKind::PermissionDenied);
}

#[test]
fn a_program_that_accepts_nobody_holds_nobody_up() {
    let bed = Bed::new();
    let programs = bed.programs();
    let listener = UnixListener::bind(bed.at("52")).unwrap();
    nix::sys::socket::listen(&listener, nix::sys::socket::Backlog::new(1).unwrap()).unwrap();
    let (mut kept, mut full) = (Vec::new(), None);
    while full.is_none() && kept.len() < 100 {
        match programs.connect(52) {
            Ok(guest) => kept.push(guest),
            Err(e) => full = Some(e.kind()),
        }
    }
    assert_eq!(full, Some(ErrorKind::WouldBlock));
}

#[test]
fn the_thread_answers_each_request_and_ends_with_the_vmm_or_by_nonsense() {
    let bed = Bed::new();
    let listener = UnixListener::bind(bed.at("52")).unwrap();
    let end = start(&bed.socket, &Users::claim()).unwrap();
    let copy = end.try_clone().unwrap();
    let vmm = RequestWriter::new(end);
    let answer = || {
        let mut fds = [nix::poll::PollFd::new(
            vmm.as_fd(),
            nix::poll::PollFlags::POLLIN,
        )];
        nix::poll::poll(&mut fds, 10_000_u16).unwrap();
        vmm.next()
    };
    vmm.ask(1, 51).unwrap();
    let (id, none) = answer().unwrap().unwrap();
    assert_eq!((id, none.is_none()), (1, true));
    vmm.ask(2, 52).unwrap();
    let (id, guest) = answer().unwrap().unwrap();
    assert_eq!(id, 2);
    let (program, _) = listener.accept().unwrap();
    let peer = nix::sys::socket::getsockopt(&program, nix::sys::socket::sockopt::PeerCredentials);
    let is_root = peer.unwrap().uid() == 0;
    assert!(!is_root, "a program takes the guest for nobody else");
    drop(guest);
    nix::unistd::write(&copy, b"nonsense of a VMM").unwrap();
    assert!(answer().is_err(), "its end is closed");
}

#[test]
fn requests_without_end_are_carried_out_at_a_pace() {
    let mut pace = Pace::new();
    let begin = Instant::now();
    let mut now = begin;
    for _ in 0..10 * PER_PERIOD {
        if let Some(rest) = pace.next(now) {
            now += rest;
        }
    }
    assert_eq!(now - begin, 9 * PERIOD);
    // Few are not delayed.
    for _ in 0..100 {
        now += PERIOD / 100;
        assert_eq!(pace.next(now + PERIOD), None);
    }
}
