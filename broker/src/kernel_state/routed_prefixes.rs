//! Prefixes that the network routes to this host: what the programs at the uplinks know of them.
//!
//! Packets to such a prefix are its VM's, from the opening of its row to its removal: none goes to the
//! host's stack. Neighbours on the uplink that ask for an address of the guest's are answered by the
//! program, which needs the uplink's MAC for it. That is so whether or not the prefix is on that link:
//! a router that has a route by this host does not ask.
use std::{
    collections::{BTreeMap, HashSet},
    net::Ipv6Addr,
};

use anyhow::{Context as _, bail};
use ipnet::IpNet;
use slipgate_abi::{ForwardKey6, ForwardTarget, IfIndex};
use slipgate_control::{
    groups::AllGroups,
    maps::Insert,
    vm::{self, OpenVm},
};
use slipgate_model::GuestIpv6;

use super::{Attached, ServedVm};
use crate::config::VmConfig;

/// The uplinks on which neighbours are answered for guests.
#[derive(Debug, Default)]
pub(crate) struct NeighbourLinks {
    /// Their MACs, with which neighbours are answered.
    macs: BTreeMap<IfIndex, [u8; 6]>,
    /// Has them pass the frames by which neighbours ask; `None`: no VM may have IPv6.
    groups: Option<AllGroups>,
}

impl NeighbourLinks {
    /// For a process whose VMs may have routed prefixes, or not. It takes privileges that a broker gives
    /// up before it serves.
    pub(crate) fn open(has_prefixes: bool) -> Self {
        let groups = has_prefixes.then(AllGroups::open);
        let groups = groups.and_then(|opened| {
            opened
                .inspect_err(|e| tracing::warn!("neighbours that ask for guests' addresses: {e}"))
                .ok()
        });
        Self {
            groups,
            ..Self::default()
        }
    }
}

impl Attached {
    /// Makes packets to a VM's routed prefix its own, and has neighbours answered.
    ///
    /// # Errors
    /// The prefix is another process's VM's, or the map is full.
    pub(super) fn open_routed_prefix(
        &self,
        config: &VmConfig,
        open: &OpenVm,
        ipv6: Option<&GuestIpv6>,
    ) -> anyhow::Result<()> {
        let Some(prefix) = ipv6.filter(|net| net.is_routed).map(|net| net.prefix) else {
            return Ok(());
        };
        let maps = self.datapath.maps();
        let key = key_of(prefix.network());
        let entry = maps.forwards6.get(&key)?;
        let other = entry.filter(|target| target.id() != open.id);
        let row = other.and_then(|other| other.row().zip(Some(other.id())));
        if let Some(name) = row.and_then(|(row, id)| vm::name_if_open(maps, row, id)) {
            bail!(
                "{prefix} is routed to {name}, a VM of another process: give each VM a prefix of its \
                 own"
            );
        }
        let target = ForwardTarget::new(open.id, open.row, 0);
        let inserted = maps.forwards6.insert(&key, &target, Insert::Any);
        inserted.with_context(|| format!("the prefix {prefix}, which is routed to a VM"))?;
        self.answer_neighbours_of(config, open);
        Ok(())
    }

    /// Leaves packets to a VM's prefix to the host again.
    pub(crate) fn close_routed_prefix(&self, gone: Option<&GuestIpv6>) {
        let Some(net) = gone.filter(|net| net.is_routed) else {
            return;
        };
        if let Err(e) = self
            .datapath
            .maps()
            .forwards6
            .remove(&key_of(net.prefix.network()))
        {
            tracing::warn!("{}: {e}", net.prefix);
        }
    }

    /// Returns the keys of the served VMs' routed prefixes in `FORWARDS6`.
    pub(super) fn routed_prefixes(&self) -> HashSet<ForwardKey6> {
        let nets = self.vms.iter().filter_map(|vm| vm.ipv6);
        let routed = nets.filter(|net| net.is_routed);
        routed.map(|net| key_of(net.prefix.network())).collect()
    }

    /// Checks that no address of the host is in a prefix that is to be one VM's alone.
    ///
    /// # Errors
    /// One is: the error names it.
    pub(super) fn check_routed_prefix(&self, ipv6: Option<&GuestIpv6>) -> anyhow::Result<()> {
        let Some(prefix) = ipv6.filter(|net| net.is_routed).map(|net| net.prefix) else {
            return Ok(());
        };
        let mut own = self.watch.network().addresses.iter();
        let prefix = IpNet::V6(prefix);
        if let Some(own) = own.find(|own| prefix.contains(&own.address)) {
            bail!(
                "ipv6: {prefix} can't be routed to a VM: the host has an address in it ({}): give a \
                 prefix that is routed to the host, or --ipv6 nat",
                own.address
            );
        }
        Ok(())
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
        if vm.ipv6.is_some_and(|net| net.is_routed) {
            self.answer_neighbours_of(&vm.config, &vm.open);
        }
    }

    fn answer_neighbours_of(&self, config: &VmConfig, open: &OpenVm) {
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

fn key_of(prefix: Ipv6Addr) -> ForwardKey6 {
    ForwardKey6::of_routed(prefix.into())
}
