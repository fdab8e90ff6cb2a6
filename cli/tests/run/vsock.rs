//! vsock: streams between a guest and programs of the host.
use std::{
    fs,
    io::{self, Read as _, Write as _},
    net::Shutdown,
    os::unix::{
        fs::MetadataExt as _,
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    thread,
};

use nix::sys::socket::{getsockopt, sockopt};
use slipgate_testbed::{
    MicroVm, OrdinaryUser, pattern::Pattern, require_kvm, require_root_and_tun,
};

use crate::{Bed, WAIT, eventually};

const MIB: usize = 1 << 20;

impl Bed {
    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("vm.sock")
    }

    /// Listens for a port of the host, beside the socket.
    pub(crate) fn program(&self, port: u32) -> UnixListener {
        let path = self.folder.path().join(format!("vm.sock_{port}"));
        UnixListener::bind(path).unwrap()
    }

    /// Starts the built-in guest with a vsock device.
    pub(crate) fn start_vsock(&self, work: &str) -> MicroVm {
        let vsock = format!("3,{}", self.socket().display());
        let work = format!("{work}; wait 1");
        self.start_with(&["--cmdline", &work, "--vsock", &vsock])
    }
}

/// As [`connect`], to a machine that is starting: its socket's file is there a moment before it is
/// listened at, and the guest's port later.
#[track_caller]
pub(crate) fn reach(path: &Path, port: u32) -> UnixStream {
    let mut reached = None;
    eventually("the port is reached", || {
        reached = connect(path, port).ok().flatten();
        reached.is_some()
    });
    reached.unwrap()
}

/// Connects to a port of the guest. `None`: the guest refuses.
pub(crate) fn connect(path: &Path, port: u32) -> io::Result<Option<UnixStream>> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(WAIT))?;
    writeln!(stream, "CONNECT {port}")?;
    let mut line = Vec::new();
    let mut byte = [0];
    while stream.read(&mut byte)? == 1 && byte != *b"\n" {
        line.push(byte[0]);
    }
    match line.strip_prefix(b"OK ") {
        Some(port) => {
            let port: u32 = String::from_utf8_lossy(port).parse().unwrap();
            assert!(port >= 1 << 30, "{port}");
            Ok(Some(stream))
        }
        None => {
            assert_eq!(line, b"", "the answer of a port without a listener");
            Ok(None)
        }
    }
}

/// Sends so many bytes of a pattern, and checks that the same come back, and then an end.
pub(crate) fn exchange(mut stream: UnixStream, seed: u64, bytes: usize) {
    let mut writer = stream.try_clone().unwrap();
    let sender = thread::spawn(move || {
        let mut pattern = Pattern::new(seed);
        let mut left = bytes;
        while left > 0 {
            let mut part = vec![0; left.min(70_001)];
            pattern.fill(&mut part);
            writer.write_all(&part).unwrap();
            left -= part.len();
        }
        writer.shutdown(Shutdown::Write).unwrap();
    });
    let mut pattern = Pattern::new(seed);
    let mut part = vec![0; 50_000];
    loop {
        match stream.read(&mut part).unwrap() {
            0 => break,
            read => pattern.check(&part[..read]).unwrap(),
        }
    }
    assert_eq!(pattern.position(), bytes as u64);
    sender.join().unwrap();
}

#[test]
fn programs_of_the_host_reach_a_port_of_the_guest_and_half_close() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let path = bed.socket();
    let vm = bed.start_vsock("vsock echo 5 4");
    let first = reach(&path, 5);
    assert!(connect(&path, 6).unwrap().is_none(), "nobody listens on 6");
    exchange(first, 1, 4 * MIB);
    let at_once: Vec<_> = (2..4)
        .map(|seed| {
            let stream = connect(&path, 5).unwrap().unwrap();
            thread::spawn(move || exchange(stream, seed, 2 * MIB))
        })
        .collect();
    for thread in at_once {
        thread.join().unwrap();
    }
    exchange(connect(&path, 5).unwrap().unwrap(), 4, 0);
    let end = vm.finish(WAIT).unwrap();
    let said = end.said("workload");
    assert_eq!(end.status.code(), Some(0), "{said:?} {}", end.stderr);
    assert_eq!(said[0]["connections"], 4, "{said:?}");
    assert_eq!(said[0]["bytes"], 8 * MIB, "{said:?}");
    assert_eq!(said[0]["cid"], 3, "{said:?}");
    assert!(!path.exists(), "the socket's file goes with the machine");
    bed.assert_nothing_is_left();
}

