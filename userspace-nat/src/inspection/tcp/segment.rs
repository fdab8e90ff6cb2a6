//! Segments that a session receives and sends.
use std::net::IpAddr;

use slipgate_abi::tcp::Flags;

use crate::{
    inspection::tcp::Options,
    packet::{
        build,
        checksum::Sum,
        transport::{OPTION_TIMESTAMPS, Tcp},
    },
};

/// A segment that was received.
#[derive(Clone, Copy, Debug)]
pub struct Received<'s> {
    /// Sequence number of the first octet.
    pub sequence: u32,
    /// Acknowledgement number, valid with ACK.
    pub acknowledgement: u32,
    /// Flags as in [`slipgate_abi::tcp::Flags`].
    pub flags: u8,
    /// Window field, not scaled.
    pub window: u16,
    /// TCP options of the segment.
    pub options: Options,
    /// Payload of the segment.
    pub payload: &'s [u8],
}

impl<'s> Received<'s> {
    /// Parses a segment from its header and the IP payload that begins with it.
    pub fn new(tcp: &Tcp, l4: &'s [u8]) -> Self {
        let (header, payload) = l4.split_at(tcp.header_len.min(l4.len()));
        Self {
            sequence: tcp.sequence,
            acknowledgement: tcp.acknowledgement,
            flags: tcp.flags,
            window: tcp.window,
            options: Options::parse(header),
            payload,
        }
    }

    pub(super) fn has(&self, flags: u8) -> bool {
        self.flags & flags == flags
    }

    pub(super) fn is_syn(&self) -> bool {
        self.has(Flags::SYN)
    }

    pub(super) fn sequence_len(&self) -> u32 {
        let flags = u32::from(self.is_syn()) + u32::from(self.has(Flags::FIN));
        self.payload.len() as u32 + flags
    }
}

/// A segment to send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment<'s> {
    /// Sequence number of the first octet.
    pub sequence: u32,
    /// Acknowledgement number, valid with ACK.
    pub acknowledgement: u32,
    /// Flags as in [`slipgate_abi::tcp::Flags`].
    pub flags: u8,
    /// Window field, not scaled.
    pub window: u16,
    /// Timestamp value and echo reply, if sent.
    pub time: Option<(u32, u32)>,
    /// Payload of the segment.
    pub payload: &'s [u8],
}

/// Output for a session's segments.
pub trait Wire {
    /// Sends a segment to the server, as if from the guest.
    fn to_server(&mut self, segment: &Segment<'_>);
    /// Sends a bare header to the server. The implementation fills in its checksum.
    fn syn_to_server(&mut self, header: &[u8]);
    /// Sends a segment to the guest, as if from the server.
    fn to_guest(&mut self, segment: &Segment<'_>);
    /// Number of segments sent to the server so far.
    fn sent_to_server(&self) -> usize;
}

impl Segment<'_> {
    /// A segment with RST in its flags.
    pub(super) const fn reset(sequence: u32, acknowledgement: u32, flags: u8) -> Self {
        Self {
            sequence,
            acknowledgement,
            flags,
            window: 0,
            time: None,
            payload: &[],
        }
    }

    /// Builds the packet with its checksums in `out`, which is cleared first.
    pub fn build(&self, out: &mut Vec<u8>, from: (IpAddr, u16), to: (IpAddr, u16)) {
        build::ip(out, from.0, to.0, 6, |out| {
            let begin = out.len();
            out.extend_from_slice(&from.1.to_be_bytes());
            out.extend_from_slice(&to.1.to_be_bytes());
            out.extend_from_slice(&self.sequence.to_be_bytes());
            out.extend_from_slice(&self.acknowledgement.to_be_bytes());
            let words = if self.time.is_some() { 8 } else { 5 };
            out.extend_from_slice(&[words << 4, self.flags]);
            out.extend_from_slice(&self.window.to_be_bytes());
            out.extend_from_slice(&[0; 4]);
            if let Some((value, echo)) = self.time {
                // Two NOPs align it (RFC 7323 appendix A).
                out.extend_from_slice(&[1, 1, OPTION_TIMESTAMPS, 10]);
                out.extend_from_slice(&value.to_be_bytes());
                out.extend_from_slice(&echo.to_be_bytes());
            }
            out.extend_from_slice(self.payload);
            fill_checksum(&mut out[begin..], from.0, to.0);
        });
    }
}

/// Builds a packet of a bare TCP header with its checksum in `out`, which is cleared first.
pub fn build_header(out: &mut Vec<u8>, from: IpAddr, to: IpAddr, header: &[u8]) {
    build::ip(out, from, to, 6, |out| {
        let begin = out.len();
        out.extend_from_slice(header);
        fill_checksum(&mut out[begin..], from, to);
    });
}

fn fill_checksum(segment: &mut [u8], from: IpAddr, to: IpAddr) {
    let Some(field) = segment.get_mut(16..18) else {
        return;
    };
    field.fill(0);
    let sum = Sum::default()
        .pseudo(from, to, 6, segment.len())
        .bytes(segment)
        .finish();
    segment[16..18].copy_from_slice(&sum.to_be_bytes());
}
