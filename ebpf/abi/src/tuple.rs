//! Identity of a flow on one of its two links: addresses, ports and protocol.

/// An IPv4 address in network order. Aligned so that programs compare it as one word, and made of
/// octets so that `bpftool` prints it legibly.
#[repr(C, align(4))]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, PartialOrd, Ord)]
pub struct Ip4 {
    /// Octets of the address, most significant first.
    pub octets: [u8; 4],
}

impl Ip4 {
    /// The unspecified address, 0.0.0.0.
    pub const UNSPECIFIED: Self = Self { octets: [0; 4] };

    /// The address whose four octets in a packet were read as a native-endian word.
    #[inline(always)]
    pub const fn from_wire(word: u32) -> Self {
        Self {
            octets: word.to_ne_bytes(),
        }
    }

    /// The address as a native-endian word to store in a packet.
    #[inline(always)]
    pub const fn to_wire(self) -> u32 {
        u32::from_ne_bytes(self.octets)
    }

    /// Whether the address is in 127.0.0.0/8, which no link may carry (RFC 1122 section 3.2.1.3).
    #[inline(always)]
    pub const fn is_loopback(self) -> bool {
        self.octets[0] == 127
    }
}

impl From<core::net::Ipv4Addr> for Ip4 {
    fn from(addr: core::net::Ipv4Addr) -> Self {
        Self {
            octets: addr.octets(),
        }
    }
}

impl From<Ip4> for core::net::IpAddr {
    fn from(addr: Ip4) -> Self {
        Self::from(addr.octets)
    }
}

impl From<Ip4> for core::net::Ipv4Addr {
    fn from(addr: Ip4) -> Self {
        Self::from(addr.octets)
    }
}

/// Transport protocol of a flow, with its IP protocol number.
#[repr(u8)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum Protocol {
    /// ICMP echo. The query id takes the place of the local port (RFC 5508 section 3.1).
    Icmp = 1,
    /// Transmission Control Protocol (RFC 9293).
    Tcp = 6,
    /// User Datagram Protocol (RFC 768).
    Udp = 17,
}

impl Protocol {
    /// All protocols of which there are flows.
    pub const fn all() -> [Self; 3] {
        [Self::Tcp, Self::Udp, Self::Icmp]
    }

    /// The protocol with this number in an IPv4 header; `None` if slipgate has no flows of it.
    #[inline(always)]
    pub const fn from_ip(number: u8) -> Option<Self> {
        match number {
            1 => Some(Self::Icmp),
            6 => Some(Self::Tcp),
            17 => Some(Self::Udp),
            _ => None,
        }
    }

    /// The protocol with this name in flags and output.
    pub fn by_name(name: &str) -> Option<Self> {
        Self::all()
            .into_iter()
            .find(|protocol| protocol.name() == name)
    }

    /// Name of the protocol in flags and output.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Icmp => "icmp",
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

/// Direction of a packet, seen from the guest.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Direction {
    /// From the guest to the world.
    Tx,
    /// From the world to the guest.
    Rx,
}

impl Direction {
    /// The opposite of this direction.
    #[inline(always)]
    pub const fn other(self) -> Self {
        match self {
            Self::Tx => Self::Rx,
            Self::Rx => Self::Tx,
        }
    }
}

/// Key of the map `FLOWS`: a flow as one link sees it. Each flow has two. On the guest's link,
/// `scope` is the VM's id and `local` the guest's own address. On the world's link, `scope` is
/// [`Tuple::WORLD`] and `local` the translated address.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Tuple {
    /// Id of the VM, or [`Tuple::WORLD`].
    pub scope: u32,
    /// Address of the guest, or its translation.
    pub local: Ip4,
    /// Address of the peer.
    pub remote: Ip4,
    /// Port of the guest or its translation, or the ICMP query id, host order.
    pub local_port: u16,
    /// Port of the peer, host order; 0 for ICMP.
    pub remote_port: u16,
    /// Number of a [`Protocol`].
    pub protocol: u8,
    /// Explicit padding, always zero.
    pub pad: [u8; 3],
}

impl Tuple {
    /// Scope of tuples on the world's link. VM ids start at 1.
    pub const WORLD: u32 = 0;
}
