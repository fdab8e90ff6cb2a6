//! Flows of a guest's port that has an endpoint-independent mapping.
//!
//! A mapping that has no flow yet may be given another port, where other processes have the port or
//! its tuple. One with flows keeps its port: a tuple that is taken then refuses the flow.
use slipgate_abi::{ForwardTarget, Refusal, SlotIndex, VmRow};
use slipgate_policy::NatBehaviour;

use super::commit::PORT_TRIES;
use crate::{
    datapath::{Datapath, InsertError},
    flow::{
        NewFlow, OpenError,
        mappings::{Closed, Inside},
    },
    state::Nat,
};

impl<D: Datapath> Nat<D> {
    /// Opens a flow with the translated port of its guest's port. Returns its slot.
    pub(super) fn open_mapped(
        &mut self,
        mut flow: NewFlow,
        behaviour: NatBehaviour,
        now_ns: u64,
    ) -> Result<SlotIndex, Refusal> {
        let inside = Inside::of(&flow.guest, flow.nat).ok_or(Refusal::Insertion)?;
        let mut swept = false;
        for _ in 0..PORT_TRIES {
            let port = self.flows.mappings.take(inside, flow.vm_row);
            flow.nat_port = port.ok_or(Refusal::PortsExhausted)?;
            if behaviour.filtering.lets_others_in() {
                match self.open_port_of(&inside) {
                    Ok(()) => {}
                    // Another process has the port.
                    Err(InsertError::Exists) if self.flows.mappings.give_back(&inside) => continue,
                    Err(error) => {
                        self.flows.mappings.give_back(&inside);
                        return Err(match error {
                            InsertError::Full => Refusal::TableFull,
                            InsertError::Exists => Refusal::PortsExhausted,
                            InsertError::Os(_) => Refusal::Insertion,
                        });
                    }
                }
            }
            let refusal = match self.flows.open(&mut self.datapath, &flow, now_ns) {
                Ok(slot) if self.claim_socket(slot, now_ns) => return Ok(slot),
                // The host does not let the flow have the port: another might do.
                Ok(_) if self.flows.mappings.give_back(&inside) => continue,
                Ok(_) => Refusal::PortsExhausted,
                Err(OpenError::WorldTaken) if self.flows.mappings.give_back(&inside) => continue,
                Err(OpenError::GuestTaken) if !swept && self.sweep(&flow.guest) => {
                    swept = true;
                    continue;
                }
                Err(OpenError::NoSlot) => {
                    self.make_room_for_next(flow.vm_row, now_ns);
                    Refusal::TableFull
                }
                Err(OpenError::MapFull) => Refusal::TableFull,
                Err(OpenError::WorldTaken) => Refusal::PortsExhausted,
                Err(OpenError::GuestTaken | OpenError::Kernel(_)) => Refusal::Insertion,
            };
            self.flows.mappings.give_back(&inside);
            return Err(refusal);
        }
        Err(Refusal::PortsExhausted)
    }

    /// Has the programs hand over first packets to the translated port of a guest's port.
    pub(crate) fn open_port_of(&mut self, inside: &Inside) -> Result<(), InsertError> {
        let mappings = &mut self.flows.mappings;
        let Some(mapping) = mappings.get(inside).filter(|mapping| !mapping.is_open()) else {
            return Ok(());
        };
        let key = inside.pool().key(mapping.port);
        if !mappings.may_open(inside.vm) {
            return Err(InsertError::Full);
        }
        let target = ForwardTarget::new(inside.vm, mapping.row, inside.port);
        // The entry of whoever had the port before, or the port would be closed after it is opened.
        if let Some(closed) = mappings.take_closed_at(inside.pool(), mapping.port) {
            self.close(&closed);
        }
        self.datapath.open_port(&key, target)?;
        self.flows.mappings.set_open(inside, true);
        Ok(())
    }

    /// Has the programs leave first packets to the port of a mapping that is gone to the host.
    pub(crate) fn close(&mut self, closed: &Closed) {
        let _ = self.datapath.close_port(&closed.key(), closed.vm);
    }

    /// Has the programs leave first packets to such a port to the host again.
    pub(crate) fn close_port_of(&mut self, inside: &Inside) {
        let mappings = &mut self.flows.mappings;
        let Some(mapping) = mappings.get(inside).filter(|mapping| mapping.is_open()) else {
            return;
        };
        // Where the kernel refuses, the engine lets nobody in.
        let key = inside.pool().key(mapping.port);
        let _ = self.datapath.close_port(&key, inside.vm);
        mappings.set_open(inside, false);
    }

    /// Makes room for when the refused packet is sent again: a slot rests.
    pub(super) fn make_room_for_next(&mut self, row: VmRow, now_ns: u64) {
        let found = self.flows.find_room(&self.datapath, row, false, now_ns);
        self.flows.make_room(&mut self.datapath, &found, now_ns);
    }
}
