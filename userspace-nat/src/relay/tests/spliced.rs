//! Connections of forwards that are continued by a socket of the guest's namespace, which here is the
//! tests' own: its guest has the address 127.0.0.1.
use std::{
    io::{IoSlice, IoSliceMut, Write as _},
    net::{Ipv4Addr, Ipv6Addr, Shutdown, TcpStream},
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    thread,
};

use nix::{
    poll::{PollFd, PollFlags, poll},
    sys::socket::{
        AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, getsockopt, recvmsg, send,
        sendmsg, setsockopt, socket, socketpair, sockopt,
    },
};
use slipgate_model::NAMESPACE_SOCKETS;

use super::{
    super::{turns::PACKETS_PER_TURN, *},
    guest::{Close, End},
    world::{Client, VM, World, bytes},
};
use crate::{ndp::addresses::bind, test_vm};

/// Bytes beyond what sockets and pipes between them hold.
const MANY: usize = 48 << 20;

/// More descriptors than any test has.
pub(super) const MANY_FILES: u64 = 1 << 20;

pub(super) fn channel() -> (OwnedFd, OwnedFd) {
    let flags = SockFlag::SOCK_CLOEXEC;
    socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags).unwrap()
}

/// What the process in the namespace does when it is asked. Returns the family; `None` if nobody asks
/// any more.
pub(super) fn answer(channel: &OwnedFd) -> Option<u8> {
    let mut word = [0];
    let mut parts = [IoSliceMut::new(&mut word)];
    let received = recvmsg::<()>(channel.as_raw_fd(), &mut parts, None, MsgFlags::empty());
    if !received.is_ok_and(|received| received.bytes == 1) {
        return None;
    }
    let family = match word {
        [6] => AddressFamily::Inet6,
        _ => AddressFamily::Inet,
    };
    for _ in 0..NAMESPACE_SOCKETS {
        let made = socket(family, SockType::Stream, SockFlag::empty(), None).unwrap();
        let fds = [made.as_raw_fd()];
        let rights = [ControlMessage::ScmRights(&fds)];
        let parts = [IoSlice::new(&word)];
        let flags = MsgFlags::MSG_NOSIGNAL;
        // The test may be over.
        sendmsg::<()>(channel.as_raw_fd(), &parts, &rights, flags, None).ok()?;
    }
    Some(word[0])
}

/// Sockets of which some of this family are ready.
fn sockets(version: Version) -> NamespaceSockets {
    let (ours, theirs) = channel();
    let mut sockets = NamespaceSockets::new(ours, MANY_FILES);
    answer(&theirs).unwrap();
    if version == Version::V6 {
        assert!(sockets.take(version).is_none(), "nobody has asked for them");
        answer(&theirs).unwrap();
    }
    thread::spawn(move || while answer(&theirs).is_some() {});
    sockets
}

/// A world, the address of a forward, and the guest's service to which it leads.
fn world() -> (World, SocketAddr, TcpListener) {
    world_of(Version::V4)
}

fn world_of(version: Version) -> (World, SocketAddr, TcpListener) {
    let (mut world, row) = World::with_ipv6(Limits::default());
    let mut net = test_vm::vm6(VM.get());
    net.guest = Ipv4Addr::LOCALHOST;
    bind(row, Ipv6Addr::LOCALHOST, 1);
    world.relay.add_vm(net, Some(row));
    world.relay.set_namespace(VM, sockets(version));
    let host = match version {
        Version::V4 => "127.0.0.1",
        Version::V6 => "::1",
    };
    let listener = TcpListener::bind((host, 0)).unwrap();
    listener.set_nonblocking(true).unwrap();
    let at = world.forward_tcp_at(host, listener.local_addr().unwrap().port());
    (world, at, listener)
}

/// A client of the forward with this end, and the service with that one, connected.
fn connected(end: End, of_service: End) -> (World, [Client; 2]) {
    connect_in(world(), end, of_service)
}

fn connect_in(
    (mut world, at, listener): (World, SocketAddr, TcpListener),
    end: End,
    of_service: End,
) -> (World, [Client; 2]) {
    let mut clients = vec![Client::connect(at, end)];
    let (mut service, mut of_service) = (None, Some(of_service));
    world.run(&mut clients, 1_000, |_, _| {
        if let Ok((stream, _)) = listener.accept() {
            stream.set_nonblocking(true).unwrap();
            let end = of_service.take().unwrap();
            service = Some(Client { stream, end });
        }
        service.is_some()
    });
    (world, [clients.remove(0), service.unwrap()])
}

