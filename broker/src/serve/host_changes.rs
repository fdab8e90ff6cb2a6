//! Changes of the host that the broker goes along with: links, routes, addresses, ports, resolvers.
use std::collections::BTreeSet;

use slipgate_control::netlink::Changes;
use slipgate_ipc::engine::ToEngine;

use super::Broker;
use crate::kernel_errors::is_shortage;

impl Broker {
    /// Follows changes of the host's network. A change that can't be followed for lack of
    /// descriptors or memory is followed later, with all other changes by then.
    pub(super) fn follow_network(&mut self) -> anyhow::Result<()> {
        let changes = self.parts.attached.watch.update()?;
        self.parts.attached.follow_offloads();
        let done = self.go_along_with(&changes);
        if self.unless_short(done)? {
            self.parts.attached.watch.caught_up();
        }
        Ok(())
    }

    pub(super) fn go_along_with(&mut self, changes: &Changes) -> anyhow::Result<()> {
        // A TAP of ours goes with its VM, whose end is about to be seen.
        if self.vm.is_none() {
            match changes.missed {
                true => self.follow_all_taps()?,
                false => self.follow_taps(&changes.named)?,
            }
        }
        let attached = &mut self.parts.attached;
        attached.keep_unrouted(changes);
        let pacer = attached.pacing_device_name();
        if pacer.is_some_and(|name| changes.missed || changes.named.contains(name)) {
            attached.keep_pacing_device();
        }
        let is_routing = attached.concerns_routing(changes);
        if is_routing {
            attached.follow_uplink()?;
            attached.follow_domains()?;
            let uplinks = attached.follow_vm_uplinks();
            attached.follow_uplink_macs();
            attached.follow_routed_prefixes();
            self.parts.tell_network()?;
            self.parts.tell_vms_by_uplinks(&uplinks)?;
            self.parts.follow_ipv6()?;
            self.look_at_resolvers()?;
            self.parts.attached.host_nat.look_soon();
        }
        if is_routing || changes.neighbours {
            self.parts.attached.refresh_next_hops()?;
        }
        Ok(())
    }

    /// Serves TAPs and uplinks that are there and could not be served when they came.
    pub(super) fn serve_what_came(&mut self) -> anyhow::Result<()> {
        if self.parts.attached.misses_vm_uplinks() {
            self.parts.follow_vm_uplinks()?;
        }
        if self.vm.is_none() {
            let missing = self.parts.attached.missing_taps();
            let done = self.follow_taps(&missing);
            self.unless_short(done)?;
        }
        Ok(())
    }

    fn follow_all_taps(&mut self) -> anyhow::Result<()> {
        let vms = self.parts.attached.vms.iter();
        let all = vms.map(|vm| vm.config.tap.clone()).collect();
        self.follow_taps(&all)
    }

    /// Serves TAPs of these names that came, and has the engine know of MTUs that changed.
    fn follow_taps(&mut self, names: &BTreeSet<String>) -> anyhow::Result<()> {
        let changed = self.parts.attached.follow_taps(names)?;
        let mut vms = changed.into_iter();
        vms.try_for_each(|(worker, vm)| self.parts.engines.send(worker, ToEngine::Vm(vm)))
    }

    /// Whether it was done. What failed for want of descriptors or memory is left to the watch,
    /// which asks for everything again later.
    pub(super) fn unless_short(&mut self, done: anyhow::Result<()>) -> anyhow::Result<bool> {
        match done {
            Err(e) if is_shortage(&e) => {
                self.parts.attached.watch.fall_behind(&format!("{e:#}"));
                Ok(false)
            }
            other => other.map(|()| true),
        }
    }

    pub(super) fn look_at_ports(&mut self) -> anyhow::Result<()> {
        // What can't be read now is as it was.
        let Some(now) = self.parts.attached.ports_in_use() else {
            return Ok(());
        };
        if now != self.reserved_ports {
            self.parts
                .engines
                .send_all(|| ToEngine::ReservedPorts(now.clone()))?;
            self.reserved_ports = now;
        }
        Ok(())
    }

    /// Follows the host's resolvers.
    pub(super) fn look_at_resolvers(&mut self) -> anyhow::Result<()> {
        if let Some(now) = self.parts.attached.resolvers.changed() {
            tracing::info!("the host's resolvers are {now:?} now");
            self.parts
                .engines
                .send_all(|| ToEngine::Resolvers(now.clone()))?;
        }
        Ok(())
    }
}
