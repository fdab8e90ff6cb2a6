use std::{
    fmt::{Debug, Display},
    hash::Hash,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4},
};

/// An address that a server may have: of IPv4, or of either family.
pub trait Address: Copy + Display + Into<IpAddr> + Send + Sync {
    /// The same with a port.
    type Socket: Copy + Debug + Display + Eq + Hash + Into<SocketAddr> + Send + Sync;

    /// This address with a port.
    fn at(self, port: u16) -> Self::Socket;

    /// An address with a port, where it is one of this kind.
    fn of(address: SocketAddr) -> Option<Self::Socket>;
}

impl Address for Ipv4Addr {
    type Socket = SocketAddrV4;

    fn at(self, port: u16) -> SocketAddrV4 {
        SocketAddrV4::new(self, port)
    }

    fn of(address: SocketAddr) -> Option<SocketAddrV4> {
        match address {
            SocketAddr::V4(address) => Some(address),
            SocketAddr::V6(_) => None,
        }
    }
}

impl Address for Ipv6Addr {
    type Socket = SocketAddr;

    fn at(self, port: u16) -> SocketAddr {
        IpAddr::from(self).at(port)
    }

    fn of(address: SocketAddr) -> Option<SocketAddr> {
        IpAddr::of(address)
    }
}

impl Address for IpAddr {
    type Socket = SocketAddr;

    fn at(self, port: u16) -> SocketAddr {
        SocketAddr::new(self, port)
    }

    /// IPv4 peers of a socket of both families are theirs as IPv4.
    fn of(address: SocketAddr) -> Option<SocketAddr> {
        Some(SocketAddr::new(address.ip().to_canonical(), address.port()))
    }
}
