use std::{
    net::{SocketAddrV4, TcpListener},
    os::fd::AsRawFd,
    time::Duration,
};

use slipgate_abi::{Ip4, VmId, tcp::Flags};

use super::{
    super::*,
    guest::{Close, End},
    world::{Client, Impairment, MS, VM, World, bytes},
};
use crate::fake::packets;
use slipgate_policy::Destination;

const LOSSY: Impairment = Impairment {
    loss: 3,
    duplicates: 3,
    jitter_ms: 5,
    garbled: 0,
};
const GUEST: Ip4 = Ip4 {
    octets: [10, 0, 2, 15],
};
const GATEWAY: Ip4 = Ip4 {
    octets: [10, 0, 2, 2],
};

fn perfect() -> World {
    World::new(Limits::default(), Impairment::default())
}

fn at(port: u16) -> SocketAddrV4 {
    SocketAddrV4::new(GATEWAY.into(), port)
}

fn syn(from: u16, to: u16, isn: u32) -> Vec<u8> {
    packets::syn((GUEST, from), (GATEWAY, to), isn)
}

/// The flags and ports of what went to the guest since the last look.
fn told(world: &mut World) -> Vec<(u8, u16)> {
    let packets = std::mem::take(&mut world.to_guest);
    let segments = packets.iter().filter_map(|packet| {
        match Packet::parse(Ipv4::parse(packet).ok()?).ok()?.transport {
            Transport::Tcp(tcp) => Some((tcp.flags, tcp.source)),
            _ => None,
        }
    });
    segments.collect()
}

/// The guest connects to a port that leads to a service; both ends.
fn connected(world: &mut World, guest: End, service: End) -> (TcpListener, [Client; 1]) {
    let listener = world.lead(8080);
    world.guest.connect(at(8080), 40_000, guest);
    let mut accepted = None;
    let mut service = Some(service);
    world.run(&mut [], 10_000, |_, _| {
        if let Some(end) = service.take() {
            match Client::accept(&listener, End::new(end.send.clone(), Close::Never)) {
                Some(client) => accepted = Some(Client { end, ..client }),
                None => service = Some(end),
            }
        }
        accepted.is_some()
    });
    (listener, [accepted.unwrap()])
}

fn streams(world: &World) -> u32 {
    world.relay.counts(VM).loopback_streams
}

fn is_exchanged(a: &End, b: &End) -> bool {
    a.eof && b.eof && a.received == b.send && b.received == a.send
}

#[test]
fn bytes_arrive_whole_both_ways_and_either_side_may_end_first() {
    for (guest, service) in [
        (Close::WhenSent, Close::WhenSent),
        (Close::WhenSent, Close::AfterPeer),
        (Close::AfterPeer, Close::WhenSent),
    ] {
        let mut world = World::new(Limits::default(), LOSSY);
        let (_listener, mut services) = connected(
            &mut world,
            End::new(bytes(400_000, 1), guest),
            End::new(bytes(300_000, 2), service),
        );
        world.run(&mut services, 600_000, |world, services| {
            assert!(!services[0].end.reset && !world.guest.ends[0].1.reset);
            is_exchanged(&services[0].end, &world.guest.ends[0].1)
        });
        world.run(&mut services, 70_000, |world, _| streams(world) == 0);
        world.assert_empty();
        let counts = world.relay.counts(VM);
        assert_eq!(
            (counts.bytes_to_guest, counts.bytes_from_guest),
            (300_000, 400_000)
        );
    }
}

#[test]
fn a_port_that_nobody_has_is_refused_by_rst_and_was_never_open() {
    let mut world = perfect();
    world.relay.keep_records(true);
    let listener = world.lead(8080);
    drop(listener);
    assert_eq!(world.offer(&syn(40_000, 8080, 7)), Taken::Yes);
    world.step(&mut []);
    let all = told(&mut world);
    assert_eq!(all, [(Flags::RST | Flags::ACK, 8080)]);
    let rst = world.relay.next_record().unwrap();
    assert!(rst.1.is_none(), "it began");
    let (flow, end) = world.relay.next_record().unwrap();
    assert_eq!(end.unwrap().reason, "refused");
    assert_eq!((flow.tx.0, flow.rx.0, flow.connect_us), (1, 1, 0));
    world.assert_empty();
}

