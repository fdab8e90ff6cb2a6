//! The virtio network card (virtio 1.2, 5.1).
mod card;
mod control;
#[cfg(test)]
#[path = "fake_test.rs"]
pub(crate) mod fake;
mod header;
mod pair;

pub use card::{Card, Vectors, local_mac};
pub(crate) use card::{Config, patience};
pub use control::{Control, command};
pub(crate) use pair::LARGEST;
pub use pair::Pair;

/// Feature bits of the network card.
pub mod feature {
    /// The device completes checksums.
    pub const CSUM: u64 = 1 << 0;
    /// The driver accepts frames whose checksums are to be completed.
    pub const GUEST_CSUM: u64 = 1 << 1;
    /// The driver's offloads can be changed while running.
    pub const CTRL_GUEST_OFFLOADS: u64 = 1 << 2;
    /// The device reports its MTU.
    pub const MTU: u64 = 1 << 3;
    /// The device reports its MAC address.
    pub const MAC: u64 = 1 << 5;
    /// The driver accepts TCP/IPv4 frames of up to 64 KiB.
    pub const GUEST_TSO4: u64 = 1 << 7;
    /// The driver accepts TCP/IPv6 frames of up to 64 KiB.
    pub const GUEST_TSO6: u64 = 1 << 8;
    /// The driver accepts large TCP frames with ECN.
    pub const GUEST_ECN: u64 = 1 << 9;
    /// The device segments TCP/IPv4 frames.
    pub const HOST_TSO4: u64 = 1 << 11;
    /// A frame may take several receive buffers.
    pub const MRG_RXBUF: u64 = 1 << 15;
    /// The device reports the state of its link.
    pub const STATUS: u64 = 1 << 16;
    /// The device has a control queue.
    pub const CTRL_VQ: u64 = 1 << 17;
    /// The control queue has receive modes.
    pub const CTRL_RX: u64 = 1 << 18;
    /// The control queue has VLAN filters.
    pub const CTRL_VLAN: u64 = 1 << 19;
    /// The device may request announcements.
    pub const GUEST_ANNOUNCE: u64 = 1 << 21;
    /// The device has several queue pairs.
    pub const MQ: u64 = 1 << 22;
    /// The MAC address can be set.
    pub const CTRL_MAC_ADDR: u64 = 1 << 23;
    /// The driver accepts UDP/IPv4 frames that stand for several.
    pub const GUEST_USO4: u64 = 1 << 54;
    /// The driver accepts UDP/IPv6 frames that stand for several.
    pub const GUEST_USO6: u64 = 1 << 55;
    /// The device segments UDP frames.
    pub const HOST_USO: u64 = 1 << 56;
}

/// Features that the driver uses. Guest-side USO is not among them: no stack here splits a UDP
/// frame. Nor is HOST_TSO6: smoltcp 0.14 drops an IPv6 packet that is larger than the MTU, also one to
/// be segmented.
pub const WANTED: u64 = feature::CSUM
    | feature::GUEST_CSUM
    | feature::CTRL_GUEST_OFFLOADS
    | feature::MTU
    | feature::MAC
    | feature::GUEST_TSO4
    | feature::GUEST_TSO6
    | feature::GUEST_ECN
    | feature::HOST_TSO4
    | feature::MRG_RXBUF
    | feature::STATUS
    | feature::CTRL_VQ
    | feature::CTRL_RX
    | feature::CTRL_VLAN
    | feature::GUEST_ANNOUNCE
    | feature::MQ
    | feature::CTRL_MAC_ADDR
    | feature::HOST_USO
    | super::ring::feature::EVENT_IDX
    | super::ring::feature::INDIRECT_DESC;
