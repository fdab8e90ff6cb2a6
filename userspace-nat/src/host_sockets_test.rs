use std::{
    fs::File,
    net::{Ipv4Addr, Ipv6Addr, TcpListener},
};

use super::*;

const REMOTES: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(198, 51, 100, 7)),
    IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 7, 0, 0, 0, 0, 7)),
];

#[test]
fn flows_leave_the_last_descriptors_and_what_was_promised_is_there() {
    // Numbers are the process's, whose other tests have some: far above all of these.
    let numbers = File::open("/dev/null").unwrap().as_raw_fd() as u64 + 1_000;
    for remote in REMOTES {
        for protocol in [Protocol::Tcp, Protocol::Udp] {
            let none = HostSockets::new(KEPT);
            assert!(none.lacks(remote, protocol), "{remote} {protocol:?}");
            let error = none.take(remote, protocol).map(drop).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(nix::libc::EMFILE));

            let mut sockets = HostSockets::new(numbers + KEPT);
            assert!(!sockets.lacks(remote, protocol), "{remote} {protocol:?}");
            // The flow that was admitted has its socket, though no other would have one.
            sockets.most = 0;
            assert!(!sockets.lacks(remote, protocol));
            assert!(sockets.take(remote, protocol).is_ok());
            assert!(sockets.lacks(remote, protocol), "{remote} {protocol:?}");
            // And as soon as there are some, the next.
            sockets.most = numbers + KEPT;
            assert!(!sockets.lacks(remote, protocol));
        }
    }
}

#[test]
fn the_next_socket_of_a_kind_that_was_taken_is_made_ahead() {
    for remote in REMOTES {
        let mut sockets = HostSockets::new(1 << 20);
        sockets.make_next();
        assert!(sockets.made.borrow().iter().all(Option::is_none));
        drop(sockets.take(remote, Protocol::Tcp).unwrap());
        sockets.make_next();
        sockets.most = 0;
        assert!(!sockets.lacks(remote, Protocol::Tcp), "{remote}");
        assert!(sockets.lacks(remote, Protocol::Udp), "{remote}");
        // Only one of them.
        drop(sockets.take(remote, Protocol::Tcp).unwrap());
        sockets.make_next();
        assert!(sockets.lacks(remote, Protocol::Tcp), "{remote}");
    }
}

/// Before it is connected: a second urgent byte of the server would displace the first otherwise.
#[test]
fn a_socket_of_tcp_keeps_urgent_data_in_place_from_the_beginning() {
    let sockets = HostSockets::new(1 << 20);
    for remote in REMOTES {
        let socket = sockets.take(remote, Protocol::Tcp).unwrap();
        let keeps = nix::sys::socket::getsockopt(&socket, sockopt::OobInline);
        assert_eq!(keeps, Ok(true), "{remote}");
    }
}

#[test]
fn a_kind_of_socket_that_is_forbidden_is_no_shortage() {
    let forbidden = io::Error::from(Errno::EACCES);
    assert!(!is_shortage(&forbidden));
    for short in [Errno::EMFILE, Errno::ENFILE, Errno::ENOBUFS, Errno::ENOMEM] {
        assert!(is_shortage(&short.into()), "{short}");
    }
}

#[test]
fn a_port_of_another_socket_is_told_before_the_flow_begins_and_other_errors_with_its_first_packet()
{
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let tuple = |local: Ipv4Addr| FlowTuple {
        scope: FlowTuple::WORLD,
        local: local.into(),
        remote: REMOTES[0],
        local_port: listener.local_addr().unwrap().port(),
        remote_port: 7,
        protocol: Protocol::Tcp as u8,
    };
    let sockets = HostSockets::new(1 << 20);
    let taken = tuple(Ipv4Addr::LOCALHOST);
    assert_eq!(sockets.claim(&taken), Err(Busy::Bound));
    assert!(sockets.take_claimed(&taken).is_none());
    // The host does not have the address: no other port would do.
    let elsewhere = tuple(Ipv4Addr::new(198, 51, 100, 9));
    assert_eq!(sockets.claim(&elsewhere), Ok(()));
    let error = sockets.take_claimed(&elsewhere).unwrap().unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::AddrNotAvailable);
    assert!(sockets.take_claimed(&elsewhere).is_none(), "once");
    // What was not taken does not pile up.
    for _ in 0..2 * MOST_CLAIMED {
        sockets.claim(&elsewhere).unwrap();
    }
    assert_eq!(sockets.claimed.borrow().len(), MOST_CLAIMED);
    sockets.give_up_claims();
    assert!(sockets.take_claimed(&elsewhere).is_none());
}
