//! The engine port: the device through which the engine reads and writes frames.
//!
//! Each read and each write is one frame:
//! ```text
//! virtio_net_hdr (10) | PortHeader (12) | EtherType (2) | L3 …
//! ```
//! A fragment of the world has its link in place of the EtherType ([`Frame::link`]).
//!
//! The `virtio_net_hdr` (virtio 1.2 section 5.1.6, legacy length as by `TUNSETVNETHDRSZ` 10) says
//! whether the frame is a GSO super-packet and whether its L4 checksum is still to be completed. A
//! re-injected frame keeps this header, so that it stays whole.
use std::{collections::VecDeque, fmt, io, ops::Range, os::fd::BorrowedFd, rc::Rc};

use nix::sys::epoll::{Epoll, EpollFlags};
use slipgate_abi::{
    Command, Handover, IfIndex, PortHeader, VmRow,
    portframe::PortFlags,
    segment::{self, Segments},
};

use slipgate_model::GuestTcpCounts;

use crate::{host_sockets::HostSockets, stats::Traffic, vm::VmNet};

/// Length of the virtio-net header on the port, bytes.
pub const VNET_LEN: usize = 10;
/// Offset of the `PortHeader` in a frame, bytes.
pub const PORT_HEADER_AT: usize = VNET_LEN;
/// Offset of the EtherType in a frame, bytes.
pub const ETHERTYPE_AT: usize = VNET_LEN + PortHeader::LEN;
/// Offset of the L3 header in a frame, bytes.
pub const L3_AT: usize = ETHERTYPE_AT + 2;
/// Length of the Ethernet header, bytes; `csum_start` counts from its start.
pub const ETHERNET_LEN: usize = PortHeader::LEN + 2;
/// Longest frame with its headers, bytes.
pub const MAX_FRAME: usize = L3_AT + 65_535;
/// Most frames that one batch holds.
pub const BATCH: usize = 64;

/// EtherType of IPv4 packets.
pub const ETHERTYPE_IPV4: u16 = 0x0800;
/// EtherType of ARP packets.
pub const ETHERTYPE_ARP: u16 = 0x0806;
/// EtherType of IPv6 packets.
pub const ETHERTYPE_IPV6: u16 = 0x86dd;

/// Returns the EtherType of an L3 packet, by the version in its first octet.
pub fn ethertype_of(l3: &[u8]) -> u16 {
    match l3.first().map(|octet| octet >> 4) {
        Some(6) => ETHERTYPE_IPV6,
        _ => ETHERTYPE_IPV4,
    }
}

/// The engine port, whose descriptor is non-blocking.
pub trait FrameIo {
    /// Reads frames until the batch is full or no frame is waiting (which is not an error).
    ///
    /// # Errors
    /// When reading fails for another reason.
    fn recv(&mut self, batch: &mut Batch) -> io::Result<()>;
    /// Writes one frame, with all its headers.
    ///
    /// # Errors
    /// When the port does not accept the frame.
    fn send(&mut self, frame: &[u8]) -> io::Result<()>;
    /// Descriptor for the epoll set; `None` for implementations without one: in tests, and where
    /// [`FrameIo::set`] has many.
    fn fd(&self) -> Option<BorrowedFd<'_>>;
    /// The epoll set in which the port has its descriptors, which becomes the engine's: a set within a set
    /// has to be asked twice for each event. Each event that is the port's is passed to
    /// [`FrameIo::on_ready`].
    fn set(&self) -> Option<Rc<Epoll>>;
    /// Takes an event of the port's own set, with its key. [`FrameIo::recv`] handles it.
    fn on_ready(&mut self, key: u32, flags: EpollFlags);
    /// Time at which [`FrameIo::recv`] has something to do without an event, ns.
    fn next_deadline_ns(&self) -> Option<u64>;
    /// Bytes of frames that may be written at present and are not dropped on their way to the guest.
    /// When there is room again, an event of the port's tells.
    fn room(&mut self) -> usize;
    /// Whether there is something to do at once, without an event.
    fn has_more(&self) -> bool {
        false
    }
    /// The host's sockets that flows end in, where they do (user mode).
    fn host_sockets(&self) -> Option<Rc<HostSockets>> {
        None
    }
    /// What the flows that end here keep of their guest's segments, and counts of them (user mode, whose
    /// port has one guest).
    fn tcp_counts(&self) -> GuestTcpCounts {
        GuestTcpCounts::default()
    }
    /// Does what was put off until the thread has nothing else to do. Returns whether there is something
    /// to do at once now, without an event. Called where [`FrameIo::is_looked_at`] says so.
    fn rest(&mut self) -> bool;
    /// Whether it is worth a short look before the thread sleeps: frames of established flows come by
    /// this port too.
    fn is_looked_at(&self) -> bool {
        false
    }
}

