//! Kernel state of the broker: created in order at the start, updated while it serves, removed in
//! order at the end.
mod budgets;
mod catalogue;
mod domains;
mod egress;
mod forwards;
mod guard_list;
mod hook_places;
mod host_nat;
mod ipv6;
mod listening;
mod network_view;
mod pacing;
mod reserve;
mod resolver_warning;
mod routed_prefixes;
mod rules;
mod served_vms;
mod subjects;
mod tap_changes;
mod taps;
mod translated;
mod uplink;
mod vm_status;
mod vm_uplinks;
mod vms;
mod workers;
mod xdp;

use std::{
    collections::{BTreeSet, HashSet},
    fs::File,
    net::{IpAddr, TcpListener},
    os::unix::net::UnixListener,
};

use anyhow::anyhow;
use slipgate_abi::IfIndex;
use slipgate_control::{
    Datapath, HeldGuard, Users,
    attach::{Hook, Program},
    netlink::{NetworkWatch, NextHops},
    owner::DaemonLock,
    pacing::{self as queues, PacingDevice},
    serve,
    tap::EnginePort,
    vm,
};
use slipgate_ipc::{
    api::Event,
    engine::{NetworkView, ToEngine},
};

pub(crate) use self::{
    budgets::{
        BudgetOrder, Budgets, LOOK_EVERY as BUDGETS_EVERY, freeze, has_frozen, is_cut, look_at,
        today,
    },
    catalogue::{Catalogue, Name, TakenIn},
    domains::Domains,
    forwards::{
        ForwardChange, GivenBack, HeldForwards, OF_ITS_VM, forward_text, forward_texts,
        forwards_described,
    },
    hook_places::HookPlaces,
    host_nat::HostNatWatch,
    ipv6::{Ipv6Wish, ipv6_status, leads_to_ipv6},
    network_view::view as network_view,
    pacing::Pacing,
    reserve::{ResourceTaken, reserve},
    routed_prefixes::NeighbourLinks,
    rules::Writer,
    served_vms::ServedVms,
    subjects::{Served, resolve},
    uplink::{Uplink, check_source, find as find_uplink},
    vm_uplinks::VmUplinks,
    vms::{FoundTap, GATEWAY_MAC, MOST_CREDITS, ServedVm, ipv6_in_row, learning_name, tap_of},
    workers::Worker,
};
use crate::{
    config::{Config, PolicyFlags},
    handover::HandedOver,
    host::HostResolvers,
    output_files::{open_flow_log, open_pcap},
    persisted_policy, persisted_vms,
};

