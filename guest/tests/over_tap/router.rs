//! A router that advertises a prefix, on a kernel socket (RFC 4861).

use std::{
    io,
    net::{Ipv6Addr, SocketAddrV6, UdpSocket},
    os::fd::{AsRawFd, FromRawFd},
};

use slipgate_testbed::NetNs;

use crate::served::Served;

const ROUTER_SOLICITATION: u8 = 133;
const ROUTER_ADVERTISEMENT: u8 = 134;
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
const ALL_ROUTERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 2);
/// Hop limit of all messages: no router has passed them on.
const HOP_LIMIT: libc::c_int = 255;

/// Router that answers each solicitation, and stops when dropped.
pub(crate) struct Router {
    _served: Served,
}

impl Router {
    /// Starts to advertise the /64 of `prefix` on `device`, and an MTU.
    pub(crate) fn start(ns: &NetNs, device: &str, prefix: Ipv6Addr, mtu: Option<u32>) -> Router {
        let index = ns.ip(&format!("-o link show {device}")).unwrap();
        let index: u32 = index.split(':').next().unwrap().parse().unwrap();
        let socket = ns.run(socket);
        socket.join_multicast_v6(&ALL_ROUTERS, index).unwrap();
        let answer = move |socket: &UdpSocket, asked: &[u8]| {
            if asked.first() == Some(&ROUTER_SOLICITATION) {
                let to = SocketAddrV6::new(ALL_NODES, 0, 0, index);
                let sent = socket.send_to(&advertisement(prefix, mtu), to);
                sent.expect("advertise a prefix");
            }
        };
        Router {
            _served: Served::start(ns, "router", socket, answer),
        }
    }
}

/// Returns a raw socket of ICMPv6, whose checksums the kernel makes.
fn socket() -> UdpSocket {
    let hop_limit = HOP_LIMIT;
    let size = size_of_val(&hop_limit) as libc::socklen_t;
    // SAFETY: socket takes numbers; the new descriptor is owned; the option outlives the call.
    unsafe {
        let fd = libc::socket(
            libc::AF_INET6,
            libc::SOCK_RAW | libc::SOCK_CLOEXEC,
            libc::IPPROTO_ICMPV6,
        );
        assert!(fd >= 0, "{}", io::Error::last_os_error());
        let socket = UdpSocket::from_raw_fd(fd);
        let set = libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_IPV6,
            libc::IPV6_MULTICAST_HOPS,
            (&raw const hop_limit).cast(),
            size,
        );
        assert_eq!(set, 0, "{}", io::Error::last_os_error());
        socket
    }
}

fn advertisement(prefix: Ipv6Addr, mtu: Option<u32>) -> Vec<u8> {
    let [seconds, never] = [1800_u16.to_be_bytes(), [0xFF; 2]];
    let mut message = vec![ROUTER_ADVERTISEMENT, 0, 0, 0, 64, 0];
    message.extend_from_slice(&seconds);
    message.extend_from_slice(&[0; 8]);
    if let Some(mtu) = mtu {
        message.extend_from_slice(&[5, 1, 0, 0]);
        message.extend_from_slice(&mtu.to_be_bytes());
    }
    // On the link, and for addresses.
    message.extend_from_slice(&[3, 4, 64, 0xC0]);
    message.extend_from_slice(&[never, never, never, never].concat());
    message.extend_from_slice(&[0; 4]);
    message.extend_from_slice(&prefix.octets());
    // A resolver, which the guest passes over.
    message.extend_from_slice(&[25, 3, 0, 0]);
    message.extend_from_slice(&[never, never].concat());
    message.extend_from_slice(&prefix.octets());
    message
}