#[test]
fn the_record_says_where_it_led_and_by_what() {
    let mut world = perfect();
    world.relay.keep_records(true);
    let (listener, mut services) = connected(
        &mut world,
        End::new(bytes(10, 1), Close::WhenSent),
        End::new(bytes(20, 2), Close::WhenSent),
    );
    let peer = services[0].stream.peer_addr().unwrap();
    world.run(&mut services, 1_000, |world, _| streams(world) == 0);
    let (began, none) = world.relay.next_record().unwrap();
    let (flow, end) = world.relay.next_record().unwrap();
    assert_eq!((none, end.unwrap().reason), (None, "closed"));
    assert_eq!(began.number, flow.number);
    assert_eq!(flow.guest, "10.0.2.15:40000".parse().unwrap());
    assert_eq!(flow.remote, at(8080).into());
    let service = listener.local_addr().unwrap();
    assert_eq!(flow.host, Some(service));
    assert_eq!(flow.nat, Some(peer));
    assert_eq!(flow.rule_text.as_deref(), Some("host_loopback"));
    assert!(!flow.inbound && flow.rule.is_none() && flow.connect_us > 0);
}

/// A service that accepts nobody: its backlog is full.
fn full(world: &mut World) -> (TcpListener, Vec<std::net::TcpStream>) {
    let listener = world.lead(8080);
    // SAFETY: listen takes numbers only.
    assert_eq!(unsafe { nix::libc::listen(listener.as_raw_fd(), 0) }, 0);
    let address = listener.local_addr().unwrap();
    let briefly = Duration::from_millis(50);
    let fill = std::iter::from_fn(|| std::net::TcpStream::connect_timeout(&address, briefly).ok());
    let held = fill.take(64).collect();
    (listener, held)
}

#[test]
fn a_syn_is_unanswered_until_the_service_has_accepted() {
    let limits = Limits {
        connect_ns: 3_600_000 * MS,
        ..Limits::default()
    };
    let mut world = World::new(limits, Impairment::default());
    let (listener, held) = full(&mut world);
    world
        .guest
        .connect(at(8080), 40_000, End::new(bytes(100, 1), Close::WhenSent));
    world.idle(&mut [], 300);
    assert_eq!(told(&mut world), [], "nothing, however often it asks");
    assert_eq!(streams(&world), 1);
    while listener.accept().is_ok() {}
    drop(held);
    // The host's kernel asks again after a second.
    let began = std::time::Instant::now();
    let mut client = None;
    while client.is_none() && began.elapsed() < Duration::from_secs(10) {
        world.step(&mut []);
        client = Client::accept(&listener, End::new(bytes(50, 2), Close::WhenSent));
        std::thread::sleep(Duration::from_millis(1));
    }
    let mut services = [client.expect("it is accepted once there is room")];
    world.run(&mut services, 100_000, |world, services| {
        is_exchanged(&services[0].end, &world.guest.ends[0].1)
    });
}

#[test]
fn a_service_that_does_not_answer_is_given_up_by_rst() {
    let mut world = perfect();
    let (_listener, _held) = full(&mut world);
    world.offer(&syn(40_000, 8080, 7));
    world.idle(&mut [], 4_900);
    assert_eq!(told(&mut world), []);
    world.idle(&mut [], 200);
    assert_eq!(told(&mut world), [(Flags::RST | Flags::ACK, 8080)]);
    world.assert_empty();
}

