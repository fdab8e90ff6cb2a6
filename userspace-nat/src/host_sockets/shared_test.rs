use std::net::UdpSocket;

use super::*;
use crate::host_sockets::HostSockets;

fn tuple(local_port: u16, remote_port: u16) -> FlowTuple {
    FlowTuple {
        scope: FlowTuple::WORLD,
        local: Ipv4Addr::LOCALHOST.into(),
        // No flow goes to the host's loopback: of another host's address it makes no difference.
        remote: Ipv4Addr::new(192, 0, 2, 1).into(),
        local_port,
        remote_port,
        protocol: 17,
    }
}

fn free_port() -> u16 {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.local_addr().unwrap().port()
}

#[test]
fn a_shared_port_is_held_once_and_by_nobody_else() {
    let host = HostSockets::new(1_000);
    let port = free_port();
    assert!(!host.shared.has(&tuple(port, 1)), "there is no range");
    host.shared.set_range(Some(&(port..=port)));
    assert!(host.shared.has(&tuple(port, 1)));
    let tcp = FlowTuple {
        protocol: 6,
        ..tuple(port, 1)
    };
    assert!(!host.shared.has(&tcp));
    host.hold_shared(&tuple(port, 1)).unwrap();
    host.hold_shared(&tuple(port, 2)).unwrap();
    let (nobody, socket) = host.shared.take_made().unwrap();
    assert!(host.shared.take_made().is_none() && is_of_strangers(&nobody));
    assert_eq!(nobody.local_addr(), tuple(port, 1).local_addr());
    // Whoever comes does not get it, with the option that anybody may set neither; flows' sockets do.
    assert!(UdpSocket::bind(("127.0.0.1", port)).is_err());
    let local = SockaddrStorage::from(nobody.local_addr());
    let udp = || {
        host.make(Ipv4Addr::LOCALHOST.into(), Protocol::Udp)
            .unwrap()
    };
    let (theirs, own) = (udp(), udp());
    setsockopt(&theirs, sockopt::ReuseAddr, &true).unwrap();
    SharedPorts::share(&own).unwrap();
    for _ in 0..2 {
        assert_eq!(bind(theirs.as_raw_fd(), &local), Err(Errno::EADDRINUSE));
        let _ = bind(own.as_raw_fd(), &local);
    }
    assert_eq!(
        bind(own.as_raw_fd(), &local),
        Err(Errno::EINVAL),
        "it is bound"
    );
    drop((own, socket));
    host.shared.release(&nobody);
    assert!(!host.shared.are_some_held());
    let other = UdpSocket::bind(("127.0.0.1", port)).unwrap();
    let busy = host.hold_shared(&tuple(port, 1));
    assert!(
        matches!(busy, Err(NotOpened::Busy(Busy::Bound, _))),
        "{busy:?}"
    );
    drop(other);
}