/// `struct virtio_net_hdr`, in host order.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct VirtioNetHdr {
    /// Bits [`VirtioNetHdr::NEEDS_CSUM`] and [`VirtioNetHdr::DATA_VALID`].
    pub flags: u8,
    /// [`VirtioNetHdr::GSO_NONE`], or one of the other types here.
    pub gso_type: u8,
    /// Length of the headers up to and with L4, bytes; a hint.
    pub hdr_len: u16,
    /// L4 payload per segment, bytes.
    pub gso_size: u16,
    /// Offset at which checksumming starts, bytes from the start of the Ethernet header.
    pub csum_start: u16,
    /// Offset of the checksum field, bytes from `csum_start`.
    pub csum_offset: u16,
}

impl VirtioNetHdr {
    /// Flag: the L4 checksum field holds the pseudo-header's sum only.
    pub const NEEDS_CSUM: u8 = 1;
    /// Flag: the checksum was verified.
    pub const DATA_VALID: u8 = 2;
    /// GSO type of a single packet.
    pub const GSO_NONE: u8 = 0;
    /// GSO type of TCP over IPv4.
    pub const GSO_TCPV4: u8 = 1;
    /// GSO type of TCP over IPv6.
    pub const GSO_TCPV6: u8 = 4;
    /// GSO type of UDP that is segmented into datagrams (`UDP_SEGMENT`).
    pub const GSO_UDP_L4: u8 = 5;

    /// Decodes the first bytes of a frame.
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

    /// Encodes the header as on the port.
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

/// Frames that were read together, and those of earlier batches that are kept until they are handled.
///
/// All lie in one piece of memory, a place for each, of which the kernel provides the pages that are
/// used. A place that was freed is used again before others.
pub struct Batch {
    memory: Vec<u8>,
    free: Vec<u16>,
    frames: Vec<KeptFrame>,
}

/// A frame that is kept.
#[derive(Clone, Copy, Debug)]
pub struct KeptFrame {
    place: u16,
    len: usize,
}

/// Size of a cache line, bytes.
const LINE_LEN: usize = 64;
/// Distance between two places, bytes: whole pages, of which a short frame uses one or two, and a cache
/// line, so that the first lines of many frames are not all in the same set of a cache.
const PLACE_LEN: usize = MAX_FRAME.next_multiple_of(4_096) + LINE_LEN;

impl Default for Batch {
    fn default() -> Self {
        Self::new()
    }
}

impl Batch {
    /// Creates an empty batch with room for [`BATCH`] frames.
    pub fn new() -> Self {
        Self::keeping(0)
    }

    /// The same, with room for `kept` frames that are kept beside those of the batch.
    pub fn keeping(kept: u16) -> Self {
        let places = BATCH as u16 + kept;
        Self {
            memory: vec![0; usize::from(places) * PLACE_LEN],
            free: (0..places).rev().collect(),
            frames: Vec::with_capacity(BATCH),
        }
    }

    /// Removes all frames from the batch.
    pub fn clear(&mut self) {
        while let Some(frame) = self.frames.pop() {
            self.release(frame);
        }
    }

    /// Empties the batch, whose frames are [kept](Batch::kept) or released.
    pub fn keep(&mut self) {
        self.frames.clear();
    }

    /// Returns a frame that is kept, with all its headers, to be changed in place.
    pub fn kept_mut(&mut self, frame: KeptFrame) -> &mut [u8] {
        let begin = usize::from(frame.place) * PLACE_LEN;
        &mut self.memory[begin..begin + frame.len]
    }

    /// Frees the place of a frame that is kept.
    pub fn release(&mut self, frame: KeptFrame) {
        self.free.push(frame.place);
    }

