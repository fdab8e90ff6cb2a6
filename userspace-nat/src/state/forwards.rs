//! Forwards: ports of the host that lead to guests, ports of guests' own addresses that the world may open,
//! and the guests that wait behind them.
//!
//! The programs learn a guest's MAC from its frames. A guest that is configured by hand and only
//! waits for connections sends nothing, so a forward would never reach it. Until its MAC is known,
//! the engine sends an ARP request once a second.
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    net::{IpAddr, Ipv6Addr, SocketAddr},
    ops::Bound,
};

use slipgate_abi::{Protocol, RuleIndex, VmId, VmRow};
use slipgate_model::FlowTuple;

use super::VmTable;
use crate::{
    arp,
    clock::SECOND_NS,
    datapath::Tables,
    packet::Version,
    port::{ETHERTYPE_ARP, Outbox, VirtioNetHdr},
};

/// Interval between two ARP requests for a guest, ns.
const ARP_INTERVAL_NS: u64 = SECOND_NS;
/// Most VMs that are looked at in a turn: as many requests as the queue has room for.
const VMS_PER_TURN: usize = 256;

/// A port of the host that leads to a guest, or one of the guest's own addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Forward {
    /// Protocol: TCP or UDP.
    pub protocol: Protocol,
    /// Address on the host; 0.0.0.0 or `::`: any of the family. Of the guest's own addresses one, or the
    /// first of its /64 for all of these.
    pub host: IpAddr,
    /// Port on the host.
    pub host_port: u16,
    /// Id of the VM.
    pub vm: VmId,
    /// Row of the VM.
    pub vm_row: VmRow,
    /// Port of the guest.
    pub guest_port: u16,
    /// Element of `RULES` that the forward's flows show.
    pub rule: RuleIndex,
    /// Whether the address is the guest's own, to which packets come without translation.
    pub is_own: bool,
}

/// Protocol, address and port on the host.
type HostPort = (Protocol, IpAddr, u16);

/// The forwards in force.
#[derive(Debug, Default)]
pub(crate) struct Forwards {
    by_address: HashMap<HostPort, Forward>,
    of_vm: BTreeMap<VmId, HashSet<HostPort>>,
    next_arp_ns: u64,
    /// VM that was looked at last, while guests are looked for.
    looked_at: Option<VmId>,
}

impl Forwards {
    pub(crate) fn set(&mut self, forwards: Vec<Forward>) {
        self.by_address.clear();
        self.of_vm.clear();
        forwards.into_iter().for_each(|forward| self.add(forward));
    }

    /// Adds a forward. Its port is no other's.
    pub(crate) fn add(&mut self, forward: Forward) {
        let key = (forward.protocol, forward.host, forward.host_port);
        self.of_vm.entry(forward.vm).or_default().insert(key);
        self.by_address.insert(key, forward);
    }

    /// Removes the forward of a VM at this address of the host.
    pub(crate) fn remove(&mut self, vm: VmId, protocol: Protocol, host: SocketAddr) {
        let key = (protocol, host.ip(), host.port());
        if let Some(keys) = self.of_vm.get_mut(&vm)
            && keys.remove(&key)
        {
            self.by_address.remove(&key);
            if keys.is_empty() {
                self.of_vm.remove(&vm);
            }
        }
    }

    /// Removes the forwards of a VM that is gone.
    pub(crate) fn forget(&mut self, vm: VmId) {
        for key in self.of_vm.remove(&vm).unwrap_or_default() {
            self.by_address.remove(&key);
        }
    }

    /// Returns the forward of this VM that a packet from the world matches: one of its destination
    /// address, else one of all addresses of the /64 of a guest's own, else one of any address. A packet to loopback that arrives by a link matches none:
    /// those forwards are for the host alone.
    pub(crate) fn matching(&self, world: &FlowTuple, vm: VmId) -> Option<&Forward> {
        self.at(world).filter(|forward| forward.vm == vm)
    }

    /// The same of whatever VM.
    pub(crate) fn at(&self, world: &FlowTuple) -> Option<&Forward> {
        let local = world.local;
        if local.is_loopback() {
            return None;
        }
        let any = Version::of(local).unspecified();
        let protocol = world.protocol()?;
        let of = |host| self.by_address.get(&(protocol, host, world.local_port));
        let of_prefix = || of(first_of_prefix(local)?).filter(|forward| forward.is_own);
        of(local).or_else(of_prefix).or_else(|| of(any))
    }

    /// Begins to look for guests that a forward leads to and whose MAC is not known, once a second.
    pub(crate) fn begin_to_find_guests(&mut self, now_ns: u64) {
        if !self.of_vm.is_empty() && now_ns >= self.next_arp_ns {
            self.next_arp_ns = now_ns + ARP_INTERVAL_NS;
            self.looked_at = Some(VmId::NONE);
        }
    }

    /// Whether guests are being looked for.
    pub(crate) fn is_finding_guests(&self) -> bool {
        self.looked_at.is_some()
    }

    /// Does a turn's part of the search: sends ARP requests for guests whose MAC is not known.
    pub(crate) fn find_guests(&mut self, vms: &VmTable, tables: &impl Tables, out: &mut Outbox) {
        let Some(last) = self.looked_at else {
            return;
        };
        let behind = (Bound::Excluded(last), Bound::Unbounded);
        let some = self.of_vm.range(behind).take(VMS_PER_TURN);
        let some: Vec<VmId> = some.map(|(vm, _)| *vm).collect();
        self.looked_at = (some.len() == VMS_PER_TURN)
            .then(|| some.last().copied())
            .flatten();
        for vm in some.iter().filter_map(|vm| vms.by_id(*vm)) {
            let row = tables.vm(vm.net.row);
            if row.is_none_or(|row| row.knows_guest_mac()) {
                continue;
            }
            // A full outbox is ignored: the request is repeated.
            let request = arp::request(&vm.net);
            let _ = out.to_guest(&vm.net, ETHERTYPE_ARP, VirtioNetHdr::default(), &request);
        }
    }
}

/// Returns the first address of an address's /64.
fn first_of_prefix(address: IpAddr) -> Option<IpAddr> {
    match address {
        IpAddr::V4(_) => None,
        IpAddr::V6(address) => {
            let bits = address.to_bits() & !u128::from(u64::MAX);
            Some(Ipv6Addr::from_bits(bits).into())
        }
    }
}

#[cfg(test)]
#[path = "forwards_test.rs"]
mod tests;
