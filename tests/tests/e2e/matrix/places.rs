//! The places of a stand, by the family of its cell, and what rules and errors call them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use slipgate_testbed::{
    clients::{IcmpError, dns},
    dns_wire::{Question, types},
    frame::FrameBuilder,
    world::{HOST, ROUTER, SERVER, SERVER_2},
    world_ipv6::{HOST6, ROUTER6, SERVER6, SERVER6_2},
};

use super::{Cell, Family, GATEWAY6};
use crate::{GATEWAY, GATEWAY_MAC, GUEST_MAC};

/// Resolvers of the Internet, which the world has not: slipgate answers in their place.
const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(8, 8, 8, 8);
const ELSEWHERE6: Ipv6Addr = Ipv6Addr::new(0x2001, 0x4860, 0x4860, 0, 0, 0, 0, 0x8888);

impl Cell {
    /// The first server of the world.
    pub(crate) fn server(self) -> IpAddr {
        self.family.choose(SERVER, SERVER6)
    }

    /// The second server.
    pub(crate) fn server_2(self) -> IpAddr {
        self.family.choose(SERVER_2, SERVER6_2)
    }

    /// The host's address on the uplink.
    pub(crate) fn host(self) -> IpAddr {
        self.family.choose(HOST, HOST6)
    }

    /// The address from which the world's clients come to the host.
    pub(crate) fn router(self) -> IpAddr {
        self.family.choose(ROUTER, ROUTER6)
    }

    /// The guest's gateway.
    pub(crate) fn gateway(self) -> IpAddr {
        self.family.choose(GATEWAY, GATEWAY6)
    }

    /// The host's loopback address.
    pub(crate) fn loopback(self) -> IpAddr {
        self.family.choose(Ipv4Addr::LOCALHOST, Ipv6Addr::LOCALHOST)
    }

    /// A resolver of the Internet's.
    pub(crate) fn resolver_elsewhere(self) -> IpAddr {
        self.family.choose(ELSEWHERE, ELSEWHERE6)
    }

    /// A question for a name's addresses of the family.
    pub(crate) fn question(self, name: &str) -> Question {
        let kind = match self.family {
            Family::Ipv4 => types::A,
            Family::Ipv6 => types::AAAA,
        };
        dns::question(name, kind)
    }

    /// The error by which a destination is said to be prohibited.
    pub(crate) fn prohibited(self) -> IcmpError {
        match self.family {
            Family::Ipv4 => IcmpError::PROHIBITED,
            Family::Ipv6 => IcmpError::PROHIBITED6,
        }
    }

    /// Length of an IP header without options, bytes.
    pub(crate) fn headers(self) -> usize {
        match self.family {
            Family::Ipv4 => 20,
            Family::Ipv6 => 40,
        }
    }

    /// Type and code of the error about a spent time to live, or hop limit.
    pub(crate) fn time_exceeded(self) -> (u8, u8) {
        match self.family {
            Family::Ipv4 => (11, 0),
            Family::Ipv6 => (3, 0),
        }
    }

    /// Type and code of the error about a packet that is too large for a link.
    pub(crate) fn too_large(self) -> (u8, u8) {
        match self.family {
            Family::Ipv4 => (3, 4),
            Family::Ipv6 => (2, 0),
        }
    }

    /// Type and code of the errors about a host, and about a port, that can't be reached.
    pub(crate) fn unreachable(self) -> [(u8, u8); 2] {
        match self.family {
            Family::Ipv4 => [(3, 1), (3, 3)],
            Family::Ipv6 => [(1, 3), (1, 4)],
        }
    }

    /// A destination as rules have it: an address of one, and of it a port, ports, a protocol, such
    /// as `7000-7001/tcp`.
    pub(crate) fn destination(self, ip: IpAddr, ports: &str) -> String {
        match self.family {
            Family::Ipv4 => format!("{ip}:{ports}"),
            Family::Ipv6 => format!("[{ip}]:{ports}"),
        }
    }

    /// The network of the world's servers, with ports, as rules have it.
    pub(crate) fn servers(self, ports: &str) -> String {
        match self.family {
            Family::Ipv4 => format!("203.0.113.0/24:{ports}"),
            Family::Ipv6 => format!("[2001:db8:ff::/64]:{ports}"),
        }
    }

    /// A datagram of the guest's, on its way to its gateway.
    pub(crate) fn datagram(self, port: u16, to: SocketAddr) -> FrameBuilder {
        FrameBuilder::udp(at(self.guest(), port), to)
            .macs(GUEST_MAC, GATEWAY_MAC)
            .payload(b"payload")
    }

    /// All addresses of the family, as rules have them.
    pub(crate) fn everything(self) -> &'static str {
        match self.family {
            Family::Ipv4 => "0.0.0.0/0",
            Family::Ipv6 => "::/0",
        }
    }
}

/// An address with a port.
pub(crate) fn at(ip: impl Into<IpAddr>, port: u16) -> SocketAddr {
    SocketAddr::new(ip.into(), port)
}
