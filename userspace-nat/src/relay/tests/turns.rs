//! Number of packets that a VM's connections receive in one turn of the engine.
use std::net::SocketAddr;

use slipgate_abi::DropReason;

use super::{
    super::{turns::PACKETS_PER_TURN, *},
    guest::{Close, End},
    world::{Client, Impairment, VM, World, bytes},
};

const CONNECTIONS: u32 = 60;

/// So many clients that each send this much to a guest that reads nothing, until nothing more can
/// be sent: windows and buffers are full.
fn full(each: usize) -> (World, SocketAddr, Vec<Client>) {
    let mut world = World::new(Limits::default(), Impairment::default());
    let addr = world.forward_tcp(80);
    let mut clients = Vec::new();
    for seed in 0..CONNECTIONS {
        let mut end = End::new(Vec::new(), Close::AfterPeer);
        end.reads = false;
        world.guest.serve(80, end);
        let end = End::new(bytes(each, seed), Close::WhenSent);
        clients.push(Client::connect(addr, end));
    }
    world.idle(&mut clients, 50);
    assert_eq!(world.relay.counts(VM).streams, CONNECTIONS);
    (world, addr, clients)
}

fn read_all(world: &mut World) {
    for (_, end) in &mut world.guest.ends {
        end.reads = true;
    }
}

/// All of them have everything, and nobody is left.
fn complete(world: &mut World, clients: &mut [Client], most_ms: u64) {
    world.run(clients, most_ms, |world, clients| {
        let (from_guest, to_guest) = world.last_step;
        assert!(
            to_guest <= PACKETS_PER_TURN + from_guest,
            "{to_guest} packets in a turn, in which the guest sent {from_guest}"
        );
        let mut ends = world.guest.ends.iter().map(|(_, end)| end);
        assert!(
            clients.iter().all(|client| !client.end.reset),
            "none is reset"
        );
        clients.iter().all(|client| client.end.eof) && ends.all(|end| end.eof)
    });
    let mut sent: Vec<&[u8]> = clients.iter().map(|c| c.end.send.as_slice()).collect();
    let ends = world.guest.ends.iter();
    let mut received: Vec<&[u8]> = ends.map(|(_, e)| e.received.as_slice()).collect();
    sent.sort();
    received.sort();
    assert!(sent == received, "each is whole");
    world.run(clients, 70_000, |world, _| {
        world.relay.counts(VM).streams == 0
    });
    world.step(clients);
    world.assert_empty();
    assert_eq!(world.relay.next_deadline_ns(false), None, "nobody waits");
}

/// Steps until a turn's packets are spent and connections wait.
fn until_they_wait(world: &mut World, clients: &mut [Client]) {
    read_all(world);
    world.run(clients, 1_000, |world, _| !world.relay.queue.is_empty());
}

#[test]
fn windows_that_open_together_are_filled_a_turn_about() {
    let (mut world, _, mut clients) = full(150_000);
    until_they_wait(&mut world, &mut clients);
    assert!(world.last_step.1 >= PACKETS_PER_TURN);
    complete(&mut world, &mut clients, 10_000);
    assert_eq!(
        world.strays, 0,
        "each of the guest's last packets was awaited, and answered"
    );
}

/// Data that the engine has no room for waits as well, and is not lost.
#[test]
fn a_turn_sends_no_more_than_there_is_room_for() {
    let (mut world, _, mut clients) = full(150_000);
    world.out = crate::port::Outbox::new(100_000);
    until_they_wait(&mut world, &mut clients);
    complete(&mut world, &mut clients, 10_000);
    let served = &world.relay.vms[&VM];
    let dropped = served.net.stats.packets_dropped(DropReason::EngineBusy);
    assert_eq!(dropped, 0);
}

/// The port of user mode takes only what the guest's link has room for.
#[test]
fn a_connection_waits_for_a_port_that_is_full_and_goes_on_when_it_has_room() {
    let (mut world, _, mut clients) = full(150_000);
    read_all(&mut world);
    world.out.set_port_room(0);
    let before = world.to_guest.len();
    for _ in 0..5 {
        world.step(&mut clients);
    }
    let sent = &world.to_guest[before..];
    let has_data = |packet: &&Vec<u8>| {
        let packet = Ipv4::parse(packet).and_then(Packet::parse).unwrap();
        matches!(packet.transport, Transport::Tcp(tcp) if tcp.payload_len > 0)
    };
    assert_eq!(sent.iter().filter(has_data).count(), 0);
    assert!(!world.relay.queue.is_empty());
    let next_ns = world.relay.next_deadline_ns(true);
    assert!(next_ns != Some(0), "the engine would spin");
    assert_eq!(world.relay.next_deadline_ns(false), Some(0));
    world.out.set_port_room(usize::MAX);
    complete(&mut world, &mut clients, 10_000);
}

/// A fast retransmission may wait for its turn, and is not forgotten.
#[test]
fn what_is_lost_among_many_is_sent_again() {
    let (mut world, _, mut clients) = full(150_000);
    world.lose(2);
    until_they_wait(&mut world, &mut clients);
    complete(&mut world, &mut clients, 50_000);
}

#[test]
fn a_connection_of_few_words_has_its_turn_among_busy_ones() {
    const EACH: usize = 2_000_000;
    let (mut world, addr, mut clients) = full(EACH);
    until_they_wait(&mut world, &mut clients);
    let busy = world.guest.ends.len();
    world
        .guest
        .serve(80, End::new(Vec::new(), Close::AfterPeer));
    let word = b"a word".to_vec();
    clients.push(Client::connect(
        addr,
        End::new(word.clone(), Close::WhenSent),
    ));
    // The SYN waits for those before it, and so does the word; each may be a window of the guest's.
    let turns = 2 * (1 + CONNECTIONS as usize * 32_768 / 1_460 / PACKETS_PER_TURN);
    for _ in 0..turns + 6 {
        world.step(&mut clients);
    }
    let (_, end) = &world.guest.ends[busy];
    assert_eq!(end.received, word);
    let (_, first) = &world.guest.ends[0];
    assert!(first.received.len() < EACH, "the others are busy still");
}

#[test]
fn a_reset_does_not_wait() {
    let (mut world, _, mut clients) = full(150_000);
    until_they_wait(&mut world, &mut clients);
    let before = world.to_guest.len();
    for client in clients.drain(..) {
        stream::reset_host(client.stream);
    }
    world.step(&mut clients);
    let resets = world.to_guest[before..].iter().filter(|packet| {
        let packet = Ipv4::parse(packet).and_then(Packet::parse).unwrap();
        matches!(packet.transport, Transport::Tcp(tcp) if tcp.has(slipgate_abi::tcp::Flags::RST))
    });
    assert_eq!(resets.count(), CONNECTIONS as usize);
    world.step(&mut clients);
    assert_eq!(world.relay.next_deadline_ns(false), None, "nobody waits");
    world.assert_empty();
}

#[test]
fn a_vm_that_goes_while_its_connections_wait_is_forgotten() {
    let (mut world, _, mut clients) = full(150_000);
    until_they_wait(&mut world, &mut clients);
    world.with(|relay, cx| relay.remove_vm(VM, cx));
    world.step(&mut clients);
    assert_eq!(world.relay.next_deadline_ns(false), None, "nobody waits");
    assert_eq!(world.relay.entries.len(), 0);
}
