//! TCP segments of a guest that follow each other, as one frame with offloads, as GRO makes of them.
//!
//! A frame without offloads costs a run of the programs and a call of its flow's socket. A guest's bulk
//! transfer comes as many segments of the same length at a time, which cost one of each together. Counts
//! and rates are the same, since everything counts as if segmented.
use slipgate_abi::segment::MIN_TCP_GSO_SIZE;

use super::framing::FrameReader;
use crate::{
    gso::Run,
    packet::Version,
    port::{ETHERNET_LEN, ETHERTYPE_IPV4, ETHERTYPE_IPV6, L3_AT, VNET_LEN, VirtioNetHdr},
};

/// Completes the frame at the beginning of `into`, `len` bytes with room for its `virtio_net_hdr`, by the
/// frames that continue it. Returns its length.
pub fn join(reader: &mut FrameReader, into: &mut [u8], len: usize) -> usize {
    let mut end = len;
    let mut run = None;
    if let Some(first) = packet(&into[VNET_LEN..len]) {
        let begun = run.insert(Run::begin(first));
        // Smaller segments together would be taken for a bomb.
        let is_large = begun.segment_len() >= MIN_TCP_GSO_SIZE as usize;
        while is_large
            && let Some(frame) = reader.peek_frame()
            && frame.get(..ETHERNET_LEN) == Some(&into[VNET_LEN..L3_AT])
            && let Some(next) = packet(frame)
            && begun.takes(next)
        {
            begun.add(next);
            let payload = &next[begun.headers_len()..];
            into[end..end + payload.len()].copy_from_slice(payload);
            end += payload.len();
            let _ = reader.next_frame();
        }
    }
    let vnet = match run {
        Some(run) if end > len => run.finish(&mut into[L3_AT..end]),
        _ => VirtioNetHdr::default(),
    };
    into[..VNET_LEN].copy_from_slice(&vnet.encode());
    end
}

/// Returns the IP packet of a frame that has nothing else in it.
fn packet(frame: &[u8]) -> Option<&[u8]> {
    let (ethernet, l3) = frame.split_at_checked(ETHERNET_LEN)?;
    let ethertype = u16::from_be_bytes([ethernet[12], ethernet[13]]);
    let field = |at: usize| {
        Some(usize::from(u16::from_be_bytes([
            *l3.get(at)?,
            *l3.get(at + 1)?,
        ])))
    };
    let total = match ethertype {
        ETHERTYPE_IPV4 => field(2)?,
        ETHERTYPE_IPV6 => field(4)? + Version::V6.header_len(),
        _ => return None,
    };
    (total == l3.len()).then_some(l3)
}

#[cfg(test)]
#[path = "joining_test.rs"]
mod tests;
