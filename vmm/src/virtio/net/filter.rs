//! Receive filter: RX mode and MAC table (virtio 1.2 sections 5.1.6.5.1 and .2).
//!
//! Until the driver sets a filter it gets every frame: a driver that never negotiated the commands
//! must not lose a frame.
use std::sync::Arc;

use crate::snapshot::{FilterState, TableState};

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
    fn state(&self) -> TableState {
        match self {
            Table::These(addresses) => Some(addresses.clone()),
            Table::All => None,
        }
    }

    /// Returns the table of a snapshot.
    fn of(state: &TableState) -> Table {
        match state {
            Some(addresses) if addresses.len() <= MAX_ADDRESSES => Table::These(addresses.clone()),
            _ => Table::All,
        }
    }

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

    /// Returns what a snapshot says of the filter.
    pub(super) fn state(&self) -> FilterState {
        FilterState {
            modes: [
                self.promiscuous,
                self.all_multicast,
                self.all_unicast,
                self.no_multicast,
                self.no_unicast,
                self.no_broadcast,
            ],
            unicast: self.unicast.state(),
            multicast: self.multicast.state(),
        }
    }

    /// Returns the filter of a snapshot.
    pub(super) fn of(mac: [u8; 6], state: &FilterState) -> Filter {
        let [
            promiscuous,
            all_multicast,
            all_unicast,
            no_multicast,
            no_unicast,
            no_broadcast,
        ] = state.modes;
        Filter {
            mac,
            promiscuous,
            all_multicast,
            all_unicast,
            no_multicast,
            no_unicast,
            no_broadcast,
            unicast: Table::of(&state.unicast),
            multicast: Table::of(&state.multicast),
        }
    }

    /// Returns the filter as the workers get it; `None` passes all frames.
    pub(super) fn for_workers(&self) -> Option<Arc<Filter>> {
        (!self.promiscuous).then(|| Arc::new(self.clone()))
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
