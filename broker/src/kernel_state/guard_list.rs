//! The guard's list: what XDP may drop on its own, by policy.
//!
//! Policies that are put in force one after the other have numbers of two sets in turn, so that what
//! they deny is apart in the list while the VMs' rows change from one number to the other.
use std::collections::BTreeSet;

use anyhow::Context as _;
use slipgate_abi::{forward::DenyKey, maps::MAX_OWNERS};
use slipgate_control::maps::{DenyPrefix, Insert};

use super::Attached;

/// The bit of a policy's number that tells whose turn it is.
const TURN_BIT: u32 = 31;
/// Bits of a policy's number that tell its owner's row, from 1: the rest tells which of the owner's.
const OWNER_BITS: u32 = 16;
const _: () = assert!(MAX_OWNERS < 1 << OWNER_BITS);

impl Attached {
    /// The number under which the guard finds what one of our policies denies. Policies that are put
    /// in force one after the other take turns, so that their lists are apart.
    pub(crate) fn policy_number(&self, policy: u32) -> u32 {
        let turn = u32::from(self.turn) << TURN_BIT;
        turn | policy << OWNER_BITS | (self.owner.row() + 1)
    }

    fn is_our_number(&self, number: u32) -> bool {
        number & ((1 << OWNER_BITS) - 1) == self.owner.row() + 1
    }

    /// What the guard may drop on its own, of each policy that a VM has.
    pub(crate) fn write_denied(&self) -> anyhow::Result<()> {
        let deny = &self.datapath.maps().deny;
        let number = |prefix: &DenyPrefix| u32::from_be_bytes(prefix.key.policy);
        deny.remove_if(|prefix, _| self.is_our_number(number(prefix)))?;
        self.add_denied();
        Ok(())
    }

    /// The numbers of policies that VMs have now.
    pub(crate) fn denied_numbers(&self) -> BTreeSet<u32> {
        let vms = self.vms.iter();
        vms.map(|vm| self.policy_number(vm.config.policy)).collect()
    }

    /// Removes what was denied under these numbers.
    pub(crate) fn forget_denied(&self, numbers: &BTreeSet<u32>) {
        let deny = &self.datapath.maps().deny;
        let removed =
            deny.remove_if(|prefix, _| numbers.contains(&u32::from_be_bytes(prefix.key.policy)));
        // No row names these numbers any more: what stays takes room, and denies nothing.
        if let Err(e) = removed {
            tracing::warn!("removing what the policy before denied from the guard's list: {e}");
        }
    }

    /// Removes what an earlier turn of the numbers that are not in force may have left: they are
    /// about to be used again.
    pub(crate) fn clear_other_turn(&self) -> anyhow::Result<()> {
        let other = u32::from(!self.turn);
        let is_other = |number: u32| self.is_our_number(number) && number >> TURN_BIT == other;
        let deny = &self.datapath.maps().deny;
        deny.remove_if(|prefix, _| is_other(u32::from_be_bytes(prefix.key.policy)))
            .context("removing what an earlier policy denied from the guard's list")?;
        Ok(())
    }

    /// Adds what the policies deny to the guard's list.
    pub(crate) fn add_denied(&self) {
        let deny = &self.datapath.maps().deny;
        let used: BTreeSet<u32> = self.vms.iter().map(|vm| vm.config.policy).collect();
        let all = used.into_iter().flat_map(|index| {
            let denied = self.policies.of(Some(index)).deny_prefixes();
            denied.into_iter().map(move |denied| (index, denied))
        });
        for (index, (prefix, rule)) in all {
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
