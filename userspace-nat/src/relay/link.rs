//! Frames of relayed connections for a guest: TCP headers and payload, with what a device needs to
//! segment them.
use std::net::SocketAddr;

use slipgate_abi::segment::{self, Segments};

use crate::{
    packet::{Ip, Packet, Transport, Version, transport::Tcp},
    port::{ETHERNET_LEN, L3_AT, LEAST_ROOM, VirtioNetHdr, single},
    tcp::{
        EarlyRoom, Header, SCRATCH_LEN, Segment, Sendable, Workspace, headers_len, write_headers,
    },
    vm::VmNet,
};

/// Length of the buffer that is kept between calls.
const KEPT_LEN: usize = 1 << 20;
/// More than the headers of a frame, and least payload for which one is begun.
const MOST_HEADERS_LEN: usize = 128;
const LEAST_PAYLOAD: usize = 1_500;
// Or a connection could not send where its turn is said to have come.
const _: () = assert!(LEAST_PAYLOAD + MOST_HEADERS_LEN + L3_AT <= LEAST_ROOM);

/// Frames for the guest, one after another in a reused buffer.
#[derive(Debug, Default)]
pub(super) struct Packets {
    /// The first `used` bytes are frames; what is behind them is whatever was there before.
    bytes: Vec<u8>,
    used: usize,
    frames: Vec<(VirtioNetHdr, usize, Segments)>,
    /// Where bytes go that are not looked at.
    scratch: Vec<u8>,
}

impl Packets {
    pub(super) fn clear(&mut self) {
        self.used = 0;
        self.frames.clear();
        if self.bytes.len() > KEPT_LEN {
            self.bytes.truncate(KEPT_LEN);
            self.bytes.shrink_to(KEPT_LEN);
        }
    }

    /// Bytes that the frames and one more, without its payload, take of an outbox.
    fn taken_with_one_more(&self) -> usize {
        self.used + MOST_HEADERS_LEN + (self.frames.len() + 1) * L3_AT
    }

    /// Returns room for a frame's payload of up to `most` bytes behind its headers, and a place for
    /// bytes that are not looked at.
    fn room(&mut self, headers_len: usize, most: usize) -> (&mut [u8], &mut [u8]) {
        let start = self.used + headers_len;
        self.grow(start + most);
        self.scratch.resize(SCRATCH_LEN, 0);
        (&mut self.bytes[start..start + most], &mut self.scratch)
    }

    fn grow(&mut self, len: usize) {
        if self.bytes.len() < len {
            self.bytes.resize(len, 0);
        }
    }

    /// Adds a frame, whose payload is in its place. Returns its count after segmentation.
    fn push(&mut self, ends: Ends, header: &Header, payload_len: usize, mss: u16) -> Segments {
        let headers_len = header.headers_len(Version::of(ends.ours.ip()));
        let end = self.used + headers_len + payload_len;
        self.grow(end);
        let l3 = &mut self.bytes[self.used..end];
        let len = l3.len();
        let offload = write_headers(l3, ends.ours, ends.guest, header, mss);
        let counted = match offload.gso_type {
            VirtioNetHdr::GSO_NONE => single(len),
            _ => {
                let headers_len = usize::from(offload.hdr_len) - ETHERNET_LEN;
                segment::count(len as u32, headers_len as u32, offload.gso_size.into())
            }
        };
        self.used = end;
        self.frames.push((offload, end, counted));
        counted
    }

    /// Returns all frames with their offload headers and their counts after segmentation.
    pub(super) fn frames(&self) -> impl Iterator<Item = (VirtioNetHdr, &[u8], Segments)> {
        let ends = self.frames.iter().map(|(_, end, _)| *end);
        let starts = std::iter::once(0).chain(ends);
        let frames = starts.zip(&self.frames);
        frames
            .map(|(start, (offload, end, counted))| (*offload, &self.bytes[start..*end], *counted))
    }
}

