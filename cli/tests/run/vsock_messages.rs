//! vsock: numbered messages between a guest and programs of the host, and connections that one end
//! leaves in the middle of them.
use std::{
    io::{self, Read as _, Write as _},
    net::Shutdown,
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::net::UnixStream,
    },
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use slipgate_testbed::{pattern::Pattern, require_kvm, require_root_and_tun};

use crate::{
    Bed, WAIT, eventually,
    vsock::{exchange, reach},
};

/// Messages each way where no number is given (`SLIPGATE_VSOCK_MESSAGES`).
const MESSAGES: u64 = 20_000;
/// More messages than pass before a test ends the connection.
const ENDLESS: u64 = u32::MAX as u64;

/// Messages of one end, as `guest/src/workload/vsock/messages.rs` describes them: made one after the
/// other, or compared with what comes.
struct Messages {
    pattern: Pattern,
    number: u64,
    /// What is due before message `number`.
    due: Vec<u8>,
}

impl Messages {
    /// Those of the guest on a connection.
    fn of_guest(connection: u64) -> Messages {
        Messages::new(2 * connection)
    }

    /// Those of the host.
    fn of_host(connection: u64) -> Messages {
        Messages::new(2 * connection + 1)
    }

    fn new(seed: u64) -> Messages {
        Messages {
            pattern: Pattern::new(seed),
            number: 0,
            due: Vec::new(),
        }
    }

    fn next(&mut self) -> Vec<u8> {
        let body = (self.number * 31 % 241) as usize;
        let mut message = self.number.to_le_bytes().to_vec();
        message.resize(8 + body, 0);
        self.pattern.fill(&mut message[8..]);
        self.number += 1;
        message
    }

    #[track_caller]
    fn check(&mut self, bytes: &[u8]) {
        while self.due.len() < bytes.len() {
            let next = self.next();
            self.due.extend(next);
        }
        let due: Vec<u8> = self.due.drain(..bytes.len()).collect();
        assert!(due == bytes, "wrong before message {}", self.number);
    }

    /// Checks what comes to its end, and returns how many messages these are.
    #[track_caller]
    fn check_all(&mut self, stream: &mut UnixStream) -> u64 {
        let mut part = vec![0; 64 << 10];
        loop {
            match stream.read(&mut part) {
                Ok(0) => break,
                Ok(read) => self.check(&part[..read]),
                // The guest reset it.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => break,
                Err(error) => panic!("{error}"),
            }
        }
        // One of which a part came does not count.
        self.number - u64::from(!self.due.is_empty())
    }
}

/// The number of its connection, with which a guest begins.
fn greeting(stream: &mut UnixStream) -> u64 {
    let mut number = [0; 8];
    stream.read_exact(&mut number).unwrap();
    u64::from_le_bytes(number)
}

/// Sends so many messages on a connection, each by one call, and half-closes it. An error ends it.
fn send(mut stream: UnixStream, connection: u64, count: u64) -> io::Result<()> {
    let mut messages = Messages::of_host(connection);
    while messages.number < count {
        stream.write_all(&messages.next())?;
    }
    stream.shutdown(Shutdown::Write)
}

/// A program of the host: sends so many messages, and checks that as many come, beside each other.
fn talk(mut stream: UnixStream, count: u64) {
    let connection = greeting(&mut stream);
    let writer = stream.try_clone().unwrap();
    let sender = thread::spawn(move || send(writer, connection, count));
    let came = Messages::of_guest(connection).check_all(&mut stream);
    assert_eq!(came, count, "of connection {connection}");
    sender.join().unwrap().unwrap();
}

/// Bytes of so many messages.
fn bytes_of(count: u64) -> u64 {
    (0..count).map(|number| 8 + number * 31 % 241).sum()
}

#[test]
fn numbered_messages_go_each_way_beside_each_other_and_none_is_lost() {
    require_root_and_tun!();
    require_kvm!();
    let count: u64 = std::env::var("SLIPGATE_VSOCK_MESSAGES").map_or(MESSAGES, |count| {
        count.parse().expect("a number of messages")
    });
    let bed = Bed::new();
    let listener = bed.program(52);
    let vm = bed.start_vsock(&format!("vsock messages 52 1 {count}"));
    let program = thread::spawn(move || talk(listener.accept().unwrap().0, count));
    // 28 µs a message each way on a machine that does nothing else.
    let end = vm.finish(WAIT + count as u32 * Duration::from_millis(1));
    let end = end.unwrap();
    let said = end.said("workload");
    assert_eq!(end.status.code(), Some(0), "{said:?} {}", end.stderr);
    program.join().unwrap();
    eprintln!("{}", said[0]);
    assert_eq!(said[0]["messages_sent"], count, "{said:?}");
    assert_eq!(said[0]["messages_received"], count, "{said:?}");
    let counters = &end.report["vmm"]["vsock"];
    assert_eq!(counters["to_host_bytes"], 8 + bytes_of(count), "{counters}");
    assert_eq!(counters["to_guest_bytes"], bytes_of(count), "{counters}");
    assert_eq!(counters["violations"], 0, "{counters}");
    bed.assert_nothing_is_left();
}

