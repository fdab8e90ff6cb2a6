//! A frame in processing, and its outcome.
use slipgate_abi::{Command, DropReason, SlotIndex, portframe::PortFlags, segment};

use crate::{
    packet::{Ip, Ipv4, Ipv6, Packet, Transport},
    packet_path::{change::Change, hairpin::BackIn},
    poll::Poller,
    port::{ETHERTYPE_ARP, ETHERTYPE_IPV4, ETHERTYPE_IPV6, Frame, VirtioNetHdr},
};

/// Result of handling a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Disposition {
    /// The header was rewritten, and the frame is to be written to the port.
    Send,
    /// The same, and the frame orders the insertion of this flow's tuples. After it is written,
    /// [`Core::written`](crate::state::Core::written) has to be called.
    Open(SlotIndex),
    /// The frame was written already.
    Sent,
    /// The frame was dropped and counted.
    Dropped(DropReason),
    /// A service or the engine consumed the frame.
    Consumed,
}

/// A parsed frame, with its packet.
#[derive(Clone, Copy)]
pub(crate) struct Job<'a> {
    pub(crate) frame: Frame<'a>,
    pub(crate) packet: Packet<'a>,
    /// Largest fragment in which the packet came, L3 bytes; `None`: it came whole.
    pub(crate) fragment_size: Option<u32>,
    pub(crate) poller: &'a Poller,
    /// Time at which the frame's batch was read.
    pub(crate) now_ns: u64,
}

impl Job<'_> {
    /// Whether a guest sent the packet to a translated address, and the engine led it back in.
    pub(super) fn is_led_back(&self) -> bool {
        self.frame.header.flags & PortFlags::HAIRPIN != 0
    }

    /// Returns the size of the largest packet that the frame becomes, bytes.
    pub(super) fn largest(&self) -> u32 {
        let vnet = self.frame.vnet;
        let gso_size = if vnet.gso_type == VirtioNetHdr::GSO_NONE {
            0
        } else {
            vnet.gso_size
        };
        segment::largest_packet(
            self.packet.ip.bytes.len() as u32,
            self.packet.headers_len() as u32,
            u32::from(gso_size),
        )
    }
}

/// Result of handling a packet, applied to the frame's bytes once the packet's views are dropped.
pub(crate) enum Finish {
    Dispose(Disposition),
    Drop(DropReason),
    Command {
        code: Command,
        change: Option<Change>,
    },
    /// The frame goes to a guest's translated address.
    BackIn(BackIn),
}

/// Reason why a frame holds no packet that can be handled.
pub(crate) enum Unread<'p> {
    Arp,
    /// Its IPv4 header has options.
    Options(Packet<'p>),
    Drop(DropReason),
}

impl Unread<'_> {
    pub(crate) fn reason(&self) -> DropReason {
        match self {
            Self::Arp => DropReason::EtherType,
            Self::Options(_) => DropReason::IpOptions,
            Self::Drop(reason) => *reason,
        }
    }
}

/// Parses the packet of a frame. The kernel has verified the IP header's checksum.
pub(crate) fn read(frame: Frame<'_>) -> Result<Packet<'_>, Unread<'_>> {
    let drop = Unread::Drop;
    let malformed = |_| drop(DropReason::Malformed);
    let (ip, has_options): (Ip<'_>, bool) = match frame.ethertype {
        ETHERTYPE_IPV4 => {
            let ip = Ipv4::parse(frame.l3).map_err(malformed)?;
            if ip.is_fragment() {
                return Err(drop(DropReason::Fragment));
            }
            (ip.into(), ip.has_options())
        }
        ETHERTYPE_IPV6 => {
            let ip = Ipv6::parse(frame.l3).map_err(malformed)?;
            if ip.is_fragment() {
                return Err(drop(DropReason::Fragment));
            }
            if ip.has_extension() {
                return Err(drop(DropReason::ExtensionHeader));
            }
            (ip.into(), false)
        }
        ETHERTYPE_ARP => return Err(Unread::Arp),
        _ => return Err(drop(DropReason::EtherType)),
    };
    let packet = Packet::parse(ip).map_err(malformed)?;
    if packet.transport == Transport::Other {
        return Err(drop(DropReason::IpProtocol));
    }
    match has_options {
        true => Err(Unread::Options(packet)),
        false => Ok(packet),
    }
}
