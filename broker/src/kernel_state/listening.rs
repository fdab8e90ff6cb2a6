//! The groups of VMs' single addresses, so that switches which follow listeners pass what neighbours ask.
//! A guest with a /64 makes its addresses itself.
//!
//! What the kernel refuses, for want of memory or because the link goes or comes, is tried again at each
//! look.
use std::{
    collections::{BTreeMap, HashMap},
    net::Ipv6Addr,
    ops::Bound,
};

use slipgate_abi::{IfIndex, VmId};
use slipgate_control::groups::SolicitedGroups;

/// Most groups that are tried again in a look.
const RETRIED_AT_ONCE: usize = 256;

/// Joins and leaves the groups by which neighbours ask for addresses.
pub(super) trait Groups {
    /// Joins the group of an address on a link.
    fn join(&mut self, link: IfIndex, address: Ipv6Addr) -> slipgate_control::Result<()>;

    /// Leaves a group that was joined for this address.
    fn leave(&mut self, link: IfIndex, address: Ipv6Addr);
}

impl Groups for SolicitedGroups {
    fn join(&mut self, link: IfIndex, address: Ipv6Addr) -> slipgate_control::Result<()> {
        Self::join(self, link, address)
    }

    fn leave(&mut self, link: IfIndex, address: Ipv6Addr) {
        Self::leave(self, link, address);
    }
}

/// The VMs' single addresses whose groups are joined, and those whose are to be.
#[derive(Debug, Default)]
pub(super) struct Listening<G = SolicitedGroups> {
    groups: G,
    of_vm: HashMap<VmId, (IfIndex, Ipv6Addr)>,
    refused: BTreeMap<VmId, Refused>,
    /// VM that was tried last.
    tried: Option<VmId>,
}

/// A group that could not be joined.
#[derive(Clone, Copy, Debug)]
struct Refused {
    wanted: (IfIndex, Ipv6Addr),
    /// Number of tries.
    tries: u32,
}

impl<G: Groups> Listening<G> {
    /// Listens for a VM's single address on this link, and on no other. `None`: on none.
    pub(super) fn follow(&mut self, vm: VmId, wanted: Option<(IfIndex, Ipv6Addr)>) {
        let joined = self.of_vm.get(&vm).copied();
        let present = joined.or(self.refused.get(&vm).map(|refused| refused.wanted));
        if present == wanted {
            return;
        }
        self.refused.remove(&vm);
        if let Some((link, address)) = self.of_vm.remove(&vm) {
            self.groups.leave(link, address);
        }
        if let Some(wanted) = wanted {
            self.listen(vm, Refused { wanted, tries: 0 });
        }
    }

    /// Tries some of the groups again that could not be joined, those next that were not tried now.
    pub(super) fn try_again(&mut self) {
        let behind = self.tried.map_or(Bound::Unbounded, Bound::Excluded);
        let some = self.refused.range((behind, Bound::Unbounded));
        let some: Vec<_> = some
            .take(RETRIED_AT_ONCE)
            .map(|(vm, it)| (*vm, *it))
            .collect();
        self.tried = match some.len() {
            RETRIED_AT_ONCE => some.last().map(|(vm, _)| *vm),
            _ => None,
        };
        for (vm, refused) in some {
            self.listen(vm, refused);
        }
    }

    /// Number of addresses whose groups could not be joined.
    #[cfg(test)]
    fn refused(&self) -> usize {
        self.refused.len()
    }

    fn listen(&mut self, vm: VmId, Refused { wanted, tries }: Refused) {
        let (link, address) = wanted;
        match self.groups.join(link, address) {
            Ok(()) => {
                self.refused.remove(&vm);
                self.of_vm.insert(vm, wanted);
                if tries > 0 {
                    tracing::info!(
                        "{address}: the group by which neighbours ask for it is joined, after {tries} \
                         tries"
                    );
                }
            }
            Err(e) => {
                let tries = tries.saturating_add(1);
                self.refused.insert(vm, Refused { wanted, tries });
                if tries == 1 {
                    tracing::warn!(
                        "{address}: {e}: a switch that follows listeners (MLD snooping) may keep back \
                         what neighbours ask of it; it is tried again every ten seconds"
                    );
                }
            }
        }
    }
}

#[cfg(test)]
#[path = "listening_test.rs"]
mod tests;
