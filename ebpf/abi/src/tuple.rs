//! The name of a flow on one of its two links.

/// An IPv4 address in network order. Aligned so that programs compare it as one word, and made of
/// octets so that `bpftool` prints it legibly.
#[repr(C, align(4))]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, PartialOrd, Ord)]
pub struct Ip4 {
    /// The four octets, most significant first.
    pub octets: [u8; 4],
}

impl Ip4 {
    /// 0.0.0.0.
    pub const UNSPECIFIED: Self = Self { octets: [0; 4] };

    /// From the word as it stands in a packet (network order, read in native order).
    #[inline(always)]
    pub const fn from_wire(word: u32) -> Self {
        Self {
            octets: word.to_ne_bytes(),
        }
    }

    /// The word as it stands in a packet.
    #[inline(always)]
    pub const fn to_wire(self) -> u32 {
        u32::from_ne_bytes(self.octets)
    }

    /// Whether it is one that no link may carry: 127.0.0.0/8 (RFC 1122 section 3.2.1.3).
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

impl From<Ip4> for core::net::Ipv4Addr {
    fn from(addr: Ip4) -> Self {
        Self::from(addr.octets)
    }
}

/// A transport protocol that has flows.
#[repr(u8)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum Protocol {
    /// ICMP echo; the query id stands where the local port does (RFC 5508 section 3.1).
    Icmp = 1,
    /// TCP.
    Tcp = 6,
    /// UDP.
    Udp = 17,
}

impl Protocol {
    /// From an IPv4 header's protocol field; `None` for one that has no flows.
    #[inline(always)]
    pub const fn from_ip(number: u8) -> Option<Self> {
        match number {
            1 => Some(Self::Icmp),
            6 => Some(Self::Tcp),
            17 => Some(Self::Udp),
            _ => None,
        }
    }

    /// The name used in flags and output.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Icmp => "icmp",
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

/// Which way a packet goes, seen from the guest.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Direction {
    /// From the guest to the world.
    Tx,
    /// From the world to the guest.
    Rx,
}

impl Direction {
    /// The opposite one.
    #[inline(always)]
    pub const fn other(self) -> Self {
        match self {
            Self::Tx => Self::Rx,
            Self::Rx => Self::Tx,
        }
    }
}

/// Key of the map `FLOWS`: a flow as one link sees it. Each flow has two: with
/// `scope` = the VM's id and `local` = the guest's own address, and with `scope` = [`Tuple::WORLD`]
/// and `local` = the translated address.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Tuple {
    /// VM id, or [`Tuple::WORLD`].
    pub scope: u32,
    /// Address on our side of the link.
    pub local: Ip4,
    /// The peer's address.
    pub remote: Ip4,
    /// Port on our side, or the ICMP query id. Host order.
    pub local_port: u16,
    /// The peer's port; 0 for ICMP. Host order.
    pub remote_port: u16,
    /// A [`Protocol`] as its number.
    pub protocol: u8,
    /// Zero.
    pub pad: [u8; 3],
}

impl Tuple {
    /// The scope of the world's side. VM ids start at 1.
    pub const WORLD: u32 = 0;
}
