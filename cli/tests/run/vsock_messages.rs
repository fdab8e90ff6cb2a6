//! vsock: numbered messages between a guest and programs of the host, and connections that one end
//! leaves in the middle of them.
use std::{
    io::{self, Read as _},
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::net::UnixStream,
    },
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use slipgate_testbed::{
    require_kvm, require_root_and_tun,
    vsock_messages::{Messages, assert_all_went_each_way, bytes_of, greeting, send, talk},
};

use crate::{
    Bed, WAIT, eventually,
    vsock::{exchange, reach},
};

/// Messages each way. The stress tier has a million.
const MESSAGES: u64 = 20_000;
/// More messages than pass before a test ends the connection.
const ENDLESS: u64 = u32::MAX as u64;

#[test]
fn numbered_messages_go_each_way_beside_each_other_and_none_is_lost() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let listener = bed.program(52);
    let vm = bed.start_vsock(&format!("vsock messages 52 1 {MESSAGES}"));
    let program = thread::spawn(move || talk(listener.accept().unwrap().0, MESSAGES));
    let end = vm.finish(WAIT).unwrap();
    assert_all_went_each_way(&end, MESSAGES);
    program.join().unwrap().unwrap();
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
        assert_eq!(greeting(&mut stream).unwrap(), 0);
        let mut part = [0; 10_000];
        stream.read_exact(&mut part).unwrap();
        Messages::of_guest(0).check(&part).unwrap();
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
        next.join().unwrap().unwrap();
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
        other.join().unwrap().unwrap();
    }
    // The guest has nothing else to send now, and does not send.
    let there = waiting(&lazy);
    assert!(there > 0, "the guest has sent what it may");
    thread::sleep(Duration::from_millis(300));
    assert_eq!(waiting(&lazy), there, "and no more");
    assert!((there as u64) < bytes_of(COUNT));
    let early = vm.await_line("credit_waits", Duration::from_millis(1));
    assert!(early.is_err(), "it waits: {early:?}");
    talk(lazy.try_clone().unwrap(), COUNT).unwrap();
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
                let connection = greeting(&mut stream).unwrap();
                let writer = stream.try_clone().unwrap();
                let sender = thread::spawn(move || send(writer, connection, ENDLESS));
                let came = Messages::of_guest(connection)
                    .check_all(&mut stream)
                    .unwrap();
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
