//! Receive filter: RX mode and MAC table (virtio 1.2 sections 5.1.6.5.1 and .2).
//!
//! Until the driver sets a filter it gets every frame: a driver that never negotiated the commands
//! must not lose a frame.

/// Largest number of addresses in a table. With more, the driver gets all frames of that kind.
pub(super) const MAX_ADDRESSES: usize = 64;

const BROADCAST: [u8; 6] = [0xff; 6];

/// Receive filter of a driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Filter {
    pub(super) mac: [u8; 6],
    pub(super) promiscuous: bool,
    pub(super) all_multicast: bool,
    pub(super) all_unicast: bool,
    pub(super) no_multicast: bool,
    pub(super) no_unicast: bool,
    pub(super) no_broadcast: bool,
    pub(super) unicast: Table,
    pub(super) multicast: Table,
}

/// Addresses of one kind, unicast or multicast. A table that is too long passes all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Table {
    These(Vec<[u8; 6]>),
    All,
}

impl Table {
    fn has(&self, address: &[u8; 6]) -> bool {
        match self {
            Table::These(addresses) => addresses.contains(address),
            Table::All => true,
        }
    }
}

impl Filter {
    pub(super) fn new(mac: [u8; 6]) -> Filter {
        Filter {
            mac,
            promiscuous: true,
            all_multicast: false,
            all_unicast: false,
            no_multicast: false,
            no_unicast: false,
            no_broadcast: false,
            unicast: Table::These(Vec::new()),
            multicast: Table::These(Vec::new()),
        }
    }

    /// Returns whether a frame to this address goes to the guest.
    pub(super) fn wants(&self, to: &[u8; 6]) -> bool {
        if self.promiscuous {
            true
        } else if *to == BROADCAST {
            !self.no_broadcast
        } else if to[0] & 1 != 0 {
            !self.no_multicast && (self.all_multicast || self.multicast.has(to))
        } else {
            !self.no_unicast && (self.all_unicast || *to == self.mac || self.unicast.has(to))
        }
    }
}

#[cfg(test)]
#[path = "filter_test.rs"]
mod tests;
