//! The device-specific configuration: `struct virtio_net_config` (virtio 1.2 section 5.1.4).
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};

use virtio_bindings::virtio_net::{VIRTIO_NET_S_ANNOUNCE, VIRTIO_NET_S_LINK_UP};

/// Speed that the card reports, Mbit/s. A TAP has no speed; bonding in the guest needs one.
const SPEED_MBPS: u32 = 10_000;
const FULL_DUPLEX: u8 = 1;

/// Device-specific configuration that the driver reads. Only the MAC address and the status change.
#[derive(Debug)]
pub(super) struct ConfigSpace {
    /// MAC address of the card at its creation.
    own_mac: [u8; 6],
    /// Present MAC address, which the driver may set, and two bytes of zero.
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

    /// Returns the present MAC address.
    pub(super) fn mac(&self) -> [u8; 6] {
        let [a, b, c, d, e, f, ..] = self.mac.load(Ordering::Acquire).to_le_bytes();
        [a, b, c, d, e, f]
    }

    /// Sets the MAC address, at the driver's command.
    pub(super) fn set_mac(&self, mac: [u8; 6]) {
        self.mac.store(packed(mac), Ordering::Release);
    }

    /// Restores the MAC address and clears the announcement. The link state is kept.
    pub(super) fn reset(&self) {
        self.set_mac(self.own_mac);
        self.set_announce(false);
    }

    /// Reads at `offset`. Bytes beyond the end read as zeroes.
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

    /// Sets the link state. Returns whether it changed.
    pub(super) fn set_link(&self, up: bool) -> bool {
        self.set(VIRTIO_NET_S_LINK_UP as u16, up)
    }

    /// Sets or clears the request for an announcement. Returns whether it changed.
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
