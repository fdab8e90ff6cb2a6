//! Feature bits (virtio 1.2 section 5.1.3) and the TAP offloads they correspond to.
use virtio_bindings::{
    bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC},
    virtio_net::{
        VIRTIO_NET_F_CSUM, VIRTIO_NET_F_CTRL_GUEST_OFFLOADS, VIRTIO_NET_F_CTRL_MAC_ADDR,
        VIRTIO_NET_F_CTRL_RX, VIRTIO_NET_F_CTRL_RX_EXTRA, VIRTIO_NET_F_CTRL_VQ,
        VIRTIO_NET_F_GUEST_ANNOUNCE, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN,
        VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_GUEST_USO4,
        VIRTIO_NET_F_GUEST_USO6, VIRTIO_NET_F_HOST_ECN, VIRTIO_NET_F_HOST_TSO4,
        VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_HOST_USO, VIRTIO_NET_F_MAC, VIRTIO_NET_F_MQ,
        VIRTIO_NET_F_MRG_RXBUF, VIRTIO_NET_F_MTU, VIRTIO_NET_F_SPEED_DUPLEX, VIRTIO_NET_F_STATUS,
    },
};

/// Set of feature bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Features(pub(super) u64);

impl Features {
    /// Returns whether the set contains a bit.
    pub(super) fn has(self, bit: u32) -> bool {
        self.0 & (1 << bit) != 0
    }

    pub(super) fn mergeable(self) -> bool {
        self.has(VIRTIO_NET_F_MRG_RXBUF)
    }

    /// Returns the features that the device offers on a TAP with these offloads.
    pub(super) fn offered(tap: Offloads, queue_pairs: usize) -> Features {
        const ALWAYS: &[u32] = &[
            VIRTIO_NET_F_MAC,
            VIRTIO_NET_F_STATUS,
            VIRTIO_NET_F_MTU,
            VIRTIO_NET_F_SPEED_DUPLEX,
            VIRTIO_NET_F_MRG_RXBUF,
            VIRTIO_NET_F_CTRL_VQ,
            VIRTIO_NET_F_CTRL_RX,
            VIRTIO_NET_F_CTRL_RX_EXTRA,
            VIRTIO_NET_F_CTRL_MAC_ADDR,
            VIRTIO_NET_F_GUEST_ANNOUNCE,
            VIRTIO_RING_F_EVENT_IDX,
            VIRTIO_RING_F_INDIRECT_DESC,
        ];
        let mut offered = ALWAYS.iter().fold(0, |bits, bit| bits | 1 << bit);
        if queue_pairs > 1 {
            offered |= 1 << VIRTIO_NET_F_MQ;
        }
        for (offload, host, guest) in TABLE {
            if tap.has(*offload) {
                offered |= host
                    .iter()
                    .chain(*guest)
                    .fold(0, |bits, bit| bits | 1 << bit);
            }
        }
        if tap.has(Offloads::CSUM) {
            offered |= 1 << VIRTIO_NET_F_CTRL_GUEST_OFFLOADS;
        }
        Features(offered)
    }

    /// Returns the set without what the engine does not do that serves a card's rings: to filter frames.
    /// A driver that has no filter gets all.
    pub(super) fn without_filters(self) -> Features {
        Features(self.0 & !(1 << VIRTIO_NET_F_CTRL_RX | 1 << VIRTIO_NET_F_CTRL_RX_EXTRA))
    }

    /// Returns the features of these offloads, toward host and guest.
    pub(super) fn of_offloads(offloads: Offloads) -> u64 {
        let of = |(offload, host, guest): &Row| match offloads.has(*offload) {
            true => bits(host) | bits(guest),
            false => 0,
        };
        TABLE.iter().map(of).fold(0, |all, bits| all | bits)
    }

    /// Returns the features of these offloads toward the guest.
    pub(super) fn toward_guest(offloads: Offloads) -> u64 {
        let of = |(offload, _, guest): &Row| match offloads.has(*offload) {
            true => bits(guest),
            false => 0,
        };
        TABLE.iter().map(of).fold(0, |all, bits| all | bits)
    }

