//! A queue pair as the stack's device.
//!
//! # Theory of operation
//! Every buffer is allocated at start and belongs to one descriptor or to one slot for ever.
//! Received frames are handed to the stack where they lie, and their buffer is offered again with
//! the next call; only a frame of several buffers is copied together. Sent frames are written by
//! the stack behind their header: into a small slot, or a large one that the device cuts. Nothing
//! is told to the device before [`Nic::flush`] or [`Nic::arm`].
use alloc::{vec, vec::Vec};
use core::{mem::ManuallyDrop, num::NonZeroUsize};

use smoltcp::{
    phy::{Checksum, Device, DeviceCapabilities, Medium, PacketMeta, RxToken, TxToken},
    time::Instant,
};

use super::{
    super::{
        dma::Dma,
        ring::{Ring, Segment},
        transport::Doorbell,
    },
    card::Config,
    feature, header,
};
use crate::{
    pci::Registers,
    platform::{Nic, NicCounters},
};

/// A receive buffer's bytes.
const RECEIVE: usize = 4096;
/// A small slot's: a frame of the largest ordinary size, and its header.
const SMALL: usize = 2048;
/// The largest frame.
const FRAME_MOST: usize = 65_535;
/// A large slot's bytes.
const LARGE: usize = (FRAME_MOST + header::BYTES).next_multiple_of(128);
const LARGE_SLOTS: usize = 32;

/// One queue pair. Its memory is never freed: to the device it is there until the next reset, which
/// one pair alone can't ask for.
pub struct Pair<R> {
    receive: Receive<R>,
    send: Send<R>,
    place: (u16, u16),
    mac: [u8; 6],
    mtu: u16,
    features: u64,
    taken: fn() -> u64,
}

struct Receive<R> {
    ring: ManuallyDrop<Ring>,
    doorbell: Doorbell<R>,
    memory: ManuallyDrop<Dma>,
    /// The chain whose frame was handed out last.
    lent: Option<u16>,
    merged: Vec<u8>,
    mergeable: bool,
    /// Checksums that nobody vouches for are ours to check.
    check: bool,
    counters: NicCounters,
}

struct Send<R> {
    ring: ManuallyDrop<Ring>,
    doorbell: Doorbell<R>,
    memory: ManuallyDrop<Dma>,
    free_small: Vec<u32>,
    free_large: Vec<u32>,
    /// The offset of the slot that a chain in flight sends from, by its head.
    in_flight: Vec<u32>,
    large_start: u32,
    offload: bool,
    /// A frame could not be sent since the last `arm`.
    blocked: bool,
    counters: NicCounters,
}

impl<R: Registers> Pair<R> {
    pub(super) fn new(
        place: (u16, u16),
        config: &Config,
        features: u64,
        (receive, receive_bell): (Ring, Doorbell<R>),
        (send, send_bell): (Ring, Doorbell<R>),
        taken: fn() -> u64,
    ) -> Self {
        let slots = usize::from(send.size());
        let large_start = slots * SMALL;
        Pair {
            receive: Receive {
                memory: ManuallyDrop::new(Dma::new(usize::from(receive.size()) * RECEIVE)),
                ring: ManuallyDrop::new(receive),
                doorbell: receive_bell,
                lent: None,
                merged: vec![0; FRAME_MOST + RECEIVE],
                mergeable: features & feature::MRG_RXBUF != 0,
                check: features & feature::GUEST_CSUM != 0,
                counters: NicCounters::default(),
            },
            send: Send {
                in_flight: vec![0; slots],
                ring: ManuallyDrop::new(send),
                doorbell: send_bell,
                memory: ManuallyDrop::new(Dma::new(large_start + LARGE_SLOTS * LARGE)),
                free_small: (0..slots).map(|slot| (slot * SMALL) as u32).collect(),
                free_large: (0..LARGE_SLOTS)
                    .map(|slot| (large_start + slot * LARGE) as u32)
                    .collect(),
                large_start: large_start as u32,
                offload: features & feature::CSUM != 0,
                blocked: false,
                counters: NicCounters::default(),
            },
            place,
            mac: config.mac,
            mtu: config.mtu,
            features,
            taken,
        }
    }

    /// Frames that were sent and not returned yet.
    pub fn in_flight(&self) -> usize {
        let ring = &self.send.ring;
        usize::from(
            ring.used_index()
                .wrapping_sub(ring.published_index())
                .wrapping_neg(),
        )
    }

