//! Conversion of netlink messages to the types of [`super::network`]. A message that is not about
//! IP, is incomplete, or is about what is left out there, gives `None`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

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
        RouteNextHopFlags, RouteType,
    },
    rule::{RuleAction, RuleAttribute, RuleFlags, RuleMessage},
};
use slipgate_abi::IfIndex;

use super::{
    network::{Address, AddressState, Link, Neighbour, Route, RouteKind, Table},
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
    /// The `IFLA_TUN_*` attributes of `linux/if_link.h`.
    const TYPE: u16 = 3;
    const MULTI_QUEUE: u16 = 7;
    let byte = |kind| {
        let mut found = properties.iter().filter(|it| it.kind() == kind);
        let found = found.find(|it| it.value_len() == 1)?;
        let mut value = [0];
        found.emit_value(&mut value);
        Some(i32::from(value[0]))
    };
    (byte(TYPE)? == libc::IFF_TAP).then_some(byte(MULTI_QUEUE)? != 0)
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

pub(super) fn route(message: &RouteMessage) -> Option<Route> {
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
    };
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Table(number) => table = *number,
            RouteAttribute::Destination(address) => route.destination = ip(address)?,
            RouteAttribute::Oif(ifindex) => route.oif = Some(IfIndex::new(*ifindex)),
            RouteAttribute::Gateway(address) => route.gateway = ip(address),
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
    if let Some(hops) = hops {
        let out = RouteNextHopFlags::Dead | RouteNextHopFlags::Linkdown;
        let hop = hops.iter().find(|hop| !hop.flags.intersects(out))?;
        route.oif = Some(IfIndex::new(hop.interface_index));
        route.gateway = hop.attributes.iter().find_map(|attribute| match attribute {
            RouteAttribute::Gateway(address) => ip(address),
            _ => None,
        });
    }
    Some(route)
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
        is_by_more: header.tos != 0,
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
            RuleAttribute::SuppressIfGroup(group) => rule.is_by_more |= *group != u32::MAX,
            RuleAttribute::TunId(id) => rule.is_by_more |= *id != 0,
            RuleAttribute::UidRange(_)
            | RuleAttribute::IpProtocol(_)
            | RuleAttribute::SourcePortRange(_)
            | RuleAttribute::DestinationPortRange(_) => rule.is_by_more = true,
            RuleAttribute::Other(_) => rule.is_by_more = true,
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
