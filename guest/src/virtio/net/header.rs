//! `struct virtio_net_hdr`: the offloads of a frame. The driver writes it for sent frames, and
//! reads it for received ones.

/// Length of the header with VERSION_1, bytes.
pub(super) const BYTES: usize = 12;
const NEEDS_CSUM: u8 = 1;
const DATA_VALID: u8 = 2;
const GSO_TCPV4: u8 = 1;
const GSO_TCPV6: u8 = 4;
const GSO_UDP_L4: u8 = 5;

const ETHERNET: usize = 14;
const IPV4: [u8; 2] = [0x08, 0x00];
const IPV6: [u8; 2] = [0x86, 0xDD];
/// Length of the IPv6 header, bytes.
const IPV6_HEADER: usize = 40;
const TCP: u8 = 6;
const UDP: u8 = 17;

/// Protocol and offsets of an IP frame.
struct Layers {
    protocol: u8,
    /// GSO type of a large TCP frame.
    gso_tcp: u8,
    /// Offset of the TCP or UDP header.
    transport: usize,
    /// Offset of the end of the IP packet.
    end: usize,
    /// Sum of the pseudo header.
    pseudo: u64,
}

/// Finds TCP or UDP in an unfragmented IPv4 frame, or in an IPv6 frame without extension headers;
/// `None` for other frames.
fn layers(frame: &[u8]) -> Option<Layers> {
    let ip = frame.get(ETHERNET..)?;
    let version = ip.first()? >> 4;
    let (protocol, header, total, addresses, gso_tcp) =
        match <[u8; 2]>::try_from(frame.get(12..14)?).ok()? {
            IPV4 if ip.len() >= 20 && version == 4 => {
                let header = usize::from(ip[0] & 0xF) * 4;
                let fragment = u16::from_be_bytes([ip[6], ip[7]]) & 0x3FFF;
                if header < 20 || fragment != 0 {
                    return None;
                }
                let total = usize::from(u16::from_be_bytes([ip[2], ip[3]]));
                (ip[9], header, total, &ip[12..20], GSO_TCPV4)
            }
            IPV6 if ip.len() >= IPV6_HEADER && version == 6 => {
                let total = IPV6_HEADER + usize::from(u16::from_be_bytes([ip[4], ip[5]]));
                (ip[6], IPV6_HEADER, total, &ip[8..IPV6_HEADER], GSO_TCPV6)
            }
            _ => return None,
        };
    let least = match protocol {
        TCP => 20,
        UDP => 8,
        _ => return None,
    };
    if total < header + least || total > ip.len() {
        return None;
    }
    let pseudo = sum(addresses) + u64::from(protocol) + (total - header) as u64;
    Some(Layers {
        protocol,
        gso_tcp,
        transport: ETHERNET + header,
        end: ETHERNET + total,
        pseudo,
    })
}

/// Returns the header for a frame to be sent. The device completes the TCP or UDP checksum, and
/// segments the frame if `segment_bytes` is given.
pub(super) fn prepare(frame: &mut [u8], segment_bytes: Option<u16>) -> [u8; BYTES] {
    let mut header = [0; BYTES];
    let Some(Layers {
        protocol,
        gso_tcp,
        transport,
        pseudo,
        ..
    }) = layers(frame)
    else {
        return header;
    };
    let (at, length) = if protocol == TCP {
        (16, usize::from(frame[transport + 12] >> 4) * 4)
    } else {
        (6, 8)
    };
    frame[transport + at..transport + at + 2].copy_from_slice(&fold(pseudo).to_be_bytes());
    header[0] = NEEDS_CSUM;
    header[6..8].copy_from_slice(&(transport as u16).to_le_bytes());
    header[8..10].copy_from_slice(&(at as u16).to_le_bytes());
    if let Some(segment_bytes) = segment_bytes {
        header[1] = if protocol == TCP { gso_tcp } else { GSO_UDP_L4 };
        header[2..4].copy_from_slice(&((transport + length) as u16).to_le_bytes());
        header[4..6].copy_from_slice(&segment_bytes.to_le_bytes());
    }
    header
}

/// Returns the number of receive buffers that the frame takes, by its header.
pub(super) fn buffers(header: &[u8]) -> u16 {
    u16::from_le_bytes([header[10], header[11]])
}

/// Returns whether the sender, or the device, has checked the frame's checksum.
pub(super) fn vouched(header: &[u8]) -> bool {
    header[0] & (NEEDS_CSUM | DATA_VALID) != 0
}

/// Checks the TCP or UDP checksum of a received frame. Returns true for a frame without one. By
/// IPv6 a UDP checksum of 0 is wrong (RFC 8200, 8.1).
pub(super) fn is_intact(frame: &[u8]) -> bool {
    let Some(Layers {
        protocol,
        transport,
        end,
        pseudo,
        ..
    }) = layers(frame)
    else {
        return true;
    };
    if protocol == UDP && frame[transport + 6..transport + 8] == [0, 0] {
        return frame[12..14] == IPV4;
    }
    fold(pseudo + sum(&frame[transport..end])) == 0xFFFF
}

/// Returns the ones' complement sum of big-endian 16-bit words, unfolded.
fn sum(bytes: &[u8]) -> u64 {
    let mut words = bytes.chunks_exact(4);
    let total: u64 = words
        .by_ref()
        .map(|word| u64::from(u32::from_be_bytes([word[0], word[1], word[2], word[3]])))
        .sum();
    let mut last = [0; 4];
    last[..words.remainder().len()].copy_from_slice(words.remainder());
    total + u64::from(u32::from_be_bytes(last))
}

fn fold(mut sum: u64) -> u16 {
    while sum >> 16 != 0 {
        sum = (sum & 0xFFFF) + (sum >> 16);
    }
    sum as u16
}

#[cfg(test)]
#[path = "header_test.rs"]
mod tests;