#[test]
fn a_guest_may_give_up_or_ask_anew_while_the_service_is_silent() {
    let mut world = perfect();
    let (_listener, _held) = full(&mut world);
    world.offer(&syn(40_000, 8080, 7));
    world.offer(&syn(40_001, 8080, 7));
    let reset = packets::tcp((GUEST, 40_000), (GATEWAY, 8080), Flags::RST, 8, 0, &[], &[]);
    assert_eq!(world.offer(&reset), Taken::Yes);
    assert_eq!(streams(&world), 1);
    // The other one's port is used again.
    world.offer(&syn(40_001, 8080, 1_000));
    assert_eq!(streams(&world), 1);
    world.idle(&mut [], 5_100);
    let answer = world.to_guest.pop().unwrap();
    let Transport::Tcp(rst) = Packet::parse(Ipv4::parse(&answer).unwrap())
        .unwrap()
        .transport
    else {
        panic!("a segment");
    };
    assert_eq!(
        (rst.flags, rst.acknowledgement),
        (Flags::RST | Flags::ACK, 1_001)
    );
    assert!(world.to_guest.is_empty());
    world.assert_empty();
}

#[test]
fn resets_pass_both_ways() {
    let mut world = perfect();
    let (_listener, services) = connected(
        &mut world,
        End::new(bytes(10, 1), Close::Never),
        End::new(Vec::new(), Close::Never),
    );
    let [service] = services;
    world.idle(&mut [], 20);
    // Closed with unread bytes: the kernel resets.
    drop(service);
    world.run(&mut [], 100, |world, _| world.guest.ends[0].1.reset);
    world.assert_empty();

    let mut world = perfect();
    let (_listener, mut services) = connected(
        &mut world,
        End::new(bytes(10, 1), Close::Never),
        End::new(Vec::new(), Close::Never),
    );
    world.run(&mut services, 100, |_, s| s[0].end.received.len() == 10);
    world.guest.abort(0);
    world.run(&mut services, 100, |_, services| services[0].end.reset);
    world.assert_empty();
}

#[test]
fn who_does_not_read_holds_the_other_up_and_loses_nothing() {
    const LEN: usize = 16 << 20;
    let mut world = perfect();
    let (_listener, mut services) = connected(
        &mut world,
        End::new(bytes(LEN, 1), Close::WhenSent),
        End::new(bytes(LEN, 2), Close::WhenSent),
    );
    services[0].end.reads = false;
    world.guest.ends[0].1.reads = false;
    // Probes of windows that are shut go on, and nothing else once the sockets' queues are full.
    let payload = |world: &World| {
        let counts = world.relay.counts(VM);
        (counts.bytes_to_guest, counts.bytes_from_guest)
    };
    let mut relayed = (0, 0);
    while payload(&world) != relayed {
        relayed = payload(&world);
        world.idle(&mut services, 2_000);
    }
    assert!(world.guest.ends[0].1.sent < LEN && services[0].end.sent < LEN);
    services[0].end.reads = true;
    world.guest.ends[0].1.reads = true;
    world.run(&mut services, 600_000, |world, services| {
        is_exchanged(&services[0].end, &world.guest.ends[0].1)
    });
}

#[test]
fn a_vm_has_so_many_and_more_harm_none() {
    let limits = Limits {
        loopback_streams_per_vm: 2,
        ..Limits::default()
    };
    let mut world = World::new(limits, Impairment::default());
    let _listener = world.lead(8080);
    for port in [40_000, 40_001] {
        let end = End::new(bytes(10, 1), Close::Never);
        world.guest.connect(at(8080), port, end);
    }
    world.run(&mut [], 100, |world, _| {
        world.guest.ends.iter().all(|(_, end)| end.sent == 10)
    });
    assert_eq!(world.offer(&syn(40_002, 8080, 7)), Taken::OverLimit);
    assert_eq!(world.relay.counts(VM).loopback_refused, 1);
    assert_eq!(world.relay.loopback_flows(VM), 2);
    world.idle(&mut [], 100);
    assert!(world.guest.ends.iter().all(|(_, end)| !end.reset));
}

