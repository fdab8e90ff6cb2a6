use std::{net::Ipv4Addr, os::fd::AsRawFd as _};

use nix::sys::socket::{MsgFlags, send};
use slipgate_abi::Ip4;

use super::{
    super::*,
    guest::{Close, End},
    world::{Client, Impairment, MS, VM, World, bytes},
};
use crate::{fake, port::single};

const LOSSY: Impairment = Impairment {
    loss: 3,
    duplicates: 3,
    jitter_ms: 5,
    garbled: 0,
};

fn perfect() -> World {
    World::new(Limits::default(), Impairment::default())
}

/// Both ends have all of the other's bytes and its end of file.
fn is_exchanged(a: &End, b: &End) -> bool {
    a.eof && b.eof && a.received == b.send && b.received == a.send
}

#[test]
fn bytes_arrive_whole_over_a_link_that_loses_duplicates_and_reorders() {
    let mut world = World::new(Limits::default(), LOSSY);
    let addr = world.forward_tcp(80);
    world
        .guest
        .listen(80, End::new(bytes(700_000, 1), Close::WhenSent));
    let mut clients = [Client::connect(
        addr,
        End::new(bytes(600_000, 2), Close::WhenSent),
    )];
    world.run(&mut clients, 600_000, |world, clients| {
        assert!(!clients[0].end.reset && !world.guest.ends[0].1.reset);
        is_exchanged(&clients[0].end, &world.guest.ends[0].1)
    });
    world.run(&mut clients, 70_000, |world, _| {
        world.relay.counts(VM).streams == 0
    });
    world.assert_empty();
    let counts = world.relay.counts(VM);
    assert_eq!(
        (counts.bytes_to_guest, counts.bytes_from_guest),
        (600_000, 700_000)
    );
}

#[test]
fn urgent_data_of_a_client_arrives_in_its_place_once() {
    let mut world = perfect();
    let addr = world.forward_tcp(80);
    world
        .guest
        .listen(80, End::new(Vec::new(), Close::AfterPeer));
    let mut clients = [Client::connect(
        addr,
        End::new(bytes(100_000, 5), Close::WhenSent),
    )];
    let say = |data: &[u8], flags| {
        let sent = send(clients[0].stream.as_raw_fd(), data, flags);
        assert_eq!(sent, Ok(data.len()));
    };
    say(b"before", MsgFlags::empty());
    say(b"!", MsgFlags::MSG_OOB);
    say(b"behind", MsgFlags::empty());
    world.run(&mut clients, 10_000, |world, clients| {
        clients[0].end.eof && world.guest.ends[0].1.eof
    });
    let received = &world.guest.ends[0].1.received;
    assert!(received.starts_with(b"before!behind"));
    assert!(received[13..] == clients[0].end.send);
    assert_eq!(world.relay.counts(VM).streams_reset, 0);
}

/// All of it before the engine accepts the connection: a second urgent byte displaces no other.
#[test]
fn urgent_data_of_a_client_before_it_is_accepted_arrives_whole() {
    let mut world = perfect();
    let addr = world.forward_tcp(80);
    world
        .guest
        .listen(80, End::new(Vec::new(), Close::AfterPeer));
    let mut clients = [Client::connect(addr, End::new(Vec::new(), Close::WhenSent))];
    for (data, flags) in [
        (&b"a"[..], MsgFlags::MSG_OOB),
        (b"b", MsgFlags::MSG_OOB),
        (b"behind", MsgFlags::empty()),
    ] {
        let sent = send(clients[0].stream.as_raw_fd(), data, flags);
        assert_eq!(sent, Ok(data.len()));
    }
    world.run(&mut clients, 10_000, |world, clients| {
        clients[0].end.eof && world.guest.ends[0].1.eof
    });
    assert_eq!(world.guest.ends[0].1.received, b"abbehind");
}

