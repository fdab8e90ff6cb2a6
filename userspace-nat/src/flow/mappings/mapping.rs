//! One mapping, and the port of one that is gone.
use std::{collections::HashSet, net::IpAddr};

use hashbrown::HashMap;
use slipgate_abi::{SlotIndex, VmId, VmRow};

use super::Pool;
use crate::datapath::PortKey;

/// The translated port of a guest's port, and the flows that have it.
#[derive(Debug)]
pub struct Mapping {
    /// Port that packets have as their source once translated.
    pub port: u16,
    /// Row of the VM.
    pub row: VmRow,
    /// Number of the guest's own flows to each address.
    pub(super) peers: HashMap<IpAddr, u32, foldhash::fast::RandomState>,
    /// Slots of the flows that the world opened.
    pub(super) from_world: HashSet<SlotIndex>,
    /// Whether the port has an entry in `FORWARDS` or `FORWARDS6`.
    pub(super) is_open: bool,
    /// End of its rest, ns, while it has lost its last flow.
    pub(super) rests_until_ns: Option<u64>,
}

impl Mapping {
    /// Whether a flow has the mapping.
    pub fn has_flows(&self) -> bool {
        !self.peers.is_empty() || !self.from_world.is_empty()
    }

    /// Returns the number of flows that have it.
    pub(super) fn flows(&self) -> usize {
        let own: u32 = self.peers.values().sum();
        own as usize + self.from_world.len()
    }

    /// Whether the guest has a flow of its own to this address.
    pub fn has_peer(&self, remote: IpAddr) -> bool {
        self.peers.contains_key(&remote)
    }

    /// Whether it is in use. `is_answered`: whether the guest has answered a flow of the world's.
    pub fn is_in_use(&self, is_answered: impl Fn(SlotIndex) -> bool) -> bool {
        !self.peers.is_empty() || self.from_world.iter().any(|slot| is_answered(*slot))
    }

    /// Whether the programs hand over first packets to the port.
    pub const fn is_open(&self) -> bool {
        self.is_open
    }
}

/// A port whose entry in `FORWARDS` or `FORWARDS6` is to be removed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Closed {
    /// Id of the VM.
    pub vm: VmId,
    /// Protocol and translated address of the port.
    pub pool: Pool,
    /// The translated port itself.
    pub port: u16,
}

impl Closed {
    /// Returns its key in `FORWARDS` or `FORWARDS6`.
    pub fn key(&self) -> PortKey {
        self.pool.key(self.port)
    }
}