/// What `cargo xtask bench -- --only vsock` measures with.
#[test]
fn a_sink_takes_so_many_bytes_and_a_source_gives_as_many() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let path = bed.socket();
    let bytes = 3 * MIB + 7;
    let work = format!("vsock sink 5 1 {bytes}; vsock source 6 1 {bytes}");
    let mut vm = bed.start_vsock(&work);
    let mut listens = |port| {
        vm.await_line(&format!("\"listening\":\"vsock\",\"port\":{port}"), WAIT)
            .unwrap()
    };
    listens(5);
    let mut stream = reach(&path, 5);
    stream.write_all(&vec![7; bytes]).unwrap();
    let mut receipt = [0; 8];
    stream.read_exact(&mut receipt).unwrap();
    assert_eq!(u64::from_le_bytes(receipt), bytes as u64);
    drop(stream);
    listens(6);
    let mut stream = connect(&path, 6).unwrap().unwrap();
    let mut given = vec![1; bytes];
    stream.read_exact(&mut given).unwrap();
    assert!(given.iter().all(|byte| *byte == 0));
    // All that it had: what comes now is the end, when the program sends no more either.
    stream.shutdown(Shutdown::Write).unwrap();
    assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    drop(stream);
    let end = vm.finish(WAIT).unwrap();
    let said = end.said("workload");
    assert_eq!(end.status.code(), Some(0), "{said:?} {}", end.stderr);
    for (line, action) in said.iter().zip(["sink", "source"]) {
        assert_eq!(line["action"], action, "{said:?}");
        assert_eq!(line["connections"], 1, "{said:?}");
        assert_eq!(line["bytes"], bytes, "{said:?}");
    }
    bed.assert_nothing_is_left();
}

/// Sends back what comes on so many connections, one after the other.
pub(crate) fn echo(listener: UnixListener, connections: u32) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        for _ in 0..connections {
            let (mut stream, _) = listener.accept().unwrap();
            let mut writer = stream.try_clone().unwrap();
            io::copy(&mut stream, &mut writer).unwrap();
        }
    })
}

#[test]
fn a_guest_reaches_programs_of_the_host_and_half_closes() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let bytes = 2 * MIB + 7;
    let first = echo(bed.program(52), 3);
    let second = echo(bed.program(u32::MAX), 1);
    let work = format!("vsock connect 52 3 {bytes}; vsock connect {} 1 1", u32::MAX);
    let end = bed.start_vsock(&work).finish(WAIT).unwrap();
    let said = end.said("workload");
    assert_eq!(end.status.code(), Some(0), "{said:?} {}", end.stderr);
    for (line, (connections, all)) in said.iter().zip([(3, 3 * bytes), (1, 1)]) {
        assert_eq!(line["action"], "connect", "{said:?}");
        assert_eq!(line["connections"], connections, "{said:?}");
        assert_eq!(line["bytes"], all, "{said:?}");
    }
    let counters = &end.report["vmm"]["vsock"];
    assert_eq!(counters["opened_by_guest"], 4, "{counters}");
    assert_eq!(counters["to_host_bytes"], 3 * bytes + 1, "{counters}");
    assert_eq!(counters["violations"], 0, "{counters}");
    first.join().unwrap();
    second.join().unwrap();
    bed.assert_nothing_is_left();
}