    /// Returns the number of frames in the batch.
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// Whether the batch has no frame.
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Whether no more frames fit.
    pub fn is_full(&self) -> bool {
        self.frames.len() >= BATCH || self.free.is_empty()
    }

    /// Reads one more frame: `read` fills the buffer and returns the number of bytes. Returns
    /// `Ok(false)` without a call when the batch is full.
    ///
    /// # Errors
    /// Returns the error of `read`.
    pub fn push_with(
        &mut self,
        read: impl FnOnce(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<bool> {
        let Some(&place) = self.free.last().filter(|_| !self.is_full()) else {
            return Ok(false);
        };
        let whole = KeptFrame {
            place,
            len: MAX_FRAME,
        };
        let len = read(self.kept_mut(whole))?.min(MAX_FRAME);
        self.free.pop();
        self.frames.push(KeptFrame { place, len });
        Ok(true)
    }

    /// Adds one more frame, also to a full batch while there is a place: `read` fills the buffer and
    /// returns the number of bytes, 0 if there is no frame. Returns whether there was a place.
    pub fn push_more(&mut self, read: impl FnOnce(&mut [u8]) -> usize) -> bool {
        let Some(&place) = self.free.last() else {
            return false;
        };
        let whole = KeptFrame {
            place,
            len: MAX_FRAME,
        };
        let len = read(self.kept_mut(whole)).min(MAX_FRAME);
        if len > 0 {
            self.free.pop();
            self.frames.push(KeptFrame { place, len });
        }
        true
    }

    /// Returns the frame that was added last; an empty one of an empty batch.
    pub fn last(&self) -> &[u8] {
        match self.frames.len().checked_sub(1) {
            Some(last) => self.frame(last),
            None => &[],
        }
    }

    /// Removes the frame that was added last.
    pub fn drop_last(&mut self) {
        if let Some(last) = self.frames.pop() {
            self.release(last);
        }
    }

    /// Returns one frame of the batch, to be kept when the batch is [emptied](Batch::keep).
    pub fn kept(&self, index: usize) -> KeptFrame {
        self.frames[index]
    }

    /// Returns one frame of the batch with all its headers.
    pub fn frame(&self, index: usize) -> &[u8] {
        let KeptFrame { place, len } = self.frames[index];
        let begin = usize::from(place) * PLACE_LEN;
        &self.memory[begin..begin + len]
    }
}

impl fmt::Debug for Batch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch")
            .field("frames", &self.frames)
            .field("free", &self.free.len())
            .finish_non_exhaustive()
    }
}

/// Decoded headers of a frame, and its L3 packet.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    /// Offload metadata of the frame.
    pub vnet: VirtioNetHdr,
    /// VM, handover reason and flags of the frame.
    pub header: PortHeader,
    /// EtherType of the packet.
    pub ethertype: u16,
    /// Link by which a fragment of the world came ([`slipgate_abi::portframe::link`]); 0 of all else.
    pub link: u16,
    /// The packet, from the L3 header on.
    pub l3: &'a [u8],
}

impl<'a> Frame<'a> {
    /// Decodes a frame. Returns `None` when it is too short or has no valid `PortHeader`: then it
    /// is a frame of the host itself.
    pub fn parse(bytes: &'a [u8]) -> Option<Self> {
        let (vnet, rest) = bytes.split_first_chunk::<VNET_LEN>()?;
        let (header, rest) = rest.split_first_chunk::<{ PortHeader::LEN }>()?;
        let (ethertype, l3) = rest.split_first_chunk::<2>()?;
        let header = PortHeader::decode(header)?;
        let ethertype = u16::from_be_bytes(*ethertype);
        let is_link =
            header.code == Handover::Fragment as u8 && header.flags & PortFlags::FROM_UPLINK != 0;
        let (ethertype, link) = match is_link {
            true => (ethertype_of(l3), ethertype),
            false => (ethertype, 0),
        };
        Some(Self {
            vnet: VirtioNetHdr::decode(vnet),
            header,
            ethertype,
            link,
            l3,
        })
    }

    /// Whether the frame came from an uplink, not from the guest.
    pub fn is_from_world(&self) -> bool {
        self.header.flags & PortFlags::FROM_UPLINK != 0
    }
}

