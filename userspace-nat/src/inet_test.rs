use nix::sys::socket::getsockopt;

use super::*;

/// A second urgent byte of the server would displace the first otherwise.
#[test]
fn a_socket_of_tcp_keeps_urgent_data_in_place_before_it_is_connected() {
    for to in ["127.0.0.1:1", "[::1]:1"] {
        let socket = unconnected(to.parse().unwrap(), SockType::Stream, None).unwrap();
        assert_eq!(getsockopt(&socket, sockopt::OobInline), Ok(true), "{to}");
    }
}
