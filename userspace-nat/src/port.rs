//! The engine port: frames in, frames out.
//!
//! Each read and each write is one frame:
//! ```text
//! virtio_net_hdr (10) | PortHeader (12) | EtherType (2) | L3 …
//! ```
//! The `virtio_net_hdr` (virtio 1.2 section 5.1.6, legacy length as by `TUNSETVNETHDRSZ` 10) says
//! whether the frame is a GSO super-packet and whether its L4 checksum is yet to be completed. A
//! frame that is re-injected keeps it, so it stays whole.
use std::{io, os::fd::BorrowedFd};

use slipgate_abi::{
    Command, PortHeader,
    portframe::PortFlags,
    segment::{self, Segments},
};

use crate::{stats::Traffic, vm::VmNet};

/// Length of the virtio-net header on the port, bytes.
pub const VNET_LEN: usize = 10;
/// Where the PortHeader begins.
pub const PORT_HEADER_AT: usize = VNET_LEN;
/// Where the EtherType stands.
pub const ETHERTYPE_AT: usize = VNET_LEN + PortHeader::LEN;
/// Where L3 begins.
pub const L3_AT: usize = ETHERTYPE_AT + 2;
/// Length of the Ethernet header: `csum_start` counts from its begin.
pub const ETHERNET_LEN: usize = PortHeader::LEN + 2;
/// Longest frame with its headers, bytes.
pub const MAX_FRAME: usize = L3_AT + 65_535;
/// Frames read in one go.
pub const BATCH: usize = 64;

/// EtherType of IPv4.
pub const ETHERTYPE_IPV4: u16 = 0x0800;
/// EtherType of ARP.
pub const ETHERTYPE_ARP: u16 = 0x0806;
/// EtherType of IPv6.
pub const ETHERTYPE_IPV6: u16 = 0x86dd;

/// The port. The descriptor is non-blocking.
pub trait FrameIo {
    /// Reads frames until the batch is full or nothing is there (not an error).
    fn recv(&mut self, batch: &mut Batch) -> io::Result<()>;
    /// Writes one frame, all headers included.
    fn send(&mut self, frame: &[u8]) -> io::Result<()>;
    /// For the epoll set; `None` in tests without one.
    fn fd(&self) -> Option<BorrowedFd<'_>>;
}

/// `struct virtio_net_hdr`, in host order.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct VirtioNetHdr {
    /// [`VirtioNetHdr::NEEDS_CSUM`], [`VirtioNetHdr::DATA_VALID`].
    pub flags: u8,
    /// [`VirtioNetHdr::GSO_NONE`] and so on.
    pub gso_type: u8,
    /// Length of the headers up to L4, a hint.
    pub hdr_len: u16,
    /// L4 payload per segment, bytes.
    pub gso_size: u16,
    /// Where the checksum's coverage begins, from the begin of the Ethernet header.
    pub csum_start: u16,
    /// Where the checksum stands, from `csum_start`.
    pub csum_offset: u16,
}

impl VirtioNetHdr {
    /// The L4 checksum field holds the pseudo-header's sum only.
    pub const NEEDS_CSUM: u8 = 1;
    /// The checksum was verified.
    pub const DATA_VALID: u8 = 2;
    /// One packet.
    pub const GSO_NONE: u8 = 0;
    /// TCP over IPv4.
    pub const GSO_TCPV4: u8 = 1;
    /// UDP, to be cut into datagrams (`UDP_SEGMENT`).
    pub const GSO_UDP_L4: u8 = 5;

    /// From the first bytes of a frame.
    pub fn decode(b: &[u8; VNET_LEN]) -> Self {
        let word = |at: usize| u16::from_ne_bytes([b[at], b[at + 1]]);
        Self {
            flags: b[0],
            gso_type: b[1],
            hdr_len: word(2),
            gso_size: word(4),
            csum_start: word(6),
            csum_offset: word(8),
        }
    }

