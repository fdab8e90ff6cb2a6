//! Which translated ports may be given, and to which VM.
use std::cell::RefMut;

use slipgate_abi::{Protocol, VmId};

use super::{Division, FreePorts, Inside, Mapping, Mappings, Pool};
use crate::quota::Reserve;

/// Most resting ports of a VM that are looked at for one that makes room.
const RESTS_LOOKED_AT: usize = 16;

impl Mappings {
    /// Sets the number of VMs among which the ports are shared.
    pub(in crate::flow) fn share_among(&mut self, vms: usize) {
        self.vms = vms;
        self.reserve = Reserve::new(self.size, vms);
        self.open.share_among(self.division.processes(), vms);
    }

    /// Divides the ports among this process, which has row `own_row` of `OWNERS`, and `others`, one
    /// bit for each row.
    pub(in crate::flow) fn share_with(&mut self, own_row: u32, others: u64) {
        let division = Division::new(own_row, others);
        if division != self.division {
            self.division = division;
            self.divide();
        }
    }

    pub(super) fn divide(&mut self) {
        let ports = self.range.clone().into_iter().flatten();
        self.size = ports.filter(|port| self.division.is_own(*port)).count();
        self.free.get_mut().clear();
        self.share_among(self.vms);
    }

    /// Sets the ports that are bound by sockets of the host; they are not picked any more.
    pub fn set_reserved(&mut self, ports: impl IntoIterator<Item = (Protocol, u16)>) {
        let range = self.range.as_ref();
        let is_in = |port: u16| range.is_none_or(|range| range.contains(&port));
        let ports = ports.into_iter().filter(|(_, port)| is_in(*port));
        let reserved = ports.collect();
        if reserved != self.reserved {
            self.reserved = reserved;
            self.free.get_mut().clear();
        }
    }

    /// Whether [`Mappings::take`] would give a translated port to a guest's port; `None`: to one
    /// that has none. `leaving`: mappings of the VM's flows that end before, one for each flow.
    pub fn would_give(
        &self,
        (vm, pool): (VmId, Pool),
        port: Option<&Inside>,
        leaving: &[Inside],
    ) -> bool {
        let ends = |inside: &&Inside| {
            let flows = self.by_inside.get(*inside).map_or(0, Mapping::flows);
            let left = leaving.iter().filter(|of| of == inside).count();
            (inside.vm, inside.pool()) == (vm, pool) && flows == left
        };
        port.is_some_and(|inside| self.by_inside.contains_key(inside))
            || self.has_room(vm, pool, 0, 0)
            || self.rest_that_makes_room(vm, pool).is_some()
            || leaving.iter().filter(ends).any(|of| self.makes_room(of))
    }

    /// Whether a VM may have a port more once `freed` ports have become free, and `given_back` of
    /// its own have ended.
    pub(super) fn has_room(&self, vm: VmId, pool: Pool, freed: usize, given_back: usize) -> bool {
        let free = self.free(pool).map_or(0, |free| free.len()) + freed;
        let held = || self.held.get(&(vm, pool)).copied().unwrap_or(0) - given_back;
        free > 0 && self.reserve.allows(free, held)
    }

    /// Returns the oldest resting mapping of a VM whose end makes room for another.
    pub(super) fn rest_that_makes_room(&self, vm: VmId, pool: Pool) -> Option<Inside> {
        let mut oldest = self.rests.of(vm, pool).take(RESTS_LOOKED_AT);
        let makes_room = |inside: &&Inside| self.makes_room(inside);
        oldest.find(makes_room).copied()
    }

    fn makes_room(&self, inside: &Inside) -> bool {
        let (pool, mapping) = (inside.pool(), self.by_inside.get(inside));
        let is_given = mapping.is_some_and(|of| self.may_be_given(pool, of.port));
        self.has_room(inside.vm, pool, usize::from(is_given), 1)
    }

    /// Whether a port may be given that no mapping has.
    pub(super) fn may_be_given(&self, pool: Pool, port: u16) -> bool {
        !self.reserved.contains(&(pool.protocol, port))
            && self.division.is_own(port)
            && !self.unadopted.has_port(pool, port)
    }

    /// Forgets the list of the ports of a pool of which none is taken: its address may be gone.
    pub(super) fn forget_free(&mut self, pool: Pool) {
        let mut taken = self.by_outside.range((pool, 0)..=(pool, u16::MAX));
        if taken.next().is_none() {
            self.free.get_mut().remove(&pool);
        }
    }

    /// Returns the ports of a pool that may be given; `None`: there is no range.
    pub(super) fn free(&self, pool: Pool) -> Option<RefMut<'_, FreePorts>> {
        let range = self.range.as_ref()?;
        let is_free = |port: u16| {
            !self.by_outside.contains_key(&(pool, port)) && self.may_be_given(pool, port)
        };
        Some(RefMut::map(self.free.borrow_mut(), |pools| {
            let list = || FreePorts::new(range, is_free);
            pools.entry(pool).or_insert_with(list)
        }))
    }
}
