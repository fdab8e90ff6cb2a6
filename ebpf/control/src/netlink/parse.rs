//! Conversion of netlink messages to the types of [`super::network`]. A message that is not about
//! IP, is incomplete, or is about what is left out there, gives `None`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use netlink_packet_core::Emitable as _;
use netlink_packet_core::Nla as _;
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    address::{AddressAttribute, AddressFlags, AddressMessage},
    link::{
        InfoData, InfoTun, InfoVrf, LinkAttribute, LinkFlags, LinkInfo, LinkLayerType, LinkMessage,
    },
    neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourMessage},
    route::{
        RouteAddress, RouteAttribute, RouteFlags, RouteMessage, RouteMetric, RouteNextHop,
        RouteNextHopFlags, RouteType, RouteVia,
    },
    rule::{RuleAction, RuleAttribute, RuleFlags, RuleMessage},
};
use slipgate_abi::IfIndex;

use super::{
    network::{Address, AddressState, Link, Neighbour, Route, RouteKind, Table, TapQueues},
    rules::{Rule, RuleKind},
};

pub(super) fn link(message: &LinkMessage) -> Option<Link> {
    let header = &message.header;
    let has_l2 = matches!(
        header.link_layer_type,
        LinkLayerType::Ether | LinkLayerType::Loopback
    );
    let mut link = Link {
        ifindex: IfIndex::new(header.index),
        name: String::new(),
        kind: None,
        up: header.flags.contains(LinkFlags::Up) && header.flags.contains(LinkFlags::LowerUp),
        mtu: 0,
        mac: None,
        has_l2,
        loopback: header.flags.contains(LinkFlags::Loopback),
        arp: !header.flags.contains(LinkFlags::Noarp),
        is_multi_queue_tap: None,
        vrf_table: None,
        gro_max_size: None,
    };
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => link.name.clone_from(name),
            LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
            LinkAttribute::GroMaxSize(bytes) => link.gro_max_size = Some(*bytes),
            LinkAttribute::Address(mac) => link.mac = mac.as_slice().try_into().ok(),
            LinkAttribute::LinkInfo(infos) => {
                link.kind = infos.iter().find_map(|info| match info {
                    LinkInfo::Kind(kind) => Some(kind.to_string()),
                    _ => None,
                });
                link.vrf_table = infos.iter().find_map(|info| match info {
                    LinkInfo::Data(InfoData::Vrf(settings)) => {
                        settings.iter().find_map(|setting| match setting {
                            InfoVrf::TableId(table) => Some(*table),
                            _ => None,
                        })
                    }
                    _ => None,
                });
                link.is_multi_queue_tap = infos.iter().find_map(|info| match info {
                    LinkInfo::Data(InfoData::Tun(properties)) => is_multi_queue_tap(properties),
                    _ => None,
                });
            }
            _ => {}
        }
    }
    (!link.name.is_empty()).then_some(link)
}

/// Returns whether a TAP was made with `IFF_MULTI_QUEUE`; `None` for a TUN.
fn is_multi_queue_tap(properties: &[InfoTun]) -> Option<bool> {
    tap_queues(properties).map(|queues| queues.is_multi_queue)
}

/// The `IFLA_TUN_*` attributes of `linux/if_link.h`.
mod tun {
    pub(super) const TYPE: u16 = 3;
    pub(super) const PERSIST: u16 = 6;
    pub(super) const MULTI_QUEUE: u16 = 7;
    /// Of a device with several queues only.
    pub(super) const NUM_QUEUES: u16 = 8;
    pub(super) const NUM_DISABLED_QUEUES: u16 = 9;
}

/// Returns what the kernel says of a TAP's queues; `None` for a TUN.
fn tap_queues(properties: &[InfoTun]) -> Option<TapQueues> {
    let value = |kind, value: &mut [u8]| {
        let mut found = properties.iter().filter(|it| it.kind() == kind);
        let found = found.find(|it| it.value_len() == value.len())?;
        found.emit_value(value);
        Some(())
    };
    let byte = |kind| {
        let mut bytes = [0];
        value(kind, &mut bytes).map(|()| i32::from(bytes[0]))
    };
    let word = |kind| {
        let mut bytes = [0; 4];
        value(kind, &mut bytes).map(|()| u32::from_ne_bytes(bytes))
    };
    (byte(tun::TYPE)? == libc::IFF_TAP).then_some(TapQueues {
        is_multi_queue: byte(tun::MULTI_QUEUE)? != 0,
        is_persistent: byte(tun::PERSIST).is_some_and(|it| it != 0),
        open: word(tun::NUM_QUEUES).unwrap_or(0) + word(tun::NUM_DISABLED_QUEUES).unwrap_or(0),
    })
}