#[test]
fn either_side_may_end_first_and_go_on_receiving() {
    for (client, guest) in [
        (Close::WhenSent, Close::AfterPeer),
        (Close::AfterPeer, Close::WhenSent),
    ] {
        let mut world = World::new(Limits::default(), LOSSY);
        let addr = world.forward_tcp(80);
        world.guest.listen(80, End::new(bytes(200_000, 3), guest));
        let mut clients = [Client::connect(addr, End::new(bytes(200_000, 4), client))];
        world.run(&mut clients, 300_000, |world, clients| {
            is_exchanged(&clients[0].end, &world.guest.ends[0].1)
        });
        world.run(&mut clients, 70_000, |world, _| {
            world.relay.counts(VM).streams == 0
        });
        world.assert_empty();
        assert_eq!(
            world.relay.counts(VM).streams_reset,
            0,
            "{client:?} {guest:?}"
        );
    }
}

#[test]
fn hundreds_of_connections_at_once_are_each_whole() {
    const COUNT: u32 = 300;
    let mut world = World::new(Limits::default(), LOSSY);
    let addr = world.forward_tcp(80);
    let answer = bytes(4_000, 9);
    for _ in 0..COUNT {
        world
            .guest
            .serve(80, End::new(answer.clone(), Close::AfterPeer));
    }
    // Below the listener's backlog at a time, as the kernel would hold back the rest for a second.
    let mut clients = Vec::new();
    for batch in 0..COUNT / 50 {
        let batch = (0..50).map(|i| bytes(3_000, batch * 50 + i));
        clients.extend(batch.map(|send| Client::connect(addr, End::new(send, Close::WhenSent))));
        world.step(&mut clients);
    }
    assert_eq!(world.relay.counts(VM).streams, COUNT);
    world.run(&mut clients, 300_000, |_, clients| {
        assert!(clients.iter().all(|c| !c.end.reset), "none is reset");
        clients
            .iter()
            .all(|c| c.end.eof && c.end.received == answer)
    });
    world.run(&mut clients, 70_000, |world, _| {
        world.relay.counts(VM).streams == 0
    });
    world.assert_empty();
    let mut sent: Vec<&[u8]> = clients.iter().map(|c| c.end.send.as_slice()).collect();
    let mut arrived: Vec<&[u8]> = world
        .guest
        .ends
        .iter()
        .map(|(_, e)| e.received.as_slice())
        .collect();
    sent.sort();
    arrived.sort();
    assert!(
        sent == arrived,
        "each client's bytes arrived once, and whole"
    );
}

#[test]
fn accepting_sends_the_syn_at_once() {
    let mut world = perfect();
    let addr = world.forward_tcp(80);
    let _client = Client::connect(addr, End::new(Vec::new(), Close::Never));
    let mut ready = Vec::new();
    world.poller.wait(Some(1_000 * MS), &mut ready).unwrap();
    assert_eq!(ready.len(), 1);
    world.with(|relay, cx| relay.on_ready(ready[0], cx));
    let packets: Vec<_> = world.out.frames().collect();
    assert_eq!(packets.len(), 1);
    let l3 = crate::port::Frame::parse(packets[0]).unwrap().l3;
    let packet = Packet::parse(Ipv4::parse(l3).unwrap()).unwrap();
    assert_eq!(packet.ip.source.to_string(), "10.0.2.2", "from the gateway");
    let Transport::Tcp(tcp) = packet.transport else {
        panic!("not TCP");
    };
    assert!(tcp.is_opening_syn() && tcp.destination == 80);
    assert!((forward::FIRST_PORT..forward::FIRST_PORT + forward::PORTS).contains(&tcp.source));
}

#[test]
fn a_refused_port_resets_the_client() {
    let mut world = perfect();
    let addr = world.forward_tcp(81);
    let mut clients = [Client::connect(addr, End::new(bytes(10, 0), Close::Never))];
    world.run(&mut clients, 100, |_, clients| clients[0].end.reset);
    world.assert_empty();
    assert_eq!(world.relay.counts(VM).streams_reset, 1);
}

#[test]
fn a_guest_that_answers_a_syn_with_its_own_and_nothing_else_resets_the_client_in_time() {
    let mut world = perfect();
    let addr = world.forward_tcp(82);
    let mut clients = [Client::connect(addr, End::new(bytes(10, 0), Close::Never))];
    world.run(&mut clients, 100, |world, _| !world.to_guest.is_empty());
    let name = *world.relay.connections.keys().next().unwrap();
    let own = fake::packets::syn(
        (Ip4::from(Ipv4Addr::new(10, 0, 2, 15)), name.guest.port()),
        (Ip4::from(Ipv4Addr::new(10, 0, 2, 2)), name.ours.port()),
        1,
    );
    let taken = world.with(|relay, cx| relay.packet(VM, &own, single(own.len()), cx));
    assert_eq!(taken, Taken::Yes);
    world.fall_silent();
    world.idle(&mut clients, 4_900);
    assert!(!clients[0].end.reset);
    world.run(&mut clients, 200, |_, clients| clients[0].end.reset);
    world.assert_empty();
}

