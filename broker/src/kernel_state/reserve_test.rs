use std::{
    io::Read as _,
    net::{Ipv4Addr, TcpListener, UdpSocket},
    process::Command,
};

use nix::sys::socket::{MsgFlags, send};

use super::*;

fn forward(protocol: Protocol, host: Ipv4Addr, host_port: u16) -> Forward {
    Forward {
        vm: 0,
        protocol: protocol as u8,
        host: host.into(),
        is_own: false,
        is_of_both: false,
        host_port,
        guest_port: 80,
        spec: String::new(),
    }
}

#[test]
fn a_free_port_is_taken_and_listens() {
    // A port that was free a moment ago.
    let free = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let fd = bound(&forward(Protocol::Tcp, Ipv4Addr::LOCALHOST, free)).unwrap();
    let client = std::net::TcpStream::connect(("127.0.0.1", free)).unwrap();
    // Urgent data that comes before the connection is accepted displaces no other.
    for byte in [b"a", b"b"] {
        send(client.as_raw_fd(), byte, MsgFlags::MSG_OOB).unwrap();
    }
    client.shutdown(std::net::Shutdown::Write).unwrap();
    let (mut accepted, peer) = TcpListener::from(fd).accept().unwrap();
    assert_eq!(peer, client.local_addr().unwrap());
    let mut received = Vec::new();
    accepted.read_to_end(&mut received).unwrap();
    assert_eq!(received, b"ab");
}

#[test]
fn a_taken_port_says_by_whom() {
    let me = std::process::id().to_string();
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
    for (protocol, port) in [
        (Protocol::Tcp, tcp.local_addr().unwrap().port()),
        (Protocol::Udp, udp.local_addr().unwrap().port()),
    ] {
        for host in [Ipv4Addr::LOCALHOST, Ipv4Addr::UNSPECIFIED] {
            let taken = || format!("{:#}", bound(&forward(protocol, host, port)).unwrap_err());
            let mut error = taken();
            assert!(error.contains(&format!("port {port}")), "{error}");
            // A child that another test forks has a copy of the socket until its `exec`.
            for _ in 0..1_000 {
                if error.contains(&format!("process {me})")) {
                    break;
                }
                std::thread::sleep(std::time::Duration::from_millis(1));
                error = taken();
            }
            assert!(error.contains(&format!("process {me})")), "{error}");
        }
    }
}

#[test]
fn of_several_that_have_a_taken_port_another_process_is_named() {
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let copy = OwnedFd::from(tcp.try_clone().unwrap());
    let mut other = Command::new("sleep").arg("60").stdin(copy).spawn().unwrap();
    let port = tcp.local_addr().unwrap().port();
    let taken = bound(&forward(Protocol::Tcp, Ipv4Addr::LOCALHOST, port));
    other.kill().unwrap();
    let error = format!("{:#}", taken.unwrap_err());
    assert!(
        error.contains(&format!("process {})", other.id())),
        "{error}"
    );
    other.wait().unwrap();
}

#[test]
fn an_address_of_another_host_is_refused() {
    let other = Ipv4Addr::new(192, 0, 2, 99);
    let error = format!(
        "{:#}",
        bound(&forward(Protocol::Tcp, other, 1)).unwrap_err()
    );
    assert!(
        error.contains("192.0.2.99 is not an address of this host"),
        "{error}"
    );
}

#[test]
fn the_kernels_table_is_read_as_documented() {
    let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     7        0 4242 1
   1: 0100007F:1F90 0100007F:C000 01 00000000:00000000 00:00000000 00000000     0        0 4243 1
   2: 00000000:1F91 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4244 1";
    let of = |host: [u8; 4], port| sockets_in(table, true, Ipv4Addr::from(host).into(), port);
    assert_eq!(of([127, 0, 0, 1], 8080), [(4242, 7)]);
    assert_eq!(of([0, 0, 0, 0], 8080), [(4242, 7)]);
    assert_eq!(of([192, 0, 2, 1], 8080), []);
    assert_eq!(of([192, 0, 2, 1], 8081), [(4244, 0)]);
}

#[test]
fn a_port_of_the_guests_own_address_has_no_socket() {
    let own = Forward {
        is_own: true,
        ..forward(Protocol::Tcp, Ipv4Addr::UNSPECIFIED, 80)
    };
    assert!(reserve(&own).unwrap().is_none());
}
