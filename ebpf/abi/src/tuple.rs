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

/// An IPv6 address in network order. Aligned so that programs compare it as two words, and made of
/// octets so that `bpftool` prints it legibly.
#[repr(C, align(8))]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, PartialOrd, Ord)]
pub struct Ip6 {
    /// Octets of the address, most significant first.
    pub octets: [u8; 16],
}

impl Ip6 {
    /// The unspecified address, `::`.
    pub const UNSPECIFIED: Self = Self { octets: [0; 16] };
    /// All nodes of a link, `ff02::1` (RFC 4291 section 2.7.1).
    pub const ALL_NODES: Self = Self {
        octets: [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
    };
    /// The loopback address, `::1`.
    pub const LOOPBACK: Self = Self {
        octets: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
    };

    /// Group to which solicitations for this address are sent (RFC 4291 section 2.7.1).
    pub const fn solicited_node(self) -> Self {
        let [.., a, b, c] = self.octets;
        Self {
            octets: [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, a, b, c],
        }
    }

    /// The address whose octets in a packet were read as native-endian words.
    #[inline(always)]
    pub const fn from_words(words: [u32; 4]) -> Self {
        // SAFETY: arrays of the same length, of types without invalid values.
        let octets = unsafe { core::mem::transmute::<[u32; 4], [u8; 16]>(words) };
        Self { octets }
    }

    /// The address as native-endian words to store in a packet.
    #[inline(always)]
    pub const fn to_words(self) -> [u32; 4] {
        // SAFETY: as above.
        unsafe { core::mem::transmute::<[u8; 16], [u32; 4]>(self.octets) }
    }

    /// The address of these halves, native-endian words.
    #[inline(always)]
    pub const fn from_halves(halves: [u64; 2]) -> Self {
        // SAFETY: as above.
        let octets = unsafe { core::mem::transmute::<[u64; 2], [u8; 16]>(halves) };
        Self { octets }
    }

    /// Both halves as native-endian words, which compare as the address does.
    #[inline(always)]
    pub const fn halves(self) -> [u64; 2] {
        // SAFETY: as above.
        unsafe { core::mem::transmute::<[u8; 16], [u64; 2]>(self.octets) }
    }

    /// Whether two addresses are equal, by two comparisons of words.
    #[inline(always)]
    pub const fn is(self, other: Self) -> bool {
        let (a, b) = (self.halves(), other.halves());
        a[0] == b[0] && a[1] == b[1]
    }

    /// Whether two addresses have the same /64.
    #[inline(always)]
    pub const fn same_prefix(self, other: Self) -> bool {
        self.halves()[0] == other.halves()[0]
    }

    /// Whether this is the loopback address, `::1`.
    #[inline(always)]
    pub const fn is_loopback(self) -> bool {
        self.is(Self::LOOPBACK)
    }

    /// Whether this is `::`.
    #[inline(always)]
    pub const fn is_unspecified(self) -> bool {
        self.is(Self::UNSPECIFIED)
    }

    /// Whether the address is in ff00::/8 (RFC 4291 section 2.7).
    #[inline(always)]
    pub const fn is_multicast(self) -> bool {
        self.octets[0] == 0xff
    }

    /// Whether the address is in fe80::/10 (RFC 4291 section 2.5.6).
    #[inline(always)]
    pub const fn is_link_local(self) -> bool {
        self.octets[0] == 0xfe && self.octets[1] & 0xc0 == 0x80
    }
}

impl From<core::net::Ipv6Addr> for Ip6 {
    fn from(addr: core::net::Ipv6Addr) -> Self {
        Self {
            octets: addr.octets(),
        }
    }
}

impl From<Ip6> for core::net::IpAddr {
    fn from(addr: Ip6) -> Self {
        Self::from(addr.octets)
    }
}

impl From<Ip6> for core::net::Ipv6Addr {
    fn from(addr: Ip6) -> Self {
        Self::from(addr.octets)
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
    /// ICMPv6 echo (RFC 4443). The query id takes the place of the local port.
    Icmpv6 = 58,
}

impl Protocol {
    /// All protocols as users name them: [`Protocol::Icmpv6`] is ICMP over IPv6 to them.
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