/// Returns what a message about a link says of a TAP's queues; `None`: it is no TAP.
pub(super) fn tap_queues_of(message: &LinkMessage) -> Option<TapQueues> {
    let infos = message.attributes.iter().find_map(|it| match it {
        LinkAttribute::LinkInfo(infos) => Some(infos),
        _ => None,
    })?;
    infos.iter().find_map(|info| match info {
        LinkInfo::Data(InfoData::Tun(properties)) => tap_queues(properties),
        _ => None,
    })
}

/// Whether a message is about a link as such, and not about its part in a bridge (`AF_BRIDGE`).
pub(super) fn is_of_a_link(message: &LinkMessage) -> bool {
    message.header.interface_family == AddressFamily::Unspec
}

/// Parses a notice that has all attributes of a link. Some notices have a few of them only:
/// `wireless_send_event`, for one (net/wireless/wext-core.c).
pub(super) fn complete_link(message: &LinkMessage) -> Option<Link> {
    let is_mtu = |attribute: &LinkAttribute| matches!(attribute, LinkAttribute::Mtu(_));
    let is_complete = is_of_a_link(message) && message.attributes.iter().any(is_mtu);
    link(message).filter(|_| is_complete)
}

pub(super) fn address(message: &AddressMessage) -> Option<Address> {
    if !is_ip(message.header.family) {
        return None;
    }
    let (mut own, mut other, mut broadcast) = (None, None, None);
    // The header has the lower eight only; the attribute has all.
    let mut flags = AddressFlags::from_bits_retain(u32::from(message.header.flags.bits()));
    for attribute in &message.attributes {
        match attribute {
            AddressAttribute::Local(address) => own = Some(*address),
            // On a point-to-point link the peer's address, otherwise our own.
            AddressAttribute::Address(address) => other = Some(*address),
            AddressAttribute::Broadcast(address) => broadcast = Some(*address),
            AddressAttribute::Flags(all) => flags = *all,
            _ => {}
        }
    }
    let address = own
        .or(other)
        .filter(|address| !is_of_a_link_only(*address))?;
    Some(Address {
        ifindex: IfIndex::new(message.header.index),
        address,
        prefix_len: message.header.prefix_len,
        broadcast,
        peer: other.filter(|other| *other != address),
        state: state_of(address, flags),
    })
}

/// Returns how far an address may be used. Flags of IPv4 addresses have other meanings
/// (`IFA_F_SECONDARY` is `IFA_F_TEMPORARY`).
fn state_of(address: IpAddr, flags: AddressFlags) -> AddressState {
    if address.is_ipv4() {
        return AddressState::Preferred;
    }
    // One that is used while it is probed (RFC 4429) is as good as others.
    let is_probed =
        flags.contains(AddressFlags::Tentative) && !flags.contains(AddressFlags::Optimistic);
    if is_probed || flags.contains(AddressFlags::Dadfailed) {
        AddressState::Unusable
    } else if flags.contains(AddressFlags::Deprecated) {
        AddressState::Deprecated
    } else if flags.contains(AddressFlags::Secondary) {
        AddressState::Temporary
    } else {
        AddressState::Preferred
    }
}

fn is_ip(family: AddressFamily) -> bool {
    matches!(family, AddressFamily::Inet | AddressFamily::Inet6)
}

/// Whether an address is one that IPv6 has on every link: link-local or multicast.
fn is_of_a_link_only(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(_) => false,
        IpAddr::V6(address) => address.is_unicast_link_local() || address.is_multicast(),
    }
}

/// Whether a notice is about addresses and routes that IPv6 has on every link, and so about nothing
/// that is followed.
pub(super) fn is_about_a_link_only(message: &RouteNetlinkMessage) -> bool {
    match message {
        RouteNetlinkMessage::NewAddress(message) | RouteNetlinkMessage::DelAddress(message) => {
            let is_it = |attribute: &AddressAttribute| match attribute {
                AddressAttribute::Local(address) | AddressAttribute::Address(address) => {
                    is_of_a_link_only(*address)
                }
                _ => false,
            };
            message.attributes.iter().any(is_it)
        }
        RouteNetlinkMessage::NewRoute(message) | RouteNetlinkMessage::DelRoute(message) => {
            let is_it = |attribute: &RouteAttribute| match attribute {
                RouteAttribute::Destination(RouteAddress::Inet6(address)) => {
                    is_of_a_link_only((*address).into())
                }
                _ => false,
            };
            message.attributes.iter().any(is_it)
        }
        _ => false,
    }
}

