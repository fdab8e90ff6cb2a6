//! The device-specific configuration: `struct virtio_net_config` (virtio 1.2 section 5.1.4).
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};

use virtio_bindings::virtio_net::{VIRTIO_NET_S_ANNOUNCE, VIRTIO_NET_S_LINK_UP};

/// The speed that the link states, Mbit/s. A TAP has none; bonding in the guest asks for one.
const SPEED_MBPS: u32 = 10_000;
const FULL_DUPLEX: u8 = 1;

/// What the driver reads. Only address and status change.
#[derive(Debug)]
pub(super) struct ConfigSpace {
    /// The card's own address.
    own_mac: [u8; 6],
    /// What the driver made of it, and two bytes of zero.
    mac: AtomicU64,
    mtu: u16,
    max_pairs: u16,
    status: AtomicU16,
}

impl ConfigSpace {
    pub(super) fn new(mac: [u8; 6], mtu: u16, max_pairs: u16) -> ConfigSpace {
        ConfigSpace {
            own_mac: mac,
            mac: AtomicU64::new(packed(mac)),
            mtu,
            max_pairs,
            status: AtomicU16::new(VIRTIO_NET_S_LINK_UP as u16),
        }
    }

    /// The address that the card has now.
    pub(super) fn mac(&self) -> [u8; 6] {
        let [a, b, c, d, e, f, ..] = self.mac.load(Ordering::Acquire).to_le_bytes();
        [a, b, c, d, e, f]
    }

    /// The driver gave the card another address.
    pub(super) fn set_mac(&self, mac: [u8; 6]) {
        self.mac.store(packed(mac), Ordering::Release);
    }

    /// As it was when the card was made; the link stays as it is.
    pub(super) fn reset(&self) {
        self.set_mac(self.own_mac);
        self.set_announce(false);
    }

    /// Reads at `offset`; beyond the end there are zeroes.
    pub(super) fn read(&self, offset: usize, into: &mut [u8]) {
        let mut bytes = [0; 17];
        bytes[0..6].copy_from_slice(&self.mac());
        bytes[6..8].copy_from_slice(&self.status.load(Ordering::Acquire).to_le_bytes());
        bytes[8..10].copy_from_slice(&self.max_pairs.to_le_bytes());
        bytes[10..12].copy_from_slice(&self.mtu.to_le_bytes());
        bytes[12..16].copy_from_slice(&SPEED_MBPS.to_le_bytes());
        bytes[16] = FULL_DUPLEX;
        let from = bytes.get(offset..).unwrap_or(&[]);
        let there = from.len().min(into.len());
        into[..there].copy_from_slice(&from[..there]);
        into[there..].fill(0);
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

fn packed([a, b, c, d, e, f]: [u8; 6]) -> u64 {
    u64::from_le_bytes([a, b, c, d, e, f, 0, 0])
}