    /// The protocol with this number in an IPv6 header; `None` if slipgate has no flows of it.
    #[inline(always)]
    pub const fn from_ip6(number: u8) -> Option<Self> {
        match number {
            6 => Some(Self::Tcp),
            17 => Some(Self::Udp),
            58 => Some(Self::Icmpv6),
            _ => None,
        }
    }

    /// The protocol with this number, of a flow of either family.
    #[inline(always)]
    pub const fn from_number(number: u8) -> Option<Self> {
        match number {
            58 => Some(Self::Icmpv6),
            number => Self::from_ip(number),
        }
    }

    /// Whether flows of the protocol are ICMP echoes, whose local port is the query id.
    #[inline(always)]
    pub const fn is_icmp(self) -> bool {
        matches!(self, Self::Icmp | Self::Icmpv6)
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
            Self::Icmp | Self::Icmpv6 => "icmp",
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

/// Key of the map `FLOWS6`: as [`Tuple`], of an IPv6 flow.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Tuple6 {
    /// Id of the VM, or [`Tuple::WORLD`].
    pub scope: u32,
    /// Port of the guest or its translation, or the ICMPv6 query id, host order.
    pub local_port: u16,
    /// Port of the peer, host order; 0 for ICMPv6.
    pub remote_port: u16,
    /// Address of the guest, or its translation.
    pub local: Ip6,
    /// Address of the peer.
    pub remote: Ip6,
    /// Number of a [`Protocol`].
    pub protocol: u8,
    /// Explicit padding, always zero.
    pub pad: [u8; 7],
}

const _: () = assert!(size_of::<Tuple6>() == 48);

/// Two ports side by side, as they lie in a tuple.
#[inline(always)]
const fn ports_word(local: u16, remote: u16) -> u32 {
    let ([a, b], [c, d]) = (local.to_ne_bytes(), remote.to_ne_bytes());
    u32::from_ne_bytes([a, b, c, d])
}

impl Tuple6 {
    /// A tuple, made of whole words as [`Tuple::of_words`] is.
    #[inline(always)]
    pub const fn of_words(
        scope: u32,
        (local, local_port): (Ip6, u16),
        (remote, remote_port): (Ip6, u16),
        protocol: u8,
    ) -> Self {
        let ([a, b, c, d], [e, f, g, h]) = (
            scope.to_ne_bytes(),
            ports_word(local_port, remote_port).to_ne_bytes(),
        );
        let ([l0, l1], [r0, r1]) = (local.halves(), remote.halves());
        let words = [
            u64::from_ne_bytes([a, b, c, d, e, f, g, h]),
            l0,
            l1,
            r0,
            r1,
            u64::from_ne_bytes([protocol, 0, 0, 0, 0, 0, 0, 0]),
        ];
        // SAFETY: the words of the fields in their order (asserted above: no padding but its own);
        // any bits are values of them.
        unsafe { core::mem::transmute::<[u64; 6], Self>(words) }
    }

    /// Whether two tuples are equal, compared by words.
    #[inline(always)]
    pub const fn is(&self, other: &Self) -> bool {
        self.scope == other.scope
            && self.local_port == other.local_port
            && self.remote_port == other.remote_port
            && self.protocol == other.protocol
            && self.local.is(other.local)
            && self.remote.is(other.remote)
    }
}

impl Tuple {
    /// Scope of tuples on the world's link. VM ids start at 1.
    pub const WORLD: u32 = 0;

    /// A tuple, made of whole words: the kernel's hash reads a key by words, and a processor that
    /// loads a word has to wait if it was stored in parts.
    #[inline(always)]
    pub const fn of_words(
        scope: u32,
        (local, local_port): (Ip4, u16),
        (remote, remote_port): (Ip4, u16),
        protocol: u8,
    ) -> Self {
        let words = [
            scope,
            local.to_wire(),
            remote.to_wire(),
            ports_word(local_port, remote_port),
            u32::from_ne_bytes([protocol, 0, 0, 0]),
        ];
        // SAFETY: the words of the fields in their order; any bits are values of them.
        unsafe { core::mem::transmute::<[u32; 5], Self>(words) }
    }
}

#[cfg(test)]
#[path = "tuple_test.rs"]
mod tests;
