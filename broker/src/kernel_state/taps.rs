//! TAPs: attached and brought up, recorded for a successor, and shut when no process serves them.
use std::{
    collections::{BTreeSet, HashSet},
    sync::atomic::Ordering::Acquire,
};

use anyhow::Context as _;
use slipgate_abi::{IfIndex, VmId, VmRow};
use slipgate_control::{
    attach::{Hook, Program},
    device::Device,
    netlink::Changes,
    pacing, serve, vm,
};
use slipgate_policy::one_line;

use super::{Attached, ServedVm, pacing::note, xdp};
use crate::host::tap_hints;

impl Attached {
    /// Whether a device is a TAP with a guest's program, of any process.
    pub(crate) fn is_served(&self, ifindex: IfIndex) -> bool {
        let program = Program::GuestEgress;
        self.datapath.is_attached(program, ifindex)
    }

    pub(crate) fn serve_taps(&mut self) -> anyhow::Result<()> {
        (0..self.vms.len()).try_for_each(|index| self.serve_tap(index))
    }

    /// Attaches to a VM's TAP and brings it up.
    pub(crate) fn serve_tap(&mut self, index: usize) -> anyhow::Result<()> {
        self.vms[index].is_up = true;
        let vm = &self.vms[index];
        let Some(ifindex) = vm.tap_ifindex else {
            return Ok(());
        };
        let what = || format!("serving {} on {}", vm.config.name, vm.config.tap);
        xdp::guard(&self.datapath, &self.config, &vm.config.tap, ifindex).with_context(what)?;
        serve::serve_tap(&self.datapath, ifindex, self.tap_hook()).with_context(what)?;
        if let Some(found) = &mut self.vms[index].found {
            found.is_served();
        }
        Ok(())
    }

    /// Returns the hook for TAPs. A daemon's come and go by the thousand, and a tcx link is made and
    /// removed in ten times the time of a clsact filter.
    pub(super) fn tap_hook(&self) -> Hook {
        match self.config.is_daemon {
            true => Hook::Clsact,
            false => self.hook,
        }
    }

    /// Begins the record of the TAPs of this process, and of a predecessor's until they are shut. The
    /// VMs' rows are not used for this, because the engine can write them.
    pub(crate) fn note_taps(&mut self) -> anyhow::Result<()> {
        for (at, worker) in self.workers.iter_mut().enumerate() {
            let vms = self.vms.iter().filter(|vm| vm.worker == at);
            let mut taps: BTreeSet<_> = vms.filter_map(|vm| vm.tap_ifindex).collect();
            if at == 0 {
                taps.extend(self.former_taps.iter().copied());
            }
            let noted = worker.owner.note_taps(self.datapath.paths(), taps)?;
            worker.noted_taps = Some(noted);
        }
        Ok(())
    }

    /// Adds the TAP of a VM of a worker to the record.
    pub(crate) fn note_tap(&mut self, worker: usize, tap: Option<IfIndex>) -> anyhow::Result<()> {
        match (&mut self.workers[worker].noted_taps, tap) {
            (Some(noted), Some(tap)) => Ok(noted.add(tap)?),
            _ => Ok(()),
        }
    }

    /// Removes a TAP from the record, which is shut or gone.
    pub(crate) fn forget_tap(&mut self, tap: Option<IfIndex>) {
        for worker in &mut self.workers {
            if let (Some(noted), Some(tap)) = (&mut worker.noted_taps, tap)
                && let Err(e) = noted.remove(tap)
            {
                // A successor looks whether it has our program.
                tracing::warn!("{e}");
            }
        }
    }

    /// Shuts out VMs of a predecessor that are no longer served. The engine has ended their flows.
    pub(crate) fn close_departed(&mut self) -> anyhow::Result<()> {
        self.shut_departed()?;
        let maps = self.datapath.maps();
        let departed: Vec<_> = (self.owners())
            .flat_map(|owner| vm::rows_of(maps, owner.row()))
            .filter(|row| self.vms.in_row(*row).is_none())
            .collect();
        let ids = |row: &VmRow| Some(VmId::new(maps.vm(*row)?.id().load(Acquire)));
        let closed: HashSet<VmId> = departed.iter().filter_map(ids).collect();
        for row in departed {
            let name = one_line(&vm::name_of(maps, row).unwrap_or_default());
            let what = || format!("closing the row of {name}, which is not served any more");
            vm::close(maps, row).with_context(what)?;
            match self.config.new_vms {
                // Of the name that is ours now.
                true => tracing::info!("ended the flows that an earlier VM of this name had left"),
                false => tracing::info!("{name} is not served any more: its TAP is shut"),
            }
        }
        if !closed.is_empty() {
            let (paths, patience) = (self.datapath.paths(), self.datapath.patience());
            vm::remove_entries(maps, paths, &closed, patience)
                .context("removing the map entries of departed VMs")?;
        }
        Ok(())
    }