/// Returns the device to which a notice says that an address or a route of IPv6 was added.
pub(super) fn added_to(message: &RouteNetlinkMessage) -> Option<IfIndex> {
    let index = match message {
        RouteNetlinkMessage::NewAddress(message) => {
            (message.header.family == AddressFamily::Inet6).then_some(message.header.index)
        }
        RouteNetlinkMessage::NewRoute(message)
            if message.header.address_family == AddressFamily::Inet6 =>
        {
            message
                .attributes
                .iter()
                .find_map(|attribute| match attribute {
                    RouteAttribute::Oif(index) => Some(*index),
                    _ => None,
                })
        }
        _ => None,
    };
    index.map(IfIndex::new)
}

/// Calls `add` with the route, or with each of its live next hops if it has several.
pub(super) fn route(message: &RouteMessage, mut add: impl FnMut(Route)) {
    let Some((route, hops)) = route_and_hops(message) else {
        return;
    };
    let Some(hops) = hops else {
        return add(route);
    };
    let out = RouteNextHopFlags::Dead | RouteNextHopFlags::Linkdown;
    let alive = hops.iter().filter(|hop| !hop.flags.intersects(out));
    for (position, hop) in alive.enumerate() {
        add(Route {
            oif: Some(IfIndex::new(hop.interface_index)),
            gateway: hop.attributes.iter().find_map(gateway),
            // `rtnh_hops` of linux/rtnetlink.h is the weight less one.
            weight: u16::from(hop.hops) + 1,
            is_further: position > 0,
            ..route
        });
    }
}

/// Returns a route, and its next hops if they are listed.
fn route_and_hops(message: &RouteMessage) -> Option<(Route, Option<&[RouteNextHop]>)> {
    let header = &message.header;
    if !is_ip(header.address_family) || header.flags.contains(RouteFlags::Dead) {
        return None;
    }
    let mut table = u32::from(header.table);
    let mut hops: Option<&[RouteNextHop]> = None;
    let mut route = Route {
        destination: match header.address_family {
            AddressFamily::Inet => Ipv4Addr::UNSPECIFIED.into(),
            _ => Ipv6Addr::UNSPECIFIED.into(),
        },
        prefix_len: header.destination_prefix_length,
        table: Table::Main,
        kind: match header.kind {
            RouteType::Unicast => RouteKind::Unicast,
            // The host answers to an anycast address as to its own (RFC 4291 section 2.6.1).
            RouteType::Local | RouteType::Anycast => RouteKind::Local,
            RouteType::Broadcast => RouteKind::Broadcast,
            RouteType::BlackHole => RouteKind::Blackhole,
            RouteType::Unreachable | RouteType::Prohibit => RouteKind::Refused,
            RouteType::Throw => RouteKind::Throw,
            _ => RouteKind::Other,
        },
        oif: None,
        gateway: None,
        source: None,
        metric: 0,
        mtu: None,
        weight: 1,
        is_further: false,
    };
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Table(number) => table = *number,
            RouteAttribute::Destination(address) => route.destination = ip(address)?,
            RouteAttribute::Oif(ifindex) => route.oif = Some(IfIndex::new(*ifindex)),
            RouteAttribute::Gateway(_) | RouteAttribute::Via(_) => {
                route.gateway = gateway(attribute);
            }
            RouteAttribute::PrefSource(address) => route.source = ip(address),
            RouteAttribute::Priority(metric) => route.metric = *metric,
            RouteAttribute::Metrics(metrics) => {
                route.mtu = metrics.iter().find_map(|metric| match metric {
                    RouteMetric::Mtu(mtu) => Some(*mtu),
                    _ => None,
                });
            }
            RouteAttribute::MultiPath(all) => hops = Some(all),
            _ => {}
        }
    }
    if is_of_a_link_only(route.destination) {
        return None;
    }
    route.table = Table::of(table);
    Some((route, hops))
}

/// Returns the router that an attribute names. That of an IPv4 route may be an IPv6 one (`RTA_VIA`,
/// RFC 8950, formerly 5549).
fn gateway(attribute: &RouteAttribute) -> Option<IpAddr> {
    match attribute {
        RouteAttribute::Gateway(address) => ip(address),
        RouteAttribute::Via(RouteVia::Inet(address)) => Some((*address).into()),
        RouteAttribute::Via(RouteVia::Inet6(address)) => Some((*address).into()),
        _ => None,
    }
}

