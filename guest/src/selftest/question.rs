//! A frame that a DHCP server answers: DHCPDISCOVER (RFC 2131), by broadcast.

const ETHERNET: usize = 14;
const IP: usize = ETHERNET;
const UDP: usize = IP + 20;
const BOOTP: usize = UDP + 8;
/// Length of the frame, bytes: the least that a BOOTP relay takes (RFC 1542, 2.1), with headers.
pub(super) const BYTES: usize = BOOTP + 300;
/// Offset of the UDP header in the frame, and of the checksum in that header.
pub(super) const CHECKSUM: (u16, u16) = (UDP as u16, 6);

const COOKIE: [u8; 4] = [99, 130, 83, 99];

/// Returns a DHCPDISCOVER from `mac`. It has no UDP checksum, which is optional.
pub(super) fn ask(mac: [u8; 6], transaction: u32) -> [u8; BYTES] {
    let mut frame = [0; BYTES];
    let mut put = |at: usize, bytes: &[u8]| frame[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &[0xFF; 6]);
    put(6, &mac);
    put(12, &[0x08, 0x00]);
    put(IP, &[0x45, 0]);
    put(IP + 2, &((BYTES - IP) as u16).to_be_bytes());
    put(IP + 8, &[64, 17]);
    put(IP + 16, &[0xFF; 4]);
    put(UDP, &[0, 68, 0, 67]);
    put(UDP + 4, &((BYTES - UDP) as u16).to_be_bytes());
    put(BOOTP, &[1, 1, 6, 0]);
    put(BOOTP + 4, &transaction.to_be_bytes());
    put(BOOTP + 10, &[0x80, 0]); // answer by broadcast
    put(BOOTP + 28, &mac);
    put(BOOTP + 236, &COOKIE);
    put(BOOTP + 240, &[53, 1, 1, 255]); // DHCPDISCOVER, end
    let sum = !ones_complement(&frame[IP..UDP]);
    frame[IP + 10..IP + 12].copy_from_slice(&sum.to_be_bytes());
    frame
}

/// Leaves the UDP checksum to the device: puts the pseudo header's sum in its place.
pub(super) fn leave_checksum(frame: &mut [u8; BYTES]) {
    let length = (BYTES - UDP) as u16;
    let mut pseudo = [0; 12];
    pseudo[..8].copy_from_slice(&frame[IP + 12..IP + 20]);
    pseudo[9] = 17;
    pseudo[10..].copy_from_slice(&length.to_be_bytes());
    let sum = ones_complement(&pseudo);
    frame[UDP + 6..UDP + 8].copy_from_slice(&sum.to_be_bytes());
}

/// Returns whether `frame` answers the request with this transaction id.
pub(super) fn is_answer(frame: &[u8], transaction: u32) -> bool {
    let at = |offset: usize, bytes: &[u8]| frame.get(offset..offset + bytes.len()) == Some(bytes);
    at(12, &[0x08, 0x00])
        && at(IP, &[0x45])
        && at(IP + 9, &[17])
        && at(UDP + 2, &[0, 68])
        && at(BOOTP, &[2])
        && at(BOOTP + 4, &transaction.to_be_bytes())
        && at(BOOTP + 236, &COOKIE)
}

fn ones_complement(bytes: &[u8]) -> u16 {
    let sum: u32 = bytes
        .chunks_exact(2)
        .map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])))
        .sum();
    let folded = (sum & 0xFFFF) + (sum >> 16);
    ((folded & 0xFFFF) + (folded >> 16)) as u16
}

#[cfg(test)]
#[path = "question_test.rs"]
mod tests;