    /// Offers all receive buffers. Once the device has been started.
    pub(super) fn start(&mut self) {
        let Receive { ring, memory, .. } = &mut self.receive;
        for buffer in 0..usize::from(ring.size()) {
            let head = ring.offer_one(Segment {
                address: memory.address(buffer * RECEIVE),
                length: RECEIVE as u32,
                device_writes: true,
            });
            // A fresh ring hands its descriptors out in order: head and buffer have one number.
            debug_assert_eq!(head, Some(buffer as u16));
        }
        self.send.ring.disarm();
        self.receive.kick();
    }
}

impl<R: Registers> Receive<R> {
    fn kick(&mut self) {
        if self.ring.wants_kick() {
            self.counters.kicks += 1;
            self.doorbell.ring();
        }
    }

    fn give_back(&mut self) {
        if let Some(head) = self.lent.take() {
            self.ring.offer_again(head);
        }
    }

    /// The next good frame.
    fn next(&mut self) -> Option<&[u8]> {
        loop {
            self.give_back();
            let first = self.ring.take_used()?;
            let start = usize::from(first.head) * RECEIVE;
            let written = (first.written as usize).min(RECEIVE);
            if written < header::BYTES {
                self.counters.rx_dropped += 1;
                self.ring.offer_again(first.head);
                continue;
            }
            // SAFETY: the device has returned the buffer.
            let bytes = unsafe { self.memory.bytes(start, written) };
            let buffers = if self.mergeable {
                header::buffers(bytes).max(1)
            } else {
                1
            };
            let vouched = header::vouched(bytes);
            let mut length = written - header::BYTES;
            if buffers == 1 {
                self.lent = Some(first.head);
            } else {
                self.merged[..length].copy_from_slice(&bytes[header::BYTES..]);
                self.ring.offer_again(first.head);
                match self.append(usize::from(buffers) - 1, length) {
                    Some(whole) => length = whole,
                    None => {
                        self.counters.rx_dropped += 1;
                        continue;
                    }
                }
                self.counters.rx_merged += 1;
            }
            // SAFETY: as above; it is offered again after the frame was looked at.
            let bytes = unsafe {
                self.memory
                    .bytes(start + header::BYTES, written - header::BYTES)
            };
            let frame = if buffers == 1 {
                bytes
            } else {
                &self.merged[..length]
            };
            if self.check && !vouched && !header::is_intact(frame) {
                self.counters.rx_dropped += 1;
                continue;
            }
            self.counters.rx_frames += 1;
            self.counters.rx_bytes += length as u64;
            self.counters.rx_checksum_offloaded += u64::from(vouched);
            // Looked up again, since a loop may not lend what an earlier round borrowed.
            return Some(match buffers {
                // SAFETY: as above.
                1 => unsafe { self.memory.bytes(start + header::BYTES, length) },
                _ => &self.merged[..length],
            });
        }
    }

    /// Appends a frame's further buffers to the `length` bytes that are there. None: too long, or
    /// the device returned fewer than it said.
    fn append(&mut self, buffers: usize, length: usize) -> Option<usize> {
        let mut end = length;
        let mut whole = true;
        for _ in 0..buffers {
            let used = self.ring.take_used()?;
            let written = (used.written as usize).min(RECEIVE);
            whole &= end + written <= FRAME_MOST;
            if whole {
                // SAFETY: the device has returned the buffer.
                let bytes = unsafe { self.memory.bytes(usize::from(used.head) * RECEIVE, written) };
                self.merged[end..end + written].copy_from_slice(bytes);
                end += written;
            }
            self.ring.offer_again(used.head);
        }
        whole.then_some(end)
    }
}

impl<R: Registers> Send<R> {
    fn kick(&mut self) {
        if self.ring.wants_kick() {
            self.counters.kicks += 1;
            self.doorbell.ring();
        }
    }

    /// Takes back the slots of frames that are gone.
    fn reap(&mut self) {
        while let Some(used) = self.ring.take_used() {
            self.ring.release(used.head);
            let slot = self.in_flight[usize::from(used.head)];
            let free = if slot < self.large_start {
                &mut self.free_small
            } else {
                &mut self.free_large
            };
            free.push(slot);
        }
    }

    /// Whether a frame of any size can be sent.
    fn has_room(&self) -> bool {
        !self.free_small.is_empty() && !self.free_large.is_empty() && self.ring.room() > 0
    }

    fn ready(&mut self) -> bool {
        if self.ring.room() * 2 < usize::from(self.ring.size()) || !self.has_room() {
            self.reap();
        }
        if !self.has_room() {
            self.blocked = true;
            self.counters.tx_full += 1;
            return false;
        }
        true
    }

