//! Count of the frames that the guest sends, by kinds that matter to the engine. It counts at the
//! guest's own link and so does not depend on slipgate's figures.

use std::{
    net::{Ipv6Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use crate::{
    addresses_ipv6::GATEWAY6,
    error::Result,
    frame::{Packet, tcp_flags},
    guest::Guest,
    pump::{Direction, Fate},
    tap::VnetHdr,
};

/// Next header of hop-by-hop options, which messages about listeners have.
const HOP_BY_HOP: u8 = 0;
const ICMPV6: u8 = 58;
/// The first of ICMPv6's types that are valid on the link only, a query of listeners (RFC 2710), and the
/// one of a neighbour solicitation.
const FIRST_OF_LINK: u8 = 130;
const SOLICITATION: u8 = 135;

/// Frames that the guest sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// TCP SYN without ACK.
    pub syn: u64,
    /// Other packets to port 53.
    pub dns: u64,
    /// DHCP messages to port 67.
    pub dhcp: u64,
    /// ARP requests and neighbour solicitations for the gateway, which the kernel answers.
    pub arp_gateway: u64,
    /// ARP packets of other kinds, and IPv6's other messages to neighbours, routers and listeners.
    pub arp: u64,
    /// All other frames: data.
    pub data: u64,
}

impl Sent {
    /// Number of frames that the engine has to handle: openings, DNS questions, DHCP, and ARP that
    /// is not for the gateway.
    pub fn for_the_engine(&self) -> u64 {
        self.syn + self.dns + self.dhcp + self.arp
    }
}

#[derive(Default)]
struct Counters {
    syn: AtomicU64,
    dns: AtomicU64,
    dhcp: AtomicU64,
    arp_gateway: AtomicU64,
    arp: AtomicU64,
    data: AtomicU64,
}

/// A count in progress.
pub struct Census(Arc<Counters>);

impl Census {
    /// Starts counting. Replaces the guest's filter.
    ///
    /// # Errors
    /// The guest is unplugged.
    pub fn start(guest: &Guest) -> Result<Census> {
        let counters = Arc::new(Counters::default());
        let theirs = counters.clone();
        let gateway = guest.config().gateway.octets();
        let look = move |direction: Direction, _: &VnetHdr, frame: &[u8]| {
            if direction == Direction::Out {
                theirs.kind(frame, gateway).fetch_add(1, Relaxed);
            }
            Fate::Pass
        };
        guest.set_filter(Some(Box::new(look)))?;
        Ok(Census(counters))
    }

    /// Ends the count and returns the frames sent since the start.
    ///
    /// # Errors
    /// The guest is unplugged.
    pub fn finish(self, guest: &Guest) -> Result<Sent> {
        guest.set_filter(None)?;
        let Counters {
            syn,
            dns,
            dhcp,
            arp_gateway,
            arp,
            data,
        } = &*self.0;
        Ok(Sent {
            syn: syn.load(Relaxed),
            dns: dns.load(Relaxed),
            dhcp: dhcp.load(Relaxed),
            arp_gateway: arp_gateway.load(Relaxed),
            arp: arp.load(Relaxed),
            data: data.load(Relaxed),
        })
    }
}

impl Counters {
    fn kind(&self, frame: &[u8], gateway: [u8; 4]) -> &AtomicU64 {
        let Some(packet) = Packet::of_ethernet(frame) else {
            // RFC 826: a request, and the target's address.
            let asks = frame.get(20..22) == Some(&[0, 1]);
            return match asks && frame.get(38..42) == Some(&gateway) {
                true => &self.arp_gateway,
                false => &self.arp,
            };
        };
        let handshake = tcp_flags::SYN | tcp_flags::ACK;
        match (packet.protocol, packet.destination.port()) {
            (ICMPV6, _) => match packet.icmp() {
                Some((SOLICITATION, _)) if asks_for(&packet, GATEWAY6) => &self.arp_gateway,
                Some((FIRST_OF_LINK.., _)) => &self.arp,
                _ => &self.data,
            },
            (HOP_BY_HOP, _) => &self.arp,
            (_, 53) => &self.dns,
            (17, 67) => &self.dhcp,
            (6, _) if packet.tcp_flags().unwrap_or(0) & handshake == tcp_flags::SYN => &self.syn,
            _ => &self.data,
        }
    }
}

fn asks_for(solicitation: &Packet<'_, SocketAddr>, target: Ipv6Addr) -> bool {
    solicitation.transport().get(8..24) == Some(&target.octets())
}
