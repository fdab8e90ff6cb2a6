//! Against the kernel's own loopback.
use std::{
    io::ErrorKind,
    net::{Ipv4Addr, TcpListener},
};

use super::*;

#[test]
fn a_socket_is_bound_to_its_flows_tuple() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let tuple = |local: &str, remote: &str| FlowTuple {
        scope: FlowTuple::WORLD,
        local: local.parse().unwrap(),
        remote: remote.parse().unwrap(),
        local_port: 62_345,
        remote_port: listener.local_addr().unwrap().port(),
        protocol: Protocol::Tcp as u8,
    };
    // Whatever a rule says: these mean this host, or many.
    let of_ipv4 = ["127.0.0.1", "0.0.0.0", "224.0.0.1", "255.255.255.255"];
    let of_ipv6 = [
        "::1",
        "::",
        "ff02::1",
        "fe80::1",
        "::ffff:127.0.0.1",
        "::7f00:1",
    ];
    let all = of_ipv4.map(|remote| ("127.0.0.1", remote)).into_iter();
    for (local, remote) in all.chain(of_ipv6.map(|remote| ("::1", remote))) {
        let opened = HostSockets::new(1 << 20).open(&tuple(local, remote));
        let error = opened.map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{remote}");
    }
    listener.set_nonblocking(true).unwrap();
    assert!(listener.accept().is_err(), "nothing was sent");
}
