//! Entries of `FORWARDS` and `FORWARDS6` that lead to ports of guests' mappings.
use std::hash::Hash;

use aya::Pod;
use slipgate_abi::{ForwardTarget, VmId};

use super::{Insert, InsertError, Table};
use crate::Result;

impl<K: Pod + Eq + Hash> Table<K, ForwardTarget> {
    /// Has first packets to a port handed over for a VM. It is no error if they are already, by an
    /// entry of a predecessor.
    ///
    /// # Errors
    /// When the port leads elsewhere, the map is full, or the kernel refuses.
    pub fn lead_to(&self, key: &K, target: ForwardTarget) -> Result<(), InsertError> {
        match self.insert(key, &target, Insert::New) {
            Err(InsertError::Exists) => match self.get(key) {
                Ok(Some(there)) if there == target => Ok(()),
                _ => Err(InsertError::Exists),
            },
            inserted => inserted,
        }
    }

    /// Leaves first packets to a port to the host, if it leads to this VM.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn lead_no_more(&self, key: &K, vm: VmId) -> Result<()> {
        if self.get(key)?.is_some_and(|target| target.id() == vm) {
            self.remove(key)?;
        }
        Ok(())
    }
}