#[test]
fn a_silent_guest_resets_the_client_in_time() {
    let deaf = Impairment {
        loss: 100,
        ..Impairment::default()
    };
    let mut world = World::new(Limits::default(), deaf);
    let addr = world.forward_tcp(80);
    let mut clients = [Client::connect(addr, End::new(Vec::new(), Close::Never))];
    world.idle(&mut clients, 4_900);
    assert!(!clients[0].end.reset);
    assert!(world.to_guest.len() > 1, "the SYN is sent again");
    world.run(&mut clients, 200, |_, clients| clients[0].end.reset);
    world.assert_empty();
}

#[test]
fn a_guest_that_is_given_up_is_counted_as_reset() {
    let limits = Limits {
        connect_ns: u64::MAX / 2,
        silence_ns: u64::MAX / 2,
        ..Limits::default()
    };
    let mut world = World::new(limits, Impairment::default());
    world.fall_silent();
    let addr = world.forward_tcp(80);
    let mut clients = [Client::connect(addr, End::new(Vec::new(), Close::Never))];
    world.run(&mut clients, 900_000, |_, clients| clients[0].end.reset);
    world.assert_empty();
    assert_eq!(world.relay.counts(VM).streams_reset, 1);
}

#[test]
fn a_reset_goes_through_both_ways() {
    for by_guest in [true, false] {
        let mut world = perfect();
        let addr = world.forward_tcp(80);
        world
            .guest
            .listen(80, End::new(bytes(100, 1), Close::Never));
        let mut clients = vec![Client::connect(addr, End::new(bytes(100, 2), Close::Never))];
        world.run(&mut clients, 1_000, |world, clients| {
            clients[0].end.received.len() == 100 && world.guest.ends[0].1.received.len() == 100
        });
        if by_guest {
            world.guest.abort(0);
            world.run(&mut clients, 1_000, |_, clients| clients[0].end.reset);
        } else {
            stream::reset_host(clients.remove(0).stream);
            world.run(&mut clients, 1_000, |world, _| world.guest.ends[0].1.reset);
        }
        world.assert_empty();
        assert_eq!(
            world.relay.counts(VM).streams_reset,
            1,
            "by guest: {by_guest}"
        );
    }
}

#[test]
fn who_does_not_read_stops_the_other_and_nothing_is_lost() {
    const LEN: usize = 16 << 20;
    for guest_reads in [true, false] {
        let mut world = perfect();
        let addr = world.forward_tcp(80);
        let (up, down) = if guest_reads { (0, LEN) } else { (LEN, 0) };
        let mut guest = End::new(bytes(down, 1), Close::WhenSent);
        guest.reads = guest_reads;
        world.guest.listen(80, guest);
        let mut clients = [Client::connect(
            addr,
            End::new(bytes(up, 2), Close::WhenSent),
        )];
        clients[0].end.reads = !guest_reads;
        world.idle(&mut clients, 3_000);
        let sent = if guest_reads {
            world.guest.ends[0].1.sent
        } else {
            clients[0].end.sent
        };
        assert!(sent < LEN, "all of it was taken in with nobody reading");
        let counts = world.relay.counts(VM);
        if !guest_reads {
            // What the guest's own buffer takes: the rest stays in the client's socket.
            assert!(counts.bytes_to_guest <= 32_768, "{counts:?}");
        }
        world.guest.ends[0].1.reads = true;
        clients[0].end.reads = true;
        world.run(&mut clients, 120_000, |world, clients| {
            is_exchanged(&clients[0].end, &world.guest.ends[0].1)
        });
    }
}