    /// Returns the offloads that the TAP may use toward this guest: those that the driver
    /// negotiated, as far as the specification's dependencies (section 5.1.3.1) are met.
    pub(super) fn guest_offloads(self) -> Offloads {
        let all = TABLE
            .iter()
            .filter(|(_, _, guest)| guest.iter().all(|bit| self.has(*bit)))
            .fold(Offloads::default(), |all, (offload, ..)| all.with(*offload));
        all.consistent()
    }
}

fn bits(numbers: &[u32]) -> u64 {
    numbers.iter().fold(0, |bits, bit| bits | 1 << bit)
}

/// TAP offload, features toward the host, features toward the guest. USO for both IP versions is
/// one offload on a TAP.
type Row = (Offloads, &'static [u32], &'static [u32]);
const TABLE: &[Row] = &[
    (
        Offloads::CSUM,
        &[VIRTIO_NET_F_CSUM],
        &[VIRTIO_NET_F_GUEST_CSUM],
    ),
    (
        Offloads::TSO4,
        &[VIRTIO_NET_F_HOST_TSO4],
        &[VIRTIO_NET_F_GUEST_TSO4],
    ),
    (
        Offloads::TSO6,
        &[VIRTIO_NET_F_HOST_TSO6],
        &[VIRTIO_NET_F_GUEST_TSO6],
    ),
    (
        Offloads::ECN,
        &[VIRTIO_NET_F_HOST_ECN],
        &[VIRTIO_NET_F_GUEST_ECN],
    ),
    (
        Offloads::USO,
        &[VIRTIO_NET_F_HOST_USO],
        &[VIRTIO_NET_F_GUEST_USO4, VIRTIO_NET_F_GUEST_USO6],
    ),
];

/// Offloads that the reader of a TAP's frames accepts: `TUN_F_*` of `linux/if_tun.h`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Offloads(pub(super) u32);

impl Offloads {
    pub(super) const CSUM: Offloads = Offloads(libc::TUN_F_CSUM);
    pub(super) const TSO4: Offloads = Offloads(libc::TUN_F_TSO4);
    pub(super) const TSO6: Offloads = Offloads(libc::TUN_F_TSO6);
    pub(super) const ECN: Offloads = Offloads(libc::TUN_F_TSO_ECN);
    /// Since Linux 6.2; the kernel takes both bits or none.
    pub(super) const USO: Offloads = Offloads(libc::TUN_F_USO4 | libc::TUN_F_USO6);
    pub(super) const ALL: &[Offloads] = &[Self::CSUM, Self::TSO4, Self::TSO6, Self::ECN, Self::USO];

    /// Returns all of them.
    pub(super) fn all() -> Offloads {
        let all = Self::ALL.iter();
        all.fold(Offloads::default(), |all, offload| all.with(*offload))
    }

    /// Returns those of an engine that serves a card's rings.
    pub(super) fn of_rings() -> Offloads {
        Offloads(Self::all().0 & !Self::ECN.0)
    }

    pub(super) fn has(self, other: Offloads) -> bool {
        self.0 & other.0 == other.0
    }

    pub(super) fn with(self, other: Offloads) -> Offloads {
        Offloads(self.0 | other.0)
    }

    /// Returns the set without offloads whose dependencies are not in it.
    pub(super) fn consistent(self) -> Offloads {
        if !self.has(Self::CSUM) {
            return Offloads::default();
        }
        let tso = (Self::TSO4.0 | Self::TSO6.0) & self.0 != 0;
        if tso {
            self
        } else {
            Offloads(self.0 & !Self::ECN.0)
        }
    }

    /// Returns the offloads for the bits that the driver writes with
    /// `VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET`; `None` when a bit was not negotiated.
    pub(super) fn from_command(bits: u64, negotiated: Features) -> Option<Offloads> {
        let known = TABLE
            .iter()
            .flat_map(|(_, _, guest)| *guest)
            .fold(0, |known, bit| known | 1 << bit);
        (bits & !(known & negotiated.0) == 0).then(|| Features(bits).guest_offloads())
    }
}

#[cfg(test)]
#[path = "features_test.rs"]
mod tests;
