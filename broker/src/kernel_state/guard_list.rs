//! The guard's list: prefixes, by policy, that XDP may drop without the engine.
//!
//! Successive policies use numbers of two sets in turn, so that their entries stay apart in the
//! list while the VMs' rows change from one number to the other.
use std::collections::BTreeSet;

use anyhow::Context as _;
use ipnet::IpNet;
use slipgate_abi::{forward::DenyKey, maps::MAX_OWNERS};
use slipgate_control::maps::{DenyPrefix, Insert};

use super::Attached;

/// Bit of a policy's number that selects one of the two sets.
const TURN_BIT: u32 = 31;
/// Number of bits of a policy's number that hold its owner's row, from 1. The other bits number the
/// owner's policies.
const OWNER_BITS: u32 = 16;
const _: () = assert!(MAX_OWNERS < 1 << OWNER_BITS);

impl Attached {
    /// Number under which the guard finds the denied prefixes of one of our policies. Successive
    /// policies use the two sets in turn, so that their lists are apart.
    pub(crate) fn policy_number(&self, policy: u32) -> u32 {
        let turn = u32::from(self.turn) << TURN_BIT;
        turn | policy << OWNER_BITS | (self.first_row() + 1)
    }

    fn is_our_number(&self, number: u32) -> bool {
        let row = number & ((1 << OWNER_BITS) - 1);
        self.all_rows().any(|ours| ours + 1 == row)
    }

    /// Writes the prefixes that the guard may drop without the engine, for each policy that a VM
    /// has.
    pub(crate) fn write_denied(&mut self) -> anyhow::Result<()> {
        let deny = &self.datapath.maps().deny;
        let number = |prefix: &DenyPrefix| u32::from_be_bytes(prefix.key.policy);
        deny.remove_if(|prefix, _| self.is_our_number(number(prefix)))?;
        self.add_denied();
        Ok(())
    }

    /// Returns the numbers of the policies that VMs have at present.
    pub(crate) fn denied_numbers(&self) -> BTreeSet<u32> {
        let vms = self.vms.iter();
        vms.map(|vm| self.policy_number(vm.config.policy)).collect()
    }

    /// Removes the prefixes that were denied under these numbers.
    pub(crate) fn forget_denied(&self, numbers: &BTreeSet<u32>) {
        let deny = &self.datapath.maps().deny;
        let removed =
            deny.remove_if(|prefix, _| numbers.contains(&u32::from_be_bytes(prefix.key.policy)));
        // No row names these numbers any more: what stays takes room, and denies nothing.
        if let Err(e) = removed {
            tracing::warn!("removing what the policy before denied from the guard's list: {e}");
        }
    }

    /// Removes remains of an earlier use of the set of numbers that is not in force, which is about
    /// to be used again.
    pub(crate) fn clear_other_turn(&self) -> anyhow::Result<()> {
        let other = u32::from(!self.turn);
        let is_other = |number: u32| self.is_our_number(number) && number >> TURN_BIT == other;
        let deny = &self.datapath.maps().deny;
        deny.remove_if(|prefix, _| is_other(u32::from_be_bytes(prefix.key.policy)))
            .context("removing what an earlier policy denied from the guard's list")?;
        Ok(())
    }

    /// Adds the prefixes that the policies of VMs deny to the guard's list, under the numbers in
    /// force.
    pub(crate) fn add_denied(&mut self) {
        self.listed.clear();
        let used: BTreeSet<u32> = self.vms.iter().map(|vm| vm.config.policy).collect();
        used.into_iter().for_each(|index| self.add_denied_of(index));
    }

    /// Adds the prefixes that a policy denies, unless they are in the list.
    pub(crate) fn add_denied_of(&mut self, index: u32) {
        if !self.listed.insert(index) {
            return;
        }
        let deny = &self.datapath.maps().deny;
        for (prefix, rule) in self.policies.of(Some(index)).deny_prefixes() {
            // The guard drops no IPv6 by its destination: `guest_egress` drops all of it.
            let IpNet::V4(prefix) = prefix else {
                continue;
            };
            let key = DenyPrefix {
                prefix_len: 32 + u32::from(prefix.prefix_len()),
                key: DenyKey {
                    policy: self.policy_number(index).to_be_bytes(),
                    remote: prefix.addr().into(),
                },
            };
            // Without room the engine refuses what the guard then lets through.
            if deny
                .insert(&key, &(self.rules.start + rule.0), Insert::Any)
                .is_err()
            {
                tracing::warn!("the deny-list for XDP is full; the engine refuses the rest");
                break;
            }
        }
    }
}
