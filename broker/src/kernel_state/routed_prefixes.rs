//! Prefixes that the network routes to this host: what the programs at the uplinks know of them.
//!
//! Packets to such a prefix are its VM's, from the opening of its row to its removal: none goes to the
//! host's stack. While the host has an address in it, they are the host's, which would not be reached
//! otherwise: a router's advertisement may have given it one. Neighbours on the uplink that ask for an address of the guest's are answered by the
//! program, which needs the uplink's MAC for it. That is so whether or not the prefix is on that link:
//! a router that has a route by this host does not ask.
use std::{
    cell::RefCell,
    collections::{BTreeMap, HashSet},
    net::{IpAddr, Ipv6Addr},
};

use anyhow::bail;
use ipnet::{IpNet, Ipv6Net};
use slipgate_abi::{ForwardKey6, IfIndex};
use slipgate_control::{
    groups::AllGroups,
    routed::{self, Routed},
    vm::OpenVm,
};
use slipgate_model::GuestIpv6;

use super::{Attached, ServedVm, listening::Listening};
use crate::config::VmConfig;

/// The uplinks on which neighbours are answered for guests.
#[derive(Debug, Default)]
pub(crate) struct NeighbourLinks {
    /// Their MACs, with which neighbours are answered.
    macs: BTreeMap<IfIndex, [u8; 6]>,
    /// Has them pass the frames by which neighbours ask; `None`: no VM may have IPv6, or `refused`.
    groups: Option<AllGroups>,
    /// Why there is none though VMs may have routed prefixes. It is said where one has.
    refused: Option<String>,
    listening: RefCell<Listening>,
}

impl NeighbourLinks {
    /// For a process whose VMs may have routed prefixes, or not. It takes privileges that a broker gives
    /// up before it serves.
    pub(crate) fn open(has_prefixes: bool) -> Self {
        let (groups, refused) = match has_prefixes.then(AllGroups::open) {
            Some(Ok(groups)) => (Some(groups), None),
            Some(Err(e)) => (None, Some(e.to_string())),
            None => (None, None),
        };
        Self {
            groups,
            refused,
            ..Self::default()
        }
    }
}

impl Attached {
    /// Makes packets to a VM's routed prefix its own, and has neighbours answered.
    ///
    /// # Errors
    /// The prefix is another process's VM's, or around or within what such a VM has, or the map is full.
    pub(super) fn open_routed_prefix(
        &self,
        config: &VmConfig,
        open: &OpenVm,
        ipv6: Option<&GuestIpv6>,
    ) -> anyhow::Result<()> {
        let Some(prefix) = prefix_of(ipv6) else {
            return Ok(());
        };
        // This process's VMs have none that overlap: an entry that does is of a definition that is gone,
        // and is swept when forwards are written.
        let ours: Vec<u32> = self.all_rows().collect();
        let (maps, paths) = (self.datapath.maps(), self.datapath.paths());
        let patience = self.datapath.patience();
        routed::take(maps, paths, routed_of(prefix), open, &ours, patience)?;
        if let Some(e) = &self.neighbour_links.refused {
            tracing::warn!(
                "{prefix}: a network card may filter out neighbour solicitations for guests' addresses \
                 ({e}): give slipgate CAP_NET_RAW, or have the router route the prefix by this host"
            );
        }
        self.answer_neighbours_of(config, open, prefix);
        Ok(())
    }

    /// Leaves packets to the prefix of a VM to the host again.
    pub(crate) fn close_routed_prefix(&self, open: &OpenVm, ipv6: Option<&GuestIpv6>) {
        self.listen_for(open, None);
        if let Some(prefix) = prefix_of(ipv6)
            && let Err(e) = routed::leave(self.datapath.maps(), routed_of(prefix), open.id)
        {
            tracing::warn!("{prefix}: {e}");
        }
    }

    /// Leaves the prefixes to the host in which it has got an address, and takes back those in which it
    /// has none any more.
    pub(crate) fn follow_routed_prefixes(&self) {
        let maps = self.datapath.maps();
        for vm in self.vms.iter() {
            let Some(prefix) = prefix_of(vm.ipv6.as_ref()) else {
                continue;
            };
            let (name, own) = (&vm.config.name, self.host_address_in(prefix));
            match (own, self.has_its_prefix(vm)) {
                (Some(own), true) => {
                    self.close_routed_prefix(&vm.open, vm.ipv6.as_ref());
                    self.follow_own_ports(vm);
                    if let Some(vm6) = maps.vm6(vm.open.row) {
                        vm6.set_proxy(None);
                    }
                    tracing::warn!(
                        "{name}: the host has got an address in {prefix}, which is routed to the VM \
                         ({own}): what belongs to no flow of the VM's is the host's, until the address \
                         is gone. Where a router's advertisements gave it, set \
                         net.ipv6.conf.DEVICE.autoconf=0 (or accept_ra=0) and remove it"
                    );
                }
                (None, false) => {
                    match self.open_routed_prefix(&vm.config, &vm.open, vm.ipv6.as_ref()) {
                        Ok(()) => {
                            self.follow_own_ports(vm);
                            tracing::info!("{name}: {prefix} is the VM's alone again");
                        }
                        Err(e) => tracing::warn!("{name}: {e:#}"),
                    }
                }
                _ => {}
            }
        }
    }

