//! The Internet checksum (RFC 1071), computed in full. For incremental updates see
//! `slipgate_abi::checksum`.
use std::net::IpAddr;

/// A running one's complement sum of 16-bit words in network order.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sum(u64);

impl Sum {
    /// Adds bytes. An odd last byte counts as if followed by a zero, so only the last part may have
    /// an odd length.
    #[must_use]
    pub fn bytes(mut self, bytes: &[u8]) -> Self {
        let mut words = bytes.chunks_exact(4);
        for word in &mut words {
            self.0 += u64::from(u32::from_be_bytes([word[0], word[1], word[2], word[3]]));
        }
        let mut last = [0; 4];
        last[..words.remainder().len()].copy_from_slice(words.remainder());
        self.0 += u64::from(u32::from_be_bytes(last));
        self
    }

    /// Adds the pseudo-header of the addresses' family (RFC 9293 section 3.1, RFC 8200 section
    /// 8.1). `len`: L4 header and payload, bytes.
    #[must_use]
    pub fn pseudo(
        mut self,
        source: impl Into<IpAddr>,
        destination: impl Into<IpAddr>,
        protocol: u8,
        len: usize,
    ) -> Self {
        for addr in [source.into(), destination.into()] {
            self = match addr {
                IpAddr::V4(addr) => self.bytes(&addr.octets()),
                IpAddr::V6(addr) => self.bytes(&addr.octets()),
            };
        }
        self.0 += u64::from(protocol) + len as u64;
        self
    }

    /// Returns the sum folded to 16 bits, not complemented: the content of a partial checksum
    /// field.
    pub fn folded(self) -> u16 {
        let mut sum = self.0;
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        sum as u16
    }

    /// Returns the checksum: the complement of the folded sum.
    pub fn finish(self) -> u16 {
        !self.folded()
    }
}

/// Returns the checksum of bytes whose checksum field is zero. If the field is in place, returns 0
/// when it is correct.
pub fn of(bytes: &[u8]) -> u16 {
    Sum::default().bytes(bytes).finish()
}

/// Updates a checksum field in place after one of its 16-bit words changed.
pub fn replace16(field: &mut [u8; 2], old: u16, new: u16) {
    let sum = u16::from_be_bytes(*field);
    *field = slipgate_abi::checksum::update16(sum, old, new).to_be_bytes();
}

/// Updates a checksum field in place after an address under it changed to another of its family.
pub fn replace_address(field: &mut [u8; 2], old: impl Into<IpAddr>, new: impl Into<IpAddr>) {
    let mut words = |old: &[u8], new: &[u8]| {
        for (old, new) in old.chunks_exact(2).zip(new.chunks_exact(2)) {
            let word = |bytes: &[u8]| u16::from_be_bytes([bytes[0], bytes[1]]);
            replace16(field, word(old), word(new));
        }
    };
    match (old.into(), new.into()) {
        (IpAddr::V4(old), IpAddr::V4(new)) => words(&old.octets(), &new.octets()),
        (IpAddr::V6(old), IpAddr::V6(new)) => words(&old.octets(), &new.octets()),
        _ => {}
    }
}
