//! A VM's definition: checked by itself and against what there is, and put in force as far as it
//! needs no other process.
use anyhow::bail;
use slipgate_control::{serve, vm};
use slipgate_ipc::client::VmDefinition;

use crate::{
    config::VmConfig,
    kernel_errors::is_passing,
    kernel_state::{Attached, ForwardChange, ResourceTaken, ServedVm, tap_of},
    persisted_vms,
};

/// Result of comparing a definition with the VM in place, and where that VM is.
pub(super) enum Put {
    /// The VM is new; the engine does not know it yet, nor its forwards.
    Added(usize, ForwardChange),
    /// The definition was in force already.
    Unchanged(usize),
    /// The definition is in force, and the engine is to be told.
    Changed(usize, ForwardChange),
    /// Nothing was done: another policy is just being put in force.
    Later,
    /// All but the policy is in force.
    OtherPolicy(usize, Box<VmConfig>, ForwardChange),
}

impl Attached {
    /// Checks a definition by itself and against the other VMs.
    fn check_definition(&self, definition: &VmDefinition) -> anyhow::Result<VmConfig> {
        let mut new = VmConfig::checked(definition, &self.config.network)?;
        if new.tap == self.uplink.name {
            bail!("tap {}: it is the uplink: give the VM's TAP", new.tap);
        }
        if self.vms.has_uplink(&new.tap) || self.vm_uplinks.is_named(&new.tap) {
            bail!("tap {}: it is a VM's uplink: give the VM's TAP", new.tap);
        }
        if let Some(uplink) = &new.uplink {
            self.check_vm_uplink(uplink)?;
        }
        let has_it = self
            .vms
            .on_tap(&new.tap)
            .map(|at| &self.vms[at].config.name);
        if let Some(other) = has_it.filter(|name| **name != new.name) {
            return Err(ResourceTaken(format!(
                "tap {}: it is the TAP of {other}: give each VM its own, or remove that one first",
                new.tap
            ))
            .into());
        }
        let network = self.watch.network();
        if network.link_by_name(&new.tap).is_some() {
            tap_of(&new, network)?;
        }
        self.config.settle_vm(&mut new)?;
        self.check_own_addresses(&new)?;
        Ok(new)
    }

    /// Does what needs no other process. `is_applying`: a change of policy is under way.
    pub(super) fn prepare(
        &mut self,
        definition: &VmDefinition,
        is_applying: bool,
    ) -> anyhow::Result<Put> {
        self.see_host_nat_for_request();
        let new = self.check_definition(definition)?;
        self.unless_shared(|attached| Ok(attached.check_shares_of_vm(&new)?))?;
        self.host_nat.look_soon();
        match self.index_of(&new.name) {
            None => self.add_vm(new),
            Some(at) => self.change_vm(at, new, is_applying),
        }
    }

    /// Opens the row of a VM that is new.
    fn add_vm(&mut self, new: VmConfig) -> anyhow::Result<Put> {
        let forwards = self.reserve_change(&[], &new)?;
        let policy = self.policies.index_of(&new.policy);
        let vm = self.open_vm(new.clone())?;
        self.set_rates_of(&vm);
        self.config.vms.push(new);
        self.vms.push(vm);
        self.share_credits();
        self.add_denied_of(policy);
        Ok(Put::Added(self.vms.len() - 1, forwards))
    }

    /// Has the TAP of a VM served, now that the engine knows the VM, and keeps its definition.
    ///
    /// # Errors
    /// The TAP or a forward is not served. The VM is in force all the same, and the TAP is tried
    /// again when links change, and every few seconds.
    pub(super) fn begin_to_serve(&mut self, at: usize) -> anyhow::Result<()> {
        self.keep_vm(&self.vms[at]);
        let served = self.serve_its_tap(at);
        let opened = self.open_forwards(&self.vms[at]);
        served.and(opened)
    }

    /// Has the TAP of a VM served that the engine knows.
    fn serve_its_tap(&mut self, at: usize) -> anyhow::Result<()> {
        self.vms[at].is_up = true;
        let noted = self.note_tap(self.vms[at].worker, self.vms[at].tap_ifindex);
        let served = noted.and_then(|()| self.serve_tap(at));
        if let Err(e) = &served {
            let tap = self.vms[at].tap_ifindex.take();
            // What passes is tried again with what is attached already.
            if let Some(tap) = tap.filter(|_| !is_passing(e)) {
                serve::leave_tap(&self.datapath, tap);
            }
        }
        served
    }

