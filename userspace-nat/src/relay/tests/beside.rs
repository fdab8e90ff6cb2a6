//! What one connection's peer does not do, beside connections that go on.
use std::{
    net::{SocketAddrV4, TcpListener, TcpStream},
    os::fd::AsRawFd as _,
    time::Duration,
};

use super::{
    super::*,
    guest::{Close, End},
    world::{Client, Impairment, VM, World, bytes},
};

/// A service that accepts nobody: its backlog is full.
fn silent(world: &mut World, port: u16) -> (TcpListener, Vec<TcpStream>) {
    let listener = world.lead(port);
    // SAFETY: listen takes numbers only.
    assert_eq!(unsafe { nix::libc::listen(listener.as_raw_fd(), 0) }, 0);
    let address = listener.local_addr().unwrap();
    let briefly = Duration::from_millis(50);
    let fill = std::iter::from_fn(|| TcpStream::connect_timeout(&address, briefly).ok());
    let held = fill.take(64).collect();
    (listener, held)
}

#[test]
fn a_service_that_does_not_answer_delays_no_other() {
    let mut world = World::new(Limits::default(), Impairment::default());
    let gateway = |port| SocketAddrV4::new([10, 0, 2, 2].into(), port);
    let (_listener, _held) = silent(&mut world, 8_080);
    let other = world.lead(8_081);
    let end = |seed| End::new(bytes(200_000, seed), Close::WhenSent);
    world.guest.connect(gateway(8_080), 40_000, end(1));
    world.guest.connect(gateway(8_081), 40_001, end(2));
    let mut accepted = None;
    // Long before the first one is given up.
    world.run(&mut [], 1_000, |_, _| {
        accepted = Client::accept(&other, end(3));
        accepted.is_some()
    });
    let mut services = [accepted.unwrap()];
    world.run(&mut services, 2_000, |world, services| {
        let guest = &world.guest.ends[1].1;
        services[0].end.received == guest.send && guest.received == services[0].end.send
    });
    assert_eq!(world.relay.counts(VM).loopback_streams, 2, "it still waits");
}