/// The engine's descriptors are all VMs', and its resolver's.
#[test]
fn no_vm_takes_the_sockets_of_the_others() {
    const OTHER: VmId = VmId::new(8);
    let limits = Limits {
        sockets: 40,
        ..Limits::default()
    };
    let mut world = World::new(limits, Impairment::default());
    world.relay.add_vm(crate::test_vm::vm(OTHER.get()), None);
    let listener = world.lead(8080);
    let forward = world.forward_tcp(80);
    let opening = Opening {
        host_port: listener.local_addr().unwrap().port(),
        rule: "host_loopback".into(),
    };
    let open = |world: &mut World, vm, packet: &[u8]| {
        let segments = crate::port::single(packet.len());
        world.with(|relay, cx| relay.open_loopback(vm, packet, segments, &opening, cx))
    };
    let datagram = |from| {
        let datagram = crate::datagram::Datagram {
            from: SocketAddrV4::new(GUEST.into(), from).into(),
            to: at(8080).into(),
            payload: b"x",
        };
        datagram.emit()
    };
    let service = std::net::UdpSocket::bind(listener.local_addr().unwrap()).unwrap();
    // All that it may have, in whatever way.
    let mut had = 0;
    for from in 40_000..40_050 {
        had += usize::from(open(&mut world, VM, &syn(from, 8080, 7)) == Taken::Yes);
        had += usize::from(open(&mut world, VM, &datagram(from)) == Taken::Yes);
    }
    assert_eq!(had, 30, "a quarter is shared out");
    assert_eq!(
        open(&mut world, VM, &syn(41_000, 8080, 7)),
        Taken::OverLimit
    );
    assert_eq!(open(&mut world, VM, &datagram(41_000)), Taken::OverLimit);
    let other = (40_000..40_050).filter(|from| {
        let taken = open(&mut world, OTHER, &syn(*from, 8080, 7));
        taken == Taken::Yes
    });
    assert_eq!(other.count(), 5, "its part");
    let end = End::new(Vec::new(), Close::Never);
    let mut clients = [Client::connect(forward, end)];
    world.run(&mut clients, 100, |_, clients| clients[0].end.reset);
    assert_eq!(world.relay.counts(VM).streams_refused, 1);
    // What is over may be had again.
    drop(service);
    let reset = packets::tcp((GUEST, 40_000), (GATEWAY, 8080), Flags::RST, 8, 0, &[], &[]);
    world.offer(&reset);
    world.offer(&datagram(40_000));
    assert!(world.relay.loopback_flows(VM) < 30);
}

#[test]
fn a_guest_that_never_completes_is_reset_at_the_service() {
    let mut world = perfect();
    let listener = world.lead(8080);
    world.offer(&syn(40_000, 8080, 7));
    let mut services = [Client::accept(&listener, End::new(bytes(10, 1), Close::Never)).unwrap()];
    world.fall_silent();
    world.step(&mut services);
    assert_eq!(told(&mut world)[0].0, Flags::SYN | Flags::ACK);
    world.idle(&mut services, 4_900);
    assert!(!services[0].end.reset);
    world.run(&mut services, 300, |_, services| services[0].end.reset);
    world.assert_empty();
}

#[test]
fn a_guest_that_resets_our_syn_ack_is_gone() {
    let mut world = perfect();
    let listener = world.lead(8080);
    world.offer(&syn(40_000, 8080, 7));
    let mut services = [Client::accept(&listener, End::new(bytes(10, 1), Close::Never)).unwrap()];
    let reset = packets::tcp((GUEST, 40_000), (GATEWAY, 8080), Flags::RST, 8, 0, &[], &[]);
    assert_eq!(world.offer(&reset), Taken::Yes);
    world.run(&mut services, 100, |_, services| services[0].end.reset);
    world.assert_empty();
}

#[test]
fn a_syn_with_data_and_segments_of_no_connection_open_nothing() {
    let mut world = perfect();
    let _listener = world.lead(8080);
    let (from, to) = ((GUEST, 40_000), (GATEWAY, 8080));
    for (flags, data) in [
        (Flags::SYN, &b"data"[..]),
        (Flags::SYN | Flags::ACK, &[]),
        (Flags::ACK, b"data"),
        (Flags::FIN | Flags::ACK, &[]),
        (Flags::RST, &[]),
    ] {
        let packet = packets::tcp(from, to, flags, 1, 1, &[], data);
        assert_eq!(world.offer(&packet), Taken::No, "{flags:#x}");
    }
    world.assert_empty();
}

