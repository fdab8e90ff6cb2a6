//! The guard's list: prefixes, by policy, that XDP may drop without the engine.
//!
//! Successive policies of an index use two numbers in turn, so that their entries stay apart in the
//! list while the VMs' rows change from one number to the other.
use std::{collections::BTreeSet, mem};

use anyhow::Context as _;
use slipgate_abi::maps::MAX_OWNERS;
use slipgate_control::{
    SharedMaps,
    maps::{Insert, InsertError},
};
use slipgate_policy::{MOST_POLICIES, Policy};

use super::{
    Attached, ServedVm,
    catalogue::{Denied, denied},
};

/// Bit of a policy's number that selects one of the two of its index.
const TURN_BIT: u32 = 31;
/// Number of bits of a policy's number that hold its owner's row, from 1. The other bits number the
/// owner's policies.
const OWNER_BITS: u32 = 16;
const _: () = assert!(MAX_OWNERS < 1 << OWNER_BITS);
const _: () = assert!(MOST_POLICIES < 1 << (TURN_BIT - OWNER_BITS));

impl Attached {
    /// Number under which the guard finds the denied prefixes of a VM's policy.
    pub(crate) fn policy_number_of(&self, vm: &ServedVm) -> u32 {
        self.policy_number(self.policy_index(vm))
    }

    /// Number under which the guard finds the denied prefixes of one of our policies.
    pub(crate) fn policy_number(&self, index: u32) -> u32 {
        self.number_in_turn(index, self.policies.turn(index))
    }

    fn number_in_turn(&self, index: u32, turn: bool) -> u32 {
        u32::from(turn) << TURN_BIT | index << OWNER_BITS | (self.first_row() + 1)
    }

    fn is_our_number(&self, number: u32) -> bool {
        let row = number & ((1 << OWNER_BITS) - 1);
        self.all_rows().any(|ours| ours + 1 == row)
    }

    /// Writes the prefixes that the guard may drop without the engine, for each policy that a VM
    /// has.
    pub(crate) fn write_denied(&mut self) -> anyhow::Result<()> {
        remove_all_of(self.datapath.maps(), |number| self.is_our_number(number))?;
        let used: BTreeSet<u32> = self.vms.iter().map(|vm| self.policy_index(vm)).collect();
        used.into_iter().for_each(|index| self.add_denied_of(index));
        Ok(())
    }

    /// Removes what former policies denied from the list, by their indexes and turns. No row names
    /// their numbers any more.
    pub(crate) fn forget_denied(&mut self, unlisted: &[(u32, bool, Policy)]) {
        let maps = self.datapath.maps();
        for (index, turn, policy) in unlisted {
            let number = self.number_in_turn(*index, *turn);
            let mut all = denied(policy, number);
            let removed = all.try_for_each(|(key, _)| remove(maps, key));
            // What stays takes room, and denies nothing until the number is used again.
            if let Err(e) = removed {
                tracing::warn!("removing prefixes that a policy denied from the guard's list: {e}");
                self.unremoved.insert(number);
            }
        }
    }

    /// Removes what could not be removed before, as its number may be used again now.
    pub(crate) fn clear_unremoved(&mut self) -> anyhow::Result<()> {
        if self.unremoved.is_empty() {
            return Ok(());
        }
        let is_left = |number: u32| self.unremoved.contains(&number);
        remove_all_of(self.datapath.maps(), is_left)
            .context("removing prefixes that an earlier policy denied from the guard's list")?;
        self.unremoved.clear();
        Ok(())
    }

    /// Adds the prefixes that a policy denies, unless they are in the list.
    pub(crate) fn add_denied_of(&mut self, index: u32) {
        if !self.policies.list(index) {
            return;
        }
        let maps = self.datapath.maps();
        let policy = self.policies.set().of(Some(index));
        // IPv4 comes first, and each family has room of its own.
        let mut full = None;
        for (key, rule) in denied(policy, self.policy_number(index)) {
            let family = mem::discriminant(&key);
            // Without room the engine refuses what the guard then lets through.
            if full != Some(family) && insert(maps, key, rule).is_err() {
                tracing::warn!("the deny-list for XDP is full; the engine refuses the rest");
                full = Some(family);
            }
        }
    }
}

fn insert(maps: &SharedMaps, key: Denied, rule: u32) -> Result<(), InsertError> {
    match key {
        Denied::V4(key) => maps.deny.insert(&key, &rule, Insert::Any),
        Denied::V6(key) => maps.deny6.insert(&key, &rule, Insert::Any),
    }
}

fn remove(maps: &SharedMaps, key: Denied) -> slipgate_control::Result<()> {
    match key {
        Denied::V4(key) => maps.deny.remove(&key).map(drop),
        Denied::V6(key) => maps.deny6.remove(&key).map(drop),
    }
}

/// Removes all prefixes under these numbers.
fn remove_all_of(maps: &SharedMaps, is_one: impl Fn(u32) -> bool) -> slipgate_control::Result<()> {
    let is_one = |policy: [u8; 4]| is_one(u32::from_be_bytes(policy));
    maps.deny.remove_if(|prefix, _| is_one(prefix.key.policy))?;
    maps.deny6
        .remove_if(|prefix, _| is_one(prefix.key.policy))?;
    Ok(())
}

#[cfg(test)]
#[path = "guard_list_test.rs"]
mod tests;
