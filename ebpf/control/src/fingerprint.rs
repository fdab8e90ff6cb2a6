//! Fingerprints that are the same in every version of slipgate, whatever compiler built it: two
//! versions that serve one directory find the same locks. (std's hashes do not guarantee this.)

/// Returns the 64-bit FNV-1a hash in hexadecimal. It distinguishes accidental differences; it does
/// not resist deliberate collisions.
pub(crate) fn fingerprint(bytes: &[u8]) -> String {
    const BASIS: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0100_0000_01b3;
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(PRIME);
    format!("{:016x}", bytes.iter().fold(BASIS, step))
}

#[cfg(test)]
#[path = "fingerprint_test.rs"]
mod tests;
