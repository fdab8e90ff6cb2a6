//! A queue pair as the stack's device.
//!
//! # Theory of operation
//! Every buffer is allocated at start and belongs to one descriptor or to one slot for ever. The
//! stack reads received frames in place, and their buffers are offered again with the next call. A
//! frame of several buffers is copied together only if they are not adjacent. They are adjacent,
//! except at the ring's end, while the device takes them in order. The stack writes sent frames
//! behind their header: into a small slot, or a large one whose frame the device segments. The
//! device is notified only by [`Nic::flush`] or [`Nic::arm`].
mod receive;
mod send;

use core::num::NonZeroUsize;

use smoltcp::{
    phy::{Checksum, Device, DeviceCapabilities, Medium, PacketMeta, RxToken, TxToken},
    time::Instant,
};

pub(crate) use self::receive::LARGEST;
use self::{receive::Receive, send::Send};
use super::{
    super::{ring::Ring, transport::Doorbell},
    card::Config,
    feature,
};
use crate::{
    pci::Registers,
    platform::{Nic, NicCounters},
};

/// Length of the largest frame, bytes.
const FRAME_MOST: usize = 65_535;

/// One queue pair. Its memory is never freed: the device may use it until the next reset, which a
/// single pair can't request.
pub struct Pair<R> {
    receive: Receive<R>,
    send: Send<R>,
    place: (u16, u16),
    mac: [u8; 6],
    mtu: u16,
    features: u64,
    taken: fn() -> u64,
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
        Pair {
            receive: Receive::new(receive, receive_bell, features),
            send: Send::new(send, send_bell, features),
            place,
            mac: config.mac,
            mtu: config.mtu,
            features,
            taken,
        }
    }

    /// Returns the number of sent frames that the device has not returned yet.
    pub fn in_flight(&self) -> usize {
        self.send.in_flight()
    }

    /// Offers all receive buffers. Must be called once the device has been started.
    pub(super) fn start(&mut self) {
        self.receive.offer_all();
        self.send.ring.disarm();
        self.receive.kick();
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
            // Received frames are not processed either while there is no room for an answer.
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
            // Checksums that no one has checked are checked in `Receive::next`.
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

/// Token of a received frame.
pub struct Received<'a>(&'a [u8]);

impl RxToken for Received<'_> {
    fn consume<T, F: FnOnce(&[u8]) -> T>(self, look: F) -> T {
        look(self.0)
    }
}

/// Token of room for a frame to send.
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
