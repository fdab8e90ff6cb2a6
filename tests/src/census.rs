//! Count of the frames that the guest sends, by kinds that matter to the engine. It counts at the
//! guest's own link and so does not depend on slipgate's figures.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use crate::{
    error::Result,
    frame::{Packet, tcp_flags},
    guest::Guest,
    pump::{Direction, Fate},
    tap::VnetHdr,
};

/// Frames that the guest sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// TCP SYN without ACK.
    pub syn: u64,
    /// Other packets to port 53.
    pub dns: u64,
    /// DHCP messages to port 67.
    pub dhcp: u64,
    /// ARP requests for the gateway, which the kernel answers.
    pub arp_gateway: u64,
    /// ARP packets of other kinds.
    pub arp: u64,
    /// IPv6 packets of any kind.
    pub ipv6: u64,
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
    ipv6: AtomicU64,
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
            ipv6,
            data,
        } = &*self.0;
        Ok(Sent {
            syn: syn.load(Relaxed),
            dns: dns.load(Relaxed),
            dhcp: dhcp.load(Relaxed),
            arp_gateway: arp_gateway.load(Relaxed),
            arp: arp.load(Relaxed),
            ipv6: ipv6.load(Relaxed),
            data: data.load(Relaxed),
        })
    }
}

impl Counters {
    fn kind(&self, frame: &[u8], gateway: [u8; 4]) -> &AtomicU64 {
        if frame.get(12..14) == Some(&[0x86, 0xdd]) {
            return &self.ipv6;
        }
        let Some(packet) = Packet::parse_ethernet(frame) else {
            // RFC 826: a request, and the target's address.
            let asks = frame.get(20..22) == Some(&[0, 1]);
            return match asks && frame.get(38..42) == Some(&gateway) {
                true => &self.arp_gateway,
                false => &self.arp,
            };
        };
        let handshake = tcp_flags::SYN | tcp_flags::ACK;
        match (packet.protocol, packet.destination.port()) {
            (_, 53) => &self.dns,
            (17, 67) => &self.dhcp,
            (6, _) if packet.tcp_flags().unwrap_or(0) & handshake == tcp_flags::SYN => &self.syn,
            _ => &self.data,
        }
    }
}