    /// As on the port.
    pub fn encode(self) -> [u8; VNET_LEN] {
        let mut b = [0; VNET_LEN];
        b[0] = self.flags;
        b[1] = self.gso_type;
        b[2..4].copy_from_slice(&self.hdr_len.to_ne_bytes());
        b[4..6].copy_from_slice(&self.gso_size.to_ne_bytes());
        b[6..8].copy_from_slice(&self.csum_start.to_ne_bytes());
        b[8..10].copy_from_slice(&self.csum_offset.to_ne_bytes());
        b
    }

    /// Whether the L4 checksum is partial.
    pub fn needs_csum(self) -> bool {
        self.flags & Self::NEEDS_CSUM != 0
    }
}

/// Frames that were read together. Buffers are kept from batch to batch.
#[derive(Debug)]
pub struct Batch {
    buffers: Vec<Box<[u8]>>,
    lengths: Vec<usize>,
}

impl Default for Batch {
    fn default() -> Self {
        Self::new()
    }
}

impl Batch {
    /// An empty batch with room for [`BATCH`] frames.
    pub fn new() -> Self {
        Self {
            buffers: (0..BATCH)
                .map(|_| vec![0; MAX_FRAME].into_boxed_slice())
                .collect(),
            lengths: Vec::with_capacity(BATCH),
        }
    }

    /// Forgets the frames.
    pub fn clear(&mut self) {
        self.lengths.clear();
    }

    /// How many frames there are.
    pub fn len(&self) -> usize {
        self.lengths.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.lengths.is_empty()
    }

    /// Whether no more fit.
    pub fn is_full(&self) -> bool {
        self.lengths.len() == self.buffers.len()
    }

    /// Reads one more frame: `read` fills the buffer and says how many bytes. Errors pass through.
    /// Full batches take nothing and say so by `Ok(false)`.
    pub fn push_with(
        &mut self,
        read: impl FnOnce(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<bool> {
        let Some(buffer) = self.buffers.get_mut(self.lengths.len()) else {
            return Ok(false);
        };
        let n = read(buffer)?;
        self.lengths.push(n.min(buffer.len()));
        Ok(true)
    }

    /// One frame with all its headers, to be changed in place.
    pub fn frame_mut(&mut self, index: usize) -> &mut [u8] {
        &mut self.buffers[index][..self.lengths[index]]
    }

    /// One frame with all its headers.
    pub fn frame(&self, index: usize) -> &[u8] {
        &self.buffers[index][..self.lengths[index]]
    }
}

/// A frame taken apart.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    /// Offload metadata.
    pub vnet: VirtioNetHdr,
    /// Who and why.
    pub header: PortHeader,
    /// What is in it.
    pub ethertype: u16,
    /// From the L3 header on.
    pub l3: &'a [u8],
}

impl<'a> Frame<'a> {
    /// `None` when it is too short or its header is not ours: a frame of the host's own.
    pub fn parse(bytes: &'a [u8]) -> Option<Self> {
        let (vnet, rest) = bytes.split_first_chunk::<VNET_LEN>()?;
        let (header, rest) = rest.split_first_chunk::<{ PortHeader::LEN }>()?;
        let (ethertype, l3) = rest.split_first_chunk::<2>()?;
        Some(Self {
            vnet: VirtioNetHdr::decode(vnet),
            header: PortHeader::decode(header)?,
            ethertype: u16::from_be_bytes(*ethertype),
            l3,
        })
    }

    /// Whether the world sent it, and not the guest.
    pub fn is_from_world(&self) -> bool {
        self.header.flags & PortFlags::FROM_UPLINK != 0
    }
}

/// By what a packet leaves for the world as it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Exit {
    /// An element of `NEXT_HOPS`.
    NextHop(u32),
    /// An uplink, by its ifindex; the kernel finds the neighbour.
    Uplink(u32),
}

/// Frames that the engine's parts want sent, in order; bounded.
#[derive(Debug)]
pub struct Outbox {
    bytes: Vec<u8>,
    ends: Vec<usize>,
    byte_limit: usize,
}