/// Everything that the broker keeps in the kernel, with the configuration behind it.
#[derive(Debug)]
pub(crate) struct Attached {
    /// The lock of the network namespace's daemon, if this is it.
    pub(crate) daemon: Option<DaemonLock>,
    pub(crate) config: Config,
    pub(crate) datapath: Datapath,
    /// The engines' parts, one at least.
    pub(crate) workers: Vec<Worker>,
    pub(crate) vms: ServedVms,
    pub(crate) watch: NetworkWatch,
    /// The network in the last message to the engine.
    pub(crate) told_network: Option<NetworkView>,
    pub(crate) next_hops: NextHops,
    /// Next hops that are recorded for a successor; `None`: nothing is yet.
    pub(crate) noted_hops: Option<HashSet<(IfIndex, IpAddr)>>,
    /// Whether it was logged that they can't be recorded.
    pub(crate) has_told_of_hops: bool,
    pub(crate) policies: Catalogue,
    /// Ports of the host that are held for guests; their sockets stay open while an engine is
    /// restarted.
    pub(crate) forwards: HeldForwards,
    pub(crate) flow_log: Option<File>,
    pub(crate) pcap: Option<File>,
    /// The socket of `--metrics`, until it is served.
    pub(crate) metrics: Option<TcpListener>,
    /// The sockets of the API, until they are served.
    pub(crate) api: Vec<(UnixListener, bool)>,
    /// Events to be sent to clients of the API.
    pub(crate) events: Vec<Event>,
    /// Users that slipgate's processes run as.
    pub(crate) users: Users,
    /// Policy settings of the command line.
    pub(crate) command_line: PolicyFlags,
    /// Whether a policy that a predecessor applied is in force.
    pub(crate) took_over: bool,
    /// Interface indexes of TAPs that a predecessor served, until those that this process does not
    /// serve are shut.
    pub(crate) former_taps: BTreeSet<IfIndex>,
    /// TAPs whose offloads changed, and whose guard has to be looked at.
    pub(crate) guards_due: BTreeSet<IfIndex>,
    /// Spares TAPs' guards a wait.
    pub(crate) held_guard: Option<HeldGuard>,
    /// Numbers of former policies of which something may still be in the guard's list.
    pub(crate) unremoved: BTreeSet<u32>,
    /// Resolvers of the host.
    pub(crate) resolvers: HostResolvers,
    pub(crate) uplink: Uplink,
    /// Uplinks that VMs name for themselves.
    pub(crate) vm_uplinks: VmUplinks,
    /// Routes that policies name.
    pub(crate) domains: Domains,
    /// The uplinks on which neighbours are answered for guests.
    pub(crate) neighbour_links: NeighbourLinks,
    pub(crate) hook: Hook,
    /// Whether the programs are first at their hooks.
    pub(crate) hook_places: HookPlaces,
    /// The host's own NAT beside guests' flows.
    pub(crate) host_nat: HostNatWatch,
    /// State of a predecessor that is not in use yet; empty once VMs are served.
    pub(crate) handed_over: HandedOver,
    /// Whether the log already reports that another process holds the lock.
    pub(crate) told_of_lock: bool,
    /// Queues that shape VMs' rates.
    pub(crate) pacing: Pacing,
    /// The round of looks at budgets.
    pub(crate) budgets: Budgets,
}

impl Attached {
    /// Reopens the flow log and the pcap file by their names, because the old files were moved
    /// away. Returns messages for the running engines, each with its worker.
    ///
    /// # Errors
    /// A file can't be opened.
    pub(crate) fn reopen_files(&mut self) -> anyhow::Result<Vec<(usize, ToEngine)>> {
        let workers = 0..self.workers.len();
        let mut told = Vec::new();
        if let Some(path) = &self.config.flow_log {
            let file = open_flow_log(path)?;
            for worker in workers.clone() {
                told.push((worker, ToEngine::FlowLog(file.try_clone()?.into())));
            }
            self.flow_log = Some(file);
        }
        if let Some(path) = &self.config.pcap {
            let file = open_pcap(path)?;
            for worker in workers {
                told.push((worker, ToEngine::Pcap(file.try_clone()?.into())));
            }
            self.pcap = Some(file);
        }
        Ok(told)
    }

    pub(crate) fn refresh_next_hops(&mut self) -> anyhow::Result<()> {
        let mut uplinks = self.vm_uplinks.ifindexes();
        uplinks.insert(self.uplink.ifindex);
        self.next_hops
            .refresh(self.datapath.maps(), self.watch.network(), &uplinks)?;
        self.note_next_hops();
        Ok(())
    }

    /// Records for a successor which next hops are right. If it fails, it is tried again at the next
    /// refresh.
    fn note_next_hops(&mut self) {
        let right = self.next_hops.right();
        if self.noted_hops.as_ref() == Some(right) {
            return;
        }
        let paths = self.datapath.paths();
        let noted = self
            .owners()
            .try_for_each(|owner| owner.note_next_hops(paths, right));
        self.noted_hops = match noted {
            Ok(()) => Some(right.clone()),
            Err(e) => {
                let lost = "the next hops can't be recorded, so flows whose route is gone may stall with \
                            the next start";
                match std::mem::replace(&mut self.has_told_of_hops, true) {
                    false => tracing::warn!("{lost}: {e}"),
                    true => tracing::debug!("{lost}: {e}"),
                }
                None
            }
        };
    }

    /// Returns the host's network in the form in which the engine gets it.
    pub(crate) fn network_view(&self) -> NetworkView {
        let mut view = network_view::view(
            self.watch.network(),
            self.uplink.ifindex,
            &self.vm_uplinks.ifindexes(),
            self.config.nat_address,
            &self.config.network,
        );
        let mut uplinks = self.vm_uplinks.ifindexes();
        uplinks.insert(self.uplink.ifindex);
        view.routes.further = self.further_routes(&uplinks);
        view
    }

