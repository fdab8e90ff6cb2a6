//! Finds guests that have not sent anything yet.
//!
//! The programs learn a guest's MAC from its frames. A guest that is configured by hand and only
//! waits for connections sends nothing, so a forward would never reach it. Until its MAC is known,
//! the engine sends an ARP request once a second.
use crate::{
    arp,
    clock::SECOND_NS,
    datapath::Datapath,
    port::{ETHERTYPE_ARP, VirtioNetHdr},
    state::Core,
};

/// Interval between two requests, ns.
const INTERVAL_NS: u64 = SECOND_NS;

impl<D: Datapath> Core<D> {
    /// Sends ARP requests for guests that a forward leads to and whose MAC is not known.
    pub(crate) fn find_guests(&mut self, now_ns: u64) {
        if self.forwards.is_empty() || now_ns < self.find_guests_at_ns {
            return;
        }
        self.find_guests_at_ns = now_ns + INTERVAL_NS;
        let awaited = |id: u32| self.forwards.values().any(|forward| forward.vm == id);
        let silent: Vec<_> = self
            .vms()
            .map(|vm| &vm.net)
            .filter(|vm| awaited(vm.id))
            .filter(|vm| {
                self.datapath
                    .vm(vm.row)
                    .is_some_and(|row| !row.knows_guest_mac())
            })
            .cloned()
            .collect();
        for vm in silent {
            // A full outbox is ignored: the request is repeated.
            let _ = self.out.to_guest(
                &vm,
                ETHERTYPE_ARP,
                VirtioNetHdr::default(),
                &arp::request(&vm),
            );
        }
    }
}