#[test]
fn a_guest_is_reset_where_no_program_listens_that_may() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    // One beside it, by a link; one that is gone; and somebody else's.
    let other = bed.program(5);
    let at = |port: u32| bed.folder.path().join(format!("vm.sock_{port}"));
    std::os::unix::fs::symlink(at(5), at(52)).unwrap();
    drop(bed.program(53));
    let foreign = bed.program(54);
    std::os::unix::fs::chown(at(54), Some(12_345), None).unwrap();
    for port in 51..55 {
        let work = format!("vsock connect {port} 1 1");
        let end = bed.start_vsock(&work).finish(WAIT).unwrap();
        let said = end.said("workload");
        assert_eq!(end.status.code(), Some(1), "{said:?} {}", end.stderr);
        assert_eq!(said[0]["error"], "the host refuses by reset", "{said:?}");
        let counters = &end.report["vmm"]["vsock"];
        assert_eq!(counters["refused_requests"], 1, "{counters}");
        assert_eq!(counters["opened_by_guest"], 0, "{counters}");
        // It was an answer, and not the end of a time.
        assert_eq!(counters["refused_requests_silent"], 0, "{counters}");
    }
    for listener in [other, foreign] {
        listener.set_nonblocking(true).unwrap();
        assert!(listener.accept().is_err(), "nobody came");
    }
    bed.assert_nothing_is_left();
}

#[test]
fn a_guest_of_a_user_without_privileges_reaches_their_program() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let user = OrdinaryUser::new().unwrap();
    let theirs = user.file("run");
    let owner = fs::metadata(&theirs).unwrap().uid();
    let listen = |port: u32| {
        let path = theirs.join(format!("vm.sock_{port}"));
        let listener = UnixListener::bind(&path).unwrap();
        std::os::unix::fs::chown(path, Some(owner), Some(owner)).unwrap();
        listener
    };
    let echoing = echo(listen(52), 2);
    let vsock = format!("3,{}", theirs.join("vm.sock").display());
    let work = "vsock connect 52 2 70000; vsock connect 53 1 1; wait 1";
    let flags = ["--cmdline", work, "--vsock", &vsock, "--jail", "required"];
    let vm = MicroVm::start_by(&bed.world.host, &user, &flags).unwrap();
    let end = vm.finish(WAIT).unwrap();
    let said = end.said("workload");
    assert_eq!(said[0]["bytes"], 140_000, "{said:?} {}", end.stderr);
    assert_eq!(said[1]["error"], "the host refuses by reset", "{said:?}");
    echoing.join().unwrap();
}

#[test]
fn a_guest_and_programs_of_the_host_open_connections_beside_each_other() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let listener = bed.program(52);
    let work = "vsock connect 52 1 300000; vsock echo 5 1; vsock connect 52 1 300000";
    let vm = bed.start_vsock(work);
    // Not the guest: who it is is not to be taken for root.
    let (mut stream, _) = listener.accept().unwrap();
    let peer = getsockopt(&stream, sockopt::PeerCredentials).unwrap();
    assert_ne!(peer.uid(), 0);
    let mut writer = stream.try_clone().unwrap();
    io::copy(&mut stream, &mut writer).unwrap();
    drop((stream, writer));
    let echoing = echo(listener, 1);
    exchange(reach(&bed.socket(), 5), 7, 300_000);
    let end = vm.finish(WAIT).unwrap();
    let said = end.said("workload");
    assert_eq!(end.status.code(), Some(0), "{said:?} {}", end.stderr);
    echoing.join().unwrap();
    bed.assert_nothing_is_left();
}

#[test]
fn a_socket_that_is_served_or_a_wrong_address_is_refused_with_a_remedy() {
    require_root_and_tun!();
    let bed = Bed::new();
    let path = bed.socket().display().to_string();
    let listener = UnixListener::bind(&path).unwrap();
    let file = bed.folder.path().join("file");
    fs::write(&file, "notes").unwrap();
    for (vsock, part) in [
        (format!("3,{path}"), "another process listens there"),
        (
            format!("3,{}", file.display()),
            "it is there, and no socket",
        ),
        (format!("2,{path}"), "2 is not a guest's address"),
        ("3".to_owned(), "there is no path"),
    ] {
        let end = bed.start_with(&["--vsock", &vsock]).finish(WAIT).unwrap();
        assert_eq!(end.status.code(), Some(2), "{vsock}: {}", end.stderr);
        assert!(end.stderr.contains(part), "{}", end.stderr);
    }
    assert_eq!(fs::read(&file).unwrap(), b"notes");
    drop(listener);
    bed.assert_nothing_is_left();
}
