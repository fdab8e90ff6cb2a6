//! Protected address space: destinations that are refused unless a rule opens them specifically.
use std::net::IpAddr;

use ipnet::IpNet;

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
    /// A network that slipgate's guests are in.
    Guests,
    /// Private addresses, RFC 1918.
    Private,
    /// Unique local addresses, RFC 4193.
    UniqueLocal,
    /// Site-local addresses, RFC 3879.
    SiteLocal,
    /// Shared between carrier and customer, RFC 6598.
    Shared,
    /// Link-local addresses, RFC 3927 and RFC 4291 section 2.5.6.
    LinkLocal,
    /// Metadata or host service of a cloud.
    Metadata,
    /// Multicast addresses, RFC 5771 and RFC 4291 section 2.7.
    Multicast,
    /// Reserved, RFC 1112 section 4, or for no destination of a packet: discard-only (RFC 6666).
    Reserved,
    /// IPv4 addresses in IPv6 form, RFC 4291 section 2.5.5: for programs, not for packets.
    Ipv4InIpv6,
    /// Addresses that a translator of the local network makes of IPv4 addresses, RFC 8215.
    LocalTranslation,
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
            Self::UniqueLocal => "unique local (RFC 4193)",
            Self::SiteLocal => "site-local (RFC 3879)",
            Self::LinkLocal => "link-local (RFC 3927, RFC 4291)",
            Self::Metadata => "a cloud metadata service",
            Self::Multicast => "multicast",
            Self::Reserved => "reserved (240.0.0.0/4, 100::/64)",
            Self::Ipv4InIpv6 => "an IPv4 address in IPv6 form (RFC 4291)",
            Self::LocalTranslation => "for a translator of the local network (RFC 8215)",
            Self::Broadcast => "the broadcast address",
        }
    }

    /// Whether a client of a forward may be in this space: private, unique local and shared
    /// networks have clients. A packet from any other space is forged, or from a host that has no
    /// business with a guest.
    pub const fn may_come_in(self) -> bool {
        matches!(self, Self::Private | Self::UniqueLocal | Self::Shared)
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

/// IPv4 ranges that are protected on every host, by address and prefix length.
const ALWAYS_V4: [([u8; 4], u8, Space); 16] = [
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

/// IPv6 ranges that are protected on every host, by address and prefix length. Addresses that a
/// translator or tunnel of the Internet makes of IPv4 addresses are judged by these
/// ([`embedded`](crate::embedded)).
const ALWAYS_V6: [([u16; 8], u8, Space); 13] = [
    // Deprecated IPv4-compatible addresses, and the unspecified address.
    ([0, 0, 0, 0, 0, 0, 0, 0], 96, Space::Ipv4InIpv6),
    ([0, 0, 0, 0, 0, 0, 0, 1], 128, Space::Loopback),
    ([0, 0, 0, 0, 0, 0xffff, 0, 0], 96, Space::Ipv4InIpv6),
    (
        [0x64, 0xff9b, 1, 0, 0, 0, 0, 0],
        48,
        Space::LocalTranslation,
    ),
    ([0x100, 0, 0, 0, 0, 0, 0, 0], 64, Space::Reserved),
    ([0xfc00, 0, 0, 0, 0, 0, 0, 0], 7, Space::UniqueLocal),
    // AWS: instances, and credentials of pods.
    ([0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254], 128, Space::Metadata),
    ([0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x23], 128, Space::Metadata),
    // Google Cloud.
    ([0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254], 128, Space::Metadata),
    ([0xfe80, 0, 0, 0, 0, 0, 0, 0], 10, Space::LinkLocal),
    // OpenStack.
    (
        [0xfe80, 0, 0, 0, 0, 0, 0xa9fe, 0xa9fe],
        128,
        Space::Metadata,
    ),
    ([0xfec0, 0, 0, 0, 0, 0, 0, 0], 10, Space::SiteLocal),
    ([0xff00, 0, 0, 0, 0, 0, 0, 0], 8, Space::Multicast),
];

/// Returns the ranges that are protected on every host, of both families.
pub(crate) fn everywhere() -> impl Iterator<Item = (IpNet, Space)> {
    let v4 = ALWAYS_V4.map(|(addr, len, space)| (IpNet::new_assert(addr.into(), len), space));
    let v6 = ALWAYS_V6.map(|(addr, len, space)| (IpNet::new_assert(addr.into(), len), space));
    v4.into_iter().chain(v6)
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
        let guests = local.guests.iter().map(|net| (*net, Space::Guests));
        // The host's come last: of equal prefixes the last entry is kept.
        let host = local
            .host
            .iter()
            .map(|addr| (IpNet::from(*addr), Space::Host));
        Self {
            ranges: PrefixMap::new(everywhere().chain(guests).chain(host)),
        }
    }

    /// Returns the most specific protected range that contains `addr`, if one does.
    pub(crate) fn space_of(&self, addr: IpAddr) -> Option<(IpNet, Space)> {
        self.ranges
            .longest(addr)
            .map(|(range, space)| (range, *space))
    }
}