    /// Removes the kernel state of a failed start, and leaves the TAPs as they were. A predecessor's
    /// state stays: its flows continue.
    pub(crate) fn give_up(self) {
        let found = self.found_taps();
        if !self.has_adopted() {
            warn_of_rest(self.detach());
        }
        found.iter().for_each(FoundTap::restore);
    }

    /// Returns the VMs' TAPs as this process found them.
    pub(crate) fn found_taps(&self) -> Vec<FoundTap> {
        self.vms.iter().filter_map(|vm| vm.found).collect()
    }

    /// Keeps the policy in force for a successor, which may find the VMs of any of our rows.
    pub(crate) fn keep_applied(&self) {
        let run_dir = &self.datapath.paths().run_dir;
        for row in self.rows() {
            let path = persisted_policy::path(run_dir, row);
            let deny_files = || self.policies.deny_files();
            let kept = persisted_policy::keep(&path, &self.command_line, &self.config, deny_files);
            if let Err(e) = kept {
                tracing::warn!("a successor would go on with the command line's policy: {e:#}");
            }
        }
    }

    /// Removes a predecessor's applied policy, which this process did not take over. Called once
    /// VMs are served.
    pub(crate) fn forget_former(&self) {
        match self.took_over {
            false => self.forget_applied(),
            // Rows that came together may have had different ones.
            true if self.all_rows().count() > 1 => {
                self.forget_applied();
                self.keep_applied();
            }
            true => {}
        }
    }

    fn forget_applied(&self) {
        let run_dir = &self.datapath.paths().run_dir;
        for row in self.all_rows() {
            if let Err(e) = persisted_policy::forget(&persisted_policy::path(run_dir, row)) {
                tracing::warn!("{e:#}");
            }
        }
    }

    /// Takes everything down. The engine has ended the flows by now. Returns whether the maps were
    /// removed too.
    pub(crate) fn detach(self) -> anyhow::Result<bool> {
        let mut first_error = Ok(());
        let mut note = |done: slipgate_control::Result<()>| {
            if let (Ok(()), Err(e)) = (&first_error, done) {
                first_error = Err(anyhow!(e));
            }
        };
        for vm in self.vms.iter() {
            if let Some(ifindex) = vm.tap_ifindex {
                note(serve::shut_tap(&self.datapath, ifindex));
                note(queues::unshape_tap(ifindex));
                note(self.datapath.detach(Program::Guard, ifindex).map(drop));
            }
            note(vm::close(self.datapath.maps(), vm.open.row));
        }
        let closed = self.vms.iter().map(|vm| vm.open.id).collect();
        note(vm::remove_entries(
            self.datapath.maps(),
            self.datapath.paths(),
            &closed,
            self.datapath.patience(),
        ));
        self.forget_applied();
        if self.config.is_daemon
            && let Err(e) = persisted_vms::forget_all(&self.datapath.paths().run_dir)
        {
            tracing::warn!("{e:#}");
        }
        note(self.detach_pacer());
        let mut owners = Vec::new();
        for Worker { owner, port, .. } in self.workers {
            note(owner.forget_taps(self.datapath.paths()));
            note(owner.forget_next_hops(self.datapath.paths()));
            let ifindex = port.ifindex;
            note(self.datapath.detach(Program::EnginePort, ifindex).map(drop));
            drop(port);
            note(EnginePort::remove(owner.row()).map(drop));
            note(PacingDevice::remove(owner.row()).map(drop));
            owners.push(owner);
        }
        note(self.next_hops.release());
        let last = self.datapath.remove_if_last(owners);
        first_error?;
        Ok(last?)
    }
}

/// Logs the parts of a failed start that could not be taken down.
pub(crate) fn warn_of_rest(taken_down: anyhow::Result<bool>) {
    if let Err(e) = taken_down {
        tracing::warn!("undoing a failed start: {e:#}");
    }
}