/// An answer with more than one descriptor, which none of that process has.
#[test]
fn of_an_answer_with_several_descriptors_none_is_used_and_none_stays_open() {
    for count in [2, 3, 9] {
        let (ours, theirs) = channel();
        let mut sockets = NamespaceSockets::new(ours, MANY_FILES);
        let (reader, passed) = channel();
        let fds = vec![passed.as_raw_fd(); count];
        let rights = [ControlMessage::ScmRights(&fds)];
        let (parts, flags) = ([IoSlice::new(&[4])], MsgFlags::MSG_NOSIGNAL);
        sendmsg::<()>(theirs.as_raw_fd(), &parts, &rights, flags, None).unwrap();
        drop(passed);
        assert!(sockets.take(Version::V4).is_none());
        // The end: nobody has the other side any more, once a process that another test may start just now
        // runs its program.
        let mut waits = [PollFd::new(reader.as_fd(), PollFlags::POLLIN)];
        assert_eq!(poll(&mut waits, 10_000_u16), Ok(1), "{count}");
        let mut byte = [0];
        let mut parts = [IoSliceMut::new(&mut byte)];
        let flags = MsgFlags::MSG_DONTWAIT;
        let end = recvmsg::<()>(reader.as_raw_fd(), &mut parts, None, flags);
        assert_eq!(end.map(|end| end.bytes), Ok(0), "{count}");
    }
}

fn quiet() -> End {
    End::new(Vec::new(), Close::Never)
}

#[test]
fn bytes_go_by_a_socket_of_the_namespace_and_none_by_the_link() {
    for (version, headers_len) in [(Version::V4, 40), (Version::V6, 60)] {
        bytes_go_by_the_namespace(version, headers_len);
    }
}

fn bytes_go_by_the_namespace(version: Version, headers_len: u64) {
    let sent = (bytes(3_000_000, 1), bytes(2_000_000, 2));
    let (mut world, mut clients) = connect_in(
        world_of(version),
        End::new(sent.0.clone(), Close::WhenSent),
        End::new(sent.1.clone(), Close::AfterPeer),
    );
    let flow = world.relay.live(0).next().unwrap().0.clone();
    assert!(flow.inbound && flow.connect_us > 0);
    assert!(flow.guest.ip().is_loopback());
    assert_eq!(flow.remote, clients[0].stream.local_addr().unwrap());
    world.run(&mut clients, 10_000, |_, clients| {
        clients.iter().all(|client| client.end.eof)
    });
    assert!(clients[0].end.received == sent.1 && clients[1].end.received == sent.0);
    world.run(&mut clients, 1_000, |world, _| {
        world.relay.counts(VM).streams == 0
    });
    world.assert_empty();
    assert_eq!(world.relay.entries.len(), 1, "the listener is left");
    assert!(world.to_guest.is_empty());
    let counts = world.relay.counts(VM);
    assert_eq!(
        (counts.bytes_to_guest, counts.bytes_from_guest),
        (3_000_000, 2_000_000)
    );
    // As segments of 1,460 bytes, each with its headers: at least so many.
    assert!(counts.rx.0 >= 3_000_000 / 1_460 && counts.tx.0 >= 2_000_000 / 1_460);
    assert_eq!(counts.rx.1 - counts.rx.0 * headers_len, 3_000_000);
    assert_eq!(counts.tx.1 - counts.tx.0 * headers_len, 2_000_000);
    assert_eq!((counts.spliced, counts.streams_reset), (0, 0));
}

#[test]
fn what_is_not_read_waits_and_arrives_whole() {
    let sent = bytes(MANY, 3);
    let mut end = quiet();
    end.reads = false;
    let (mut world, mut clients) = connected(End::new(sent.clone(), Close::WhenSent), end);
    world.idle(&mut clients, 20);
    let stuck = clients[0].end.sent;
    assert!(stuck < MANY, "nobody reads");
    world.idle(&mut clients, 5);
    assert_eq!(clients[0].end.sent, stuck);
    clients[1].end.reads = true;
    world.run(&mut clients, 20_000, |_, clients| clients[1].end.eof);
    assert!(clients[1].end.received == sent);
}

#[test]
fn without_a_pipe_a_connection_waits_for_one() {
    let (mut world, mut clients) = connected(quiet(), quiet());
    world.relay.pipes.are_none = true;
    for (client, seed) in clients.iter_mut().zip([5, 6]) {
        client.end.send = bytes(1_000, seed);
    }
    world.idle(&mut clients, 1_000);
    for client in &clients {
        assert_eq!(client.end.sent, 1_000);
        assert!(client.end.received.is_empty() && !client.end.reset);
    }
    // It looks again after a time, not all the time.
    let due_ns = world.relay.next_deadline_ns(false).unwrap();
    assert!(world.relay.queue.is_empty() && due_ns <= world.now_ns + 100_000_000);
    world.relay.pipes.are_none = false;
    world.run(&mut clients, 1_000, |_, clients| {
        clients
            .iter()
            .all(|client| client.end.received.len() == 1_000)
    });
}