#[test]
fn over_the_limit_a_client_is_reset_and_the_others_live() {
    let limits = Limits {
        streams_per_vm: 2,
        ..Limits::default()
    };
    let mut world = World::new(limits, Impairment::default());
    let addr = world.forward_tcp(80);
    for _ in 0..3 {
        world.guest.listen(80, End::new(bytes(50, 5), Close::Never));
    }
    let end = || End::new(bytes(10, 0), Close::Never);
    let mut clients: Vec<_> = (0..3).map(|_| Client::connect(addr, end())).collect();
    world.run(&mut clients, 1_000, |_, clients| {
        clients
            .iter()
            .filter(|c| c.end.received.len() == 50)
            .count()
            == 2
            && clients.iter().filter(|c| c.end.reset).count() == 1
    });
    let counts = world.relay.counts(VM);
    assert_eq!((counts.streams, counts.streams_refused), (2, 1));
}

#[test]
fn a_vm_that_goes_takes_its_connections_and_sockets_along() {
    let mut world = perfect();
    let addr = world.forward_tcp(80);
    world.guest.listen(80, End::new(bytes(50, 5), Close::Never));
    let mut clients = [Client::connect(addr, End::new(Vec::new(), Close::Never))];
    world.run(&mut clients, 1_000, |_, clients| {
        clients[0].end.received.len() == 50
    });
    world.with(|relay, cx| relay.remove_vm(VM, cx));
    world.run(&mut clients, 1_000, |world, clients| {
        clients[0].end.reset && world.guest.ends[0].1.reset
    });
    assert!(world.relay.entries.is_empty() && world.relay.deadlines.is_empty());
    assert!(
        std::net::TcpStream::connect(addr).is_err(),
        "the listener is gone"
    );
}

#[test]
fn an_idle_connection_costs_nothing_and_ends_at_last() {
    let mut world = perfect();
    let addr = world.forward_tcp(80);
    world.guest.listen(80, End::new(bytes(50, 5), Close::Never));
    let mut clients = [Client::connect(addr, End::new(bytes(9, 1), Close::Never))];
    world.run(&mut clients, 1_000, |_, clients| {
        clients[0].end.received.len() == 50
    });
    world.idle(&mut clients, 1_000);
    world.to_guest.clear();
    let deadline_ns = world.relay.next_deadline_ns(false).unwrap();
    assert!(
        deadline_ns > world.now_ns + 7_000_000 * MS,
        "nothing to do for two hours"
    );
    world.now_ns = deadline_ns;
    world.run(&mut clients, 10, |_, clients| clients[0].end.reset);
    world.assert_empty();
}

#[test]
fn a_guest_that_garbles_its_headers_harms_only_itself() {
    // The relay does not verify checksums (offloads leave them partial), so all of it is believed.
    let garbling = Impairment {
        garbled: 30,
        ..LOSSY
    };
    let mut world = World::new(Limits::default(), garbling);
    let addr = world.forward_tcp(80);
    let mut clients = Vec::new();
    for i in 0..120 {
        world
            .guest
            .serve(80, End::new(bytes(20_000, i), Close::WhenSent));
        let from = 40_000 + i as u16;
        let resolver = "8.8.8.8:53".parse::<SocketAddr>().unwrap();
        world.guest.connect(
            resolver,
            from,
            End::new(vec![0, 3, 1, 2, 3], Close::WhenSent),
        );
        clients.push(Client::connect(
            addr,
            End::new(bytes(20_000, i), Close::WhenSent),
        ));
        world.idle(&mut clients, 20);
        let counts = world.relay.counts(VM);
        assert!(counts.dns_connections <= Limits::default().dns_connections_per_vm);
    }
    while world.relay.next_question().is_some() {}
    clients.clear();
    world.idle(&mut clients, 20);
    // Whatever state they were brought into, all end within four minutes of silence, which begins
    // when the last packet that was on its way has come.
    world.fall_silent();
    world.idle(&mut clients, garbling.jitter_ms + 1);
    let end_ns = world.now_ns + 240_000 * MS;
    while world.relay.counts(VM).streams + world.relay.counts(VM).dns_connections > 0 {
        world.now_ns = world
            .now_ns
            .max(world.relay.next_deadline_ns(false).unwrap());
        assert!(world.now_ns <= end_ns, "{:?}", world.relay.entries);
        world.step(&mut clients);
    }
    world.assert_empty();
}