/// The outbox was full; the frame was not taken. Count it as `EngineBusy`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the engine's outbox is full")]
pub struct OutboxFull;

impl Outbox {
    /// Most frames.
    pub const FRAMES: usize = 1_024;

    /// An empty one for at most `byte_limit` bytes.
    pub fn new(byte_limit: usize) -> Self {
        Self {
            bytes: Vec::new(),
            ends: Vec::new(),
            byte_limit,
        }
    }

    /// Sends an L3 packet or ARP message of ours to the guest, counted as
    /// [`Traffic::TxToGuest`]; of a GSO frame, whose `hdr_len` is right, its segments.
    pub fn to_guest(
        &mut self,
        vm: &VmNet,
        ethertype: u16,
        vnet: VirtioNetHdr,
        l3: &[u8],
    ) -> Result<(), OutboxFull> {
        let header = PortHeader {
            code: Command::ToGuest as u8,
            flags: 0,
            vm_row: vm.row,
            id: vm.id,
        };
        self.push(header, ethertype, vnet, l3)?;
        let headers_len = usize::from(vnet.hdr_len).saturating_sub(ETHERNET_LEN);
        let Segments { packets, bytes } = match vnet.gso_type {
            VirtioNetHdr::GSO_NONE => single(l3.len()),
            _ => segment::count(l3.len() as u32, headers_len as u32, vnet.gso_size.into()),
        };
        vm.stats.traffic(Traffic::TxToGuest, packets, bytes);
        Ok(())
    }

    /// Sends an IPv4 packet as it is to the world, for a VM, counted as [`Traffic::TxToWorld`].
    pub fn emit(
        &mut self,
        vm: &VmNet,
        exit: Exit,
        vnet: VirtioNetHdr,
        l3: &[u8],
    ) -> Result<(), OutboxFull> {
        let (command, id) = match exit {
            Exit::NextHop(index) => (Command::Emit, index),
            Exit::Uplink(ifindex) => (Command::EmitBy, ifindex),
        };
        let header = PortHeader {
            code: command as u8,
            flags: 0,
            vm_row: vm.row,
            id,
        };
        self.push(header, ETHERTYPE_IPV4, vnet, l3)?;
        vm.stats.traffic(Traffic::TxToWorld, 1, l3.len() as u64);
        Ok(())
    }

    /// Queues a frame with any header, uncounted.
    pub fn push(
        &mut self,
        header: PortHeader,
        ethertype: u16,
        vnet: VirtioNetHdr,
        l3: &[u8],
    ) -> Result<(), OutboxFull> {
        if !self.has_room(1, l3.len()) {
            return Err(OutboxFull);
        }
        self.bytes.extend_from_slice(&vnet.encode());
        self.bytes.extend_from_slice(&header.encode());
        self.bytes.extend_from_slice(&ethertype.to_be_bytes());
        self.bytes.extend_from_slice(l3);
        self.ends.push(self.bytes.len());
        Ok(())
    }

    /// Whether so many more frames of so many L3 bytes in all are taken.
    pub fn has_room(&self, frames: usize, l3_bytes: usize) -> bool {
        let bytes = frames * L3_AT + l3_bytes;
        self.ends.len() + frames <= Self::FRAMES && self.bytes.len() + bytes <= self.byte_limit
    }

    /// How many frames are queued.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// The queued frames, first to last.
    pub fn frames(&self) -> impl Iterator<Item = &[u8]> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts
            .zip(&self.ends)
            .map(|(start, end)| &self.bytes[start..*end])
    }

    /// Whether nothing is queued.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Whether it is to be written before more is done: what one packet, timer or answer has sent
    /// takes less than the other half.
    pub fn is_half_full(&self) -> bool {
        self.ends.len() >= Self::FRAMES / 2 || self.bytes.len() >= self.byte_limit / 2
    }

    /// Forgets the frames.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.ends.clear();
    }
}

/// What a single packet of `l3_len` bytes counts as.
pub const fn single(l3_len: usize) -> Segments {
    Segments {
        packets: 1,
        bytes: l3_len as u64,
    }
}