#[test]
fn what_the_rules_refuse_now_is_cut_or_left_and_the_rest_goes_on() {
    let mut world = perfect();
    let (_listener, mut services) = connected(
        &mut world,
        End::new(bytes(10, 1), Close::Never),
        End::new(Vec::new(), Close::Never),
    );
    let port = world.leads[&8080];
    world.idle(&mut services, 20);
    for (standing, cut, left) in [
        (Standing::Stands, 0, 0),
        (Standing::Left, 0, 1),
        (Standing::Cut, 1, 0),
    ] {
        let judges = |vm: &VmNet, to: Destination, host: u16| {
            assert_eq!((vm.id, to.addr, to.port), (VM, GATEWAY.into(), 8080));
            assert_eq!((to.protocol, host), (Protocol::Tcp, port));
            standing
        };
        let others = [VmId::new(VM.get() + 1)].into();
        let none = world.with(|relay, cx| relay.rejudge(&others, &judges, cx));
        assert_eq!(none, Rejudged::default());
        let all = [VM].into();
        let rejudged = world.with(|relay, cx| relay.rejudge(&all, &judges, cx));
        let expected = Rejudged { live: 1, cut, left };
        assert_eq!(rejudged, expected);
    }
    world.run(&mut services, 100, |world, services| {
        services[0].end.reset && world.guest.ends[0].1.reset
    });
    world.assert_empty();
}

#[test]
fn a_vm_that_is_cut_or_goes_leaves_nothing() {
    for gone in [false, true] {
        let mut world = perfect();
        let (_listener, mut services) = connected(
            &mut world,
            End::new(bytes(10, 1), Close::Never),
            End::new(Vec::new(), Close::Never),
        );
        let (_other, _held) = {
            let full = full(&mut world);
            world.offer(&syn(40_001, 8080, 7));
            full
        };
        assert_eq!(streams(&world), 2);
        match gone {
            true => world.with(|relay, cx| relay.remove_vm(VM, cx)),
            false => assert_eq!(world.with(|relay, cx| relay.cut(VM, "cut", cx)), 2),
        }
        world.run(&mut services, 100, |world, services| {
            services[0].end.reset && world.guest.ends[0].1.reset
        });
        let told = told(&mut world);
        assert!(told.contains(&(Flags::RST | Flags::ACK, 8080)), "{told:?}");
        world.assert_empty();
    }
}

#[test]
fn a_frozen_vms_connections_wait_for_the_thaw() {
    let mut world = perfect();
    let (_listener, mut services) = connected(
        &mut world,
        End::new(bytes(1_000, 1), Close::Never),
        End::new(bytes(1_000, 2), Close::Never),
    );
    world.run(&mut services, 100, |_, s| s[0].end.received.len() == 1_000);
    world.frozen = true;
    // What the service says meanwhile stays unacknowledged for longer than a guest may be silent.
    services[0].end.send.extend(bytes(100_000, 3));
    world.idle(&mut services, 200_000);
    assert!(!services[0].end.reset && streams(&world) == 1);
    world.frozen = false;
    world.run(&mut services, 130_000, |world, services| {
        assert!(!services[0].end.reset && !world.guest.ends[0].1.reset);
        world.guest.ends[0].1.received == services[0].end.send
    });
}

#[test]
fn a_guest_that_garbles_its_headers_harms_only_itself() {
    let garbling = Impairment {
        garbled: 30,
        loss: 5,
        duplicates: 10,
        jitter_ms: 5,
    };
    let mut world = World::new(Limits::default(), garbling);
    let listener = world.lead(8080);
    for port in 0..50 {
        let end = End::new(bytes(20_000, port.into()), Close::WhenSent);
        world.guest.connect(at(8080), 40_000 + port, end);
    }
    let mut services = Vec::new();
    for _ in 0..3_000 {
        let end = || End::new(bytes(5_000, 9), Close::AfterPeer);
        services.extend(std::iter::from_fn(|| Client::accept(&listener, end())));
        world.step(&mut services);
    }
    assert!(services.len() > 20, "{}", services.len());
    services.clear();
    world.idle(&mut [], 20);
    world.fall_silent();
    world.idle(&mut [], garbling.jitter_ms + 1);
    let end_ns = world.now_ns + 300_000 * MS;
    while streams(&world) > 0 {
        world.now_ns = world
            .now_ns
            .max(world.relay.next_deadline_ns(false).unwrap());
        assert!(world.now_ns < end_ns, "{:?}", world.relay.entries);
        world.step(&mut []);
    }
    world.assert_empty();
}

