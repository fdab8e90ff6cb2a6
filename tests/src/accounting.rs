//! Packets and bytes per flow as if segmented, counted in the same way as slipgate does.
//!
//! A GSO frame counts as the segments it stands for, each with its own IP and transport header;
//! bytes are L3 bytes (the IP total length), so Ethernet headers and padding do not count.

use std::{collections::HashMap, net::SocketAddr};

pub use crate::frame::FlowKey;
use crate::{
    frame::{Packet, tcp_flags},
    tap::VnetHdr,
};

/// Traffic in one direction of one flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Packets, as if segmented.
    pub packets: u64,
    /// L3 bytes, as if segmented.
    pub bytes: u64,
}

impl Counts {
    fn add(&mut self, other: Counts) {
        self.packets += other.packets;
        self.bytes += other.bytes;
    }
}

/// Traffic per direction of each flow, and frames of neither family.
#[derive(Clone, Debug, Default)]
pub struct FlowCounts {
    /// Traffic of each direction.
    pub flows: HashMap<FlowKey, Counts>,
    /// TCP resets among them, where there were any.
    pub resets: HashMap<FlowKey, u64>,
    /// Frames that carried no readable IP packet (ARP among them).
    pub other_frames: u64,
    /// Frames that stood for several segments.
    pub gso_frames: u64,
    /// The longest IP packet seen, in bytes, GSO frames whole.
    pub longest_bytes: u64,
    /// The longest packet as it would be on the wire, GSO frames segmented, in bytes.
    pub longest_segment_bytes: u64,
}

impl FlowCounts {
    /// Counts one frame. `packet`: the parsed packet in it.
    pub(crate) fn add(&mut self, vnet: &VnetHdr, packet: Option<&Packet<'_, SocketAddr>>) {
        let Some(packet) = packet else {
            self.other_frames += 1;
            return;
        };
        let measured = measure(vnet, packet);
        self.flows
            .entry(packet.flow_key())
            .or_default()
            .add(measured.counts);
        if packet
            .tcp_flags()
            .is_some_and(|flags| flags & tcp_flags::RST != 0)
        {
            *self.resets.entry(packet.flow_key()).or_default() += 1;
        }
        self.gso_frames += u64::from(measured.counts.packets > 1);
        self.longest_bytes = self.longest_bytes.max(packet.total_len as u64);
        self.longest_segment_bytes = self.longest_segment_bytes.max(measured.longest_segment);
    }

    /// Returns the traffic of one direction; zero when it was never seen.
    pub fn of(&self, key: FlowKey) -> Counts {
        self.flows.get(&key).copied().unwrap_or_default()
    }

    /// The sum over the directions that `wanted` picks.
    pub fn sum(&self, wanted: impl Fn(&FlowKey) -> bool) -> Counts {
        let mut total = Counts::default();
        self.flows
            .iter()
            .filter(|(key, _)| wanted(key))
            .for_each(|(_, counts)| total.add(*counts));
        total
    }
}

struct Measured {
    counts: Counts,
    longest_segment: u64,
}

fn measure(vnet: &VnetHdr, packet: &Packet<'_, SocketAddr>) -> Measured {
    let total = packet.total_len as u64;
    let headers = (packet.header_len + packet.transport_header_len) as u64;
    let segment = u64::from(vnet.gso_size);
    let payload = total.saturating_sub(headers);
    if !vnet.is_gso() || segment == 0 || payload <= segment {
        return Measured {
            counts: Counts {
                packets: 1,
                bytes: total,
            },
            longest_segment: total,
        };
    }
    let packets = payload.div_ceil(segment);
    let bytes = payload + packets * headers;
    Measured {
        counts: Counts { packets, bytes },
        longest_segment: segment + headers,
    }
}

#[cfg(test)]
#[path = "accounting_test.rs"]
mod tests;
