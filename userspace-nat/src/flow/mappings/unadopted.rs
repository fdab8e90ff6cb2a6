//! Ports of a predecessor's flows that are still to be adopted, and the slots of these flows.
//!
//! Nobody is given such a port. A guest's port has its mapping again once one of its flows is
//! adopted: before a frame is handled that concerns the port, this is done.
use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr},
};

use hashbrown::HashMap;
use slipgate_abi::SlotIndex;
use slipgate_model::FlowTuple;

use super::{Inside, Mappings, Pool};

/// A predecessor's flows that have mappings, as the first look at the slots found them.
#[derive(Debug, Default)]
pub(super) struct Unadopted {
    slots: BTreeMap<Inside, Vec<SlotIndex>>,
    ports: HashMap<(Pool, u16), Inside>,
}

impl Unadopted {
    pub(super) fn insert(&mut self, slot: SlotIndex, inside: Inside, port: u16) {
        self.slots.entry(inside).or_default().push(slot);
        self.ports.insert((inside.pool(), port), inside);
    }

    /// Whether a port is kept.
    pub(super) fn has_port(&self, pool: Pool, port: u16) -> bool {
        self.ports.contains_key(&(pool, port))
    }

    /// Returns the guest's port that had a translated port.
    pub(super) fn by_outside(&self, pool: Pool, port: u16) -> Option<Inside> {
        self.ports.get(&(pool, port)).copied()
    }

    /// Returns the mappings of a guest's port, one for each translated address. That of `inside`
    /// does not matter.
    pub(super) fn of_guest(&self, inside: &Inside) -> Vec<Inside> {
        let first = Inside {
            nat: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            ..*inside
        };
        let behind = self.slots.range(first..);
        let is_its = |of: &Inside| {
            Inside {
                nat: inside.nat,
                ..*of
            } == *inside
        };
        behind
            .map_while(|(of, _)| is_its(of).then_some(*of))
            .collect()
    }

    /// Takes a slot of a mapping.
    pub(super) fn take(&mut self, inside: &Inside) -> Option<SlotIndex> {
        self.slots.get_mut(inside)?.pop()
    }

    /// Lists a slot again.
    pub(super) fn put_back(&mut self, slot: SlotIndex, inside: &Inside) {
        if let Some(slots) = self.slots.get_mut(inside) {
            slots.push(slot);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ports.is_empty()
    }
}

impl Mappings {
    /// Keeps the port of a predecessor's flow, if it is of the range, until it is adopted.
    pub(in crate::flow) fn keep(
        &mut self,
        slot: SlotIndex,
        guest: &FlowTuple,
        nat: IpAddr,
        port: u16,
    ) {
        if let Some(inside) = self.inside_of(guest, nat, port) {
            self.unadopted.insert(slot, inside, port);
            self.free.get_mut().clear();
        }
    }

    /// Keeps no port any more: all flows are adopted.
    pub(in crate::flow) fn keep_none(&mut self) {
        if !self.unadopted.is_empty() {
            self.unadopted = Unadopted::default();
            self.free.get_mut().clear();
        }
    }

    /// Returns the guest's ports that a packet concerns, and whose mappings are still to be made of
    /// a predecessor's flows.
    pub(crate) fn unadopted_by(&self, tuple: &FlowTuple) -> Vec<Inside> {
        if self.unadopted.is_empty() {
            return Vec::new();
        }
        let mut found = match (tuple.scope, tuple.protocol()) {
            (FlowTuple::WORLD, Some(protocol)) => {
                let nat = tuple.local;
                let inside = self
                    .unadopted
                    .by_outside(Pool { protocol, nat }, tuple.local_port);
                Vec::from_iter(inside)
            }
            (FlowTuple::WORLD, None) => Vec::new(),
            // Of whatever translated address: the route is not known yet.
            _ => Inside::of(tuple, Ipv4Addr::UNSPECIFIED.into())
                .map_or_else(Vec::new, |inside| self.unadopted.of_guest(&inside)),
        };
        found.retain(|inside| !self.by_inside.contains_key(inside));
        found
    }

    /// Takes a slot that may hold a flow of a guest's port that is still to be adopted.
    pub(crate) fn take_unadopted(&mut self, inside: &Inside) -> Option<SlotIndex> {
        self.unadopted.take(inside)
    }

    /// Lists such a slot again.
    pub(crate) fn put_unadopted_back(&mut self, slot: SlotIndex, inside: &Inside) {
        self.unadopted.put_back(slot, inside);
    }
}