/// Segments near to what is expected, with whatever options, windows and numbers: in the end the
/// engine is all VMs'.
#[test]
fn segments_of_a_connection_that_make_no_sense_harm_nobody() {
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut below = move |bound: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % bound
    };
    const OPTIONS: [&[u8]; 8] = [
        &[],
        &[2, 4, 0, 0],
        &[2, 4, 0, 1],
        &[2, 4, 0xff, 0xff],
        &[3, 3, 255, 0],
        &[2, 4, 0, 64, 4, 2, 3, 3, 14, 0, 0, 0],
        &[8, 10, 1, 2, 3, 4, 5, 6, 7, 8, 1, 1],
        &[
            5, 18, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 9, 0, 0, 0, 1, 1, 1,
        ],
    ];
    let mut moved = (0, 0);
    for round in 0..ROUNDS {
        let mut world = perfect();
        let listener = world.lead(8080);
        let isn = [0, u32::MAX - 700, 1 << 31][below(3) as usize];
        let options = OPTIONS[below(8) as usize];
        let first = packets::tcp((GUEST, 40_000), at_port(), Flags::SYN, isn, 0, options, &[]);
        world.offer(&first);
        let end = End::new(
            bytes(60_000, 2),
            [Close::WhenSent, Close::Never][below(2) as usize],
        );
        let Some(client) = Client::accept(&listener, end) else {
            continue;
        };
        let mut services = [client];
        for _ in 0..60 {
            // The guest's own stack is not there: it would answer for itself.
            world.now_ns += below(300) * MS;
            world.step(&mut services);
            world.guest = super::guest::Guest::new();
            let last = world.to_guest.last().and_then(|packet| {
                match Packet::parse(Ipv4::parse(packet).ok()?).ok()?.transport {
                    Transport::Tcp(tcp) => Some(tcp),
                    _ => None,
                }
            });
            let Some(last) = last else { break };
            let near = |value: u32, to: u64| match to {
                0..6 => value,
                6 => value.wrapping_add(1),
                7 => value.wrapping_sub(1),
                8 => value.wrapping_add(70_000),
                9 => value.wrapping_sub(70_000),
                10 => value.wrapping_add(1 << 31),
                _ => value.wrapping_add((to as u32).wrapping_mul(37)),
            };
            let sequence = near(last.acknowledgement, below(20));
            let sent = last.sequence.wrapping_add(last.sequence_len());
            let acknowledgement = near(sent, below(20));
            let flags = match below(4) {
                0 => below(64) as u8,
                1 => Flags::ACK | Flags::FIN,
                _ => Flags::ACK,
            };
            let data = vec![7; [0, 0, 1, 500, 1_460, 9_000][below(6) as usize]];
            let mut packet = packets::tcp(
                (GUEST, 40_000),
                at_port(),
                flags,
                sequence,
                acknowledgement,
                OPTIONS[below(8) as usize],
                &data,
            );
            let window = [0, 1, 0x7210, u16::MAX][below(4) as usize];
            packet[34..36].copy_from_slice(&window.to_be_bytes());
            world.offer(&packet);
        }
        world.fall_silent();
        // Neither of these numbers is a bound: it goes on to its time-out at last.
        for _ in 0..200 {
            world.now_ns += 60_000 * MS;
            world.step(&mut services);
        }
        assert_eq!(streams(&world), 0, "round {round}");
        let counts = world.relay.counts(VM);
        // Few of its acknowledgements are of what was sent.
        moved.0 += counts.rx.1;
        moved.1 += counts.bytes_from_guest;
    }
    assert!(moved.0 > 100_000 && moved.1 > 10_000, "{moved:?}");
}

const ROUNDS: u32 = 60;

fn at_port() -> (Ip4, u16) {
    (GATEWAY, 8080)
}
