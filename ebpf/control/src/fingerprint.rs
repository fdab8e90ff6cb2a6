//! A short name for bytes that is the same in every version of slipgate, whatever compiled it: two
//! versions that serve one directory find the same locks. (std's hashes promise nothing of the kind.)

/// FNV-1a of 64 bits, in hexadecimal. It keeps apart what is different by chance, not what somebody
/// makes to collide.
pub(crate) fn fingerprint(bytes: &[u8]) -> String {
    const BASIS: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0100_0000_01b3;
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(PRIME);
    format!("{:016x}", bytes.iter().fold(BASIS, step))
}

#[cfg(test)]
#[path = "fingerprint_test.rs"]
mod tests;