/// Returns the header of a frame to the kernel.
pub(crate) fn command(code: Command, vm_row: VmRow, id: u32) -> PortHeader {
    PortHeader {
        code: code as u8,
        flags: 0,
        vm_row: vm_row.get(),
        id,
    }
}

/// Link or next hop by which a packet leaves for the world unchanged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Exit {
    /// Index of an element of `NEXT_HOPS`.
    NextHop(u32),
    /// Ifindex of an uplink; the kernel finds the neighbour.
    Uplink(IfIndex),
    /// None: the packet is for a guest of this engine, by its translated address, and is led back in.
    BackIn,
}

/// Side of a VM's network to which a packet is sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// To the guest, by its TAP.
    Guest,
    /// The world, by a link or next hop.
    World(Exit),
}

/// Most packets that wait to be led back in: answers of the engine's, few for each frame.
const MOST_BACK_IN: usize = 256;

/// Bounded queue of the frames that the engine sends, in order.
#[derive(Debug)]
pub struct Outbox {
    bytes: Vec<u8>,
    ends: Vec<usize>,
    byte_limit: usize,
    /// Bytes that the port takes at present ([`FrameIo::room`]).
    port_room: usize,
    /// Packets to be led back in.
    back_in: VecDeque<Vec<u8>>,
    /// Bytes of the frames in `back_in`.
    back_in_bytes: usize,
    /// Numbers of the frames that the engine sends of its own accord.
    unprompted: Vec<Range<usize>>,
}

/// Room below which the port counts as full, bytes: a frame without segmentation, of the usual MTU, and
/// its headers.
pub(crate) const LEAST_ROOM: usize = 1_700;

/// Error of a full outbox: the frame was not queued. It is counted as `EngineBusy`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the engine's outbox is full")]
pub struct OutboxFull;

impl Outbox {
    /// Most frames in the queue.
    pub const FRAMES: usize = 1_024;

    /// Creates an empty outbox for at most `byte_limit` bytes.
    pub fn new(byte_limit: usize) -> Self {
        Self {
            bytes: Vec::new(),
            ends: Vec::new(),
            byte_limit,
            port_room: usize::MAX,
            back_in: VecDeque::new(),
            back_in_bytes: 0,
            unprompted: Vec::new(),
        }
    }

    /// Queues an L3 packet or ARP message of the engine for the guest, and counts it as
    /// [`Traffic::TxToGuest`]. Of a GSO frame the segments are counted; its `hdr_len` must be
    /// exact.
    ///
    /// # Errors
    /// When the outbox is full.
    pub fn to_guest(
        &mut self,
        vm: &VmNet,
        ethertype: u16,
        vnet: VirtioNetHdr,
        l3: &[u8],
    ) -> Result<(), OutboxFull> {
        let header = command(Command::ToGuest, vm.row, vm.id.get());
        self.push(header, ethertype, vnet, l3)?;
        let headers_len = usize::from(vnet.hdr_len).saturating_sub(ETHERNET_LEN);
        let Segments { packets, bytes } = match vnet.gso_type {
            VirtioNetHdr::GSO_NONE => single(l3.len()),
            _ => segment::count(l3.len() as u32, headers_len as u32, vnet.gso_size.into()),
        };
        vm.stats.traffic(Traffic::TxToGuest, packets, bytes);
        Ok(())
    }

    /// Queues a packet of a flow as if the guest had just sent it: the kernel translates it, counts it in
    /// the flow and sends it.
    ///
    /// # Errors
    /// When the outbox is full.
    pub fn as_guest(
        &mut self,
        vm: &VmNet,
        vnet: VirtioNetHdr,
        l3: &[u8],
    ) -> Result<(), OutboxFull> {
        let header = command(Command::Forward, vm.row, vm.id.get());
        self.push(header, ethertype_of(l3), vnet, l3)
    }

