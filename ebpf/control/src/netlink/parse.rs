//! Conversion of netlink messages to the types of [`super::network`]. A message that is not about
//! IPv4, or incomplete, gives `None`.

use std::net::{IpAddr, Ipv4Addr};

use netlink_packet_core::Nla as _;
use netlink_packet_route::{
    AddressFamily,
    address::{AddressAttribute, AddressMessage},
    link::{InfoData, InfoTun, LinkAttribute, LinkFlags, LinkInfo, LinkLayerType, LinkMessage},
    neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourMessage},
    route::{
        RouteAddress, RouteAttribute, RouteFlags, RouteMessage, RouteMetric, RouteNextHop,
        RouteNextHopFlags, RouteType,
    },
};
use slipgate_abi::IfIndex;

use super::network::{Address, Link, Neighbour, Route, RouteKind, Table};

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
    };
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => link.name.clone_from(name),
            LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
            LinkAttribute::Address(mac) => link.mac = mac.as_slice().try_into().ok(),
            LinkAttribute::LinkInfo(infos) => {
                link.kind = infos.iter().find_map(|info| match info {
                    LinkInfo::Kind(kind) => Some(kind.to_string()),
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
    /// `IFLA_TUN_*` of `linux/if_link.h`.
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
    if message.header.family != AddressFamily::Inet {
        return None;
    }
    let (mut own, mut other, mut broadcast) = (None, None, None);
    for attribute in &message.attributes {
        match attribute {
            AddressAttribute::Local(IpAddr::V4(address)) => own = Some(*address),
            // On a point-to-point link the peer's address, otherwise our own.
            AddressAttribute::Address(IpAddr::V4(address)) => other = Some(*address),
            AddressAttribute::Broadcast(address) => broadcast = Some(*address),
            _ => {}
        }
    }
    let address = own.or(other)?;
    Some(Address {
        ifindex: IfIndex::new(message.header.index),
        address,
        prefix_len: message.header.prefix_len,
        broadcast,
        peer: other.filter(|other| *other != address),
    })
}

pub(super) fn route(message: &RouteMessage) -> Option<Route> {
    let header = &message.header;
    if header.address_family != AddressFamily::Inet || header.flags.contains(RouteFlags::Dead) {
        return None;
    }
    let mut table = u32::from(header.table);
    let mut hops: Option<&[RouteNextHop]> = None;
    let mut route = Route {
        destination: Ipv4Addr::UNSPECIFIED,
        prefix_len: header.destination_prefix_length,
        table: Table::Main,
        kind: match header.kind {
            RouteType::Unicast => RouteKind::Unicast,
            RouteType::Local => RouteKind::Local,
            RouteType::Broadcast => RouteKind::Broadcast,
            RouteType::BlackHole => RouteKind::Blackhole,
            RouteType::Unreachable | RouteType::Prohibit | RouteType::Throw => RouteKind::Refused,
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
            RouteAttribute::Destination(RouteAddress::Inet(address)) => {
                route.destination = *address;
            }
            RouteAttribute::Oif(ifindex) => route.oif = Some(IfIndex::new(*ifindex)),
            RouteAttribute::Gateway(RouteAddress::Inet(address)) => route.gateway = Some(*address),
            RouteAttribute::PrefSource(RouteAddress::Inet(address)) => {
                route.source = Some(*address);
            }
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
    route.table = match table {
        254 => Table::Main,
        255 => Table::Local,
        _ => return None,
    };
    if let Some(hops) = hops {
        let out = RouteNextHopFlags::Dead | RouteNextHopFlags::Linkdown;
        let hop = hops.iter().find(|hop| !hop.flags.intersects(out))?;
        route.oif = Some(IfIndex::new(hop.interface_index));
        route.gateway = hop.attributes.iter().find_map(|attribute| match attribute {
            RouteAttribute::Gateway(RouteAddress::Inet(address)) => Some(*address),
            _ => None,
        });
    }
    Some(route)
}

/// Returns a neighbour with its ifindex and address.
pub(super) fn neighbour(message: &NeighbourMessage) -> Option<((IfIndex, Ipv4Addr), Neighbour)> {
    /// `NUD_VALID` of the kernel's `net/neighbour.h`.
    const VALID: u16 = 0x80 | 0x40 | 0x02 | 0x10 | 0x04 | 0x08;
    const PERMANENT: u16 = 0x80;
    let (mut destination, mut mac) = (None, None);
    for attribute in &message.attributes {
        match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(address)) => {
                destination = Some(*address);
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
