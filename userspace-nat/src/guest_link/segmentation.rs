//! Frames with offloads as the plain frames that a link without offloads takes: segmented as the kernel
//! does it, and with whole checksums.
use slipgate_abi::{Protocol, tcp::Flags};

use super::framing::FrameQueue;
use crate::{
    packet::{
        Ip, Version,
        checksum::{self, Sum},
        ipv4,
        transport::{TCP_HEADER_LEN, UDP_HEADER_LEN},
    },
    port::{ETHERNET_LEN, VirtioNetHdr},
};

/// Push flag (RFC 9293 section 3.1).
const PSH: u8 = 0x08;
/// Places in a TCP header, bytes.
const TCP_SEQUENCE: usize = 4;
const TCP_FLAGS: usize = 13;

/// Queues a frame as its segments. Returns whether there was room; if not, none of them is queued.
pub fn push(queue: &mut FrameQueue, vnet: VirtioNetHdr, frame: &[u8]) -> bool {
    let Some(headers) = Headers::of(vnet, frame) else {
        if !queue.has_room(1, frame.len()) {
            return false;
        }
        let queued = queue.push(frame, &[]);
        if vnet.needs_csum() {
            complete_checksum(vnet, queued);
        }
        return true;
    };
    let (head, payload) = frame.split_at(headers.len);
    if !fits(queue, headers.len, vnet.gso_size, frame.len()) {
        return false;
    }
    let pieces = payload.chunks(vnet.gso_size.into());
    let last = pieces.len() - 1;
    for (nth, piece) in pieces.enumerate() {
        headers.complete(queue.push(head, piece), vnet, nth, nth == last);
    }
    true
}

/// Whether a queue has room for a frame of `len` bytes, segmented.
pub fn has_room(queue: &FrameQueue, vnet: VirtioNetHdr, len: usize) -> bool {
    if vnet.gso_type == VirtioNetHdr::GSO_NONE {
        return queue.has_room(1, len);
    }
    fits(queue, vnet.hdr_len.into(), vnet.gso_size, len)
}

fn fits(queue: &FrameQueue, headers: usize, gso_size: u16, len: usize) -> bool {
    let payload = len.saturating_sub(headers);
    let frames = payload.div_ceil(usize::from(gso_size).max(1)).max(1);
    queue.has_room(frames, payload + frames * headers)
}

/// Headers of a GSO frame.
#[derive(Clone, Copy, Debug)]
pub(super) struct Headers {
    /// Where the transport header begins in the frame, bytes.
    pub(super) l4: usize,
    /// Where the payload begins.
    pub(super) len: usize,
    is_tcp: bool,
    version: Version,
}

impl Headers {
    /// `None`: it is not a GSO frame, or none that has segments.
    fn of(vnet: VirtioNetHdr, frame: &[u8]) -> Option<Self> {
        let headers = Self::of_whole(vnet.gso_type, frame)?;
        (frame.len() > headers.len && vnet.gso_size > 0).then_some(headers)
    }

    /// Headers of a frame of this GSO type. `None`: it has others, or not all of them.
    pub(super) fn of_whole(gso_type: u8, frame: &[u8]) -> Option<Self> {
        let l3 = frame.get(ETHERNET_LEN..)?;
        let ip = Ip::parse_truncated(l3).ok()?;
        let version = ip.version();
        let is_tcp = match (gso_type, version) {
            (VirtioNetHdr::GSO_TCPV4, Version::V4) | (VirtioNetHdr::GSO_TCPV6, Version::V6) => true,
            (VirtioNetHdr::GSO_UDP_L4, _) => false,
            _ => return None,
        };
        let expected = match is_tcp {
            true => Protocol::Tcp,
            false => Protocol::Udp,
        };
        if ip.protocol != expected as u8 {
            return None;
        }
        let l4 = ETHERNET_LEN + ip.header_len;
        let l4_len = match is_tcp {
            true => usize::from(frame.get(l4 + 12)? >> 4) * 4,
            false => UDP_HEADER_LEN,
        };
        let len = l4 + l4_len;
        let is_whole = l4_len
            >= if is_tcp {
                TCP_HEADER_LEN
            } else {
                UDP_HEADER_LEN
            };
        (is_whole && frame.len() >= len).then_some(Self {
            l4,
            len,
            is_tcp,
            version,
        })
    }

    /// Completes the headers of a segment, which are those of the whole frame.
    fn complete(self, segment: &mut [u8], vnet: VirtioNetHdr, nth: usize, is_last: bool) {
        let (ip, l4) = segment[ETHERNET_LEN..].split_at_mut(self.l4 - ETHERNET_LEN);
        match self.version {
            Version::V4 => {
                let total = (ip.len() + l4.len()) as u16;
                ip[2..4].copy_from_slice(&total.to_be_bytes());
                let id = u16::from_be_bytes([ip[4], ip[5]]).wrapping_add(nth as u16);
                ip[4..6].copy_from_slice(&id.to_be_bytes());
                ipv4::fill_checksum(ip, ip.len());
            }
            Version::V6 => ip[4..6].copy_from_slice(&(l4.len() as u16).to_be_bytes()),
        }
        let checksum_at = if self.is_tcp {
            let place = TCP_SEQUENCE..TCP_SEQUENCE + 4;
            let mut sequence = [0; 4];
            sequence.copy_from_slice(&l4[place.clone()]);
            let before = nth as u32 * u32::from(vnet.gso_size);
            let sequence = u32::from_be_bytes(sequence).wrapping_add(before);
            l4[place].copy_from_slice(&sequence.to_be_bytes());
            if !is_last {
                l4[TCP_FLAGS] &= !(Flags::FIN | PSH);
            }
            16
        } else {
            let len = (l4.len() as u16).to_be_bytes();
            l4[4..6].copy_from_slice(&len);
            6
        };
        l4[checksum_at..checksum_at + 2].fill(0);
        // Protocol and length of the pseudo-header, and its addresses.
        let (protocol, addresses) = match self.version {
            Version::V4 => (ip[9], &ip[12..20]),
            Version::V6 => (ip[6], &ip[8..40]),
        };
        let pseudo = Sum::default().bytes(&[0, protocol]).bytes(addresses);
        let pseudo = pseudo.bytes(&(l4.len() as u16).to_be_bytes());
        fill(l4, checksum_at, pseudo.bytes(l4).finish(), !self.is_tcp);
    }
}

/// Completes a partial checksum, whose field holds the pseudo-header's sum.
fn complete_checksum(vnet: VirtioNetHdr, frame: &mut [u8]) {
    let (start, offset) = (vnet.csum_start.into(), usize::from(vnet.csum_offset));
    if let Some(l4) = frame.get_mut(start..)
        && offset + 2 <= l4.len()
    {
        let sum = checksum::of(l4);
        fill(l4, offset, sum, offset == 6);
    }
}

/// Writes a checksum. Of UDP, 0 would say that there is none (RFC 768; RFC 8200 section 8.1 forbids it).
fn fill(l4: &mut [u8], at: usize, sum: u16, is_udp: bool) {
    let sum = if is_udp && sum == 0 { u16::MAX } else { sum };
    l4[at..at + 2].copy_from_slice(&sum.to_be_bytes());
}

#[cfg(test)]
#[path = "segmentation_test.rs"]
mod tests;
