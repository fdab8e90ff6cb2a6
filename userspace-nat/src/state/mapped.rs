//! Endpoint-independent mappings that the world may use: their ports in `FORWARDS` and `FORWARDS6` follow what flows
//! and policies say ([`crate::flow::mappings`]).
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::ForwardTarget;

use super::Core;
use crate::{
    datapath::{Datapath, PortKey},
    flow::mappings::{Inside, Mapping},
};

/// Ports that are opened or closed in a turn, a system call each.
const PORTS_AT_ONCE: usize = 256;

impl<D: Datapath> Core<D> {
    /// Opens and closes ports of mappings that have changed, some at once.
    pub(crate) fn follow_mappings(&mut self) {
        let mut left = PORTS_AT_ONCE;
        while left > 0
            && let Some(closed) = self.nat.flows.mappings.take_closed()
        {
            left -= 1;
            self.nat.close(&closed);
        }
        for inside in self.nat.flows.mappings.take_changed(left) {
            self.follow_mapping(&inside);
        }
    }

    /// Opens or closes the port of a mapping, as flows and policy say.
    pub(crate) fn follow_mapping(&mut self, inside: &Inside) {
        let behaviour = self.rules.nat_behaviour(inside.vm, inside.protocol);
        let is_own = self.nat.network.may_be_translated_to(inside.vm, inside.nat);
        let lets_in = behaviour.lets_others_in() && is_own;
        let mapping = self.nat.flows.mappings.get(inside);
        let is_served = self.vms.by_id(inside.vm).is_some();
        match lets_in && is_served && mapping.is_some_and(|of| self.is_in_use(of)) {
            // It is tried again with the mapping's next flow.
            true => drop(self.nat.open_port_of(inside)),
            false => self.nat.close_port_of(inside),
        }
    }

    fn is_in_use(&self, mapping: &Mapping) -> bool {
        let datapath = &self.nat.datapath;
        mapping.is_in_use(|slot| datapath.slot(slot).tx_packets().load(Relaxed) > 0)
    }

    /// Closes the ports that a predecessor left open and that no adopted flow uses.
    pub(crate) fn close_left_ports(&mut self) {
        let Some(range) = self.nat.flows.mappings.range().cloned() else {
            return;
        };
        while self.nat.flows.mappings.has_changed() {
            self.follow_mappings();
        }
        let (flows, vms) = (&self.nat.flows, &self.vms);
        let is_unwanted = |key: &PortKey, to: &ForwardTarget| {
            range.contains(&key.port())
                && !key.is_routed()
                && vms.by_id(to.id()).is_some()
                && !flows.mappings.has_open(key)
        };
        // Where the kernel refuses, the engine lets nobody in by them.
        let _ = self.nat.datapath.close_ports(&is_unwanted);
    }
}
