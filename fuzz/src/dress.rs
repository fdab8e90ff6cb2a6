//! Completes bytes so that they look like a packet, and mutations reach beyond the first check of a
//! length or a checksum.
use slipgate_abi::Ip4;
use userspace_nat::packet::{
    Ipv4, build,
    checksum::Sum,
    ipv4::{self, HEADER_LEN},
};

/// Fields to correct, one bit each.
pub(crate) mod bit {
    /// Version, and the total length from the number of bytes.
    pub(crate) const LENGTH: u8 = 1;
    /// Source address: the sender's.
    pub(crate) const SOURCE: u8 = 2;
    /// Checksum of the IP header.
    pub(crate) const CHECKSUM: u8 = 4;
    /// Checksum of TCP, UDP or ICMP.
    pub(crate) const L4_CHECKSUM: u8 = 8;
    /// No fragment and no options.
    pub(crate) const WHOLE: u8 = 16;
    /// Every field is corrected.
    pub(crate) const ALL: u8 = 31;
}

/// Corrects the fields that `bits` select.
pub(crate) fn dress(packet: &mut [u8], bits: u8, source: Ip4) {
    if packet.len() < HEADER_LEN {
        return;
    }
    let has = |bit: u8| bits & bit != 0;
    if has(bit::LENGTH) {
        let total = u16::try_from(packet.len()).unwrap_or(u16::MAX);
        packet[0] = 0x40 | packet[0] & 0x0f;
        packet[2..4].copy_from_slice(&total.to_be_bytes());
    }
    if has(bit::WHOLE) {
        packet[0] = packet[0] & 0xf0 | 5;
        packet[6] &= 0x40;
        packet[7] = 0;
    }
    if has(bit::SOURCE) {
        packet[12..16].copy_from_slice(&source.octets);
    }
    let Ok(ip) = Ipv4::parse(packet) else {
        return;
    };
    let (header_len, total) = (ip.header_len, ip.bytes.len());
    let pseudo = Sum::default().pseudo(ip.source, ip.destination, ip.protocol, total - header_len);
    let (protocol, addresses) = (ip.protocol, (ip.source, ip.destination));
    if has(bit::CHECKSUM) {
        ipv4::fill_checksum(packet, header_len);
    }
    let l4 = &mut packet[header_len..total];
    if !has(bit::L4_CHECKSUM) || l4.len() < 8 {
        return;
    }
    let at = match protocol {
        1 => return build::fill_icmp_checksum(addresses.0, addresses.1, l4),
        6 if l4.len() >= HEADER_LEN => 16,
        17 => 6,
        _ => return,
    };
    l4[at..at + 2].fill(0);
    let sum = pseudo.bytes(l4).finish();
    l4[at..at + 2].copy_from_slice(&sum.to_be_bytes());
}