#[test]
fn spliced_connections_leave_half_of_the_sockets() {
    let (mut world, at, _listener) = world();
    world.relay.limits.sockets = 4 * (1 + spliced::MORE_SOCKETS as usize);
    let mut clients: Vec<_> = (0..3).map(|_| Client::connect(at, quiet())).collect();
    world.run(&mut clients, 1_000, |world, _| {
        world.relay.counts(VM).streams == 3
    });
    assert_eq!(world.relay.counts(VM).spliced, 2);
}

/// From now on its close is a reset.
fn resets(client: &Client) {
    let linger = nix::libc::linger {
        l_onoff: 1,
        l_linger: 0,
    };
    setsockopt(&client.stream, sockopt::Linger, &linger).unwrap();
}

/// The first of these is gone by a reset, of which the other hears soon.
fn assert_reset_arrives(world: &mut World, clients: &mut [Client]) {
    world.run(clients, 1_000, |world, _| {
        world.relay.counts(VM).streams == 0
    });
    // Whether it reads or not.
    let end = &mut clients[1].end;
    end.send.resize(end.sent + 1, 0);
    world.run(clients, 1_000, |_, clients| clients[1].end.reset);
    world.assert_empty();
    assert_eq!(world.relay.counts(VM).streams_reset, 1);
}

#[test]
fn a_reset_of_either_side_reaches_the_other() {
    for side in [0, 1] {
        let (mut world, mut clients) = connected(quiet(), quiet());
        clients.swap(0, side);
        resets(&clients[0]);
        clients[0].close();
        assert_reset_arrives(&mut world, &mut clients);
    }
}

#[test]
fn a_reset_is_noticed_while_the_other_side_does_not_read() {
    for side in [0, 1] {
        let (mut world, mut clients) = connected(quiet(), quiet());
        clients.swap(0, side);
        clients[0].end.send = bytes(MANY, 7);
        clients[1].end.reads = false;
        world.idle(&mut clients, 20);
        assert!(clients[0].end.sent < MANY, "nobody reads");
        resets(&clients[0]);
        clients[0].close();
        assert_reset_arrives(&mut world, &mut clients);
    }
}

#[test]
fn a_reset_is_noticed_after_the_end_of_that_side() {
    for side in [0, 1] {
        let mut ends = [End::new(Vec::new(), Close::WhenSent), quiet()];
        ends.swap(0, side);
        let [of_client, of_service] = ends;
        let (mut world, mut clients) = connected(of_client, of_service);
        clients.swap(0, side);
        world.run(&mut clients, 1_000, |_, clients| clients[1].end.eof);
        resets(&clients[0]);
        clients[0].close();
        assert_reset_arrives(&mut world, &mut clients);
    }
}

#[test]
fn what_came_before_a_reset_arrives_and_no_end_behind_it() {
    let (mut world, mut clients) = connected(quiet(), quiet());
    world.frozen = true;
    clients[1].end.send = bytes(1_000, 8);
    world.idle(&mut clients, 20);
    resets(&clients[1]);
    clients[1].close();
    world.idle(&mut clients, 20);
    world.frozen = false;
    world.run(&mut clients, 2_000, |_, clients| clients[0].end.reset);
    assert!(clients[0].end.received == bytes(1_000, 8) && !clients[0].end.eof);
}

#[test]
fn the_time_limit_of_a_half_closed_connection_begins_in_a_turn_that_stops_early() {
    let (mut world, mut clients) = connected(quiet(), quiet());
    world.idle(&mut clients, 20);
    clients[0].stream.shutdown(Shutdown::Write).unwrap();
    clients[1].stream.write_all(&[0; 1_000]).unwrap();
    let mut ready = Vec::new();
    while ready.len() < 2 {
        world.poller.wait(None, &mut ready).unwrap();
    }
    for readiness in ready {
        world.with(|relay, cx| relay.on_ready(readiness, cx));
    }
    // One call in this turn: the end one way, and bytes, perhaps not all, the other.
    world.with(|relay, cx| {
        relay.begin_turn();
        let served = relay.vms.get_mut(&VM).unwrap();
        served.turn.spend(PACKETS_PER_TURN - 1, relay.turn);
        relay.on_timer(&|_| false, cx);
        assert!(!relay.queue.is_empty());
    });
    let (due_ns, _) = *world.relay.deadlines.first().unwrap();
    assert!(due_ns <= world.now_ns + Limits::default().half_closed_idle_ns);
}

#[test]
fn a_frozen_vm_gets_nothing_until_it_goes_on() {
    let (mut world, mut clients) = connected(quiet(), quiet());
    world.frozen = true;
    clients[0].end.send = bytes(1_000, 4);
    world.idle(&mut clients, 3_000);
    assert_eq!(clients[0].end.sent, 1_000);
    assert!(clients[1].end.received.is_empty(), "the VM is frozen");
    world.frozen = false;
    world.run(&mut clients, 2_000, |_, clients| {
        clients[1].end.received.len() == 1_000
    });
}