/// Both ends of a connection: the relay's and the guest's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ends {
    pub(super) ours: SocketAddr,
    pub(super) guest: SocketAddr,
}

/// Environment of a connection during a call.
#[derive(Debug)]
pub(super) struct Link<'a> {
    pub(super) out: &'a mut Packets,
    /// Room for the guest's segments that came early.
    early: &'a EarlyRoom,
    pub(super) ends: Ends,
    pub(super) now_ns: u64,
    /// Most payload that a packet to the guest carries, bytes.
    pub(super) most_mss: u16,
    /// Number of packets that may still be sent; a reset always may.
    pub(super) may_send: usize,
    /// Bytes for which the engine's port has room; what is sent beyond is lost.
    pub(super) has_room_for: usize,
    /// Whether more packets wait to be sent.
    pub(super) has_more: bool,
}

impl<'a> Link<'a> {
    /// The link of a VM at this time, for one of its connections. `may_send`: packets that it may
    /// send.
    pub(super) fn to(
        (vm, early): (&VmNet, &'a EarlyRoom),
        out: &'a mut Packets,
        ends: Ends,
        may_send: usize,
        now_ns: u64,
    ) -> Self {
        let headers_len = headers_len(Version::of(ends.ours.ip()));
        Self {
            out,
            early,
            ends,
            now_ns,
            most_mss: vm.mtu.saturating_sub(headers_len as u16),
            may_send,
            has_room_for: usize::MAX,
            has_more: false,
        }
    }

    pub(super) fn version(&self) -> Version {
        Version::of(self.ends.ours.ip())
    }

    /// Whether a packet may be sent. If not, the connection has its turn later.
    pub(super) fn may_send(&mut self) -> bool {
        let may_send = self.may_send > 0 && self.payload_room() >= LEAST_PAYLOAD;
        self.has_more |= !may_send;
        may_send
    }

    /// Whether a segment without data may be sent: it needs no room of a port that is full.
    pub(super) fn may_acknowledge(&mut self) -> bool {
        self.has_more |= self.may_send == 0;
        self.may_send > 0
    }

    fn payload_room(&self) -> usize {
        self.has_room_for
            .saturating_sub(self.out.taken_with_one_more())
    }

    /// Room for the payload of the next frame: at most so many bytes, in as many packets of `mss`
    /// bytes as may be sent. And a place for bytes that are not looked at.
    pub(super) fn room(&mut self, place: Sendable, mss: u16) -> (&mut [u8], &mut [u8]) {
        let most = (place.most as usize)
            .min(self.may_send.saturating_mul(mss.into()))
            .min(self.payload_room());
        let headers_len = headers_len(self.version()) + place.options_len;
        self.out.room(headers_len, most)
    }

    /// Returns the parts of the link that the receipt of a guest's segment needs.
    pub(super) fn workspace(&mut self) -> Workspace<'_> {
        Workspace {
            scratch: self.out.room(0, 0).1,
            early: self.early,
            closed: None,
        }
    }

    /// Sends a frame, whose payload is in its room.
    pub(super) fn send(&mut self, header: &Header, payload_len: usize, mss: u16) {
        let counted = self.out.push(self.ends, header, payload_len, mss);
        self.may_send = self.may_send.saturating_sub(counted.packets as usize);
    }

    /// Sends a segment without payload.
    pub(super) fn tell(&mut self, header: &Header) {
        self.send(header, 0, u16::MAX);
    }
}

/// A guest's segment with its payload; `None` if the packet has none.
pub(super) fn segment_of(packet: &[u8]) -> Option<(Tcp, Segment, &[u8])> {
    let ip = Ip::parse(packet).ok()?;
    let packet = Packet::parse(ip).ok()?;
    let Transport::Tcp(tcp) = packet.transport else {
        return None;
    };
    let l4 = ip.payload();
    let payload = l4.get(tcp.header_len..)?;
    let payload = &payload[..payload.len().min(tcp.payload_len)];
    Some((tcp, Segment::read(&tcp, l4), payload))
}