    /// Whether a routed prefix is its VM's in the programs' map, not the host's for now.
    pub(super) fn has_its_prefix(&self, vm: &ServedVm) -> bool {
        prefix_of(vm.ipv6.as_ref()).is_some_and(|prefix| {
            let taken = self.datapath.maps().forwards6.get(&routed_of(prefix).key());
            matches!(taken, Ok(Some(target)) if target.id() == vm.open.id)
        })
    }

    /// Returns the name of another VM to which this address is routed.
    pub(super) fn routed_to_other(&self, address: IpAddr, than: &str) -> Option<&str> {
        let mut others = self.vms.iter().filter(|vm| vm.config.name != than);
        let is_its = |vm: &&ServedVm| {
            let prefix = prefix_of(vm.ipv6.as_ref());
            prefix.is_some_and(|prefix| IpNet::V6(prefix).contains(&address))
        };
        others.find(is_its).map(|vm| vm.config.name.as_str())
    }

    /// Returns the keys of the served VMs' routed prefixes in `FORWARDS6`.
    pub(super) fn routed_prefixes(&self) -> HashSet<ForwardKey6> {
        let nets = self.vms.iter().filter_map(|vm| vm.ipv6);
        let routed = nets.filter(|net| net.is_routed);
        routed.map(|net| routed_of(net.prefix).key()).collect()
    }

    /// Checks that no address of the host is in a prefix that is to be one VM's alone.
    ///
    /// # Errors
    /// One is: the error names it.
    pub(super) fn check_routed_prefix(&self, ipv6: Option<&GuestIpv6>) -> anyhow::Result<()> {
        if let Some(prefix) = prefix_of(ipv6)
            && let Some(own) = self.host_address_in(prefix)
        {
            bail!(
                "ipv6: {prefix} can't be routed to a VM: the host has an address in it ({own}): give a \
                 prefix that is routed to the host, or --ipv6 nat"
            );
        }
        Ok(())
    }

    fn host_address_in(&self, prefix: Ipv6Net) -> Option<IpAddr> {
        let prefix = IpNet::V6(prefix);
        let mut own = self.watch.network().addresses.iter();
        let own = own.find(|own| prefix.contains(&own.address));
        own.map(|own| own.address)
    }

    /// Follows the MACs of the uplinks, with which neighbours are answered.
    pub(crate) fn follow_uplink_macs(&mut self) {
        let present = self.present_macs();
        if present != self.neighbour_links.macs {
            self.neighbour_links.macs = present;
            for vm in self.vms.iter() {
                self.answer_neighbours(vm);
            }
        }
    }

    /// Has neighbours answered on the link that is a VM's uplink now.
    pub(crate) fn answer_neighbours(&self, vm: &ServedVm) {
        let prefix = prefix_of(vm.ipv6.as_ref());
        if let Some(prefix) = prefix.filter(|prefix| self.host_address_in(*prefix).is_none()) {
            self.answer_neighbours_of(&vm.config, &vm.open, prefix);
        }
    }

    fn answer_neighbours_of(&self, config: &VmConfig, open: &OpenVm, prefix: Ipv6Net) {
        let link = self.uplink_of(config);
        let link = link.and_then(|ifindex| self.watch.network().links.get(&ifindex));
        let link = link.filter(|link| link.has_l2);
        let proxy = link.and_then(|link| Some((link.ifindex.get(), link.mac?)));
        if let (Some(link), Some(groups)) = (link, &self.neighbour_links.groups)
            && let Err(e) = groups.pass_on(link.ifindex)
        {
            tracing::warn!("{}: {e}", link.name);
        }
        if let Some(vm6) = self.datapath.maps().vm6(open.row) {
            vm6.set_proxy(proxy);
        }
        let single = link.filter(|_| prefix.prefix_len() == 128);
        self.listen_for(open, single.map(|link| (link.ifindex, prefix.network())));
    }

    /// Tries again to have neighbours' questions come for addresses of which that failed.
    pub(crate) fn look_at_groups(&self) {
        self.neighbour_links.listening.borrow_mut().try_again();
    }

    fn listen_for(&self, open: &OpenVm, wanted: Option<(IfIndex, Ipv6Addr)>) {
        let mut listening = self.neighbour_links.listening.borrow_mut();
        listening.follow(open.id, wanted);
    }

    fn present_macs(&self) -> BTreeMap<IfIndex, [u8; 6]> {
        let network = self.watch.network();
        let own = self
            .vms
            .uplinks()
            .filter_map(|name| network.link_by_name(name));
        let main = network.links.get(&self.uplink.ifindex);
        let macs = own
            .chain(main)
            .filter_map(|link| Some((link.ifindex, link.mac?)));
        macs.collect()
    }
}

/// The prefix of a VM that is routed to it.
fn prefix_of(ipv6: Option<&GuestIpv6>) -> Option<Ipv6Net> {
    ipv6.filter(|net| net.is_routed).map(|net| net.prefix)
}

/// What such a prefix is to the programs: a VM's /64, or its single address.
fn routed_of(prefix: Ipv6Net) -> Routed {
    match prefix.prefix_len() {
        128 => Routed::Address(prefix.network()),
        _ => Routed::Prefix(prefix.network()),
    }
}
