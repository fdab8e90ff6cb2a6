//! Frames that hold no packet that could be handled.
use slipgate_abi::DropReason;

use crate::{
    packet::{Ipv4, Packet, Transport},
    port::{ETHERTYPE_ARP, ETHERTYPE_IPV4, ETHERTYPE_IPV6, Frame},
};

/// Why a frame holds no packet that could be handled.
pub(crate) enum Unread {
    Arp,
    Drop(DropReason),
}

impl Unread {
    pub(crate) fn reason(&self) -> DropReason {
        match self {
            Self::Arp => DropReason::EtherType,
            Self::Drop(reason) => *reason,
        }
    }
}

/// The packet that a frame holds.
pub(crate) fn read(frame: Frame<'_>) -> Result<Packet<'_>, Unread> {
    let drop = Unread::Drop;
    match frame.ethertype {
        ETHERTYPE_IPV4 => {}
        ETHERTYPE_ARP => return Err(Unread::Arp),
        ETHERTYPE_IPV6 => return Err(drop(DropReason::Ipv6)),
        _ => return Err(drop(DropReason::EtherType)),
    }
    let ip = Ipv4::parse(frame.l3).map_err(|_| drop(DropReason::Malformed))?;
    if ip.is_fragment() {
        return Err(drop(DropReason::Fragment));
    }
    if ip.has_options() {
        return Err(drop(DropReason::IpOptions));
    }
    let packet = Packet::parse(ip).map_err(|_| drop(DropReason::Malformed))?;
    if packet.transport == Transport::Other {
        return Err(drop(DropReason::IpProtocol));
    }
    Ok(packet)
}
