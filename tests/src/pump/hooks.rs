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

/// Those who see frames, and the one that judges them. Each has the number of the change that brought it.
#[derive(Default)]
pub(super) struct Hooks {
    /// Number of changes so far.
    changes: u64,
    filter: (u64, Option<Filter>),
    subscribers: Vec<(u64, Subscriber)>,
    pcap: (u64, Option<PcapWriter>),
}

struct Subscriber {
    sender: mpsc::SyncSender<SeenFrame>,
    missed: Arc<AtomicU64>,
}

impl Hooks {
    /// Number of changes so far. A hook that was set since has a higher one.
    pub(super) fn changes(&self) -> u64 {
        self.changes
    }

    /// Shows a frame to all hooks that were set after this change; 0: to all.
    pub(super) fn show(&mut self, after: u64, direction: Direction, vnet: &VnetHdr, bytes: &[u8]) {
        if let (change, Some(pcap)) = &mut self.pcap
            && *change > after
        {
            let _ = pcap.write(bytes);
        }
        self.subscribers.retain(|(change, subscriber)| {
            if *change <= after {
                return true;
            }
            match subscriber.sender.try_send(SeenFrame {
                direction,
                vnet: *vnet,
                bytes: bytes.to_vec(),
            }) {
                Ok(()) => true,
                Err(mpsc::TrySendError::Full(_)) => {
                    subscriber.missed.fetch_add(1, Ordering::Relaxed);
                    true
                }
                Err(mpsc::TrySendError::Disconnected(_)) => false,
            }
        });
    }

    /// Has the filter judge a frame.
    pub(super) fn judge(&mut self, direction: Direction, vnet: &VnetHdr, bytes: &[u8]) -> Fate {
        let filter = self.filter.1.as_mut();
        filter.map_or(Fate::Pass, |filter| filter(direction, vnet, bytes))
    }

    /// Whether the filter is another one than after this change.
    pub(super) fn has_other_filter(&self, after: u64) -> bool {
        self.filter.0 > after
    }

    pub(super) fn set_filter(&mut self, filter: Option<Filter>) {
        self.filter = (self.change(), filter);
    }

    pub(super) fn set_pcap(&mut self, pcap: PcapWriter) {
        self.pcap = (self.change(), Some(pcap));
    }

    /// The file of all frames, if there is one.
    pub(super) fn pcap(&mut self) -> Option<&mut PcapWriter> {
        self.pcap.1.as_mut()
    }

    pub(super) fn subscribe(&mut self) -> FrameTap {
        let (sender, frames) = mpsc::sync_channel(UNREAD_MAX);
        let missed = Arc::new(AtomicU64::new(0));
        let subscriber = Subscriber {
            sender,
            missed: missed.clone(),
        };
        let change = self.change();
        self.subscribers.push((change, subscriber));
        FrameTap { frames, missed }
    }

    fn change(&mut self) -> u64 {
        self.changes += 1;
        self.changes
    }
}
