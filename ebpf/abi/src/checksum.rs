//! Incremental update of the Internet checksum (RFC 1624, equation 3).

/// The checksum after a 16-bit word that it covers changed from `old` to `new`. All three are in
/// the byte order in which they appear in the packet.
#[inline(always)]
pub const fn update16(checksum: u16, old: u16, new: u16) -> u16 {
    fold(!checksum as u32 + !old as u32 as u16 as u32 + new as u32)
}

/// The checksum after a 32-bit word that it covers changed from `old` to `new`. All three are in
/// the byte order in which they appear in the packet.
#[inline(always)]
pub const fn update32(checksum: u16, old: u32, new: u32) -> u16 {
    let old = !old;
    fold((!checksum) as u32 + (old & 0xffff) + (old >> 16) + (new & 0xffff) + (new >> 16))
}

/// The sum by which a checksum changes when an address of four words changes from `old` to `new`, as
/// `bpf_csum_diff` returns it. Words are in the byte order in which they appear in the packet.
#[inline(always)]
pub const fn difference128(old: [u32; 4], new: [u32; 4]) -> u32 {
    let mut sum = 0_u64;
    let mut word = 0;
    while word < 4 {
        sum += !old[word] as u64 + new[word] as u64;
        word += 1;
    }
    let sum = (sum & 0xffff_ffff) + (sum >> 32);
    (sum + (sum >> 32)) as u32
}

/// The checksum of words whose sum this is, all in the byte order in which they appear in the packet.
#[inline(always)]
pub const fn of_sum(sum: u64) -> u16 {
    let sum = (sum & 0xffff_ffff) + (sum >> 32);
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    !(sum as u16)
}

/// Folds a sum of up to 2^16 words to 16 bits and complements it.
#[inline(always)]
const fn fold(sum: u32) -> u16 {
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    !(sum as u16)
}

#[cfg(test)]
#[path = "checksum_test.rs"]
mod tests;
