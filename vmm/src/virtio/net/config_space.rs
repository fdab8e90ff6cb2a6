//! The device-specific configuration: `struct virtio_net_config` (virtio 1.2 section 5.1.4).
use std::sync::atomic::{AtomicU16, Ordering};

use virtio_bindings::virtio_net::{VIRTIO_NET_S_ANNOUNCE, VIRTIO_NET_S_LINK_UP};

/// The speed that the link states, Mbit/s. A TAP has none; bonding in the guest asks for one.
const SPEED_MBPS: u32 = 10_000;
const FULL_DUPLEX: u8 = 1;

/// What the driver reads. Only the status changes.
#[derive(Debug)]
pub(super) struct ConfigSpace {
    mac: [u8; 6],
    mtu: u16,
    max_pairs: u16,
    status: AtomicU16,
}

impl ConfigSpace {
    pub(super) fn new(mac: [u8; 6], mtu: u16, max_pairs: u16) -> ConfigSpace {
        ConfigSpace {
            mac,
            mtu,
            max_pairs,
            status: AtomicU16::new(VIRTIO_NET_S_LINK_UP as u16),
        }
    }

    /// The card's own address.
    pub(super) fn mac(&self) -> [u8; 6] {
        self.mac
    }

    /// Reads at `offset`; beyond the end there are zeroes.
    pub(super) fn read(&self, offset: usize, into: &mut [u8]) {
        let mut bytes = [0; 17];
        bytes[0..6].copy_from_slice(&self.mac);
        bytes[6..8].copy_from_slice(&self.status.load(Ordering::Acquire).to_le_bytes());
        bytes[8..10].copy_from_slice(&self.max_pairs.to_le_bytes());
        bytes[10..12].copy_from_slice(&self.mtu.to_le_bytes());
        bytes[12..16].copy_from_slice(&SPEED_MBPS.to_le_bytes());
        bytes[16] = FULL_DUPLEX;
        for (at, byte) in (offset..).zip(into) {
            *byte = bytes.get(at).copied().unwrap_or(0);
        }
    }

    /// Whether the link is up; says whether that is a change.
    pub(super) fn set_link(&self, up: bool) -> bool {
        self.set(VIRTIO_NET_S_LINK_UP as u16, up)
    }

    /// Whether the driver is to announce itself; says whether that is a change.
    pub(super) fn set_announce(&self, wanted: bool) -> bool {
        self.set(VIRTIO_NET_S_ANNOUNCE as u16, wanted)
    }

    fn set(&self, bit: u16, on: bool) -> bool {
        let before = if on {
            self.status.fetch_or(bit, Ordering::AcqRel)
        } else {
            self.status.fetch_and(!bit, Ordering::AcqRel)
        };
        (before & bit != 0) != on
    }
}