#[test]
fn a_flow_that_is_cut_is_reset_on_both_sides() {
    let (mut world, mut clients) = connected(quiet(), quiet());
    let number = world.relay.live(0).next().unwrap().0.number;
    assert!(world.with(|relay, cx| relay.cut_flow(number, "cut", cx)));
    world.run(&mut clients, 1_000, |_, clients| {
        clients.iter().all(|client| client.end.reset)
    });
    world.assert_empty();
}

#[test]
fn what_the_namespaces_own_tcp_refuses_goes_by_the_link() {
    let (mut world, at, listener) = world();
    drop(listener);
    let mut clients = [Client::connect(at, quiet())];
    world.run(&mut clients, 1_000, |world, _| !world.to_guest.is_empty());
    // Nobody answers there either.
    world.run(&mut clients, 10_000, |_, clients| clients[0].end.reset);
    world.assert_empty();
}

#[test]
fn while_somebody_wants_packets_connections_consist_of_packets() {
    let (mut world, at, _listener) = world();
    world.relay.set_watched(true);
    let mut clients = [Client::connect(at, quiet())];
    world.run(&mut clients, 1_000, |world, _| !world.to_guest.is_empty());
    assert_eq!(world.relay.counts(VM).spliced, 0);
}

#[test]
fn urgent_data_arrives_in_its_place_both_ways() {
    for side in [0, 1] {
        let (mut world, mut clients) = connected(quiet(), quiet());
        clients.swap(0, side);
        for part in 0..3 {
            let flags = if part == 1 {
                MsgFlags::MSG_OOB
            } else {
                MsgFlags::empty()
            };
            let data = [&b"before"[..], b"!", b"behind"][part];
            send(clients[0].stream.as_raw_fd(), data, flags).unwrap();
            world.idle(&mut clients, 2);
        }
        clients[0].end = End::new(bytes(100_000, 9), Close::WhenSent);
        world.run(&mut clients, 1_000, |_, clients| clients[1].end.eof);
        let received = &clients[1].end.received;
        assert!(received.starts_with(b"before!behind"), "{side}");
        assert!(received[13..] == clients[0].end.send);
    }
}

/// Before the client is accepted, and before the connection to the guest stands.
#[test]
fn urgent_data_before_a_connection_is_looked_at_displaces_no_other() {
    let (mut world, at, listener) = world();
    let mut clients = vec![Client::connect(at, quiet())];
    let say = |stream: &TcpStream| {
        for (data, flags) in [
            (&b"a"[..], MsgFlags::MSG_OOB),
            (b"b", MsgFlags::MSG_OOB),
            (b"behind", MsgFlags::empty()),
        ] {
            send(stream.as_raw_fd(), data, flags).unwrap();
        }
    };
    say(&clients[0].stream);
    let mut service = None;
    world.run(&mut clients, 1_000, |_, _| {
        if let Ok((stream, _)) = listener.accept() {
            stream.set_nonblocking(true).unwrap();
            say(&stream);
            service = Some(stream);
        }
        service.is_some()
    });
    let stream = service.unwrap();
    clients.push(Client {
        stream,
        end: quiet(),
    });
    world.run(&mut clients, 1_000, |_, clients| {
        clients.iter().all(|client| client.end.received.len() == 8)
    });
    assert!(clients.iter().all(|it| it.end.received == b"abbehind"));
    assert_eq!(world.relay.counts(VM).spliced, 1);
}

#[test]
fn a_socket_of_the_namespace_keeps_urgent_data_in_place_before_it_is_connected() {
    for version in [Version::V4, Version::V6] {
        let socket = sockets(version).take(version).unwrap();
        assert_eq!(getsockopt(&socket, sockopt::OobInline), Ok(true));
    }
}

/// A source's end behind urgent data: splice finds the end in front of the mark then, too.
#[test]
fn urgent_data_and_the_end_before_the_first_look_lose_nothing() {
    for side in [0, 1] {
        let (mut world, mut clients) = connected(quiet(), quiet());
        clients.swap(0, side);
        let from = clients[0].stream.as_raw_fd();
        for (data, flags) in [
            (&b"before"[..], MsgFlags::empty()),
            (b"!", MsgFlags::MSG_OOB),
            (b"behind", MsgFlags::empty()),
        ] {
            send(from, data, flags).unwrap();
        }
        clients[0].stream.shutdown(Shutdown::Write).unwrap();
        world.run(&mut clients, 1_000, |_, clients| clients[1].end.eof);
        assert_eq!(clients[1].end.received, b"before!behind", "{side}");
    }
}