    /// Queues a packet of either family without offload metadata for one side of a VM's network, and counts it
    /// as [`Traffic::TxToGuest`] or [`Traffic::TxToWorld`].
    ///
    /// # Errors
    /// When the outbox is full.
    pub fn packet(&mut self, vm: &VmNet, to: Side, l3: &[u8]) -> Result<(), OutboxFull> {
        let vnet = VirtioNetHdr::default();
        let (code, id) = match to {
            Side::Guest => return self.to_guest(vm, ethertype_of(l3), vnet, l3),
            Side::World(Exit::NextHop(index)) => (Command::Emit, index),
            Side::World(Exit::Uplink(ifindex)) => (Command::EmitBy, ifindex.get()),
            Side::World(Exit::BackIn) => {
                let bytes = self.back_in_bytes + l3.len();
                if self.back_in.len() >= MOST_BACK_IN || bytes > self.byte_limit {
                    return Err(OutboxFull);
                }
                self.back_in_bytes = bytes;
                self.back_in.push_back(l3.to_vec());
                vm.stats.traffic(Traffic::TxToWorld, 1, l3.len() as u64);
                return Ok(());
            }
        };
        self.push(command(code, vm.row, id), ethertype_of(l3), vnet, l3)?;
        vm.stats.traffic(Traffic::TxToWorld, 1, l3.len() as u64);
        Ok(())
    }

    /// Takes a packet that is to be led back in, from an L3 header on.
    pub(crate) fn take_back_in(&mut self) -> Option<Vec<u8>> {
        let packet = self.back_in.pop_front()?;
        self.back_in_bytes -= packet.len();
        Some(packet)
    }

    /// Whether packets are to be led back in.
    pub(crate) fn has_back_in(&self) -> bool {
        !self.back_in.is_empty()
    }

    /// Queues a frame with any header, without counting it.
    ///
    /// # Errors
    /// When the outbox is full.
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

    /// Whether `frames` more frames with `l3_bytes` L3 bytes in all fit.
    pub fn has_room(&self, frames: usize, l3_bytes: usize) -> bool {
        let bytes = frames * L3_AT + l3_bytes;
        self.ends.len() + frames <= Self::FRAMES && self.bytes.len() + bytes <= self.byte_limit
    }

    /// Sets how many bytes the port takes before frames are dropped ([`FrameIo::room`]).
    pub(crate) fn set_port_room(&mut self, bytes: usize) {
        self.port_room = bytes;
    }

    /// Returns the bytes for which there is room, also in the port, [`L3_AT`] of them for each frame; 0
    /// if no more frames fit.
    pub(crate) fn room(&self) -> usize {
        let limit = self.byte_limit.min(self.port_room);
        match self.ends.len() < Self::FRAMES {
            true => limit.saturating_sub(self.bytes.len()),
            false => 0,
        }
    }

    /// Whether the port takes no further frame with data at present.
    pub(crate) fn is_port_full(&self) -> bool {
        self.bytes.len() + LEAST_ROOM > self.port_room
    }

    /// Returns the number of queued frames.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns the queued frames, oldest first.
    pub fn frames(&self) -> impl Iterator<Item = &[u8]> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts
            .zip(&self.ends)
            .map(|(start, end)| &self.bytes[start..*end])
    }

    /// Notes that the engine sends the frames from number `first` on of its own accord: nothing came for
    /// their guests. See [`Outbox::prompted_frames`].
    pub(crate) fn are_unprompted_from(&mut self, first: usize) {
        let frames = first..self.len();
        match self.unprompted.last_mut() {
            Some(last) if last.end == first => last.end = frames.end,
            _ if frames.is_empty() => {}
            _ => self.unprompted.push(frames),
        }
    }

    /// Returns the queued frames, but for those that the engine sends of its own accord.
    pub(crate) fn prompted_frames(&self) -> impl Iterator<Item = &[u8]> {
        let is_prompted = |number: &usize| !self.unprompted.iter().any(|own| own.contains(number));
        let frames = self.frames().enumerate();
        frames.filter_map(move |(number, frame)| is_prompted(&number).then_some(frame))
    }

    /// Whether no frame is queued.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Whether the queue should be written before more work is done. The answers to one packet or
    /// timer need less than the other half.
    pub fn is_half_full(&self) -> bool {
        self.ends.len() >= Self::FRAMES / 2
            || self.bytes.len() >= self.byte_limit / 2
            || self.back_in.len() >= MOST_BACK_IN / 2
            || self.back_in_bytes >= self.byte_limit / 2
    }

    /// Removes all frames from the queue.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.ends.clear();
        self.unprompted.clear();
    }
}

/// Returns the count of a single packet of `l3_len` bytes.
pub const fn single(l3_len: usize) -> Segments {
    Segments {
        packets: 1,
        bytes: l3_len as u64,
    }
}