/// Returns a rule; `None` if it is of another family.
pub(super) fn rule(message: &RuleMessage) -> Option<Rule> {
    let header = &message.header;
    if !is_ip(header.family) {
        return None;
    }
    let is_ipv6 = header.family == AddressFamily::Inet6;
    let (mut from, mut to) = (None, None);
    let mut rule = Rule {
        is_ipv6,
        is_inverted: header.flags.contains(RuleFlags::Invert),
        action: match header.action {
            RuleAction::ToTable => RuleKind::ToTable,
            RuleAction::Goto => RuleKind::Goto(0),
            RuleAction::Nop => RuleKind::Nothing,
            RuleAction::Blackhole => RuleKind::Refuse(RouteKind::Blackhole),
            RuleAction::Unreachable | RuleAction::Prohibit => RuleKind::Refuse(RouteKind::Refused),
            _ => RuleKind::Unknown,
        },
        table: u32::from(header.table),
        more: Some(header.tos)
            .filter(|tos| *tos != 0)
            .into_iter()
            .collect(),
        ..Rule::default()
    };
    let mut marks = Vec::new();
    for attribute in &message.attributes {
        match attribute {
            RuleAttribute::Priority(priority) => rule.priority = *priority,
            RuleAttribute::Table(table) => rule.table = *table,
            // This version of the crate reads the attribute of the mask as another mark.
            RuleAttribute::FwMark(mark) | RuleAttribute::FwMask(mark) => marks.push(*mark),
            RuleAttribute::Source(address) => from = Some(*address),
            RuleAttribute::Destination(address) => to = Some(*address),
            RuleAttribute::Iifname(name) => rule.iif = Some(name.clone()),
            RuleAttribute::Oifname(name) => rule.oif = Some(name.clone()),
            RuleAttribute::L3MDev(is_on) => rule.is_of_vrfs = *is_on,
            RuleAttribute::Goto(priority) => rule.action = RuleKind::Goto(*priority),
            // The kernel's own default for "none" is all bits set.
            RuleAttribute::SuppressPrefixLen(len) if *len != u32::MAX => {
                rule.suppressed_len = u8::try_from(*len).ok();
            }
            RuleAttribute::SuppressIfGroup(u32::MAX) | RuleAttribute::TunId(0) => {}
            RuleAttribute::SuppressIfGroup(_)
            | RuleAttribute::TunId(_)
            | RuleAttribute::UidRange(_)
            | RuleAttribute::IpProtocol(_)
            | RuleAttribute::SourcePortRange(_)
            | RuleAttribute::DestinationPortRange(_)
            | RuleAttribute::Other(_) => {
                let mut bytes = vec![0; attribute.buffer_len()];
                attribute.emit(&mut bytes);
                rule.more.extend(bytes);
            }
            _ => {}
        }
    }
    // The kernel says the mask whenever it says the mark, and the mark unless it is 0.
    match marks[..] {
        [mark, mask, ..] => (rule.mark, rule.mask) = (mark, mask),
        [mask] => rule.mask = mask,
        [] => {}
    }
    rule.from = from.map(|address| (address, header.src_len));
    rule.to = to.map(|address| (address, header.dst_len));
    Some(rule)
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(address) => Some((*address).into()),
        RouteAddress::Inet6(address) => Some((*address).into()),
        _ => None,
    }
}

/// Returns a neighbour with its ifindex and address.
pub(super) fn neighbour(message: &NeighbourMessage) -> Option<((IfIndex, IpAddr), Neighbour)> {
    /// `NUD_VALID` of the kernel's `net/neighbour.h`.
    const VALID: u16 = 0x80 | 0x40 | 0x02 | 0x10 | 0x04 | 0x08;
    const PERMANENT: u16 = 0x80;
    let (mut destination, mut mac) = (None, None);
    for attribute in &message.attributes {
        match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(address)) => {
                destination = Some((*address).into());
            }
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(address)) => {
                destination = Some((*address).into());
            }
            NeighbourAttribute::LinkLayerAddress(address) => {
                mac = address.as_slice().try_into().ok();
            }
            _ => {}
        }
    }
    let state = u16::from(message.header.state);
    let neighbour = Neighbour {
        mac: mac.filter(|_| state & VALID != 0),
        permanent: state & PERMANENT != 0,
    };
    let ifindex = IfIndex::new(message.header.ifindex);
    Some(((ifindex, destination?), neighbour))
}

#[cfg(test)]
#[path = "ipv6_test.rs"]
mod tests;
