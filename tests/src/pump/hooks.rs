//! Observation and manipulation by a test of the frames on a pump.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use crate::{frame::Packet, pcap::PcapWriter, tap::VnetHdr};

/// Frames a subscriber may leave unread; the next one is lost to it, and counted.
const UNREAD_MAX: usize = 65_536;

/// Direction of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the guest outward, or from the host on an uplink.
    Out,
    /// Toward the guest (or the host).
    In,
}

/// Decision of a filter about a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The frame passes unchanged.
    Pass,
    /// The frame is dropped.
    Lose,
    /// Let it pass that many times in all.
    Repeat(usize),
    /// Another frame is sent in its place.
    Replace(VnetHdr, Vec<u8>),
}

/// Looks at every frame before it is counted and moved on.
pub type Filter = Box<dyn FnMut(Direction, &VnetHdr, &[u8]) -> Fate + Send>;

/// A frame seen on the pump.
#[derive(Clone, Debug)]
pub struct SeenFrame {
    /// Direction of the frame.
    pub direction: Direction,
    /// Offload header of the frame.
    pub vnet: VnetHdr,
    /// The whole frame, from the Ethernet header on.
    pub bytes: Vec<u8>,
}

impl SeenFrame {
    /// IPv4 packet in the frame, if there is one.
    pub fn packet(&self) -> Option<Packet<'_>> {
        Packet::parse_ethernet(&self.bytes)
    }

    /// Packet of either family in the frame, if there is one.
    pub fn packet_of_either(&self) -> Option<Packet<'_, SocketAddr>> {
        Packet::of_ethernet(&self.bytes)
    }
}

/// The frames that pass a pump from the moment it was made, as copies.
#[derive(Debug)]
pub struct FrameTap {
    frames: mpsc::Receiver<SeenFrame>,
    missed: Arc<AtomicU64>,
}

impl FrameTap {
    /// The next frame that `wanted` picks; others are thrown away. `None` after `timeout`.
    pub fn wait_for(
        &self,
        timeout: Duration,
        mut wanted: impl FnMut(&SeenFrame) -> bool,
    ) -> Option<SeenFrame> {
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.frames.recv_timeout(left) {
                Ok(frame) if wanted(&frame) => return Some(frame),
                Ok(_) => {}
                Err(_) => return None,
            }
        }
    }

    /// The next frame toward the guest.
    pub fn next_in(&self, timeout: Duration) -> Option<SeenFrame> {
        self.wait_for(timeout, |frame| frame.direction == Direction::In)
    }

    /// Returns all frames that are waiting.
    pub fn drain(&self) -> Vec<SeenFrame> {
        self.frames.try_iter().collect()
    }

    /// Frames lost to this reader because it left too many unread.
    pub fn missed(&self) -> u64 {
        self.missed.load(Ordering::Relaxed)
    }
}

#[derive(Default)]
pub(super) struct Hooks {
    /// Number of changes so far.
    pub(super) changes: u64,
    pub(super) filter: Option<Filter>,
    subscribers: Vec<(mpsc::SyncSender<SeenFrame>, Arc<AtomicU64>)>,
    pub(super) pcap: Option<PcapWriter>,
}

impl Hooks {
    pub(super) fn see(&mut self, direction: Direction, vnet: &VnetHdr, bytes: &[u8]) -> Fate {
        if let Some(pcap) = &mut self.pcap {
            let _ = pcap.write(bytes);
        }
        self.subscribers.retain(|(sender, missed)| {
            match sender.try_send(SeenFrame {
                direction,
                vnet: *vnet,
                bytes: bytes.to_vec(),
            }) {
                Ok(()) => true,
                Err(mpsc::TrySendError::Full(_)) => {
                    missed.fetch_add(1, Ordering::Relaxed);
                    true
                }
                Err(mpsc::TrySendError::Disconnected(_)) => false,
            }
        });
        self.filter
            .as_mut()
            .map_or(Fate::Pass, |filter| filter(direction, vnet, bytes))
    }

    pub(super) fn subscribe(&mut self) -> FrameTap {
        let (sender, frames) = mpsc::sync_channel(UNREAD_MAX);
        let missed = Arc::new(AtomicU64::new(0));
        self.subscribers.push((sender, missed.clone()));
        FrameTap { frames, missed }
    }
}
