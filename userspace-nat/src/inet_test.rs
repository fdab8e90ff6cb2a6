use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener};

use nix::sys::socket::getsockopt;

use super::*;

/// As soon as it is connected: a second urgent byte of the server would displace the first otherwise.
#[test]
fn a_socket_of_tcp_is_opened_with_urgent_data_in_place() {
    let hosts: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    for host in hosts {
        let server = TcpListener::bind((host, 0)).unwrap();
        let socket = open(server.local_addr().unwrap(), SockType::Stream).unwrap();
        assert_eq!(getsockopt(&socket, sockopt::OobInline), Ok(true), "{host}");
    }
}