    /// Takes a VM out of those that are served; its TAP is down. `told`: number of the message by
    /// which the engine is told.
    pub(super) fn take_out(&mut self, at: usize, told: u64) -> ServedVm {
        let gone = self.vms.swap_remove(at);
        // In the same order.
        self.config.vms.swap_remove(at);
        vm::retire(self.datapath.maps(), gone.open.row);
        self.close_forwards(&gone, told);
        self.close_routed_prefix(&gone.open, gone.ipv6.as_ref());
        self.unshape(gone.open.row, gone.tap_ifindex);
        self.share_credits();
        let run_dir = &self.datapath.paths().run_dir;
        if let Err(e) = persisted_vms::forget(run_dir, &gone.config.name) {
            tracing::warn!("{e:#}");
        }
        let (row, tap) = (gone.open.row, gone.tap_ifindex);
        if let Err(e) = vm::forget_tap(self.datapath.maps(), row, tap) {
            tracing::warn!("{e}");
        }
        self.forget_tap(tap);
        gone
    }

    /// Makes a VM's definition this one, but for its policy. What can fail comes first: a change
    /// that is refused leaves all as it was.
    fn change_vm(&mut self, at: usize, new: VmConfig, is_applying: bool) -> anyhow::Result<Put> {
        let old = &self.vms[at].config;
        if old.ip != new.ip {
            bail!(
                "ip {}: the address of {} is {} as long as it is served: remove it and add it again",
                new.ip,
                new.name,
                old.ip
            );
        }
        let ipv6 = |vm: &VmConfig| {
            let prefix = vm.ipv6_prefix.unwrap_or(self.config.network.ipv6_prefix);
            (vm.ipv6.unwrap_or(self.config.network.ipv6), prefix)
        };
        if ipv6(old) != ipv6(&new) {
            let (mode, prefix) = ipv6(old);
            bail!(
                "ipv6 and ipv6_prefix: IPv6 of {} is {} with {prefix} as long as it is served: \
                 remove it and add it again",
                new.name,
                mode.name()
            );
        }
        let forwards = self.reserve_change(&old.forwards, &new)?;
        if old.definition() == new.definition() && forwards.is_empty() {
            return Ok(Put::Unchanged(at));
        }
        // Connections that are refused now end as with another policy.
        let has_other_policy = old.flags.policy_name() != new.flags.policy_name()
            || old.host_loopback != new.host_loopback;
        if has_other_policy && is_applying {
            return Ok(Put::Later);
        }
        let has_other_tap = old.tap != new.tap;
        let mut in_force = VmConfig {
            policy: old.policy.clone(),
            ..new.clone()
        };
        in_force.flags.policy = old.flags.policy.clone();
        in_force.host_loopback = old.host_loopback.clone();
        in_force.flags.inline_policy = old.flags.inline_policy.clone();
        if has_other_tap {
            self.shut_tap_of(&self.vms[at])?;
            let tap = self.vms[at].tap_ifindex;
            self.unshape_tap_of(self.vms[at].open.row, tap);
            vm::forget_tap(self.datapath.maps(), self.vms[at].open.row, tap)?;
            self.forget_tap(tap);
        }
        let opened = match self.open_vm(in_force.clone()) {
            Ok(opened) => opened,
            Err(e) => {
                if has_other_tap {
                    // It is served again as if it had come.
                    self.vms[at].tap_ifindex = None;
                }
                return Err(e);
            }
        };
        // From here on nothing fails, but the TAP may be served later.
        self.config.vms[at] = in_force;
        let idle_after = new.idle_after.unwrap_or(self.config.idle_after);
        let old = &self.vms[at];
        let has_other_tap = has_other_tap || old.tap_ifindex != opened.tap_ifindex;
        let vm = ServedVm {
            generation: old.generation + 1,
            is_idle: old.is_idle && idle_after != 0,
            is_up: old.is_up,
            is_learning: old.is_learning,
            ..opened
        };
        self.vms.replace(at, vm);
        let (row, number) = (self.vms[at].open.row, self.policy_number_of(&self.vms[at]));
        vm::set_policy(self.datapath.maps(), row, number);
        self.share_credits();
        self.set_rates_at(at);
        if has_other_tap
            && self.vms[at].is_up
            && let Err(e) = self.serve_its_tap(at)
        {
            tracing::warn!("the TAP of {} is served later: {e:#}", new.name);
        }
        self.keep_vm(&self.vms[at]);
        Ok(match has_other_policy {
            true => Put::OtherPolicy(at, Box::new(new), forwards),
            false => Put::Changed(at, forwards),
        })
    }
}