    fn send<T>(
        &mut self,
        length: usize,
        segment: Option<u16>,
        fill: impl FnOnce(&mut [u8]) -> T,
    ) -> T {
        let small = length <= SMALL - header::BYTES;
        let free = if small {
            &mut self.free_small
        } else {
            &mut self.free_large
        };
        let slot = free
            .pop()
            .expect("a token is given only when there are slots");
        let start = slot as usize;
        assert!(length <= FRAME_MOST, "a frame of {length} bytes");
        // SAFETY: a free slot: the device has no business there.
        let buffer = unsafe { self.memory.bytes_mut(start, header::BYTES + length) };
        let (head, frame) = buffer.split_at_mut(header::BYTES);
        let result = fill(frame);
        let prepared = if self.offload {
            header::prepare(frame, segment)
        } else {
            [0; header::BYTES]
        };
        head.copy_from_slice(&prepared);
        let offered = self.ring.offer_one(Segment {
            address: self.memory.address(start),
            length: (header::BYTES + length) as u32,
            device_writes: false,
        });
        let head = offered.expect("a token is given only when there is a descriptor");
        self.in_flight[usize::from(head)] = slot;
        self.counters.tx_frames += 1;
        self.counters.tx_bytes += length as u64;
        self.counters.tx_segmented += u64::from(segment.is_some());
        result
    }
}

impl<R: Registers> Nic for Pair<R> {
    fn mac(&self) -> [u8; 6] {
        self.mac
    }

    fn pair(&self) -> (u16, u16) {
        self.place
    }

    fn flush(&mut self) {
        self.send.kick();
    }

    fn arm(&mut self) -> bool {
        self.receive.give_back();
        self.receive.kick();
        self.send.kick();
        if core::mem::take(&mut self.send.blocked) {
            self.send.reap();
            // What is received is not looked at either while there is no room for an answer.
            return !self.send.has_room() && self.send.ring.arm();
        }
        self.receive.ring.arm()
    }

    fn can_segment_udp(&self) -> bool {
        self.features & feature::HOST_USO != 0
    }

    fn counters(&self) -> NicCounters {
        let (receive, send) = (&self.receive.counters, &self.send.counters);
        NicCounters {
            tx_frames: send.tx_frames,
            tx_bytes: send.tx_bytes,
            tx_segmented: send.tx_segmented,
            tx_full: send.tx_full,
            kicks: receive.kicks + send.kicks,
            interrupts: (self.taken)(),
            ..*receive
        }
    }
}

impl<R: Registers> Device for Pair<R> {
    type RxToken<'a>
        = Received<'a>
    where
        R: 'a;
    type TxToken<'a>
        = Slot<'a, R>
    where
        R: 'a;

    fn receive(&mut self, _: Instant) -> Option<(Received<'_>, Slot<'_, R>)> {
        if !self.receive.ring.has_used() || !self.send.ready() {
            return None;
        }
        let frame = self.receive.next()?;
        Some((
            Received(frame),
            Slot {
                send: &mut self.send,
                segment: None,
            },
        ))
    }

    fn transmit(&mut self, _: Instant) -> Option<Slot<'_, R>> {
        self.send.ready().then_some(Slot {
            send: &mut self.send,
            segment: None,
        })
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let has = |bit| self.features & bit != 0;
        let transport = match (has(feature::GUEST_CSUM), has(feature::CSUM)) {
            // What nobody vouches for is checked in `Receive::next`.
            (true, true) => Checksum::None,
            (true, false) => Checksum::Tx,
            (false, true) => Checksum::Rx,
            (false, false) => Checksum::Both,
        };
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ethernet;
        capabilities.max_transmission_unit = (usize::from(self.mtu) + 14).min(FRAME_MOST);
        capabilities.checksum.tcp = transport;
        capabilities.checksum.udp = transport;
        if has(feature::HOST_TSO4) {
            capabilities.segmentation.tcpv4 = NonZeroUsize::new(FRAME_MOST);
        }
        capabilities
    }
}

/// A received frame.
pub struct Received<'a>(&'a [u8]);

impl RxToken for Received<'_> {
    fn consume<T, F: FnOnce(&[u8]) -> T>(self, look: F) -> T {
        look(self.0)
    }
}

/// Room for a frame to be sent.
pub struct Slot<'a, R> {
    send: &'a mut Send<R>,
    segment: Option<u16>,
}

impl<R: Registers> TxToken for Slot<'_, R> {
    fn consume<T, F: FnOnce(&mut [u8]) -> T>(self, length: usize, fill: F) -> T {
        self.send.send(length, self.segment, fill)
    }

    fn set_meta(&mut self, meta: PacketMeta) {
        self.segment = meta.segmentation_offload_size.map(|bytes| bytes.get());
    }
}