    /// Takes down the TAPs that only a predecessor served.
    fn shut_departed(&mut self) -> anyhow::Result<()> {
        let ours: HashSet<IfIndex> = self.vms.iter().filter_map(|vm| vm.tap_ifindex).collect();
        for tap in std::mem::take(&mut self.former_taps) {
            // An index that came again is another device, without our program.
            if ours.contains(&tap) || !self.is_served(tap) {
                continue;
            }
            let what =
                || format!("shutting the TAP with index {tap}, which is not served any more");
            serve::shut_tap(&self.datapath, tap).with_context(what)?;
            note(pacing::unshape_tap(tap));
            self.datapath
                .detach(Program::Guard, tap)
                .with_context(what)?;
        }
        self.note_taps()?;
        let paths = self.datapath.paths();
        for owner in self.owners() {
            owner.forget_merged_taps(paths)?;
            // Until they are in a record of our own, a successor needs the former ones.
            if self.noted_hops.is_some() {
                owner.forget_merged_next_hops(paths)?;
            }
            owner.remove_merged_ports()?;
        }
        Ok(())
    }

    /// Takes a VM's TAP down and removes our programs from it. A TAP that is gone is no error.
    ///
    /// # Errors
    /// Another process holds the lock, or the kernel refuses. A TAP that still has its program is
    /// served as before.
    pub(crate) fn shut_tap_of(&self, vm: &ServedVm) -> anyhow::Result<()> {
        let Some(ifindex) = vm.tap_ifindex else {
            return Ok(());
        };
        let what = || format!("shutting {}", vm.config.tap);
        let shut = serve::shut_tap(&self.datapath, ifindex);
        if shut.is_err()
            && vm.is_up
            && self.is_served(ifindex)
            && let Err(e) = Device::with_index(ifindex).and_then(|tap| tap.set_up(true))
        {
            tracing::warn!("{}: {e}", vm.config.tap);
        }
        shut.with_context(what)?;
        self.datapath
            .detach(Program::Guard, ifindex)
            .with_context(what)?;
        Ok(())
    }

    /// Returns the index of the VM whose TAP this is.
    fn served_at(&self, ifindex: IfIndex) -> Option<usize> {
        let link = self.watch.network().links.get(&ifindex)?;
        let at = self.vms.on_tap(&link.name)?;
        (self.vms[at].tap_ifindex == Some(ifindex)).then_some(at)
    }

    /// Disables forwarding and IPv6 where they were turned on, on the TAPs, the port and the pacing device, so
    /// that the host routes none of their packets and sends none of its own: `sysctl net.ipv4.ip_forward=1`
    /// and `net.ipv6.conf.all.disable_ipv6=0` change every device.
    pub(crate) fn keep_unrouted(&self, changes: &Changes) {
        let links = &self.watch.network().links;
        let is_port = |ifindex| self.workers.iter().any(|it| it.port.ifindex == ifindex);
        let is_ours = |ifindex: &IfIndex| {
            is_port(*ifindex) || self.is_pacing_end(*ifindex) || self.served_at(*ifindex).is_some()
        };
        let routed: Vec<IfIndex> = match changes.missed {
            true => links.values().map(|link| link.ifindex).collect(),
            false => changes.forwarding.union(&changes.ipv6).copied().collect(),
        };
        for ifindex in routed.into_iter().filter(is_ours) {
            let kept = Device::with_index(ifindex)
                .map(|device| [device.set_forwarding(false), device.disable_ipv6()]);
            let failed = match kept {
                Ok(both) => both.into_iter().filter_map(Result::err).collect(),
                Err(e) => vec![e],
            };
            for e in failed {
                // One that is gone: a notice is on its way.
                tracing::debug!("{e}");
            }
        }
    }

    /// Follows VMMs that change segmentation offload, after an update of the watch.
    pub(crate) fn follow_offloads(&mut self) {
        let mut changed = self.watch.take_changed_features();
        if !changed.is_empty() {
            self.guards_due.append(&mut changed);
            self.look_at_guards();
        }
    }

    /// Attaches the guard to TAPs whose offloads changed, or detaches it from them. TAPs that
    /// another process's lock keeps from it are looked at with the next call.
    pub(crate) fn look_at_guards(&mut self) {
        let mut locked = None;
        while let Some(ifindex) = self.guards_due.pop_first() {
            let Some(at) = self.served_at(ifindex) else {
                continue;
            };
            let tap = &self.vms[at].config.tap;
            match xdp::guard(&self.datapath, &self.config, tap, ifindex) {
                Ok(()) => {}
                // The others would wait for it too.
                Err(e) if e.is_locked() => {
                    self.guards_due.insert(ifindex);
                    locked = Some(e);
                    break;
                }
                Err(e) => tracing::debug!("the guard of {tap}: {e}"),
            }
        }
        if let (Some(e), false) = (&locked, self.told_of_lock) {
            tracing::warn!("changes of TAPs are handled later: {e}");
        }
        self.told_of_lock = locked.is_some();
    }

    /// Logs which VMMs can open the TAPs.
    pub(crate) fn hint_at_queues(&self) {
        let network = self.watch.network();
        let taps = self.vms.iter().filter_map(|vm| vm.tap_ifindex);
        for hint in tap_hints(taps.filter_map(|tap| network.links.get(&tap))) {
            tracing::info!("{hint}");
        }
    }

    /// Returns the names of TAPs that exist, should be served and are not.
    pub(crate) fn missing_taps(&self) -> BTreeSet<String> {
        let network = self.watch.network();
        let lacks = self.vms.iter().filter(|vm| {
            vm.tap_ifindex.is_none() && network.link_by_name(&vm.config.tap).is_some()
        });
        lacks.map(|vm| vm.config.tap.clone()).collect()
    }
}
