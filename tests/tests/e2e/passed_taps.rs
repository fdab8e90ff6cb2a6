//! A VM's TAP that is passed as an open descriptor, to the API and by the command line.

use std::{
    fs::File,
    io::{IoSlice, Read as _, Write as _},
    os::{
        fd::{AsFd as _, AsRawFd as _, BorrowedFd, RawFd},
        unix::net::UnixStream,
    },
    thread,
    time::Duration,
};

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use serde_json::{Value, json};
use slipgate_testbed::{Guest, GuestConfig};

use crate::{
    Cell, WAIT,
    api::Stand,
    eventually,
    matrix::{matrix, pings},
};

matrix! {
    a_vms_tap_is_passed_as_a_descriptor: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "its guest has a socket in place of a TAP";
    what_is_no_tap_of_this_namespace_is_refused: [hybrid_ipv4],
        without [hybrid_ipv6]: "no packet of the guest's is part of it",
        without [user_ipv4, user_ipv6]: "its guest has a socket in place of a TAP";
    descriptors_beyond_one_are_left_nowhere: [hybrid_ipv4],
        without [hybrid_ipv6]: "no packet of the guest's is part of it",
        without [user_ipv4, user_ipv6]: "its guest has a socket in place of a TAP";
}

/// Sends a PUT of a VM with descriptors, and returns the connection.
fn send(stand: &Stand, socket: &str, vm: &str, fds: &[BorrowedFd<'_>]) -> UnixStream {
    let body = json!({ "tap": { "descriptor": true } }).to_string();
    let text = format!(
        "PUT /v1/vms/{vm} HTTP/1.1\r\nHost: slipgate\r\nConnection: close\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let stream = UnixStream::connect(stand.socket(socket)).unwrap();
    let raw: Vec<RawFd> = fds.iter().map(|fd| fd.as_raw_fd()).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let parts = [IoSlice::new(text.as_bytes())];
    // Who may not connect any more may have been refused by now.
    let _ = sendmsg::<()>(
        stream.as_raw_fd(),
        &parts,
        &rights,
        MsgFlags::MSG_NOSIGNAL,
        None,
    );
    stream
}

/// Status and body of the answer to such a PUT.
fn put(stand: &Stand, socket: &str, vm: &str, fds: &[BorrowedFd<'_>]) -> (u16, Value) {
    let mut answer = String::new();
    let mut stream = send(stand, socket, vm, fds);
    stream.set_read_timeout(Some(4 * WAIT)).unwrap();
    stream.read_to_string(&mut answer).unwrap();
    let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
    let body = answer.split_once("\r\n\r\n").unwrap().1;
    (status, serde_json::from_str(body).unwrap_or_default())
}

fn tap_of(guest: &Guest) -> BorrowedFd<'_> {
    guest.queues()[0].fd().as_fd()
}

fn a_vms_tap_is_passed_as_a_descriptor(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let guests = ["tap0", "tap1"].map(|tap| stand.guest(tap));
    let reaches = |guest: &Guest| pings(guest, cell.server(), WAIT);
    let (status, vm) = put(&stand, "api.sock", "a", &[tap_of(&guests[0])]);
    assert_eq!((status, &vm["tap"]), (201, &json!("tap0")), "{vm}");
    assert!(reaches(&guests[0]));
    // With the address that it has shown.
    let vm = stand.as_put_answers("/v1/vms/a");
    assert_eq!(
        put(&stand, "api.sock", "a", &[tap_of(&guests[0])]),
        (200, vm)
    );

    // By the command line, which inherits it.
    let inherited = nix::unistd::dup(tap_of(&guests[1])).unwrap();
    let number = inherited.as_raw_fd().to_string();
    stand
        .daemon
        .run(&["vm", "add", "b", "--tap-fd", &number])
        .unwrap();
    drop(inherited);
    assert_eq!(stand.ask("GET", "/v1/vms/b", None).1["tap"], "tap1");
    assert!(reaches(&guests[1]));

    // The client's own descriptor may be closed; what is gone with it is waited for.
    let [first, mut second] = guests;
    second.unplug();
    let state = |vm: &str| stand.ask("GET", &format!("/v1/vms/{vm}"), None).1["state"].clone();
    eventually("the TAP is missed", || {
        (state("b") == "waiting").then_some(())
    });
    assert!(reaches(&first));
}

fn what_is_no_tap_of_this_namespace_is_refused(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let refused = |fd: BorrowedFd<'_>, part: &str| {
        let (status, problem) = put(&stand, "api.sock", "a", &[fd]);
        let detail = problem["detail"].as_str().unwrap_or_default();
        assert_eq!(status, 422, "{problem}");
        assert!(detail.contains(part), "{problem}");
    };
    let (pipe, _other) = nix::unistd::pipe().unwrap();
    refused(pipe.as_fd(), "another file's");
    let unbound = File::options().read(true).write(true).open("/dev/net/tun");
    let unbound = unbound.unwrap();
    refused(unbound.as_fd(), "no interface in the daemon's network");
    let elsewhere = Guest::in_host(&stand.world().net, GuestConfig::new("tap0")).unwrap();
    refused(tap_of(&elsewhere), "no interface in the daemon's network");
    assert_eq!(stand.ask("GET", "/v1/vms", None).1, json!([]));
    assert_eq!(put(&stand, "read.sock", "a", &[pipe.as_fd()]).0, 403);
}

/// However many descriptors clients send and in whatever way, none is left open.
fn descriptors_beyond_one_are_left_nowhere(cell: Cell) {
    const SENT: usize = 250;
    let stand = Stand::of(cell, &[]);
    let guest = stand.guest("tap0");
    assert_eq!(put(&stand, "api.sock", "a", &[tap_of(&guest)]).0, 201);
    let processes = || {
        let of = |title| stand.daemon.children_named(title)[0];
        [
            stand.daemon.broker_pid(),
            of("slipgate-api"),
            of("slipgate-api-read"),
        ]
    };
    let open = |pid: &u32| {
        std::fs::read_dir(format!("/proc/{pid}/fd"))
            .unwrap()
            .count()
    };
    let (pids, file) = (processes(), File::open("/dev/null").unwrap());
    let before = pids.map(|pid| open(&pid));
    let many = [file.as_fd(); SENT];
    for socket in ["api.sock", "read.sock"] {
        for _ in 0..8 {
            // One that does not wait for the answer, and one that never ends its head.
            drop(send(&stand, socket, "a", &many));
            let mut unfinished = UnixStream::connect(stand.socket(socket)).unwrap();
            unfinished.write_all(b"PUT /v1/").unwrap();
            let raw = many.map(|fd| fd.as_raw_fd());
            let rights = [ControlMessage::ScmRights(&raw)];
            let bytes = [IoSlice::new(b"vms/")];
            for _ in 0..2 {
                let flags = MsgFlags::MSG_NOSIGNAL;
                sendmsg::<()>(unfinished.as_raw_fd(), &bytes, &rights, flags, None).unwrap();
            }
        }
        let expected = if socket == "api.sock" { 400 } else { 403 };
        assert_eq!(put(&stand, socket, "a", &many).0, expected);
    }
    assert_eq!(put(&stand, "api.sock", "a", &[file.as_fd()]).0, 422);
    eventually("all are closed", || {
        thread::sleep(Duration::from_millis(50));
        let now = pids.map(|pid| open(&pid));
        now.iter()
            .zip(before)
            .all(|(now, before)| *now <= before)
            .then_some(())
    });
    assert_eq!(processes(), pids);
    assert_eq!(put(&stand, "api.sock", "a", &[tap_of(&guest)]).0, 200);
}
