//! Protected address space: destinations that are refused unless a rule opens them specifically.
use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::Ipv4Net;

use crate::{LocalAddresses, PrefixMap};

/// Kind of protected address space.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Space {
    /// "This network", RFC 1122 section 3.2.1.3.
    ThisNetwork,
    /// Loopback, RFC 1122 section 3.2.1.3.
    Loopback,
    /// Address of the host.
    Host,
    /// Network of guests.
    Guests,
    /// Private addresses, RFC 1918.
    Private,
    /// Shared between carrier and customer, RFC 6598.
    Shared,
    /// Link-local addresses, RFC 3927.
    LinkLocal,
    /// Metadata or host service of a cloud.
    Metadata,
    /// Multicast addresses, RFC 5771.
    Multicast,
    /// Reserved, RFC 1112 section 4.
    Reserved,
    /// Limited broadcast address, RFC 919.
    Broadcast,
}

impl Space {
    /// Describes an address in this space, for a sentence.
    pub const fn describe(self) -> &'static str {
        match self {
            Self::ThisNetwork => "\"this network\" (RFC 1122)",
            Self::Loopback => "loopback",
            Self::Host => "an address of the host",
            Self::Guests => "in a guests' network",
            Self::Private => "private (RFC 1918)",
            Self::Shared => "shared space (RFC 6598)",
            Self::LinkLocal => "link-local (RFC 3927)",
            Self::Metadata => "a cloud metadata service",
            Self::Multicast => "multicast",
            Self::Reserved => "reserved (240.0.0.0/4)",
            Self::Broadcast => "the broadcast address",
        }
    }

    /// Whether a client of a forward may be in this space: private and shared networks have
    /// clients. A packet from any other space is forged, or from a host that has no business with a
    /// guest.
    pub const fn may_come_in(self) -> bool {
        matches!(self, Self::Private | Self::Shared)
    }

    /// Returns why no rule can open this space; `None` if a rule can. A flow to the host or a
    /// guests' network has no link to leave by.
    pub const fn never_opens(self) -> Option<&'static str> {
        match self {
            Self::Host | Self::Loopback => Some(
                "a flow to the host itself has no link to leave by; by `--forward` the host opens \
                 connections to the guest",
            ),
            Self::Guests => Some(
                "a VM's own network ends at its TAP; in it the gateway answers ping, DHCP and DNS, \
                 and the rest is refused",
            ),
            _ => None,
        }
    }
}

/// Ranges that are protected on every host, by address and prefix length.
const ALWAYS: [([u8; 4], u8, Space); 16] = [
    ([0, 0, 0, 0], 8, Space::ThisNetwork),
    ([10, 0, 0, 0], 8, Space::Private),
    ([100, 64, 0, 0], 10, Space::Shared),
    // Alibaba Cloud, inside shared space.
    ([100, 100, 100, 200], 32, Space::Metadata),
    ([127, 0, 0, 0], 8, Space::Loopback),
    // Azure's host agent: a public address that only a virtual machine's host answers.
    ([168, 63, 129, 16], 32, Space::Metadata),
    ([169, 254, 0, 0], 16, Space::LinkLocal),
    // AWS, Google Cloud, Azure, OpenStack and others.
    ([169, 254, 169, 254], 32, Space::Metadata),
    // AWS: credentials of container tasks, and of pods.
    ([169, 254, 170, 2], 32, Space::Metadata),
    ([169, 254, 170, 23], 32, Space::Metadata),
    ([172, 16, 0, 0], 12, Space::Private),
    // Oracle Cloud (classic).
    ([192, 0, 0, 192], 32, Space::Metadata),
    ([192, 168, 0, 0], 16, Space::Private),
    ([224, 0, 0, 0], 4, Space::Multicast),
    ([240, 0, 0, 0], 4, Space::Reserved),
    ([255, 255, 255, 255], 32, Space::Broadcast),
];

/// Returns the ranges that are protected on every host.
pub(crate) fn everywhere() -> impl Iterator<Item = Ipv4Net> {
    ALWAYS
        .iter()
        .map(|(addr, len, _)| Ipv4Net::new_assert((*addr).into(), *len))
}

/// Returns why an IPv6 address must not appear in an answer about a public name; `None` if it may.
/// The caller judges an IPv4 address inside it ([`embedded`]).
pub fn shut_v6(addr: Ipv6Addr) -> Option<&'static str> {
    let first = addr.segments()[0];
    match first {
        _ if addr.is_loopback() || addr.is_unspecified() => Some("the host itself"),
        _ if addr.is_multicast() => Some("multicast"),
        0xfc00..=0xfdff => Some("private (RFC 4193)"),
        0xfe80..=0xfebf => Some("link-local (RFC 4291)"),
        0xfec0..=0xfeff => Some("site-local (RFC 3879)"),
        _ => None,
    }
}

/// Returns the IPv4 address in a mapped, compatible, NAT64 (RFC 6052) or 6to4 (RFC 3056) address.
pub fn embedded(addr: Ipv6Addr) -> Option<Ipv4Addr> {
    let s = addr.segments();
    let v4 = |high: u16, low: u16| Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low));
    match s {
        [0, 0, 0, 0, 0, 0 | 0xffff, high, low] if high != 0 => Some(v4(high, low)),
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] => Some(v4(high, low)),
        [0x2002, high, low, ..] => Some(v4(high, low)),
        _ => None,
    }
}

/// Protected ranges and their kinds, by prefix.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Protected {
    ranges: PrefixMap<Space>,
}

impl Default for Protected {
    fn default() -> Self {
        Self::new(&LocalAddresses::default())
    }
}

impl Protected {
    pub(crate) fn new(local: &LocalAddresses) -> Self {
        let always = ALWAYS
            .iter()
            .map(|(addr, len, space)| (Ipv4Net::new_assert((*addr).into(), *len), *space));
        let guests = local.guests.iter().map(|net| (*net, Space::Guests));
        // The host's come last: of equal prefixes the last entry is kept.
        let host = local
            .host
            .iter()
            .map(|addr| (Ipv4Net::from(*addr), Space::Host));
        Self {
            ranges: PrefixMap::new(always.chain(guests).chain(host)),
        }
    }

    /// Returns the most specific protected range that contains `addr`, if one does.
    pub(crate) fn space_of(&self, addr: Ipv4Addr) -> Option<(Ipv4Net, Space)> {
        self.ranges
            .longest(addr)
            .map(|(range, space)| (range, *space))
    }
}