/// The program is the only one that has the socket: `cat`, which reads all that comes, or `sleep`,
/// which reads nothing.
#[test]
fn a_guest_learns_that_its_program_was_killed_in_the_middle() {
    require_root_and_tun!();
    require_kvm!();
    for program in [&["cat"][..], &["sleep", "600"]] {
        let bed = Bed::new();
        let (victim, next) = (bed.program(52), bed.program(53));
        let work = format!("vsock messages 52 1 {ENDLESS}; vsock messages 53 1 1000");
        let vm = bed.start_vsock(&work);
        let (mut stream, _) = victim.accept().unwrap();
        assert_eq!(greeting(&mut stream), 0);
        let mut part = [0; 10_000];
        stream.read_exact(&mut part).unwrap();
        Messages::of_guest(0).check(&part);
        let mut child = Command::new(program[0])
            .args(&program[1..])
            .stdin(OwnedFd::from(stream))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        thread::sleep(Duration::from_millis(200));
        child.kill().unwrap();
        child.wait().unwrap();
        let next = thread::spawn(move || talk(next.accept().unwrap().0, 1000));
        // Sooner than the guest's patience, which is 60 s.
        let end = vm.finish(WAIT).unwrap();
        let said = end.said("workload");
        assert_eq!(end.status.code(), Some(1), "{said:?} {}", end.stderr);
        next.join().unwrap();
        let error = said[0]["error"].as_str().unwrap();
        let ends = [
            "the host has reset it, after 0 messages",
            "0 messages came, and then an end",
            "the host takes no more, after 0 messages",
        ];
        assert!(ends.contains(&error), "{program:?}: {error}");
        assert_eq!(said[0]["connections"], 0, "{said:?}");
        assert_eq!(said[1]["connections"], 1, "{said:?}");
        assert_eq!(said[1].get("error"), None, "{said:?}");
        bed.assert_nothing_is_left();
    }
}

/// Bytes that wait in a socket.
fn waiting(stream: &UnixStream) -> usize {
    let mut bytes: libc::c_int = 0;
    // SAFETY: it writes one number.
    let done = unsafe { libc::ioctl(stream.as_raw_fd(), libc::FIONREAD, &raw mut bytes) };
    assert_eq!(done, 0, "{}", io::Error::last_os_error());
    bytes as usize
}

#[test]
fn a_program_that_does_not_read_holds_up_its_own_connection_alone_and_then_has_all() {
    const COUNT: u64 = 16_000;
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let listener = bed.program(52);
    let mut vm = bed.start_vsock(&format!("vsock messages 52 3 {COUNT}"));
    let (mut lazy, _) = listener.accept().unwrap();
    let others: Vec<_> = (0..2)
        .map(|_| {
            let (stream, _) = listener.accept().unwrap();
            thread::spawn(move || talk(stream, COUNT))
        })
        .collect();
    for other in others {
        other.join().unwrap();
    }
    // The guest has nothing else to send now, and does not send.
    let there = waiting(&lazy);
    assert!(there > 0, "the guest has sent what it may");
    thread::sleep(Duration::from_millis(300));
    assert_eq!(waiting(&lazy), there, "and no more");
    assert!((there as u64) < bytes_of(COUNT));
    let early = vm.await_line("credit_waits", Duration::from_millis(1));
    assert!(early.is_err(), "it waits: {early:?}");
    talk(lazy.try_clone().unwrap(), COUNT);
    assert_eq!(lazy.read(&mut [0]).unwrap(), 0);
    drop(lazy);
    let end = vm.finish(WAIT).unwrap();
    let said = end.said("workload");
    assert_eq!(end.status.code(), Some(0), "{said:?} {}", end.stderr);
    assert_eq!(said[0]["connections"], 3, "{said:?}");
    assert_eq!(said[0]["messages_sent"], 3 * COUNT, "{said:?}");
    assert_eq!(said[0]["messages_received"], 3 * COUNT, "{said:?}");
    assert!(said[0]["credit_waits"].as_u64().unwrap() > 0, "{said:?}");
    let counters = &end.report["vmm"]["vsock"];
    assert!(counters["held_bytes"].as_u64().unwrap() > 0, "{counters}");
    assert_eq!(counters["violations"], 0, "{counters}");
    bed.assert_nothing_is_left();
}

#[test]
fn a_program_sees_that_the_guest_reset_its_connection_in_the_middle() {
    const COUNT: u64 = 3_000;
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let listener = bed.program(52);
    // The guest stays until both have seen it: the machine's end would be seen too.
    let vm = bed.start_vsock(&format!("vsock abort 52 2 {COUNT}; vsock echo 5 1"));
    let programs: Vec<_> = (0..2)
        .map(|_| {
            let (mut stream, _) = listener.accept().unwrap();
            thread::spawn(move || {
                let connection = greeting(&mut stream);
                let writer = stream.try_clone().unwrap();
                let sender = thread::spawn(move || send(writer, connection, ENDLESS));
                let came = Messages::of_guest(connection).check_all(&mut stream);
                assert!((1..=COUNT).contains(&came), "{came}");
                // A half-close would take what is sent without end.
                let error = sender.join().unwrap().unwrap_err();
                let ends = [io::ErrorKind::BrokenPipe, io::ErrorKind::ConnectionReset];
                assert!(ends.contains(&error.kind()), "{error}");
            })
        })
        .collect();
    eventually("both see it", || {
        programs.iter().all(thread::JoinHandle::is_finished)
    });
    for program in programs {
        program.join().unwrap();
    }
    exchange(reach(&bed.socket(), 5), 7, 1_000);
    let end = vm.finish(WAIT).unwrap();
    let said = end.said("workload");
    assert_eq!(end.status.code(), Some(0), "{said:?} {}", end.stderr);
    assert_eq!(said[0]["action"], "abort", "{said:?}");
    assert_eq!(said[0]["messages_sent"], 2 * COUNT, "{said:?}");
    let counters = &end.report["vmm"]["vsock"];
    assert_eq!(counters["violations"], 0, "{counters}");
    bed.assert_nothing_is_left();
}
