//! Finds guests that have not said anything yet.
//!
//! The programs learn a guest's MAC from what it sends. One that is configured by hand and only
//! waits for connections sends nothing, so a forward would wait for it for ever: until it is known,
//! it is asked for by ARP, once a second.
use crate::{
    arp,
    clock::SECOND_NS,
    datapath::Datapath,
    port::{ETHERTYPE_ARP, VirtioNetHdr},
    state::Core,
};

/// Between two requests, ns.
const INTERVAL_NS: u64 = SECOND_NS;

impl<D: Datapath> Core<D> {
    /// Asks for guests that a forward leads to and whose MAC is not known.
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
            // A full outbox is no reason to do anything else: it is asked again.
            let _ = self.out.to_guest(
                &vm,
                ETHERTYPE_ARP,
                VirtioNetHdr::default(),
                &arp::request(&vm),
            );
        }
    }
}
